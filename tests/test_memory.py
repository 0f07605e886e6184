"""Host memory: arenas, the pool that keeps one warm, and scattered segments."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aiockpt.memory import arena as memory
from aiockpt.memory.arena import (
    CAN_LEND,
    Arena,
    ArenaPool,
    Borrowed,
    PageChooser,
    view_of_address,
)


def resident(arena: Arena) -> int:
    """Return how many pages of an arena are in memory."""
    pages = -(-arena.nbytes // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.mincore(
        ctypes.c_void_p(arena.address), ctypes.c_size_t(arena.nbytes), states
    )
    assert result == 0, os.strerror(ctypes.get_errno())
    return sum(state & 1 for state in states)


@pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's here")
class TestPopulate:
    """Pages that are there before bytes are."""

    def test_slow_pages_are_all_brought(self, monkeypatch) -> None:
        """Exactly those of the range, rounded to where a sample starts."""
        monkeypatch.setattr(memory, "_QUICK", 0.0)
        arena = Arena((40 << 20) + 5)
        arena.populate((16 << 20) - 1, (24 << 20) + 1)
        assert (8 << 20) <= resident(arena) * mmap.PAGESIZE <= (12 << 20)
        arena.populate(0, arena.nbytes)
        assert resident(arena) * mmap.PAGESIZE >= arena.nbytes
        arena.close()

    def test_quick_pages_are_left_to_the_bytes(self, monkeypatch) -> None:
        """But for a sample."""
        monkeypatch.setattr(memory, "_QUICK", 60.0)
        arena = Arena(64 << 20)
        arena.populate(0, arena.nbytes)
        assert 0 < resident(arena) * mmap.PAGESIZE <= arena.nbytes // 2
        arena.close()

    def test_every_page_is_there_where_that_is_asked_for(self, monkeypatch) -> None:
        """However quick they are."""
        monkeypatch.setattr(memory, "_QUICK", 60.0)
        arena = Arena(40 << 20)
        arena.populate(0, 16 << 20, every=True)
        assert (16 << 20) <= resident(arena) * mmap.PAGESIZE <= (20 << 20)
        arena.close()

    def test_what_lies_there_stays(self, monkeypatch) -> None:
        """A resumed receive has bytes in the range already."""
        monkeypatch.setattr(memory, "_QUICK", 0.0)
        arena = Arena(8 << 20)
        (view,) = arena.buffers(0, arena.nbytes)
        view[:5] = b"bytes"
        arena.populate(0, arena.nbytes)
        assert bytes(view[:6]) == b"bytes\0"


MIB = 1 << 20


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
        chooser = PageChooser()
        for start in range(0, nbytes, 32 * MIB):
            chooser.map(self.touch, start, min(start + 32 * MIB, nbytes), every=False)
            self.touch(start, min(start + 32 * MIB, nbytes), True)
        return self.seconds


class TestPageChooser:
    """The faster kind of pages, whatever the host has left."""

    @pytest.mark.parametrize(
        ("huge", "small"),
        [(0.45, 1.6), (0.5, 1.7), (0.64, 1.9), (0.18, 0.66), (3.4, 1.7), (7.6, 1.9)],
    )
    @pytest.mark.parametrize("nbytes", [64 * MIB, 1024 * MIB])
    def test_a_fresh_arena_is_as_fast_as_the_better_kind(
        self, huge: float, small: float, nbytes: int
    ) -> None:
        """Within a tenth: a sample of the slower kind is all that is lost."""
        best = nbytes / (max(huge, small) * 1e9)
        assert Host(huge, small).fill(nbytes) <= best / 0.9

    def test_comparing_costs_little_where_the_kinds_differ_much(self) -> None:
        """Each comparison takes a huge page that is six times as slow."""
        assert Host(0.45, 2.9).fill(1024 * MIB) <= 1024 * MIB / 2.9e9 / 0.9

    def test_the_kind_follows_the_host(self) -> None:
        """Free memory is warm at first, and cold where the host has taken it back."""
        host = Host(0.5, 1.7, cold=range(256 * MIB, 512 * MIB))
        host.fill(512 * MIB)
        warm = [kind for page, kind in host.kinds.items() if page < 128]
        cold = [kind for page, kind in host.kinds.items() if page >= 128]
        assert all(warm)
        assert cold.count(False) > 0.9 * len(cold)

    def test_a_few_cold_pages_do_not_hide_warm_ones(self) -> None:
        """Small pages that come quickly are a sign that huge ones would, too."""
        host = Host(0.5, 1.7, cold=range(16 * MIB))
        host.fill(512 * MIB)
        small = [page for page, kind in host.kinds.items() if not kind]
        assert small
        assert len(small) * 2 * MIB <= 48 * MIB

    def test_warm_pages_are_left_to_the_bytes(self) -> None:
        """But for the sample that begins each stride."""
        host = Host(7.6, 1.9)
        PageChooser().map(host.touch, 0, 64 * MIB, every=False)
        assert len(host.kinds) == 8

    def test_memory_that_was_mapped_before_is_quick(self) -> None:
        """A kept arena is not sampled again with small pages."""
        host = Host(0.5, 1.7)
        chooser = PageChooser()
        chooser.map(host.touch, 0, 64 * MIB, every=True)
        before = dict(host.kinds)
        chooser.map(host.touch, 0, 64 * MIB, every=True)
        assert host.kinds == before


@pytest.mark.parametrize("shared", [False, True])
class TestArena:
    """One allocation."""

    def test_it_starts_as_zeros_that_cost_nothing(self, shared: bool) -> None:
        """Pages come when they are touched."""
        arena = Arena(64 << 20, shared=shared)
        assert resident(arena) == 0
        (view,) = arena.buffers(5, 5000)
        assert bytes(view) == bytes(4995)
        del view
        arena.close()

    def test_its_views_are_the_memory_at_its_address(self, shared: bool) -> None:
        """Whoever copies by address and whoever copies by view meet."""
        arena = Arena(100, shared=shared)
        (view,) = arena.buffers(10, 13)
        view[:] = b"abc"
        assert ctypes.string_at(arena.address + 10, 3) == b"abc"
        assert arena.buffers(7, 7) == []
        del view
        arena.close()

    def test_tensors_keep_their_memory(self, shared: bool) -> None:
        """Closing an arena must not unmap what somebody can still read."""
        arena = Arena(1 << 20, shared=shared)
        tensor = torch.frombuffer(arena.buffer, dtype=torch.float32)
        tensor.fill_(3)
        arena.close()
        del arena
        gc.collect()
        assert tensor.sum() == 3 * tensor.numel()

    def test_closing_is_idempotent(self, shared: bool) -> None:
        """Its descriptor is closed once."""
        arena = Arena(100, shared=shared)
        arena.close()
        arena.close()
        assert arena.fd == -1

    def test_it_may_be_empty(self, shared: bool) -> None:
        """A state dict without tensors has a segment of no bytes."""
        arena = Arena(0, shared=shared)
        assert arena.nbytes == 0
        arena.close()


class TestSharing:
    """An arena that another process can map."""

    def test_its_descriptor_is_its_memory(self) -> None:
        """Whoever maps it sees what is written here."""
        arena = Arena(5000, shared=True)
        with mmap.mmap(arena.fd, 5000) as other:
            arena.buffers(0, 3)[0][:] = b"abc"
            assert other[:3] == b"abc"
        arena.close()

    def test_it_has_no_name(self) -> None:
        """Nothing is left in /dev/shm when the process dies."""
        arena = Arena(5000, shared=True)
        target = Path(f"/proc/self/fd/{arena.fd}").readlink()
        assert target.name.startswith("memfd:aiockpt")
        assert not os.get_inheritable(arena.fd)
        arena.close()


class TestPinning:
    """Page-locking for a device."""

    def test_it_is_done_once_and_undone_with_the_arena(self) -> None:
        """However many checkpoints pass through."""
        done: list[str] = []

        def pin(_: Arena) -> object:
            done.append("pin")
            return lambda: done.append("unpin")

        arena = Arena(100)
        arena.pin(pin)  # type: ignore[arg-type]
        arena.pin(pin)  # type: ignore[arg-type]
        arena.close()
        arena.close()
        assert done == ["pin", "unpin"]

    def test_it_is_undone_with_the_last_who_has_the_arena(self) -> None:
        """Also where a call that failed has closed nothing."""
        done: list[str] = []
        arena = Arena(100)
        arena.pin(lambda _: lambda: done.append("unpin"))
        del arena
        gc.collect()
        assert done == ["unpin"]


class TestPool:
    """At most one free arena is kept."""

    def pool(self) -> tuple[ArenaPool, list[Arena]]:
        disposed: list[Arena] = []
        return ArenaPool(shared=False, keep=1, dispose=disposed.append), disposed

    def test_a_free_arena_is_taken_again(self) -> None:
        """If it is about as large as what is wanted."""
        pool, disposed = self.pool()
        arena = pool.take(1000)
        pool.give_back(arena)
        assert pool.take(600) is arena
        assert disposed == []

    @pytest.mark.parametrize("nbytes", [1001, 499])
    def test_one_that_does_not_fit_goes(self, nbytes: int) -> None:
        """A huge arena is not kept for a small checkpoint."""
        pool, disposed = self.pool()
        arena = pool.take(1000)
        pool.give_back(arena)
        assert pool.take(nbytes) is not arena
        assert disposed == [arena]

    def test_two_users_get_two_arenas(self) -> None:
        """Only one of them is kept afterwards."""
        pool, disposed = self.pool()
        one, two = pool.take(1000), pool.take(1000)
        assert one is not two
        pool.give_back(one)
        pool.give_back(two)
        assert disposed == [one]

    def test_as_many_are_kept_as_were_asked_for(self) -> None:
        """What came back last is taken first: it may still be in a cache."""
        disposed: list[Arena] = []
        pool = ArenaPool(shared=True, keep=2, dispose=disposed.append)
        one, two, three = (pool.take(1000) for _ in range(3))
        for arena in (one, two, three):
            pool.give_back(arena)
        assert disposed == [one]
        assert pool.take(1000) is three
        assert pool.take(1000) is two
        for arena in (one, two, three):
            arena.close()

    def test_one_that_fits_is_found_beside_one_that_does_not(self) -> None:
        """Checkpoints of two sizes may take turns."""
        disposed: list[Arena] = []
        pool = ArenaPool(shared=False, keep=2, dispose=disposed.append)
        small, large = pool.take(100), pool.take(10_000)
        pool.give_back(small)
        pool.give_back(large)
        assert pool.take(100) is small
        assert disposed == []

    def test_trimming_keeps_nothing(self) -> None:
        """What nobody uses returns to the system."""
        pool, disposed = self.pool()
        arena = pool.take(1000)
        pool.give_back(arena)
        pool.trim()
        pool.trim()
        assert disposed == [arena]

    def test_what_comes_back_after_trimming_is_not_kept(self) -> None:
        """Until somebody takes one again, who will want it warm."""
        pool, disposed = self.pool()
        late, other = pool.take(1000), pool.take(1000)
        pool.trim()
        pool.give_back(late)
        assert disposed == [late]
        assert pool.take(1000) is not late
        pool.give_back(other)
        assert disposed == [late]
        assert pool.take(1000) is other


def test_a_view_of_an_address_keeps_its_owner() -> None:
    """The memory cannot go while somebody can write to it."""
    tensor = torch.zeros(4, dtype=torch.uint8)
    view = view_of_address(tensor.data_ptr(), 4, tensor)
    del tensor
    gc.collect()
    view[:] = b"abcd"
    assert isinstance(view.obj.owner, torch.Tensor)  # type: ignore[attr-defined]
    assert view.obj.owner.tolist() == list(b"abcd")  # type: ignore[attr-defined]


def test_a_closed_pool_keeps_nothing() -> None:
    """What comes back after the end returns to the system, as does what was free."""
    disposed: list[Arena] = []
    pool = ArenaPool(shared=False, keep=1, dispose=disposed.append)
    first, second = pool.take(100), pool.take(200)
    pool.give_back(first)
    pool.close()
    assert disposed == [first]
    pool.give_back(second)
    assert disposed == [first, second]
    pool.close()
    for arena in disposed:
        arena.close()


def test_threads_may_share_a_pool() -> None:
    """An arena has one user at a time, and none is lost."""
    disposed: list[Arena] = []
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
    for arena in disposed:
        arena.close()


@pytest.mark.skipif(not CAN_LEND, reason="memory is lent on Linux only")
class TestLending:
    """Memory that another process gets."""

    def test_only_its_owner_can_write_or_change_it(self) -> None:
        """And he only by the mapping that he has had before."""
        arena = Arena(1 << 20, shared=True)
        fd = arena.lend()
        assert arena.lend() == fd
        assert not os.get_inheritable(fd)
        for each in (fd, arena.fd):
            with pytest.raises(OSError, match=r"not permitted|Bad file descriptor"):
                os.pwrite(each, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(each, 1 << 20)
            with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
                os.ftruncate(each, 0)
        arena.buffer[:3] = b"abc"
        assert os.pread(fd, 3, 0) == b"abc"
        arena.close()
        assert arena.closed

    def test_what_is_borrowed_is_copied_where_it_is_written(self) -> None:
        """Not where it is made ready, nor on the other side."""
        arena = Arena(3 * mmap.PAGESIZE, shared=True)
        borrowed = Borrowed(arena.lend(), arena.nbytes)
        borrowed.populate(0, arena.nbytes)
        arena.buffer[:3] = b"abc"
        assert bytes(borrowed.buffer[:3]) == b"abc"
        borrowed.buffer[:2] = b"xy"
        assert bytes(arena.buffer[:3]) == b"abc"
        assert bytes(borrowed.buffer[:3]) == b"xyc"
        arena.close()
        assert bytes(borrowed.buffer[:3]) == b"xyc"
        view = borrowed.buffer
        borrowed.close()
        assert not borrowed.closed
        del view
        borrowed.close()
        assert borrowed.closed

    def test_a_spent_arena_is_not_used_again(self) -> None:
        """Others may still read it."""
        pool = ArenaPool(shared=True, keep=2, dispose=Arena.close)
        spent, fine = pool.take(100), pool.take(100)
        spent.spent = True
        pool.give_back(spent)
        pool.give_back(fine)
        assert spent.closed
        assert pool.take(100) is fine
        again = pool.take(100)
        assert again is not spent
        for each in (fine, again):
            each.close()
