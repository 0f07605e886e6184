"""Hostile directories of torch.distributed.checkpoint.

``python dcp_hostile.py DIRECTORY COUNT`` makes sources of each directory below, under
guard. Then it reads the metadata of the directory "mutated" with COUNT random
mistakes. It prints what came, and what the guard saw, as JSON.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aiockpt import Limits
from aiockpt.runtime.words import printable
from aiockpt.storage.dcp import METADATA
from aiockpt.storage.dcp_sources import dcp_sources
from tests.support.auditing import Guard

FILE = "__0_0.distcp"
SIZE = 4096
OPCODES = [*range(256), *b"(.0RbctueNhjqr\x81\x85\x86\x93\x94" * 20]
LIMITS = Limits(max_header_bytes=8 << 20, max_nodes=100_000)


class Call:
    """Calls a function by its name when it is unpickled."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name, self.args = name, args

    def __reduce__(self) -> tuple[Any, ...]:
        return _Name(self.name), self.args

    def __hash__(self) -> int:
        return 1


class StoredAs:
    """A value that is pickled as the storage of a tensor."""

    def __init__(self, *described: Any) -> None:
        self.described = described


class _Name:
    """A value that is pickled as any name, without an import of it."""

    def __init__(self, name: str) -> None:
        self.module, _, self.name = name.rpartition(".")

    def __call__(self) -> None:
        raise NotImplementedError


_Written: Any = pickle._Pickler


class _Pickler(_Written):
    """The one in Python, whose way of writing names can be replaced."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.described if isinstance(obj, StoredAs) else None

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Name):
            super().save(obj.module)
            super().save(obj.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            super().save(obj, save_persistent_id)


def dumped(value: Any) -> bytes:
    """Pickle a value that may have a `Call`."""
    stream = io.BytesIO()
    _Pickler(stream, 4).dump(value)
    return stream.getvalue()


def tensor(
    shape: list[int],
    chunks: list[tuple[list[int], list[int]]],
    dtype: torch.dtype = torch.float32,
    layout: torch.layout = torch.strided,
) -> TensorStorageMetadata:
    """Describe a tensor by the offsets and sizes of its chunks."""
    return TensorStorageMetadata(
        TensorProperties(dtype, layout),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in chunks],
    )


def metadata() -> Metadata:
    """Return one that is well-formed: a tensor of two chunks, a value, a list."""
    found = Metadata(
        {
            "w": tensor([4, 3], [([0, 0], [2, 3]), ([2, 0], [2, 3])]),
            "steps.0": BytesStorageMetadata(),
            "steps.1": tensor([], [([], [])]),
        }
    )
    found.planner_data = {"w": ("w",), "steps.0": ("steps", 0), "steps.1": ("steps", 1)}
    found.storage_data = {
        MetadataIndex("w", [0, 0], 0): _StorageInfo(FILE, 0, 100),
        MetadataIndex("w", [2, 0], 1): _StorageInfo(FILE, 100, 100),
        MetadataIndex("steps.0"): _StorageInfo(FILE, 200, 100),
        MetadataIndex("steps.1", [], 0): _StorageInfo(FILE, 300, 100),
    }
    found.storage_meta = StorageMeta(Path("/somewhere"), "id")
    return found


def parts(found: Metadata) -> dict[Any, Any]:
    """Return what describes the tensors and values."""
    described: dict[Any, Any] = found.state_dict_metadata
    return described


def changed(change: Callable[[Metadata], object]) -> bytes:
    """Pickle the well-formed one after a change."""
    found = metadata()
    change(found)
    return dumped(found)


NAMES = (
    *("os.system", "posix.system", "builtins.eval", "builtins.exec", "builtins.open"),
    *("builtins.compile", "builtins.__import__", "builtins.getattr", "builtins.dict"),
    *("subprocess.Popen", "importlib.import_module", "pickle.loads", "torch.load"),
    *("functools.partial", "operator.attrgetter", "shutil.rmtree", "pty.spawn"),
    *("types.CodeType", "ctypes.CDLL", "runpy.run_path", "copyreg._reconstructor"),
    *("torch.distributed.checkpoint.metadata.os.system", "torch._utils._rebuild"),
    *("pathlib.Path", "torch.qint8", "collections.deque", "aiockpt.load"),
)

PLACES: tuple[Callable[[Any], bytes], ...] = (
    dumped,
    lambda call: changed(lambda found: setattr(found, "planner_data", call)),
    lambda call: changed(lambda found: parts(found).update(w=call)),
    lambda call: changed(lambda found: setattr(found, "storage_meta", call)),
    lambda call: changed(lambda found: found.storage_data.update({call: 1})),
    lambda call: changed(lambda found: setattr(found, "version", [call])),
    lambda call: changed(
        lambda found: setattr(found.state_dict_metadata["w"], "size", call)
    ),
)


def calls(mark: Path) -> Iterator[tuple[str, bytes]]:
    """Yield metadata that would call something, in one place or another."""
    for number, name in enumerate(NAMES):
        call = Call(name, f"touch {mark}")
        yield f"call {name}", PLACES[number % len(PLACES)](call)


START = b"\x80\x04"

INSTRUCTIONS = {
    "protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "inst": START + b"(S'true'\nios\nsystem\n.",
    "obj": START + b"(cos\nsystem\nVtrue\no.",
    "newobj_ex": START + b"cos\nsystem\n)}\x92.",
    "extension": START + b"\x82\x01.",
    "long extension": START + b"\x84\x01\x00\x00\x00.",
    "persistent id": START + b"X\x01\x00\x00\x00aQ.",
    "persistent text": START + b"Pa\n.",
    "dup": START + b"]2a.",
    "pop": START + b"NN0.",
    "pop mark": START + b"N(N1.",
    "float": START + b"G\x00\x00\x00\x00\x00\x00\x00\x00.",
    "decimal": START + b"L" + b"9" * 100_000 + b"L\n.",
    "string": START + b"S'a'\n.",
    "bytes": START + b"C\x01a.",
    "bytearray": START + b"\x96\x01\x00\x00\x00\x00\x00\x00\x00a.",
    "buffer": START + b"\x97.",
    "set": START + b"\x8f(N\x90.",
    "frozenset": START + b"(N\x91.",
    "long text": START + b"\x8d" + b"\xff" * 8 + b".",
    "protocol 255": b"\x80\xff.",
    "no end": START + b"N",
    "nothing": b"",
    "no value": START + b".",
    "two values": START + b"NN.",
    "a mark": START + b"N(.",
    "more behind": dumped(metadata()) + b"N.",
    "empty stack": START + b"a.",
    "no such memo": START + b"h\x07.",
    "far memo": START + b"j\xff\xff\xff\xff.",
    "items for none": START + b"NNa.",
    "keys for a list": START + b"]NNs.",
    "odd keys": START + b"}(NNNu.",
    "state for a list": START + b"]]b.",
    "call of a string": START + b"X\x01\x00\x00\x00a)R.",
    "call with no tuple": START + b"ctorch\nSize\nNR.",
    "name of no string": START + b"NN\x93.",
    "a name without end": START + b"ctorch" + b"x" * 1000 + b".",
    "text that is no text": START + b"X\x02\x00\x00\x00\xff\xff.",
}
"""What Python writes for no plain data, or for nothing at all."""

BOMBS = {
    "put far away": START + b"Nr\xff\xff\xff\x7f.",
    "a long text": START + b"X\xff\xff\xff\xff.",
    "a long frame": START + b"\x95" + b"\xff" * 8,
    "a long integer": START + b"\x8a\xff" + b"\xff" * 255 + b".",
    "marks": START + b"(" * 1_000_000 + b".",
    "dicts": START + b"}" * 200_000 + b".",
    "memo": START + b"N" + b"\x94" * 200_000 + b".",
    "deep tuples": START + b")" + b"\x85" * 80_000 + b".",
    "deep lists": START + b"]" * 80_000 + b"a" * 79_999 + b".",
    "a large file": START + b"N" * (9 << 20) + b".",
    "laughs": START + b"]\x94" + b"](h\x00h\x00h\x00h\x00e\x94" * 60 + b".",
}
"""What would take much memory or time."""


def _many(found: Metadata) -> None:
    """Let many tensors have one long list of chunks."""
    shared = tensor([0], [([0], [0])] * 4000)
    found.state_dict_metadata.update({f"w{n}": shared for n in range(4000)})


def _named(name: str, value: Any, *chunks: list[int]) -> Callable[[Metadata], object]:
    """Add a tensor or value, whose chunks lie somewhere."""

    def change(found: Metadata) -> None:
        found.state_dict_metadata[name] = value
        for chunk in chunks:
            index = MetadataIndex(name, chunk)
            found.storage_data[index] = _StorageInfo(FILE, 0, 100)

    return change


def _attribute(path: str, value: Any) -> Callable[[Metadata], object]:
    """Change an attribute of the first tensor, or of its first chunk."""

    def change(found: Metadata) -> None:
        target = parts(found)["w"]
        *above, last = path.split(".")
        for step in above:
            target = getattr(target, step)
        if isinstance(target, list):
            target = target[0]
        setattr(target, last, value)

    return change


def _stored(name: str, value: Any) -> Callable[[Metadata], object]:
    """Change an attribute of where something is stored."""
    return lambda found: setattr(
        found.storage_data[MetadataIndex("w", [0, 0])], name, value
    )


def _planned(**paths: Any) -> Callable[[Metadata], object]:
    return lambda found: found.planner_data.update(paths)


def _sizes(*numbers: Any) -> tuple[Any, ...]:
    return numbers


CHANGES: dict[str, Callable[[Metadata], object]] = {
    "no storage": lambda found: setattr(found, "storage_data", None),
    "no tensors": lambda found: setattr(found, "state_dict_metadata", None),
    "a key that is no name": lambda found: parts(found).update({1: 2}),
    "another record": lambda found: parts(found).update(w=found.storage_meta),
    "a chunk is missing": lambda found: found.storage_data.pop(
        MetadataIndex("w", [2, 0])
    ),
    "a value is missing": lambda found: found.storage_data.pop(
        MetadataIndex("steps.0")
    ),
    "a value at an offset": _named("v", BytesStorageMetadata(), [0]),
    "uncovered": _attribute("chunks", []),
    "a hole": _named("v", tensor([4], [([0], [1]), ([3], [1])]), [0], [3]),
    "overlap": _named("v", tensor([4], [([0], [3]), ([2], [2])]), [0], [2]),
    "overlap and hole": _named("v", tensor([4], [([0], [2]), ([1], [2])]), [0], [1]),
    "overlap in two": _named(
        "v",
        tensor([2, 2], [([0, 0], [1, 2]), ([0, 1], [2, 1]), ([1, 0], [1, 1])]),
        *([0, 0], [0, 1], [1, 0]),
    ),
    "two at one offset": _named("v", tensor([4], [([0], [4]), ([0], [2])]), [0]),
    "outside": _named("v", tensor([4], [([0], [2]), ([3], [2])]), [0], [3]),
    "far outside": _named("v", tensor([4], [([2**62], [2**62])]), [2**62]),
    "other dimensions": _named("v", tensor([4], [([0, 0], [4, 1])]), [0, 0]),
    "a negative size": _attribute("size", _sizes(-4, -3)),
    "a size of bools": _attribute("size", _sizes(True, True)),
    "a size of strings": _attribute("size", _sizes("4", "3")),
    "a huge size": _attribute("size", _sizes(2**62, 2**62)),
    "a huge empty size": _named("v", tensor([0, 2**40, 2**40], [])),
    "a huge number": _attribute("size", _sizes(2**100)),
    "many dimensions": _attribute("size", (1,) * 1000),
    "no size": _attribute("size", None),
    "chunks that are none": _attribute("chunks", (1, 2)),
    "a chunk that is none": _attribute("chunks", [None, None]),
    "no properties": _attribute("properties", None),
    "sparse": _attribute("properties.layout", torch.sparse_coo),
    "a quantized dtype": _attribute("properties.dtype", torch.qint8),
    "transformed": _stored("transform_descriptors", ["stream.zstd/1"]),
    "an absolute file": _stored("relative_path", "/etc/passwd"),
    "a file above": _stored("relative_path", "../good/__0_0.distcp"),
    "a file far above": _stored("relative_path", "a/../../../../etc/passwd"),
    "the directory": _stored("relative_path", "."),
    "no file": _stored("relative_path", ""),
    "a NUL": _stored("relative_path", "a\0b"),
    "no text": _stored("relative_path", "\ud800"),
    "a long name": _stored("relative_path", "x" * 5000),
    "a file that is none": _stored("relative_path", 7),
    "a lost file": _stored("relative_path", "__9_0.distcp"),
    "a link": _stored("relative_path", "link"),
    "a loop": _stored("relative_path", "loop"),
    "a pipe": _stored("relative_path", "pipe"),
    "a negative offset": _stored("offset", -1),
    "an offset behind": _stored("offset", SIZE),
    "a huge length": _stored("length", 2**62),
    "no length": _stored("length", None),
    "a path of a string": _planned(w="w"),
    "an empty path": _planned(w=()),
    "a path of numbers": _planned(w=(0, 1)),
    "a path with None": _planned(w=("w", None)),
    "a path of bools": _planned(w=("w", True)),
    "a deep path": _planned(w=("w",) * 1000),
    "a path that is taken": _planned(w=("steps", 1)),
    "a path below a leaf": _planned(w=("steps", 1, "w")),
    "a path above a leaf": _planned(w=("steps",)),
    "a key in a list": _planned(w=("steps", "w")),
    "a far index": _planned(w=("list", 2**40)),
    "a negative index": _planned(w=("list", -1)),
    "no paths": lambda found: setattr(found, "planner_data", [1]),
    "one list of chunks": _many,
}
"""Well-formed pickles of metadata that are not what they should be."""


# ------------------------------------------------------------------------ archives

IN_FILE = "in a file: "
"""How the names of directories begin whose metadata is as it should be."""

SHAPE = (2, 3)
BODY = torch.arange(6.0).numpy().tobytes()


def archive_of(pickled: bytes, data: bytes = BODY) -> bytes:
    """Return what ``torch.save`` would write, made by another program."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        file.writestr("archive/data/0", data)
    return stream.getvalue()


def pickled_tensor(
    *,
    storage: Any = None,
    kind: str = "torch.FloatStorage",
    key: Any = "0",
    numel: Any = 6,
    offset: Any = 0,
    size: Any = SHAPE,
    stride: Any = (3, 1),
    rebuild: str = "torch._utils._rebuild_tensor_v2",
) -> bytes:
    """Return the pickle of a tensor that says this."""
    stored = StoredAs("storage", _Name(kind), key, "cpu", numel)
    parts = stored if storage is None else storage, offset, size, stride
    return dumped(Call(rebuild, *parts, False, OrderedDict()))


_SAID: dict[str, dict[str, Any]] = {
    "a far offset": {"offset": 2**62},
    "an offset behind": {"offset": 1},
    "an offset before": {"offset": -1},
    "an offset that is a bool": {"offset": True},
    "a huge stride": {"stride": (2**62, 1)},
    "a stride behind": {"stride": (4, 1)},
    "a stride backwards": {"stride": (-3, 1)},
    "a stride of text": {"stride": ("3", "1")},
    "a stride of one": {"stride": (3,)},
    "a stride of three": {"stride": (3, 1, 1)},
    "a stride in a list": {"stride": [3, 1]},
    "other sizes": {"size": (3, 2), "stride": (2, 1)},
    "more sizes": {"size": (2, 3, 1), "stride": (3, 1, 1)},
    "sizes in a list": {"size": [2, 3]},
    "huge sizes": {"size": (2**40, 2**40)},
    "negative sizes": {"size": (-2, -3)},
    "fewer elements": {"numel": 5},
    "more elements": {"numel": 7},
    "far more elements": {"numel": 2**61},
    "negative elements": {"numel": -6},
    "no number of elements": {"numel": None},
    "another dtype": {"kind": "torch.IntStorage"},
    "a wider dtype": {"kind": "torch.DoubleStorage"},
    "no dtype": {"kind": "torch.storage.UntypedStorage"},
    "a class for a dtype": {"kind": "os.system"},
    "another record": {"key": "1"},
    "a record above": {"key": "../../../etc/passwd"},
    "a record that is a number": {"key": 0},
    "no storage": {"storage": OrderedDict()},
    "a storage in a storage": {"storage": StoredAs(StoredAs("storage"))},
    "another function": {"rebuild": "torch._utils._rebuild_parameter"},
    "a function of its own": {"rebuild": "os.system"},
}
FORGED: dict[str, bytes] = {
    **{name: archive_of(pickled_tensor(**said)) for name, said in _SAID.items()},
    "one element for all": archive_of(pickled_tensor(numel=1, stride=(0, 0)), BODY[:4]),
    "one row for all": archive_of(pickled_tensor(numel=3, stride=(0, 1)), BODY[:12]),
    "five for six": archive_of(pickled_tensor(numel=5, stride=(2, 1)), BODY[:20]),
}
"""Archives that say something wrong of a tensor of six elements."""


def with_tensors(directory: Path, content: bytes, *places: tuple[int, int]) -> None:
    """Make a directory whose tensors are at these offsets, with these lengths."""
    directory.mkdir()
    (directory / FILE).write_bytes(content)
    names = [f"w{number}" for number in range(len(places))]
    found = Metadata({name: tensor([2, 3], [([0, 0], [2, 3])]) for name in names})
    found.storage_data = {
        MetadataIndex(name, [0, 0], 0): _StorageInfo(FILE, *place)
        for name, place in zip(names, places, strict=True)
    }
    (directory / METADATA).write_bytes(dumped(found))


def make_in_file(top: Path, archives: dict[str, bytes]) -> None:
    """Make the directories whose archives are not what they should be."""
    for name, archive in {**archives, **FORGED}.items():
        directory = top / f"{IN_FILE}{name}"
        with_tensors(directory, b"x" * 10 + archive, (10, len(archive)))
    good = archive_of(pickled_tensor())
    for name, place in {
        "begins late": (1, len(good) - 1),
        "begins early": (9, len(good) + 1),
        "ends early": (10, len(good) - 1),
        "ends late": (10, len(good) + 1),
        "is empty": (10, 0),
        "is in the middle": (50, 100),
    }.items():
        content = b"x" * 10 + good + b"x" * 10
        with_tensors(top / f"{IN_FILE}{name}", content, place)
    # The elements of a tensor are the archive of another one, which is not aligned.
    for odd in (1, 2, 3):
        body = b"x" * ((odd - good.index(BODY)) % 4) + good
        body += b"x" * (-len(body) % 4)
        count = len(body) // 4
        outer = archive_of(pickled_tensor(numel=count, stride=(count - 3, 1)), body)
        inner = outer.index(good), len(good)
        with_tensors(top / f"{IN_FILE}{odd} odd", outer, (0, len(outer)), inner)


def cases(mark: Path) -> dict[str, bytes]:
    """Return the metadata of every hostile directory by its name."""
    changes = {name: changed(change) for name, change in CHANGES.items()}
    return {**dict(calls(mark)), **INSTRUCTIONS, **BOMBS, **changes}


def make(directory: Path, content: bytes) -> None:
    """Make a directory with this metadata."""
    directory.mkdir()
    (directory / METADATA).write_bytes(content)
    with open(directory / FILE, "wb") as file:
        file.truncate(SIZE)
    (directory / "link").symlink_to("/etc/passwd")
    (directory / "loop").symlink_to("loop")
    os.mkfifo(directory / "pipe")


def came(directory: Path) -> str:
    """Make sources of a directory, with its values; say what came."""
    try:
        with ExitStack() as stack:
            found = dcp_sources(directory, stack, limits=LIMITS)
    except Exception as error:  # noqa: BLE001 - what it is, is the answer
        return f"{type(error).__name__}: {error}"
    return "".join(found.left_out.values()) or "read"


def mutated(directory: Path, guard: Guard, count: int) -> dict[str, int]:
    """Read the metadata of a directory with random mistakes; count what came."""
    good, chance = dumped(metadata()), random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        content = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.choice(OPCODES)
        (directory / METADATA).write_bytes(content[: chance.randint(1, 2 * len(good))])
        with guard:
            outcomes[came(directory).partition(":")[0]] += 1
    return outcomes


def main(top: Path, count: int) -> None:
    """Read every directory under guard."""
    came(top / "good")  # what is imported at the first use is imported now
    printable("\0")
    names = sorted(each.name for each in top.iterdir() if each.is_dir())
    files = [str(top / name / METADATA) for name in names]
    read = [str(top / name / FILE) for name in ("good", "mutated", "value")]
    read += [str(top / name / FILE) for name in names if name.startswith(IN_FILE)]
    guard = Guard(paths=(*files, *read))
    said: dict[str, Any] = {}
    for name in names:
        guard.events, begin = [], time.process_time()
        with guard:
            outcome = came(top / name)
        took = time.process_time() - begin
        said[name] = {"came": outcome, "events": guard.events, "took": took}
    guard.events = []
    said["mutated"] |= {"outcomes": mutated(top / "mutated", guard, count)}
    said["mutated"]["events"] += guard.events
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
