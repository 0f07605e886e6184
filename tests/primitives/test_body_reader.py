"""Bytes get into memory, by either mover, and the connection stays usable."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from itertools import accumulate, pairwise

import pytest
from aiohttp import ClientResponse, ClientSession
from hypothesis import given
from hypothesis import strategies as st

from aiockpt.errors import LocalProtocolError
from aiockpt.http import body_reader
from aiockpt.http.body_reader import BodySink, Buffers, read_body
from aiockpt.http.chunk_run import Arrived
from aiockpt.runtime.bridge import Bridge
from tests.support.rangepeer import io_threads, noise

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),
    pytest.mark.every_loop,
    pytest.mark.torch_free,
]


@pytest.fixture(params=["threads", "loop", "portable"])
def pumps(request, monkeypatch) -> Iterator[Bridge]:
    """Receive in threads, where none is free, or as if there were no plain socket."""
    is_portable = request.param == "portable"
    monkeypatch.setattr(body_reader, "_KNOWN_SYSTEM", not is_portable)
    monkeypatch.setattr(body_reader, "MIN_TURN_BYTES", 1)
    with io_threads() as pumps:
        if request.param == "loop":
            pumps.close()
        yield pumps


def memory_of(sizes: list[int]) -> tuple[bytearray, BodySink]:
    """Return memory that consists of buffers of these sizes, and what fills it."""
    memory = bytearray(sum(sizes))
    return memory, BodySink(cutting(memory, sizes), 0, len(memory))


def cutting(memory: bytearray | mmap.mmap, sizes: list[int]) -> Buffers:
    """Return what gives memory as buffers of these sizes, in a row."""
    ends = list(accumulate(sizes))

    def buffers(start: int, stop: int) -> list[memoryview]:
        cuts = [start, *(end for end in ends if start <= end <= stop), stop]
        return [memoryview(memory)[a:b] for a, b in pairwise(cuts)]

    return buffers


SIZES = st.lists(
    st.integers(0, 50)
    | st.sampled_from([0, 70_000, body_reader.SMALL - 1, body_reader.SMALL]),
    max_size=30,
)


class TestBodySink:
    """A run of bytes lands in its buffers however both are cut."""

    @given(SIZES, st.lists(st.integers(1, 100_000), min_size=1), st.data())
    def test_received_or_written_every_byte_gets_to_its_place(
        self, sizes, steps, data
    ) -> None:
        """Pieces of any length, some received in place and some copied."""
        memory, fill = memory_of(sizes)
        source, at, turn = noise(len(memory)), 0, 0
        while fill.remaining:
            step = steps[turn % len(steps)]
            if data.draw(st.booleans()):
                count = min(step, fill.remaining)
                fill.write(source[at : at + count])
            else:
                room = fill.next_buffer()
                count = min(step, len(room))
                assert 0 < len(room) <= body_reader.MAX_PIECE
                room[:count] = source[at : at + count]
                fill.advance(count)
            at, turn = at + count, turn + 1
        fill.close()
        assert memory == source
        assert (fill.filled, fill.size) == (len(source), len(source))

    @given(SIZES, st.integers(0, 200_000))
    def test_closed_it_has_every_byte_that_it_counts(self, sizes, count) -> None:
        """A transfer that breaks off can go on after what was filled."""
        memory, fill = memory_of(sizes)
        source = noise(len(memory))
        while fill.filled < min(count, fill.size):
            room = fill.next_buffer()[: count - fill.filled]
            room[:] = source[fill.filled : fill.filled + len(room)]
            fill.advance(len(room))
        fill.close()
        assert memory[: fill.filled] == source[: fill.filled]
        assert not any(memory[fill.filled :])

    def test_memory_is_asked_for_a_few_megabytes_at_a_time(self) -> None:
        """Views of many small tensors are not all made in one go."""
        asked: list[tuple[int, int]] = []
        memory = bytearray(10 << 20)
        give = cutting(memory, [3 << 20, 100, 5 << 20])

        def buffers(start: int, stop: int) -> Sequence[memoryview]:
            asked.append((start, stop))
            return give(start, stop)

        source, fill = noise(10 << 20), BodySink(buffers, 5, 10 << 20)
        while fill.remaining:
            at, room = fill.filled + 5, fill.next_buffer()
            room[:] = source[at : at + len(room)]
            fill.advance(len(room))
        assert memory == bytes(5) + source[5:]
        assert max(stop - start for start, stop in asked) == body_reader.WINDOW
        assert [start for start, _ in asked[1:]] == [stop for _, stop in asked[:-1]]

    def test_memory_is_checked_right_before_each_write(self) -> None:
        """It may have become somebody else's since its views were made."""
        memory, checked = bytearray(3 << 20), list[tuple[int, int]]()

        def note(start: int, stop: int) -> None:
            checked.append((start, stop))

        ends = [300, 600, 1 << 20]  # the small ones share a scratch
        fill = BodySink(cutting(memory, ends), 5, len(memory), check=note)
        while fill.remaining:
            fill.advance(len(fill.next_buffer()))
        fill.close()
        checked = [*dict.fromkeys(checked)]  # before the bytes come, and after it
        assert [start for start, _ in checked[1:]] == [stop for _, stop in checked[:-1]]
        assert (checked[0][0], checked[-1][1]) == (5, len(memory))

    def test_gone_memory_is_not_written_to(self) -> None:
        """The error of the check ends the body."""
        memory = bytearray(100)

        def gone(start: int, stop: int) -> None:
            raise LocalProtocolError(f"{start} to {stop} are gone")

        fill = BodySink(cutting(memory, [10, 20]), 0, 100, check=gone)
        room = fill.next_buffer()
        room[:] = b"x" * len(room)
        with pytest.raises(LocalProtocolError, match="are gone"):
            fill.advance(len(room))
        assert not any(memory)

    def test_destination_of_another_size_is_the_callers_mistake(self) -> None:
        """Better no byte at all than one in the wrong place."""
        with pytest.raises(LocalProtocolError, match="another size"):
            BodySink(lambda start, stop: [memoryview(bytearray(9))], 0, 10)

    @pytest.mark.parametrize("how", ["received", "written"])
    def test_bytes_that_are_wanted_are_in_their_place(self, how: str) -> None:
        """The bytes came together with others, for many small buffers."""
        memory, source, seen = bytearray(50_000), noise(50_000), list[int]()

        class Late:
            def digest(self, data: memoryview) -> bool:
                seen.append(data.nbytes)
                return sum(seen) >= 20_050

            def mark_stored(self) -> None:
                assert memory[: sum(seen)] == source[: sum(seen)]

            def verify_stored(self) -> None:
                pass

            def arrived(self) -> Arrived:
                return Arrived(None, 0, 0)

        fill = BodySink(
            cutting(memory, [100] * 500),
            0,
            50_000,
            Late(),  # type: ignore[arg-type]
        )
        for start, stop in pairwise([0, 10_000, 20_050, 50_000]):
            if how == "written":
                fill.write(source[start:stop])
            else:
                fill.next_buffer()[: stop - start] = source[start:stop]
                fill.advance(stop - start)
            if stop > 10_000:
                assert memory[:stop] == source[:stop]
        assert memory == source

    @pytest.mark.parametrize(
        ("sizes", "length"),
        [([3 << 20], 1 << 20), ([100] * 5000, 100 * body_reader.MAX_SCATTER)],
        ids=["large", "small"],
    )
    def test_one_system_call_receives_a_bounded_number_of_bytes(
        self, sizes: list[int], length: int
    ) -> None:
        """A megabyte of a large buffer in place, or many small ones together."""
        memory, fill = memory_of(sizes)
        room = fill.next_buffer()
        room[:2] = b"ab"
        assert len(room) == length
        assert memory.startswith(b"ab") is (len(sizes) == 1)


@asynccontextmanager
async def answering(*pieces: bytes, close: bool = False) -> AsyncIterator[str]:
    """Answer each request of a connection with pieces, each sent by itself."""

    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        tasks.append(asyncio.current_task())
        with closing(writer), suppress(asyncio.IncompleteReadError, OSError):
            while await reader.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if close:
                    break

    tasks: list[asyncio.Task | None] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    finally:
        server.close()
        await asyncio.gather(*filter(None, tasks))  # the client has closed


BODY = noise(300_000)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n"


@asynccontextmanager
async def asked(session: ClientSession, url: str) -> AsyncIterator[ClientResponse]:
    """Give an answer whose body is still to come, or has come a while ago."""
    async with session.get(url, read_bufsize=1 << 20) as answer:
        yield answer


@pytest.mark.asyncio
class TestReceive:
    """The body of one answer, and what the connection is good for afterwards."""

    @pytest.mark.parametrize("size", [0, 150_000, 299_999])
    async def test_body_that_breaks_off_is_an_error_and_what_came_is_kept(
        self, pumps, size
    ) -> None:
        """The connection is closed, not used again."""
        pieces = (HEAD, BODY[:size])
        async with answering(*pieces, close=True) as url, ClientSession() as session:
            memory, fill = memory_of([1000] * 300)
            async with asked(session, url) as answer:
                connection = answer.connection
                with pytest.raises(Exception, match=r"early|not completed|reset"):
                    await read_body(answer, fill, pumps)
                assert answer.closed
                assert connection is not None
                assert connection.closed
        assert memory[: fill.filled] == BODY[: fill.filled]
        assert fill.filled <= size

    @pytest.mark.parametrize("close", [True, False])
    async def test_peer_that_closes_after_the_last_byte_has_sent_it_all(
        self, pumps, close
    ) -> None:
        """``Connection: close`` is obeyed, and no error."""
        head = HEAD[:-2] + b"Connection: close\r\n\r\n"
        async with (
            answering(head, BODY, close=close) as url,
            ClientSession() as session,
        ):
            for _ in range(2):
                memory, fill = memory_of([len(BODY)])
                async with asked(session, url) as answer:
                    await read_body(answer, fill, pumps)
                assert memory == BODY

    async def test_nothing_holds_on_to_the_memory(self, pumps) -> None:
        """A mapping can be closed as soon as the call has ended, however it did."""
        async with (
            answering(HEAD, BODY) as url,
            answering(HEAD, BODY[:5000], close=True) as broken,
            ClientSession() as session,
        ):
            for address in (url, broken):
                memory = mmap.mmap(-1, len(BODY))
                async with asked(session, address) as answer:
                    try:
                        fill = BodySink(cutting(memory, [len(BODY)]), 0, len(BODY))
                        await read_body(answer, fill, pumps)
                    except (OSError, Exception):  # noqa: BLE001 - told apart elsewhere
                        assert address is broken
                memory.close()

    async def test_plain_connection_is_received_from_directly(
        self, pumps, monkeypatch
    ) -> None:
        """Most of the body never passes through aiohttp's stream."""
        if not body_reader._KNOWN_SYSTEM:
            pytest.skip("that is the other mover")
        async with answering(HEAD, BODY) as url, ClientSession() as session:
            for known, most in ((True, 100_000), (False, len(BODY))):
                monkeypatch.setattr(body_reader, "_KNOWN_AIOHTTP", known)
                memory, fill = memory_of([len(BODY)])
                async with asked(session, url) as answer:
                    await read_body(answer, fill, pumps)
                assert memory == BODY
                assert answer.content.total_bytes <= most

    async def test_cancelled_it_closes_the_connection(self, pumps) -> None:
        """What is still to come would be taken for the next answer."""
        async with answering(HEAD, BODY[:1000]) as url, ClientSession() as session:
            _, fill = memory_of([len(BODY)])
            async with asked(session, url) as answer:
                connection = answer.connection
                task = asyncio.create_task(read_body(answer, fill, pumps))
                while fill.filled < 1000:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert connection is not None
                assert connection.closed
