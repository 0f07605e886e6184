"""The sums of fingerprints, against a slow definition of their keys."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from aiockpt.format.limits import IS_CANCELLED, WorkCancelledError
from aiockpt.memory import multilinear
from aiockpt.memory.multilinear import HeldTensor, keys, word_sums
from aiockpt.state.mesh import ShardRuns, shard_of, whole
from aiockpt.state.sharding import Placement, Split, StridedSplit
from tests.primitives.test_mesh import coordinates, layout_of, taken

TABLE = keys(torch.device("cpu"))
MASK = 2**64 - 1


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the words of a full tensor, with its shape or one dimension more."""
    flat = tensor.contiguous().view(torch.uint8 if tensor.dim() else tensor.dtype)
    if not tensor.dim():
        flat = tensor.reshape(1).view(torch.uint8)
    size = min(tensor.itemsize, 4)
    digits = flat.flatten().view(torch.int8).view(-1, size).long()
    words = (digits * 256 ** torch.arange(size)).sum(1)
    more = (tensor.itemsize // 4,) if tensor.itemsize > 4 else ()
    return words.reshape((*tensor.shape, *more))


def hash_of(block: int, seed: int) -> int:
    """Return the hash of a block, as the text defines it."""
    mixed = block + seed & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return (mixed ^ mixed >> 31) | 1


SEEDS = (0x243F6A8885A308D3, 0x452821E638D01377)


def products(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return each word times its keys, one by one, as the text defines them."""
    words = words_of(tensor)
    width = 1
    for size in reversed(words.shape):
        if width >= 256:
            break
        width *= size
    index = torch.arange(words.numel())
    column, row = index % width, index // width
    block = row * -(-width // 65536) + column // 65536
    numbers, place = block.unique(return_inverse=True)
    found = []
    for seed, table in zip(SEEDS, TABLE, strict=True):
        hashes = [hash_of(number, seed) for number in numbers.tolist()]
        signed = [each - 2**64 if each >= 2**63 else each for each in hashes]
        key = torch.tensor(signed)[place] * table[column % 65536]
        found.append((words.flatten().long() * key).reshape(words.shape))
    return found


def expected(tensor: torch.Tensor, shard: ShardRuns) -> tuple[int, int]:
    """Return the sums of a shard."""
    parts = products(tensor)
    runs = (
        shard if parts[0].dim() == len(shard) else (*shard, ((0, parts[0].shape[-1]),))
    )
    first, second = (int(taken(each, runs).sum()) & MASK for each in parts)
    return first, second


def drawn(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits."""
    noise = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(256, (size,), dtype=torch.uint8, generator=noise)
    return raw.view(torch.bool if dtype is torch.bool else dtype).reshape((*shape,))


def added(some: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Add the sums of shards."""
    first, second = (sum(row) & MASK for row in zip(*some, strict=True))
    return first, second


CUTS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = [
    ((1000, 70), (4,), (Split(0),)),
    ((1000, 70), (3,), (Split(1),)),
    ((300, 3), (2,), (Split(1),)),
    ((66_001,), (4,), (Split(0),)),
    ((140_000,), (2, 2), (StridedSplit(0, 2), Split(0))),
    ((4, 66_000), (4,), (Split(1),)),
    ((4, 66_000), (3,), (Split(0),)),
    ((40, 20, 3, 3), (2,), (Split(1),)),
    ((40, 20, 3, 3), (2,), (Split(3),)),
    ((64, 8, 40), (2, 2), (Split(2), Split(0))),
    ((64, 512), (2, 2), (StridedSplit(0, 2), Split(0))),
    ((17_000, 2, 2), (2,), (Split(2),)),
    ((7, 5), (4,), (Split(0),)),
    ((), (2,), ()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "sizes", "placements"), CUTS)
def test_shards_add_up(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    placements: tuple[Placement, ...],
    dtype: torch.dtype,
) -> None:
    """Each shard has the sums of its elements, and all together those of the whole."""
    full = drawn(shape, dtype)
    if not placements:
        assert word_sums([HeldTensor(full, shape, ())]) == [expected(full, ())]
        return
    shards = []
    for at in coordinates(sizes):
        shard = shard_of(layout_of(shape, sizes, placements, at))
        assert shard is not None
        shards.append(shard)
    held = [HeldTensor(taken(full, shard), shape, shard) for shard in shards]
    found = word_sums(held)
    assert found == [
        expected(full, shard) if each.tensor.numel() else (0, 0)
        for each, shard in zip(held, shards, strict=True)
    ]
    assert added(found) == word_sums([HeldTensor(full, shape, whole(shape))])[0]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.bits8),
    *(torch.int16, torch.bfloat16, torch.float16, torch.int32, torch.float32),
    *(torch.int64, torch.float64, torch.complex32, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (40, 300)])
def test_every_dtype_has_words(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Elements of any size are words of at most 32 bits, in the order of memory."""
    raw = drawn((*shape[:-1], shape[-1] * dtype.itemsize), torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    full = raw.view(dtype)
    assert word_sums([HeldTensor(full, shape, whole(shape))]) == [
        expected(raw.view(dtype), whole(shape))
    ]


def test_it_sums_what_a_program_sees() -> None:
    """Strides, views and lazy signs make no difference."""
    real, other = drawn((300, 40), torch.float32), torch.rand(300, 40)
    plain = torch.complex(other, real.nan_to_num(0))
    views = [
        (real.t(), real.t().contiguous()),
        (real[::3, 1::2], real[::3, 1::2].clone()),
        (real[:1].expand(300, 40), real[:1].repeat(300, 1)),
        (plain.conj(), plain.conj().resolve_conj()),
        (plain.conj().imag, plain.conj().imag.clone()),
        (torch.nn.Parameter(real), real),
    ]
    for view, dense in views:
        shape = tuple(view.shape)
        found = word_sums(
            [HeldTensor(each, shape, whole(shape)) for each in (view, dense)]
        )
        assert found[0] == found[1] == expected(dense, whole(shape))


@pytest.mark.parametrize("by_bytes", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128],
    ids=str,
)
def test_elements_may_share_memory(
    dtype: torch.dtype, by_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that overlap have the sums of their elements, each time."""
    if not by_bytes:
        monkeypatch.setattr(multilinear, "multiplies_bytes", lambda: False)
    wide = 66_000 // max(dtype.itemsize // 4, 1)  # more than a block
    raw = drawn((66_000,), dtype)
    views = [
        raw[:1000].expand(9, 1000),
        raw[:wide].expand(5, wide),
        raw[:1000].expand(9, 1000)[:, 3:900],
        raw[:6000].view(6, 1, 1000).expand(6, 5, 1000),
        raw.as_strided((9, 1000), (500, 1)),
        raw.as_strided((9, 1000), (1, 1)),
        raw[:1].expand(9, 1000),
    ]
    for view in views:
        shape = tuple(view.shape)
        dense = view.clone(memory_format=torch.contiguous_format)
        held = [HeldTensor(each, shape, whole(shape)) for each in (view, dense, view)]
        assert word_sums(held) == 3 * [expected(dense, whole(shape))]


@pytest.mark.parametrize("by_bytes", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128],
    ids=str,
)
def test_a_shard_may_have_one_column_with_any_stride(
    dtype: torch.dtype, by_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch calls a single column contiguous, however far apart its elements are."""
    if not by_bytes:
        monkeypatch.setattr(multilinear, "multiplies_bytes", lambda: False)
    monkeypatch.setattr(multilinear, "_STACKED_WORDS", 16)
    full = drawn((50, 300), dtype)
    shard = ((0, 50),), ((3, 4),)
    column = full[:, 3:4].clone()
    held = [
        HeldTensor(each, (50, 300), shard)
        for each in (column, column.as_strided((50, 1), (1, 50)), full[:, 3:4])
    ]
    assert word_sums(held) == 3 * [expected(full, shard)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128])
@pytest.mark.parametrize(
    "shape",
    [(40, 3, 2, 300), (2, 120, 301), (132_001,), (2, 22_000, 3), (1, 1, 1100, 64)],
)
def test_strides_make_no_difference_to_parts(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of a tensor has its own elements, however they lie."""
    monkeypatch.setattr(multilinear, "_TASK_WORDS", 1 << 16)
    full = drawn(shape, dtype)
    backwards = [*range(full.dim() - 1, -1, -1)]
    views = [
        full,
        full.permute(backwards).contiguous().permute(backwards),
        torch.stack([full, full], -1)[..., 1],
        torch.cat([full, full], 0)[: shape[0]],
    ]
    held = [HeldTensor(each, shape, whole(shape)) for each in views]
    assert word_sums(held) == len(views) * [expected(full, whole(shape))]
    if dtype.is_complex:
        clear = full.conj().resolve_conj()
        held = [HeldTensor(views[1].conj(), shape, whole(shape))]
        assert word_sums(held) == [expected(clear, whole(shape))]


def test_small_tensors_are_summed_together() -> None:
    """A state dict of many small tensors has the sums of each."""
    rng = random.Random(1)
    shapes = [(), (1,), (3, 5), (512,), (20, 30)]
    kinds = [torch.float32, torch.int64, torch.bfloat16]
    some = [drawn(rng.choice(shapes), rng.choice(kinds), seed) for seed in range(200)]
    held = [HeldTensor(each, tuple(each.shape), whole(each.shape)) for each in some]
    assert word_sums(held) == [expected(each, whole(each.shape)) for each in some]


def test_threads_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are summed in threads."""
    monkeypatch.setattr(multilinear, "_TASK_WORDS", 1 << 16)
    monkeypatch.setattr(multilinear, "_ALONE_WORDS", 1 << 17)
    full = drawn((200, 1024), torch.float32)
    held = [HeldTensor(full, (200, 1024), whole(full.shape))]
    found = word_sums(held)
    monkeypatch.setattr(multilinear, "multiplies_bytes", lambda: False)
    assert word_sums(held) == found
    monkeypatch.setattr(multilinear, "_ALONE_WORDS", 1 << 40)
    assert word_sums(held) == found == [expected(full, whole(full.shape))]


@pytest.mark.parametrize(
    ("shape", "sizes", "placements"), [row for row in CUTS if row[2]]
)
def test_a_device_gets_the_same_sums(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    placements: tuple[Placement, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Larger blocks, as a device sums them at once, make no difference."""
    full = drawn(shape, torch.float64)
    held = []
    for at in coordinates(sizes):
        shard = shard_of(layout_of(shape, sizes, placements, at))
        assert shard is not None
        held.append(HeldTensor(taken(full, shard), shape, shard))
    found = word_sums(held)
    for words in (multilinear._CACHED_WORDS, multilinear._TASK_WORDS):
        monkeypatch.setattr(multilinear, "multiplies_bytes", lambda: False)
        monkeypatch.setattr(multilinear, "_words_at_once", lambda _, own=words: own)
        assert word_sums(held) == found


def test_the_programs_default_device_makes_no_difference() -> None:
    """New tensors of a program may be on any device."""
    full = drawn((300, 70), torch.float32)
    held = [HeldTensor(full, (300, 70), whole(full.shape))]
    held += [HeldTensor(full[0], (70,), whole((70,)))]
    with torch.device("meta"):
        found = word_sums(held)
    assert found == word_sums(held)


def test_torch_uses_its_threads_again() -> None:
    """Only the block runs alone."""
    before = torch.get_num_threads()
    with multilinear.alone():
        assert torch.get_num_threads() == (1 if multilinear._openmp() else before)
    assert torch.get_num_threads() == before


def test_no_key_makes_a_word_vanish() -> None:
    """A changed word changes a sum: the keys have few zeros at their ends."""
    zeros = TABLE & -TABLE  # the lowest bit of each
    assert int(zeros.min()) > 0
    assert int(zeros.max()) < 2**31


def test_a_cancelled_caller_ends_the_work() -> None:
    """The threads end soon when nobody waits for the sums any more."""
    full = torch.zeros(2048, 1024)
    token = IS_CANCELLED.set(lambda: True)
    try:
        with pytest.raises(WorkCancelledError):
            word_sums([HeldTensor(full, (2048, 1024), whole(full.shape))])
    finally:
        IS_CANCELLED.reset(token)
