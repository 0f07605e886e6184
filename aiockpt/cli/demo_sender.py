"""The demo's sending process: serves a training state until its input ends."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from aiockpt.cli.demo_state import STEP, fingerprints, training_state
from aiockpt.errors import AiockptError
from aiockpt.http.options import Server
from aiockpt.http.transport import HTTPTransport

__all__ = ["main"]


def main() -> int:
    """Serve the state of the model that the only argument names."""
    try:
        asyncio.run(_serve(Path(sys.argv[1])))
    except AiockptError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(model: Path) -> None:
    state = training_state(model)
    prints = dict(fingerprints(state))
    async with HTTPTransport[object](server=Server(host="127.0.0.1")) as transport:
        started = time.monotonic()
        await transport.send_checkpoint([1], STEP, state)
        offer = {
            "metadata": transport.metadata(),
            "staged_in": time.monotonic() - started,
            "fingerprints": prints,
        }
        print(json.dumps(offer), flush=True)
        await _end_of_input()


async def _end_of_input() -> None:
    """Wait until the receiving process is done, or gone."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()


if __name__ == "__main__":
    sys.exit(main())
