"""A directory of torch.distributed.checkpoint runs nothing, and leads nowhere else."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from aiockpt import Limits
from aiockpt.errors import LimitExceededError, StorageError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.storage.checkpoint_file import opened
from aiockpt.storage.dcp import (
    METADATA,
    DcpArchive,
    DcpElements,
    DcpShard,
    DcpTensor,
    DcpValue,
    elements_of,
    read_dcp,
    value_of,
)
from tests.support import dcp_hostile
from tests.support.dcp_hostile import (
    BODY,
    FILE,
    IN_FILE,
    SHAPE,
    archive_of,
    changed,
    dumped,
    metadata,
)
from tests.support.hostile import Evil
from tests.support.matrix import EXHAUSTIVE

REFUSED = ("StorageError", "CheckpointNotFoundError", "LimitExceededError")
SAID = {
    "call os.system": "it mentions os.system, which does not belong there",
    "call posix.system": "it mentions posix.system",
    "put far away": "memo entry 2147483647 out of order",
    "marks": "the depth of a pickle is 65",
    "dicts": "the number of values in a pickle is 100001",
    "memo": "more memo entries than values",
    "a large file": "more than the limit of 8388608",
    "a long integer": "an integer of 255 bytes",
    "a chunk is missing": "no file has the shard of 'w' at (2, 0)",
    "a value is missing": "no file has the value 'steps.0'",
    "uncovered": "no file has 12 of the 12 elements of 'w'; load another",
    "a hole": "no file has 2 of the 4 elements of 'v'",
    "overlap": "shards of 'v' overlap",
    "overlap and hole": "shards of 'v' overlap",
    "overlap in two": "shards of 'v' overlap",
    "two at one offset": "two shards of 'v' are at (0,)",
    "outside": "'v' has a shard at (3,) of (2,), outside of (4,)",
    "sparse": "'w' is no dense tensor",
    "a quantized dtype": "it mentions torch.qint8",
    "transformed": "'w' was transformed as it was written, for example compressed",
    "an absolute file": "/etc/passwd is not in the directory",
    "a file above": "../good/__0_0.distcp is not in the directory",
    "a lost file": "the file __9_0.distcp is missing",
    "a link": "link is not in the directory: copy it there",
    "a pipe": "it is not a regular file",
    "an offset behind": "it is truncated: 4096 of at least 4196 bytes",
    "a path that is taken": "the path of 'steps.1' is taken",
    "a path below a leaf": "the path of 'steps.1' is taken",
    "a path above a leaf": "the path of 'steps.0' is taken",
    "a key in a list": "a container has both keys and indices",
    "a far index": "the number of items in lists is 1099511627777",
    "one list of chunks": "the number of shards is 10",
}
"""What some of the errors say."""


def with_value(directory: Path, archive: bytes) -> None:
    """Make a directory with one value."""
    directory.mkdir()
    found = metadata()
    found.state_dict_metadata = {"v": found.state_dict_metadata["steps.0"]}
    found.planner_data = None
    info = found.storage_data[next(iter(found.storage_data))]
    info.offset, info.length = 0, len(archive)
    found.storage_data = {MetadataIndex("v"): info}
    (directory / METADATA).write_bytes(dumped(found))
    (directory / FILE).write_bytes(archive)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Let a guarded process read all hostile directories."""
    top = tmp_path_factory.mktemp("top")
    mark = top / "mark"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"w": torch.zeros(2), "v": [1]}
        save(state, checkpoint_id=top / "good", no_dist=True)
    for name, content in dcp_hostile.cases(mark).items():
        dcp_hostile.make(top / name, content)
    dcp_hostile.make(top / "mutated", dumped(metadata()))
    archives = {name: archive for name, (archive, _) in ARCHIVES.items()}
    dcp_hostile.make_in_file(top, archives)
    with_value(top / "value", archive_of(pickle.dumps(Evil(f"touch {mark}"), 2)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", dcp_hostile.__file__, str(top), "400"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not mark.exists()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_hostile_metadata_is_refused(said: dict[str, Any]) -> None:
    """More than a hundred ways; nothing is imported, called, or opened."""
    hostile = {
        name: each
        for name, each in said.items()
        if name not in ("good", "mutated", "value") and not name.startswith(IN_FILE)
    }
    assert said["good"]["came"] == "read"
    assert len(hostile) > 120
    for name, each in hostile.items():
        assert each["came"].startswith(REFUSED), (name, each["came"])
        assert SAID.get(name, "") in each["came"], (name, each["came"])
        assert each["events"] == [], name
        assert each["took"] < 20, name  # seconds of CPU
    assert {*SAID} <= {*hostile}


def test_hostile_archives_are_refused(said: dict[str, Any]) -> None:
    """Each of them is in a directory with good metadata."""
    hostile = {name: each for name, each in said.items() if name.startswith(IN_FILE)}
    assert len(hostile) > 60
    for name, each in hostile.items():
        assert each["came"].startswith("StorageError: "), (name, each["came"])
        assert "or load another checkpoint" in each["came"], (name, each["came"])
        assert each["events"] == [], name
    for odd in (1, 2, 3):
        came = hostile[f"{IN_FILE}{odd} odd"]["came"]
        assert "the elements of 'w1' begin within those of another tensor" in came


def test_a_value_that_needs_code_is_left_out(said: dict[str, Any]) -> None:
    """The reason names it, and nothing runs."""
    why = "the value 'v' holds a posix.system, which only running pickled code"
    assert why in said["value"]["came"]
    assert said["value"]["events"] == []


def test_random_mistakes_run_nothing(said: dict[str, Any]) -> None:
    """Some of them do not matter; of the others each is refused."""
    assert said["mutated"]["events"] == []
    outcomes = said["mutated"]["outcomes"]
    assert {*outcomes} <= {*REFUSED, "read"}
    assert outcomes["StorageError"] > 250


def test_metadata_that_was_cut_is_refused(tmp_path: Path) -> None:
    """Metadata that ends at any earlier byte is refused: a fifth of them in check."""
    content = dumped(metadata())
    dcp_hostile.make(tmp_path / "cut", content)
    assert read_dcp(tmp_path / "cut", limits=FILE_LIMITS).leaves
    for size in range(0, len(content), 1 if EXHAUSTIVE else 5):
        os.truncate(tmp_path / "cut" / METADATA, 0)
        (tmp_path / "cut" / METADATA).write_bytes(content[:size])
        with pytest.raises(StorageError, match="malformed or truncated"):
            read_dcp(tmp_path / "cut", limits=FILE_LIMITS)


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        (Limits(max_header_bytes=100), "the size of"),
        (Limits(max_text_bytes=10), "the size of a string"),
        (Limits(max_nodes=50), "the number of values in a pickle"),
        (Limits(max_depth=1), "the depth of a pickle"),
        (Limits(max_tensors=2), "the number of tensors"),
    ],
)
def test_limits(tmp_path: Path, limits: Limits, what: str) -> None:
    """The error says what is too large, and how to accept it."""
    dcp_hostile.make(tmp_path / "large", dumped(metadata()))
    with pytest.raises(LimitExceededError, match=what) as caught:
        read_dcp(tmp_path / "large", limits=limits)
    assert f"Limits({caught.value.option}=...)" in str(caught.value)


def test_a_link_to_another_metadata_is_refused(tmp_path: Path) -> None:
    """It could be anybody's file."""
    dcp_hostile.make(tmp_path / "good", dumped(metadata()))
    dcp_hostile.make(tmp_path / "link", b"")
    (tmp_path / "link" / METADATA).unlink()
    (tmp_path / "link" / METADATA).symlink_to(tmp_path / "good" / METADATA)
    with pytest.raises(StorageError, match="not in the directory"):
        read_dcp(tmp_path / "link", limits=FILE_LIMITS)


def test_a_link_within_the_directory_is_followed(tmp_path: Path) -> None:
    """Somebody may have tidied up the directory by links."""
    content = changed(dcp_hostile.CHANGES["a link"])
    dcp_hostile.make(tmp_path / "tidy", content)
    (tmp_path / "tidy" / "link").unlink()
    (tmp_path / "tidy" / "link").symlink_to(FILE)
    found = read_dcp(tmp_path / "tidy", limits=FILE_LIMITS)
    assert found.files["link"] == tmp_path / "tidy" / FILE


# ------------------------------------------------------------------------ archives


def saved(value: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def pickle_in(archive: bytes) -> bytes:
    """Return the pickle of an archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return file.read("archive/data.pkl")


GOOD = saved(torch.arange(6.0).view(SHAPE))
PICKLE = pickle_in(GOOD)
PLAIN = archive_of(PICKLE, BODY)


def found_in(path: Path, archive: bytes, before: int = 0) -> DcpElements:
    """Look for the elements of a tensor in an archive in a file."""
    path.write_bytes(b"x" * before + archive + b"x" * 100)
    shard = DcpShard((0, 0), SHAPE, DcpArchive(path.name, before, len(archive)))
    tensor = DcpTensor("layer.w", ("layer", "w"), "float32", SHAPE, (shard,))
    with opened(path) as file:
        return elements_of(file, tensor, shard)


def patched(at: int, form: str, *values: Any) -> bytes:
    """Change some bytes of an archive, counted from its end."""
    content = bytearray(PLAIN)
    struct.pack_into(form, content, len(content) + at, *values)
    return bytes(content)


def compressed() -> bytes:
    """Return an archive that may be much larger when it is read."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", PICKLE)
        file.writestr("archive/data/0", BODY)
    return stream.getvalue()


def without(name: str) -> bytes:
    """Return an archive that lacks a record."""
    stream = io.BytesIO()
    records = {"data.pkl": PICKLE, "data/0": BODY}
    with zipfile.ZipFile(stream, "w") as file:
        for each in records.keys() - {name}:
            file.writestr(f"archive/{each}", records[each])
    return stream.getvalue()


def twice() -> bytes:
    """Return an archive with two pickles, of which somebody may read the other."""
    stream = io.BytesIO(PLAIN)
    with zipfile.ZipFile(stream, "a") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's, of that name
        file.writestr("archive/data.pkl", PICKLE)
    return stream.getvalue()


ARCHIVES = {
    "a call": (archive_of(dumped(Evil("true"))), "it mentions posix.system"),
    "a number": (saved(3), "it is no plain tensor"),
    "a dict": (saved({"w": torch.zeros(SHAPE)}), "it is no plain tensor"),
    "a sparse tensor": (saved(torch.zeros(SHAPE).to_sparse()), "_rebuild_sparse"),
    "a meta tensor": (saved(torch.zeros(SHAPE, device="meta")), "_rebuild_meta"),
    "a conjugated tensor": (
        saved(torch.zeros(SHAPE, dtype=torch.complex64).conj()),
        "it is no plain tensor of a dtype that is known here",
    ),
    "another dtype": (saved(torch.zeros(SHAPE).double()), "there is float64, not"),
    "another shape": (saved(torch.zeros(3, 2)), r"its shape there is not \(2, 3\)"),
    "a short record": (archive_of(PICKLE, BODY[1:]), "23 bytes do not hold"),
    "a long record": (archive_of(PICKLE, BODY + b"x"), "25 bytes do not hold"),
    "a large pickle": (archive_of(PICKLE + b"x" * (64 << 10)), "has 65"),
    "another byte order": (
        PLAIN.replace(b"little", b"big\0\0\0"),
        "its bytes have another order",
    ),
    "compressed": (compressed(), "compressed, or malformed"),
    "said to be compressed": (
        patched(PLAIN.index(b"PK\1\2") + 10 - len(PLAIN), "<H", 8),
        "compressed, or malformed",
    ),
    "no pickle": (without("data.pkl"), "there is no record data.pkl"),
    "no elements": (without("data/0"), "there is no record data/0"),
    "two pickles": (twice(), "two records have one name"),
    "no archive": (b"\0" * 1000, "torch.save wrote no archive there"),
    "nothing": (b"", "torch.save wrote no archive there"),
    "a comment": (patched(-2, "<H", 7), "torch.save wrote no archive there"),
    "a few bytes": (GOOD[-22:], "not in the archive"),
    "many records": (patched(-12, "<H", 65535), "unpack"),
    "a far list": (patched(-6, "<L", 2**31), "not in the archive"),
    "a long list": (patched(-10, "<L", 2**31), "not in the archive"),
    "cut": (GOOD[:-1], "torch.save wrote no archive there"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_that_are_no_tensor_are_refused(tmp_path: Path, name: str) -> None:
    """The error names the file and the tensor, and says what to do."""
    archive, why = ARCHIVES[name]
    with pytest.raises(StorageError, match=why) as caught:
        found_in(tmp_path / FILE, archive, before=10)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / FILE}: 'layer.w' at (0, 0) cannot be read")
    assert "copy the file again, or load another checkpoint" in said


@pytest.mark.parametrize("archive", [GOOD, PLAIN], ids=["torch", "another program"])
def test_elements_are_found_in_an_archive(tmp_path: Path, archive: bytes) -> None:
    """The zip file of any writer works."""
    found = found_in(tmp_path / FILE, archive, before=10)
    content = (tmp_path / FILE).read_bytes()
    assert content[found.start : found.stop] == BODY
    assert found.stride == (3, 1)


def test_random_mistakes_never_lead_out_of_an_archive(tmp_path: Path) -> None:
    """Each is refused, or leads to some other bytes of the archive."""
    chance = random.Random(8)
    outcomes = {True: 0, False: 0}
    for _ in range(500):
        content = bytearray(chance.choice((GOOD, PLAIN)))
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] = chance.choice(dcp_hostile.OPCODES)
        try:
            found = found_in(tmp_path / FILE, bytes(content), before=10)
        except (StorageError, LimitExceededError):
            outcomes[False] += 1
        else:
            assert 10 <= found.start <= found.stop <= 10 + len(content)
            outcomes[True] += 1
    assert min(outcomes.values()) > 50, outcomes


def test_a_value_that_needs_code_is_refused(tmp_path: Path) -> None:
    """The error names the file, the value and the class."""
    mark = tmp_path / "mark"
    archive = archive_of(pickle.dumps(Evil(f"touch {mark}"), 2))
    for content, why in (
        (archive, "holds a posix.system, which only running pickled code brings back"),
        (compressed(), "compressed, or malformed"),
        (b"x" * 100, "torch.save wrote no archive there"),
    ):
        (tmp_path / FILE).write_bytes(content)
        value = DcpValue("v", ("v",), DcpArchive(FILE, 0, len(content)))
        with opened(tmp_path / FILE) as file:
            with pytest.raises(StorageError, match=f"the value 'v' .*{why}") as caught:
                value_of(file, value, limits=FILE_LIMITS)
            assert caught.value.path == str(tmp_path / FILE)
            with pytest.raises(LimitExceededError, match="the value 'v'"):
                value_of(file, value, limits=Limits(max_header_bytes=10))
    assert not mark.exists()
