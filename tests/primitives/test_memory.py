"""Host memory: arenas, the pool that keeps one warm, and state dicts as one segment."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.memory import arena as memory
from aiockpt.memory.arena import (
    Arena,
    ArenaPool,
    PageChooser,
    view_of_address,
)
from aiockpt.memory.copies import CopyPlan
from aiockpt.state.flatten import describe

MIB = 1 << 20


def resident(arena: Arena) -> int:
    """Return how many bytes of an arena are in memory."""
    states = (ctypes.c_ubyte * -(-arena.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    where = ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.nbytes)
    assert libc.mincore(*where, states) == 0, os.strerror(ctypes.get_errno())
    return sum(state & 1 for state in states) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's here")
@pytest.mark.parametrize(
    ("quick", "at", "every", "least", "most"),
    [
        (0.0, (0, 40), False, 40, 40),
        (0.0, (16, 24), False, 8, 12),
        (60.0, (0, 40), False, 1, 20),  # but for a sample, the bytes bring them
        (60.0, (0, 16), True, 16, 20),
    ],
)
def test_pages_are_there_before_bytes_are(
    monkeypatch, quick: float, at, every: bool, least: int, most: int
) -> None:
    """The pages are populated where that is slow, and what they hold stays."""
    monkeypatch.setattr(memory, "_QUICK_S", quick)
    arena = Arena(40 * MIB)
    (view,) = arena.buffers(at[0] * MIB, at[0] * MIB + 6)
    view[:5] = b"bytes"
    arena.populate(at[0] * MIB, at[1] * MIB, every=every)
    assert least * MIB <= resident(arena) <= most * MIB
    assert bytes(view) == b"bytes\0"
    del view
    arena.close()


class Host:
    """Memory whose pages take as long as a test says, and who mapped which."""

    def __init__(
        self, huge: float, small: float, *, cold: range = range(1 << 60)
    ) -> None:
        self.rates = {True: huge * 1e9, False: small * 1e9}
        self.cold = cold
        self.seconds = 0.0
        self.kinds: dict[int, bool] = {}

    def rate(self, at: int, *, huge: bool) -> float:
        """Return the bytes per second of a page; outside of ``cold`` it is warm."""
        return self.rates[huge] if at in self.cold else (7e9 if huge else 3.2e9)

    def touch(self, start: int, stop: int, huge: bool) -> float:
        """Map pages; return how long that took."""
        took = 0.0
        for page in range(start // (2 * MIB), -(-stop // (2 * MIB))):
            if page not in self.kinds:
                self.kinds[page] = huge
                took += 2 * MIB / self.rate(page * 2 * MIB, huge=huge)
        self.seconds += took
        return took

    def fill(self, nbytes: int) -> float:
        """Receive that many bytes as a download does; return the seconds for pages."""
        chooser, at = PageChooser(), 0
        for start in range(0, nbytes, 32 * MIB):
            stop = min(start + 32 * MIB, nbytes)
            if at < stop:
                at = chooser.map(self.touch, max(at, start), stop, every=False)
            self.touch(start, stop, True)
        return self.seconds


class TestPageChooser:
    """The faster kind of pages, whatever the host has left."""

    @pytest.mark.parametrize(
        ("huge", "small", "mib"),
        [
            *((0.45, 1.6, 64), (0.5, 1.7, 64), (0.64, 1.9, 64), (0.18, 0.66, 64)),
            *((3.4, 1.7, 64), (7.6, 1.9, 64), (0.18, 0.66, 1024), (7.6, 1.9, 1024)),
            (0.45, 2.9, 1024),  # a sample is six times as slow: it needs more bytes
        ],
    )
    def test_a_fresh_arena_is_as_fast_as_the_better_kind(
        self, huge: float, small: float, mib: int
    ) -> None:
        """Within a tenth: a sample of the slower kind is all that is lost."""
        best = mib * MIB / (max(huge, small) * 1e9)
        assert Host(huge, small).fill(mib * MIB) <= best / 0.9

    def test_the_kind_follows_the_host(self) -> None:
        """Free memory is warm at first, and cold where the host has taken it back."""
        host = Host(0.5, 1.7, cold=range(256 * MIB, 512 * MIB))
        host.fill(512 * MIB)
        assert all(kind for page, kind in host.kinds.items() if page < 128)
        cold = [kind for page, kind in host.kinds.items() if page >= 128]
        assert cold.count(False) > 0.85 * len(cold)  # 32 MiB had been trusted

    def test_a_few_cold_pages_do_not_hide_warm_ones(self) -> None:
        """Small pages that come quickly are a sign that huge ones would, too."""
        host = Host(0.5, 1.7, cold=range(16 * MIB))
        host.fill(512 * MIB)
        small = [page for page, kind in host.kinds.items() if not kind]
        assert 0 < len(small) * 2 * MIB <= 48 * MIB

    def test_chance_brings_no_small_pages(self) -> None:
        """A warm huge page that took long by chance is no reason for small ones."""
        host, chooser = Host(7.6, 3.2), PageChooser()

        def touch(start: int, stop: int, huge: bool) -> float:
            return host.touch(start, stop, huge) + (1e-3 if huge else 0.2e-3)

        chooser.map(touch, 0, 512 * MIB, every=False)
        assert sum(not kind for kind in host.kinds.values()) <= 5  # of 256: compared

    def test_what_is_there_is_left_alone(self) -> None:
        """Warm pages but for a few samples, and those that were mapped."""
        host = Host(7.6, 1.9)
        PageChooser().map(host.touch, 0, 64 * MIB, every=False)
        assert [*host.kinds] == [0, 4, 12, 28]  # of 2 MiB each
        host, chooser = Host(0.5, 1.7), PageChooser()
        chooser.map(host.touch, 0, 64 * MIB, every=True)
        before = dict(host.kinds)
        chooser.map(host.touch, 0, 64 * MIB, every=True)
        assert host.kinds == before


@pytest.mark.parametrize("shared", [False, True])
def test_an_arena(shared: bool) -> None:
    """It costs nothing until it is touched; its views, address and buffer are one."""
    arena = Arena(64 * MIB, shared=shared)
    assert resident(arena) == 0
    (view,) = arena.buffers(5, 5000)
    assert bytes(view) == bytes(4995)
    view[:3] = b"abc"
    assert ctypes.string_at(arena.address + 5, 3) == b"abc"
    assert arena.buffers(7, 7) == []
    if shared:
        assert os.pread(arena.fd, 3, 5) == b"abc"  # another process may map it
        target = Path(f"/proc/self/fd/{arena.fd}").readlink()
        assert target.name.startswith("memfd:aiockpt")  # which has no name to leak
        assert not os.get_inheritable(arena.fd)
    tensor = torch.frombuffer(arena.buffer, dtype=torch.uint8)
    arena.close()
    arena.close()
    assert arena.fd == -1
    del arena, view
    gc.collect()
    assert tensor[5:8].tolist() == [*b"abc"]  # who can read it keeps it
    empty = Arena(0, shared=shared)
    assert empty.nbytes == 0
    empty.close()


def test_a_view_of_an_address_keeps_its_owner() -> None:
    """The memory cannot go while somebody can write to it."""
    tensor = torch.zeros(4, dtype=torch.uint8)
    view = view_of_address(tensor.data_ptr(), 4, tensor)
    del tensor
    gc.collect()
    view[:] = b"abcd"
    assert view.obj.owner.tolist() == [*b"abcd"]  # type: ignore[attr-defined]


class TestPool:
    """The pool keeps as many free arenas as it was asked to."""

    @pytest.fixture
    def disposed(self):
        """Return what the pool has let go of; closed at the end."""
        found: list[Arena] = []
        yield found
        for arena in found:
            arena.close()

    def test_what_came_back_last_is_taken_first(self, disposed) -> None:
        """It may still be in a cache; one too many goes, and so does a spent one."""
        pool = ArenaPool(shared=True, keep=2, dispose=disposed.append)
        one, two, three, spent = (pool.take(1000) for _ in range(4))
        spent.spent = True  # others may still read it
        for arena in (one, two, three, spent):
            pool.give_back(arena)
        assert {*map(id, disposed)} == {id(one), id(spent)}
        assert pool.take(1000) is three
        assert pool.take(1000) is two
        disposed += [two, three]

    def test_one_that_fits_is_found_beside_one_that_does_not(self, disposed) -> None:
        """Checkpoints of two sizes may take turns."""
        pool = ArenaPool(shared=False, keep=2, dispose=disposed.append)
        small, large = pool.take(100), pool.take(10_000)
        pool.give_back(small)
        pool.give_back(large)
        assert pool.take(100) is small
        assert pool.take(5_000) is large  # at most twice as large
        assert disposed == []

    @pytest.mark.parametrize("end", [ArenaPool.trim, ArenaPool.close])
    def test_trimming_keeps_nothing(self, disposed, end) -> None:
        """What comes back later goes, too: until the next take, or for ever."""
        pool = ArenaPool(shared=False, keep=1, dispose=disposed.append)
        free, late, later = pool.take(1000), pool.take(1000), pool.take(1000)
        pool.give_back(free)
        end(pool)
        pool.give_back(late)
        assert disposed == [free, late]
        last = pool.take(1000)
        pool.give_back(later)
        assert (later in disposed) == (end is ArenaPool.close)
        disposed += [later, last]

    def test_threads_may_share_it(self, disposed) -> None:
        """An arena has one user at a time, and none is lost."""
        pool = ArenaPool(shared=False, keep=1, dispose=disposed.append)
        taken: set[int] = set()

        def use() -> None:
            for _ in range(300):
                arena = pool.take(100)
                assert arena.address not in taken
                taken.add(arena.address)
                taken.remove(arena.address)
                pool.give_back(arena)

        with ThreadPoolExecutor(4) as threads:
            for work in [threads.submit(use) for _ in range(4)]:
                work.result()
        pool.close()
        assert not taken
        assert len({id(arena) for arena in disposed}) == len(disposed)


def planned(state, arena: Arena | None = None) -> tuple[CopyPlan, int]:
    """Return the copies of a state dict, and the length of its segment."""
    own = describe(state, limits=Limits(), allow_pickle=False, writing=True)
    arena = arena or Arena(own.entries.nbytes)
    plan = CopyPlan(own.backings, own.entries, arena=arena, port_for=lambda _: None)
    return plan, own.entries.nbytes


def odd_state() -> dict[str, torch.Tensor]:
    """Return tensors of every alignment, a sparse view, padding, and nothing at all."""
    flat = torch.arange(41, dtype=torch.uint8)
    return {
        "wide": torch.arange(5, dtype=torch.float64),
        "sparse": torch.arange(40.0)[::4],
        "odd": flat[1:4],
        "words": torch.arange(7, dtype=torch.int16),
        "empty": torch.empty(0),
        "mixed": flat[8:40].view(torch.int32)[:3],
        "rest": flat[9:33],
    }


STATE = odd_state()
PLAN, SEGMENT_BYTES = planned(STATE)
SPARSE = 256  # more than is staged element by element, or is padding


class TestCopyPlan:
    """The data segment in a state dict's own memory looks like one run of bytes."""

    @given(bounds=st.lists(st.integers(0, SEGMENT_BYTES), max_size=6))
    def test_any_cut_gives_the_same_bytes(self, bounds: list[int]) -> None:
        """Wherever a range starts and stops, its views join up to the whole."""
        window = PLAN.in_place()
        whole = b"".join(window.buffers(0, SEGMENT_BYTES))
        assert len(whole) == SEGMENT_BYTES
        cuts = sorted({0, SEGMENT_BYTES, *bounds})
        pieces = [window.buffers(start, stop) for start, stop in pairwise(cuts)]
        assert b"".join(view for piece in pieces for view in piece) == whole
        assert all(view.nbytes for piece in pieces for view in piece)

    @given(
        start=st.integers(0, SEGMENT_BYTES - 1),
        nbytes=st.integers(1, SEGMENT_BYTES),
        block=st.integers(1, 100),
    )
    def test_what_is_reported_as_staged_is_there(self, start, nbytes, block) -> None:
        """Any range in blocks of any size is there; the last report is of its end."""
        arena = Arena(SEGMENT_BYTES)
        [staged] = arena.buffers(0, SEGMENT_BYTES)
        staged[:] = b"?" * SEGMENT_BYTES  # as another snapshot leaves it
        plan, _ = planned(STATE, arena)
        for each in (plan, PLAN):
            each.stage_parts({})
        whole = b"".join(PLAN.in_place().buffers(0, SEGMENT_BYTES))
        stop = min(start + nbytes, SEGMENT_BYTES)
        done = [start]
        for at in plan.staged(start, stop, block):
            assert staged[start:at] == whole[start:at]
            done.append(at)
        assert done == sorted(set(done))
        assert done[-1] == stop
        assert max(last - first for first, last in pairwise(done)) < 2 * block + SPARSE

    def test_the_window_keeps_the_tensors_alive(self) -> None:
        """Memory is not freed while it can still be written to; there may be none."""
        plan, size = planned({"only": torch.ones(1000)})
        views = plan.in_place().buffers(0, size)
        del plan
        views[0][:] = bytes(size)
        assert bytes(views[0]) == bytes(size)
        plan, size = planned({"step": 3})
        assert size == 0
        assert plan.in_place().buffers(0, 0) == []
