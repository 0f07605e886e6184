"""Multilinear sums: words times keys, where the tensor is.

`fold` sums rows of bytes, for the digests of a device. `word_sums` sums the words of
tensors by their place in the full tensor, for fingerprints.

A word has at most 32 bits: an element of 1, 2 or 4 bytes is one word, and a larger one
is several, in the order of memory, as a further dimension. With words of 64 bits, two
flipped top bits would vanish from both sums. The value of a word is that of its bytes,
as signed digits to the base 256, the first one with the weight 1. So no two words have
the same value, and a host can have torch multiply the bytes as they are.

The words of a full tensor lie in rows. A row has the fewest trailing dimensions that
together have at least 256 words, or all dimensions. Rows are cut into *blocks* of
65,536 words, which are numbered through all rows. The word at column ``c`` of block
``b`` has the key ``hash(b) * table[c]`` modulo 2**64, of which there are two, with two
hashes and two tables. `fold` uses the tables alone. The hashes are odd, and no number
of the tables has so many zeros at its end that a single word could vanish.

The tables are the first MiB of SHAKE-128 of the bytes ``aiockpt``, as little-endian
integers of 64 bits, the first table first. A hash is the finalizer of SplitMix64, with
unsigned integers modulo 2**64 and shifts before exclusive ors::

    z = b + seed                             # 243F6A8885A308D3, 452821E638D01377
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
    z = (z ^ z >> 27) * 0x94D049BB133111EB
    hash = (z ^ z >> 31) | 1

A shard is a product of indices along each dimension. So its rows and its columns are
independent of each other: each row is a dot product with a part of the table, however
short its runs are.

Everything is exact, modulo 2**64, so the order does not matter, and neither do threads
and devices. A CPU multiplies bytes several times faster than 64-bit numbers. So a host
has torch multiply the matrix of the words' bytes with one of the digits of the keys
(`_byte_dots`), unless that is slower there.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import shake_128
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch

from aiockpt.format.limits import IS_CANCELLED, WorkCancelledError
from aiockpt.memory.copies import WORDS
from aiockpt.runtime.bridge import share_out

HeldRuns: TypeAlias = Sequence[tuple[tuple[int, int], ...]]
"""For each dimension of a full tensor, the half-open runs of indices of a shard."""

_HOST: Final = torch.device("cpu")  # whatever the default of the program is
_COLUMN_BITS: Final = 16
_COLUMNS: Final = 1 << _COLUMN_BITS
_MIN_ROW_WORDS: Final = 256
ROW_BYTES: Final = 4 * _COLUMNS

_FOLDED_BYTES: Final = 16 * ROW_BYTES
"""So much is folded at once, which needs five times as much memory."""

_CACHED_WORDS: Final = 1 << 15  # that a host sums at once as numbers
_TASK_WORDS: Final = 1 << 22  # that a device sums at once, or a host by their bytes
_STACKED_WORDS: Final = 1 << 12  # smaller tensors are summed together
_ALONE_WORDS: Final = 1 << 20  # so few are summed without further threads

_SEEDS: Final = (0x243F6A8885A308D3, 0x452821E638D01377)  # digits of pi
_FACTORS: Final = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64


def keys(device: torch.device) -> torch.Tensor:
    """Return the tables, ``[2, columns]``; the same everywhere."""
    stream = shake_128(b"aiockpt").digest(2 * 8 * _COLUMNS)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).view(2, -1).to(device)


_kept_keys: Final = cache(keys)


def fold(data: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the folded rows of bytes, ``[rows, 2]``, on their device."""
    return torch.cat(
        [
            _dots(_rows(data[start : start + _FOLDED_BYTES]), keys)
            for start in range(0, data.numel(), _FOLDED_BYTES)
        ]
    )


def _rows(data: torch.Tensor) -> torch.Tensor:
    size = data.numel()
    if size % ROW_BYTES or data.storage_offset() % 4 or data.data_ptr() % 4:
        padded = data.new_zeros(size + -size % ROW_BYTES)
        padded[:size] = data
        data = padded
    return data.view(torch.int32).view(-1, _COLUMNS)


def _dots(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the dot products of rows of words with both keys, ``[rows, 2]``."""
    wide = words.to(torch.int64)
    if wide.device.type == "cpu":
        return torch.stack([torch.mv(wide, key) for key in keys], 1)
    return torch.stack([(wide * key).sum(1) for key in keys], 1)


# ------------------------------------------------------------------ products of bytes

_DIGITS: Final = 10
"""The digits of a 64-bit number, of 7 bits each, from -64 to 63. With 8 bits, a CPU
without an instruction for sums of such products may lose the carry of two of them."""

_BYTES_AT_ONCE: Final = 16 << 10  # of a row, which keep the sums below 2**31
_MIN_BYTES_ROWS: Final = 4  # the digits take more memory than fewer rows

_FLIPS: Final = {torch.int8: 0, torch.int16: 0x80, torch.int32: 0x808080}
"""The top bits of all bytes of a word but the last one, which has the sign of a number.
"""


def _byte_dots(elements: torch.Tensor, columns: slice | torch.Tensor) -> torch.Tensor:
    """Return the dot products of rows with columns of the tables, ``[rows, 2]``."""
    digits = _digits(min(elements.itemsize, 4))[columns].flatten(0, 1)
    data = _separate(elements).view(torch.int8)
    total = torch.zeros(len(data), 2 * _DIGITS, dtype=torch.int64, device=_HOST)
    for at in range(0, data.shape[1], _BYTES_AT_ONCE):
        near = slice(at, at + _BYTES_AT_ONCE)
        some = data[:, near]
        total += torch._int_mm(some, digits[near])  # noqa: SLF001 - there is no other
    weights = 128 ** torch.arange(_DIGITS, device=_HOST)
    return (total.view(-1, 2, _DIGITS) * weights).sum(2)


def _separate(rows: torch.Tensor) -> torch.Tensor:
    """Return a matrix as rows that share no memory, copied if they do.

    Torch has wrong products of bytes for rows that overlap, such as those of an
    expanded tensor. It cannot view a single column with any stride as bytes, and calls
    it contiguous.
    """
    if rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _number_dots(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the dot products of rows of words with keys, ``[rows, 2]``.

    With the top bits of its bytes flipped, a word is too high by as much.
    """
    flip = _FLIPS[words.dtype]
    return _dots(words ^ flip, keys) - flip * keys.sum(1)


@cache
def _digits(size: int) -> torch.Tensor:
    """Return the digits of the factors of a word's bytes: ``[columns, size, 2 * 10]``.

    The factor of byte ``n`` is the key times ``256**n``.
    """
    table = _kept_keys(_HOST)
    factors = 256 ** torch.arange(size, device=_HOST)
    rest = table.t().unsqueeze(1) * factors.unsqueeze(1)
    found = []
    for _ in range(_DIGITS):
        digit = ((rest + 64) & 127) - 64
        rest = (rest - digit) >> 7
        found.append(digit.to(torch.int8))
    return torch.stack(found, -1).flatten(2)


@cache
def multiplies_bytes() -> bool:
    """Say whether torch multiplies bytes exactly here, and faster than numbers."""
    table = _kept_keys(_HOST)
    words = table.view(torch.int32).view(64, -1).clone()
    for row, word in enumerate((0, -1, 0x7F7F7F7F, -0x7F7F7F80)):
        words[row] = word
    every = slice(0, words.shape[1])

    def by_bytes() -> torch.Tensor:
        return _byte_dots(words, every)

    def by_numbers() -> torch.Tensor:
        return _number_dots(words, table[:, every])

    try:
        with alone():
            is_exact = torch.equal(by_bytes(), by_numbers())
            return is_exact and _seconds(by_bytes) < _seconds(by_numbers)
    except (AttributeError, RuntimeError, Warning):  # torch may have none here
        return False


def _seconds(call: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


# --------------------------------------------------------------------------- threads


@contextmanager
def alone() -> Iterator[None]:
    """Have torch use this thread alone for what this thread does in the block.

    Otherwise torch has a team of threads for each thread that calls it. On a busy host,
    each call would wait until the whole team has had a core. Torch itself can only
    change this for all threads of the process. If the OpenMP library is not found, the
    block runs as usual.
    """
    torch.get_num_threads()  # sets the number of a new thread
    before = [(each, each.omp_get_max_threads()) for each in _openmp()]
    try:
        for each, _ in before:
            each.omp_set_num_threads(1)
        yield
    finally:
        for each, count in before:
            each.omp_set_num_threads(count)


@cache
def _openmp() -> Sequence[ctypes.CDLL]:
    """Return the OpenMP libraries that this process has loaded."""
    found: list[ctypes.CDLL] = []
    with suppress(OSError):
        mapped = Path("/proc/self/maps").read_text()
        for path in sorted({*_OPENMP.findall(mapped)}):
            with suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                library.omp_set_num_threads.restype = None
                library.omp_get_max_threads.restype = ctypes.c_int
                found.append(library)
    return found


_OPENMP: Final = re.compile(
    r"(/.*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[^/\n]*)$", re.MULTILINE
)


# ------------------------------------------------------------------- keys of a shard


def _words_at_once(device: torch.device) -> int:
    are_few = device.type == "cpu" and not multiplies_bytes()
    return _CACHED_WORDS if are_few else _TASK_WORDS


def _hashes(blocks: torch.Tensor) -> torch.Tensor:
    """Return both hashes of block numbers, as a new last dimension."""
    found = []
    for seed in _SEEDS:
        mixed = blocks + seed
        for shift, factor in zip((30, 27), _FACTORS, strict=True):
            mixed = (mixed ^ _shifted(mixed, shift)) * factor
        found.append((mixed ^ _shifted(mixed, 31)) | 1)
    return torch.stack(found, -1)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, as unsigned numbers."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


# ------------------------------------------------------------------- words of a shard


class HeldTensor(NamedTuple):
    """A local tensor, and what it holds of a full one.

    Attributes:
        tensor: The local tensor.
        shape: The shape of the full tensor.
        runs: What the local tensor holds of each dimension.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    runs: HeldRuns


class _ColumnRun(NamedTuple):
    """Neighbouring columns of the local rows that are in one block.

    Attributes:
        start: The first local column.
        stop: The end of the local columns.
        block: The number of the block in its row.
        columns: The columns of the block.
    """

    start: int
    stop: int
    block: int
    columns: slice | torch.Tensor


class _Keys:
    """The keys of a shard's words: those of its columns, and a factor for each row.

    Args:
        shape: The shape of the full tensor, in words.
        runs: What the shard holds of each dimension.
        table: The tables, on the device of the words.

    Attributes:
        rows: The number of local rows.
        width: The number of words in each.
        runs: The runs of the local columns.
    """

    def __init__(
        self, shape: tuple[int, ...], runs: HeldRuns, table: torch.Tensor
    ) -> None:
        dims, width = len(shape), 1
        while dims and width < _MIN_ROW_WORDS:
            dims -= 1
            width *= shape[dims]
        self.runs = [*_column_runs(shape[dims:], runs[dims:])]
        self.width = self.runs[-1].stop
        rows = _indices(shape[:dims], runs[:dims])
        self.rows = rows.numel()
        self._lead = [sum(b - a for a, b in own) for own in runs[:dims]]
        blocks = torch.tensor([run.block for run in self.runs], device=_HOST)
        numbers = rows.unsqueeze(1) * -(-width // _COLUMNS) + blocks
        self._factors = _hashes(numbers.to(table.device))  # [rows, runs, 2]
        self._table = table

    def parts(self) -> Iterator[tuple[range, range]]:
        """Yield rows and runs for tasks of about the same size.

        The rows of a task are those of a slice along one dimension of the local tensor,
        so that a tensor that is not contiguous is copied by parts.
        """
        most = max(_TASK_WORDS // self.width, 1)
        runs = len(self.runs) if most > 1 else _TASK_WORDS // _COLUMNS
        inner = whole = 1
        for size in reversed(self._lead):
            inner, whole = whole, whole * size
            if whole > most:
                break
        step = most // inner * inner
        for first in range(0, self.rows, whole):
            for row in range(first, first + whole, step):
                for run in range(0, len(self.runs), runs):
                    yield (
                        range(row, min(row + step, first + whole)),
                        range(run, min(run + runs, len(self.runs))),
                    )

    def sum(self, tensor: torch.Tensor, rows: range, runs: range) -> torch.Tensor:
        """Return the sums of some rows and some runs of columns, ``[2]``.

        Args:
            tensor: The local tensor.
            rows, runs: Which rows, and which runs, as from `parts`.
        """
        unit = 2 if tensor.itemsize >= 8 else 1  # words of an integer
        start = self.runs[runs.start].start // unit
        stop = self.runs[runs.stop - 1].stop // unit
        first = rows.start * (self.width // unit) + start
        words = _part(tensor, first, len(rows), stop - start)
        most = _words_at_once(words.device)
        total = torch.zeros(2, dtype=torch.int64, device=words.device)
        at = runs.start
        while at < runs.stop:
            run, count = self.runs[at], 1
            if len(rows) == 1:
                count = self._alike(runs[at - runs.start :], most // _COLUMNS)
            size = run.stop - run.start
            step = max(most // (size * count), 1)
            left = run.start // unit - start
            columns = slice(left, left + size * count // unit)
            factors = self._factors[rows.start : rows.stop, at : at + count]
            for row in range(0, len(rows), step):
                near = slice(row, row + step)
                block = words[near, columns].reshape(-1, size // unit)
                products = self._products(block, run.columns)
                total += (products * factors[near].flatten(0, 1)).sum(0)
            at += count
        return total

    def _products(
        self, elements: torch.Tensor, columns: slice | torch.Tensor
    ) -> torch.Tensor:
        """Return the dot products of rows with columns of the tables, ``[rows, 2]``."""
        is_host = elements.device.type == "cpu"
        if is_host and len(elements) >= _MIN_BYTES_ROWS and multiplies_bytes():
            return _byte_dots(elements, columns)
        if elements.itemsize == 8:
            elements = _separate(elements).view(torch.int32)
        return _number_dots(elements, self._table[:, columns])

    def _alike(self, runs: range, most: int) -> int:
        """Return how many of the first runs are whole blocks, to be summed as rows."""
        some = (self.runs[number] for number in runs[:most])
        whole = takewhile(lambda run: run.stop - run.start == _COLUMNS, some)
        return max(sum(1 for _ in whole), 1)

    def flat(self) -> torch.Tensor:
        """Return the keys of all local words, ``[2, words]``; for few words."""
        table = torch.cat([self._table[:, run.columns] for run in self.runs], 1)
        sizes = torch.tensor([run.stop - run.start for run in self.runs], device=_HOST)
        factors = self._factors.repeat_interleave(sizes.to(table.device), 1)
        return (factors.permute(2, 0, 1) * table.unsqueeze(1)).flatten(1)


def _indices(shape: Sequence[int], runs: HeldRuns) -> torch.Tensor:
    """Return the index in the flat tensor of each element that a shard holds."""
    found = torch.zeros(1, dtype=torch.int64, device=_HOST)
    for size, own in zip(shape, runs, strict=True):
        along = torch.cat([torch.arange(*each, device=_HOST) for each in own])
        found = (found.unsqueeze(1) * size + along).flatten()
    return found


def _column_runs(shape: Sequence[int], runs: HeldRuns) -> Iterator[_ColumnRun]:
    """Yield the columns that a shard holds of each row, in the order of both."""
    inner, dims, at = 1, len(shape), 0
    while dims and tuple(runs[dims - 1]) == ((0, shape[dims - 1]),):
        dims -= 1
        inner *= shape[dims]
    if dims <= 1:  # few runs, which may be long
        for first, last in runs[0] if dims else ((0, 1),):
            yield from _cut(at, first * inner, last * inner)
            at += (last - first) * inner
        return
    below, rest = prod(shape[1:]), _indices(shape[1:], runs[1:])  # fewer than 256
    step = max(_COLUMNS // below, 1)
    for lower, upper in runs[0]:
        for first in range(lower, upper, step):
            outer = torch.arange(first, min(first + step, upper), device=_HOST)
            found = (outer.unsqueeze(1) * below + rest).flatten()
            blocks = found >> _COLUMN_BITS  # a division takes several times as long
            ends = 1 + (blocks.diff() != 0).nonzero().flatten()
            for some in found.tensor_split(ends):
                block, stop = int(some[0]) >> _COLUMN_BITS, at + some.numel()
                yield _ColumnRun(at, stop, block, some & (_COLUMNS - 1))
                at = stop


def _cut(at: int, first: int, last: int) -> Iterator[_ColumnRun]:
    """Yield the columns ``[first, last)``, so that each run is in one block."""
    while first < last:
        size = min(last - first, _COLUMNS - first % _COLUMNS)
        block, column = divmod(first, _COLUMNS)
        yield _ColumnRun(at, at + size, block, slice(column, column + size))
        at, first = at + size, first + size


# ------------------------------------------------------------------------------- sums


def word_sums(held: Sequence[HeldTensor]) -> list[tuple[int, int]]:
    """Return the sums of each local tensor, modulo 2**64.

    Tensors of the host are summed in threads, those of a device on its current stream.
    It blocks, and releases the interpreter lock in between.

    Raises:
        WorkCancelledError: the caller of this thread's work was cancelled.
    """
    found: list[_Found] = []
    is_cancelled = IS_CANCELLED.get()

    def run(task: _Task) -> None:
        if is_cancelled is not None and is_cancelled():
            raise WorkCancelledError("the caller was cancelled")
        with alone():
            some = task.sum()
            # A small tensor would keep the allocator from reusing a copy before it.
            is_host = some.device.type == "cpu"
            found.append((task.numbers, some.tolist() if is_host else some))

    with alone():
        own: list[_Task] = []
        for task in _tasks(held):
            if task.tensors[0].device.type == "cpu":
                own.append(task)
            else:
                run(task)
        on_host = {number for task in own for number in task.numbers}
        if sum(held[each].tensor.numel() for each in on_host) < _ALONE_WORDS:
            for task in own:
                run(task)
        else:
            share_out(run, own)
        totals = torch.zeros(len(held), 2, dtype=torch.int64, device=_HOST)
        for numbers, some in found:
            sums = torch.as_tensor(some, device=_HOST)
            totals.index_add_(0, torch.tensor(numbers, device=_HOST), sums)
    return [(first % 2**64, second % 2**64) for first, second in totals.tolist()]


_Found: TypeAlias = tuple[Sequence[int], torch.Tensor | list[list[int]]]
"""The numbers of tensors, and sums to add to theirs, ``[numbers, 2]``."""


class _Task(NamedTuple):
    """Tensors to sum. Their words are made when it runs: a copy may be needed for that.

    Attributes:
        numbers: The numbers of the tensors.
        tensors: The local tensors: one, or several small ones.
        keys: The keys of their words.
        rows, runs: Which words of one tensor to sum; None: all words of each.
    """

    numbers: Sequence[int]
    tensors: Sequence[torch.Tensor]
    keys: _Keys
    rows: range | None = None
    runs: range | None = None

    def sum(self) -> torch.Tensor:
        """Return the sums, ``[numbers, 2]``."""
        if self.rows is not None and self.runs is not None:
            return self.keys.sum(self.tensors[0], self.rows, self.runs).unsqueeze(0)
        words = torch.stack([_words(each).flatten() for each in self.tensors])
        if words.itemsize == 8:
            words = words.view(torch.int32)
        return _number_dots(words, self.keys.flat())


def _tasks(held: Sequence[HeldTensor]) -> Iterator[_Task]:
    """Yield tasks that sum the words of all tensors once."""
    known: dict[object, _Keys] = {}
    small: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, (tensor, shape, runs) in enumerate(held):
        if not tensor.numel():
            continue
        size = tensor.itemsize // 4
        key = shape, runs, size, tensor.device
        if key not in known:
            table = _kept_keys(tensor.device)
            if size > 1:  # an element is several words
                shape, runs = (*shape, size), (*runs, ((0, size),))  # noqa: PLW2901
            known[key] = _Keys(shape, runs, table)
        keys = known[key]
        if keys.rows * keys.width <= _STACKED_WORDS:
            small[key, tensor.dtype, tensor.shape].append(number)
            continue
        for rows, columns in keys.parts():
            yield _Task([number], [tensor], keys, rows, columns)
    for (shard, *_), numbers in small.items():
        keys = known[shard]
        step = max(_CACHED_WORDS // (keys.rows * keys.width), 1)
        for at in range(0, len(numbers), step):
            some = numbers[at : at + step]
            yield _Task(some, [held[each].tensor for each in some], keys)


def _part(tensor: torch.Tensor, first: int, rows: int, width: int) -> torch.Tensor:
    """Return some elements of a tensor as rows of integers.

    Only these are copied if the tensor is not contiguous.

    Args:
        tensor: The tensor.
        first: The first integer.
        rows: The number of rows. Several are those of a slice along one dimension.
        width: The integers in each row.
    """
    stop = first + rows * width
    inner = tensor.numel() * max(tensor.itemsize // 8, 1)
    tensor = tensor.detach()
    for size in tensor.shape:
        inner //= size
        low, high = first // inner, -(-stop // inner)
        tensor = tensor[low:high]
        first, stop = first - low * inner, stop - low * inner
        if high - low > 1:
            break
        tensor = tensor[0]
    return _words(tensor).reshape(rows, -1)[:, first : first + width]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements, as a program sees them, as integers of at most 8 bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(torch.int8 if tensor.itemsize == 1 else WORDS[tensor.itemsize])
