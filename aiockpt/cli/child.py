"""A process of its own for the other end of a transfer on this machine.

The parent writes questions to its standard input, one a line, and reads an answer in
JSON for each. The child ends with its input, so also when the parent dies.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any, TypeAlias

from aiockpt.errors import AiockptError, WorkerError

__all__ = ["Ask", "answer", "run_child"]

Ask: TypeAlias = Callable[[str], Awaitable[Any]]
"""Returns the child's answer to a question."""

_LONGEST = 1 << 26  # bytes of an answer


@asynccontextmanager
async def run_child(function: str, argument: object) -> AsyncIterator[Ask]:
    """Give what asks a new process, which ends with the block.

    Args:
        function: ``module:function``, a coroutine function that calls `answer`.
        argument: What it is called with, as text.

    Raises:
        WorkerError: the process failed, or has died, when it is asked.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, function, str(argument)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    questions, answers = process.stdin, process.stdout

    async def ask(question: str) -> Any:
        with suppress(ConnectionError):
            questions.write(f"{question}\n".encode())
            await questions.drain()
        if not (line := await answers.readline()):
            code = await process.wait()
            raise WorkerError("the sending process has ended", exitcode=code)
        found = json.loads(line)
        if "error" in found:
            raise WorkerError(found["error"], exitcode=await process.wait())
        return found["answer"]

    try:
        yield ask
    finally:
        questions.close()
        await process.wait()


async def answer(answers: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
    """Answer the parent, in the child, until the parent is done or gone."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async for question in reader:
        found = await answers[question.decode().strip()]()
        print(json.dumps({"answer": found}), flush=True)


def main(function: str, argument: str) -> int:
    """Be the child; return its exit code."""
    module, _, name = function.partition(":")
    try:
        asyncio.run(getattr(import_module(module), name)(argument))
    except AiockptError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
