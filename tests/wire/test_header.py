"""A header says what was built, byte for byte, and describes nothing unacceptable."""

from __future__ import annotations

import re
import struct
import sys
from itertools import count
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiockpt import Limits
from aiockpt.errors import (
    LimitExceededError,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)
from aiockpt.format import dtypes
from aiockpt.format.chunks import (
    ALGORITHM,
    DEVICE_ALGORITHM,
    ChunkGrid,
    digest,
    digits_of,
)
from aiockpt.format.entries import lay_out
from aiockpt.format.header import (
    CHECK_SLICE,
    PREFIX,
    build_manifest,
    decode_header,
    header_length,
    snapshot_id_of,
    with_digests,
    with_step,
)
from aiockpt.format.limits import (
    IS_CANCELLED,
    WorkCancelledError,
    enforce,
    enforce_values,
)
from aiockpt.format.manifest import (
    COMPACTED,
    ForeignHeader,
    Manifest,
    TensorSpec,
)
from tests.support.headers import entries_of, forged, parts_of, prefixed, sealed

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 1 << 16
GOLDEN = Path(__file__).parent / "golden" / "version1.hex"
LIMITS = Limits()
CODES = {code: size for size, code in dtypes.DTYPES.values() if code is not None}
NAMES = st.text(max_size=6).filter(lambda name: name != "__metadata__")
UNSEALED = "0" * 32
VALID: dict[str, Any] = {
    "step": 1,
    "chunk_bytes": CHUNK,
    "entries": entries_of(("a", "F32", (4,), 16)),
    "views": [],
    "tree": ["tensor", 0],
    "digests": ["0" * 32],
}
VIEW = TensorSpec(0, "float32", (2, 2), (2, 1), 0, COMPACTED)


def again(manifest: Manifest, **changes: Any) -> Manifest:
    """Describe the same checkpoint once more, from what its manifest says."""
    facts: dict[str, Any] = {
        "step": manifest.step,
        "chunk_bytes": manifest.chunk_bytes,
        "entries": manifest.entries,
        "views": manifest.views,
        "tree": manifest.tree,
        "digests": manifest.digests,
    }
    return build_manifest(**facts | changes)


def text_of(header: bytes) -> bytes:
    """Return the JSON of a header, without its length and its padding."""
    return bytes(header[8:]).rstrip(b" ")


@pytest.fixture
def manifest() -> Manifest:
    """A small checkpoint with two entries, a view, and all that a header can say."""
    rows = ("layer.weight", "F32", (2, 3), 24), ("layer.scale", "BF16", (4,), 8)
    return build_manifest(
        step=7,
        chunk_bytes=CHUNK,
        entries=entries_of(*rows),
        views=[TensorSpec(0, "float32", (3, 2), (1, 3), 0, 3)],
        tree=["dict", ["layer", "step"], [["tensors", ["weight", "t"], [0, 2]], 7]],
        digests=[digest([bytes(32)])],
    )


class TestManifest:
    """A decoded manifest answers questions, and refuses impossible ones."""

    def test_it_is_the_same_once_it_has_been_decoded(self, manifest: Manifest) -> None:
        """It does not depend on the memory that the header lay in."""
        empty: Any = {"entries": entries_of(), "tree": ["dict", [], []], "digests": []}
        for sent in (manifest, build_manifest(**VALID | empty)):
            for kind in (bytes, bytearray, memoryview):
                data = bytearray(sent.header)
                decoded = decode_header(kind(data), limits=LIMITS)
                data[:] = bytes(len(data))
                assert decoded == sent
        assert (
            len(manifest.header) == manifest.header_bytes == manifest.total_bytes - 32
        )
        assert manifest.header_bytes % 64 == 0
        lean, outline = manifest.without_header(), manifest.outline
        assert (lean.header, lean.outline) == (b"", outline)
        assert (outline.grid, outline.digests) == (manifest.grid, manifest.digests)
        assert outline.total_bytes == manifest.total_bytes == lean.total_bytes

    def test_its_id_is_of_the_content(self, manifest: Manifest) -> None:
        """A restarted server serves the same snapshot; digests may come later."""
        assert again(manifest) == manifest
        assert again(manifest, step=8).snapshot_id != manifest.snapshot_id
        assert with_step(manifest, 9) == again(manifest, step=9)
        late = again(manifest, digests=[UNSEALED])
        assert len(late.header) == len(manifest.header)
        assert late.snapshot_id != manifest.snapshot_id
        assert with_digests(late, manifest.digests) == manifest

    def test_tensors_are_entries_first_and_views_behind(
        self, manifest: Manifest
    ) -> None:
        """An entry is its own description: dense, contiguous, plain."""
        numbers = range(manifest.tensor_count)
        assert [manifest.tensor(number) for number in numbers] == [
            TensorSpec(0, "float32", (2, 3), (3, 1), 0, 0),
            TensorSpec(1, "bfloat16", (4,), (1,), 0, 0),
            TensorSpec(0, "float32", (3, 2), (1, 3), 0, 3),
        ]
        assert [manifest.storage_of(number) for number in numbers] == [0, 1, 0]
        for number in (-1, 3, 2**62):  # a number comes from the peer's tree
            with pytest.raises(RemoteProtocolError, match="of 3"):
                manifest.tensor(number)

    @pytest.mark.parametrize(
        "changes",
        [
            *({"chunk_bytes": 0}, {"chunk_bytes": -64}, {"chunk_bytes": 100}),
            *({"digests": []}, {"digests": ["0" * 31]}),
            *({"digests": ["0" * 32, "0" * 32]}, {"digests": ["G" * 32]}),
            {"entries": entries_of(("a", "F32", (4,), 12))},
            {"entries": entries_of(("a", "C128", (1,), 16))},
            {"entries": entries_of(("a", "F4", (32,), 16))},
            {"views": [msgspec.structs.replace(VIEW, offset=1)]},
            {"views": [msgspec.structs.replace(VIEW, storage=1)]},
            *({"views": [msgspec.structs.replace(VIEW, dtype="float")]}, {"step": -1}),
            {"step": 2**63},
            {"entries": entries_of(("__metadata__", "U8", (1,), 1))},
            {"entries": entries_of(("\ud800", "U8", (1,), 1))},
            {"entries": entries_of(("a", "U8", (1,), 1), ("a", "U8", (1,), 1))},
        ],
        ids=min,
    )
    def test_what_a_receiver_would_refuse_is_not_built(
        self, changes: dict[str, Any]
    ) -> None:
        """The sender learns of its bug, not each of its receivers."""
        build_manifest(**VALID)
        with pytest.raises(LocalProtocolError):
            build_manifest(**VALID | changes)


def golden() -> bytes:
    """Return the bytes of the golden hexdump."""
    lines = re.findall(r"^[0-9a-f]{8}  ([0-9a-f ]+)", GOLDEN.read_text(), re.MULTILINE)
    return bytes.fromhex("".join(lines))


def test_version_1_is_read_and_written_as_ever() -> None:
    """A header of an earlier release says the same today, and is made byte for byte."""
    manifest = decode_header(golden(), limits=LIMITS)
    assert isinstance(manifest, Manifest)
    assert manifest.step == 42
    assert manifest.names == ["emb.weight", 'ünïcode "quoted"', "z"]
    assert [entry.dtype for entry in manifest.entries] == ["F32", "BF16", "U8"]
    assert manifest.segment_bytes == 62
    assert manifest.digests == ("00112233445566778899aabbccddeeff",)
    assert [view.flags for view in manifest.views] == [3, 4]
    assert again(manifest).header == golden()


class TestAlgorithms:
    """A manifest names the algorithm of its digests, and its id is of the same one."""

    # The ids of VALID by the libraries alone: the digests of the header in
    # which the check digits are zeros. The first one is that of an earlier release.
    IDS: ClassVar = {
        "xxh3-128": "e8cb02b37c88beaaf4052cf989246378",
        "sha256": "a0a0b091eb17dc8f29d33ef1b6581cf27d935e11c93c187a87ced43aee749ef5",
        "blake3": "3b6354a9163d361800ae3931acf99f74e6eadff5a0a6fec2ab8fbd0b9c74c3aa",
    }

    @pytest.mark.parametrize("algorithm", IDS)
    def test_its_bytes_and_its_id(self, algorithm: str) -> None:
        """Only the name, the digests and the check digits differ from the default."""
        made = valid_of(algorithm)
        assert made.snapshot_id == self.IDS[algorithm]
        assert decode_header(made.header, limits=LIMITS) == made
        other, _ = parts_of(bytes(valid_of("xxh3-128").header))
        found, _ = parts_of(bytes(made.header))
        digests = "ab" * (16 if algorithm == ALGORITHM else 32)
        assert found == other | {"algorithm": algorithm, "digests": digests}
        assert bytes(made.header[8:]).startswith(PREFIX)
        check = bytes(made.header[8:])[CHECK_SLICE].decode()
        assert check == snapshot_id_of(made.header[8:])
        assert (check == made.snapshot_id) is (algorithm == ALGORITHM)

    @pytest.mark.parametrize("algorithm", IDS)
    def test_digests_may_come_later(self, algorithm: str) -> None:
        """The header has room for them, and the id is that of the result."""
        made = valid_of(algorithm)
        late = valid_of(algorithm, digests=[made.grid.unsealed])
        assert late.header_bytes == made.header_bytes
        assert late.snapshot_id != made.snapshot_id
        assert with_digests(late, made.digests) == made
        assert with_step(made, 9) == valid_of(algorithm, step=9)
        assert made.outline.grid.algorithm == algorithm

    @pytest.mark.parametrize("algorithm", IDS)
    def test_every_flipped_bit_is_noticed(self, algorithm: str) -> None:
        """The check digits are of the default, so no library is needed for that."""
        header = bytes(valid_of(algorithm).header)
        with mock.patch.dict(sys.modules, {"blake3": None}):
            for position in range(8 * 8, 8 * len(header)):
                damaged = bytearray(header)
                damaged[position // 8] ^= 1 << position % 8
                with pytest.raises(ProtocolError):
                    decode_header(damaged, limits=LIMITS)

    @pytest.mark.parametrize(
        ("algorithm", "digits"),
        [("xxh3-128", 64), ("sha256", 32), ("blake3", 32), ("blake3", 63)],
    )
    def test_digests_of_another_length(self, algorithm: str, digits: int) -> None:
        """Neither side truncates them."""
        with pytest.raises(LocalProtocolError, match="digits of digests instead of"):
            valid_of(algorithm, digests=["a" * digits])

    def test_a_device_and_a_host_do_not_mix(self) -> None:
        """Who knows one algorithm refuses the others, and names what it knows."""
        made = valid_of("sha256")
        with pytest.raises(RemoteProtocolError, match=r"'sha256'; known: 'xxh3-128'$"):
            decode_header(made.header, limits=LIMITS, algorithms=[ALGORITHM])
        folded = valid_of(DEVICE_ALGORITHM)
        with pytest.raises(RemoteProtocolError, match=f"algorithm '{DEVICE_ALGORITHM}"):
            decode_header(folded.header, limits=LIMITS)
        known = [DEVICE_ALGORITHM]
        assert decode_header(folded.header, limits=LIMITS, algorithms=known) == folded


def valid_of(algorithm: str, **changes: Any) -> Manifest:
    """Return the manifest of `VALID` with digests of an algorithm."""
    digests = ["ab" * (digits_of(algorithm) // 2)]
    facts = VALID | {"algorithm": algorithm, "digests": digests}
    return build_manifest(**facts | changes)


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """Return entries as a state dict may have them, in any order."""
    found = []
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        code = draw(st.sampled_from(sorted(CODES)))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        nbytes = prod(shape) * CODES[code]
        wider = [size for size in (16, 8, 4, 2, 1) if nbytes % size == 0]
        align = draw(st.sampled_from([s for s in wider if s >= CODES[code]] or [1]))
        found.append((name, code, shape, nbytes, align))
    return found


class TestLayout:
    """The segment has no holes, and every tensor in it is aligned."""

    @given(rows())
    def test_entries_tile_the_segment_aligned(
        self, found: list[tuple[str, str, tuple[int, ...], int, int]]
    ) -> None:
        """The widest come first and equals keep their order; the header tells it."""
        columns = zip(*found, strict=True) if found else [[]] * 5
        order, entries = lay_out(*columns)
        assert list(order) == sorted(range(len(found)), key=lambda i: (-found[i][4], i))
        end = 0
        for index, offset in zip(order, entries.starts, strict=True):
            *_, nbytes, align = found[index]
            assert offset == end
            assert offset % align == 0
            end = offset + nbytes
        assert end == entries.nbytes
        manifest = build_manifest(
            step=1,
            chunk_bytes=CHUNK,
            entries=entries,
            tree=["list", [["tensor", index] for index in range(len(found))]],
            digests=[digest([bytes(end)])] * len(ChunkGrid(end, CHUNK)),
        )
        assert manifest.segment_bytes == end
        assert decode_header(manifest.header, limits=LIMITS) == manifest

    def test_a_ragged_entry_is_refused(self) -> None:
        """The entry after it would not be aligned."""
        with pytest.raises(LocalProtocolError, match=r"'b': 10 bytes.* alignment of 8"):
            lay_out(["a", "b"], ["U8"] * 2, [(8,), (10,)], [8, 10], [8, 8])


MANY = 9_000  # entries, views or nodes: several pieces, both ways


def large(**changes: Any) -> Manifest:
    """Return a manifest of many entries that are four bytes each."""
    names = [f"layer.{n}.weight" for n in range(MANY)]
    facts: dict[str, Any] = {
        "step": 1,
        "chunk_bytes": CHUNK,
        "entries": entries_of(*((name, "F32", (1,), 4) for name in names)),
        "tree": ["tensors", names, [*range(MANY)]],
        "digests": [UNSEALED],
    }
    return build_manifest(**facts | changes)


class TestPieces:
    """Long headers are handled in pieces, and come out as if handled whole."""

    @pytest.mark.parametrize(
        "name",
        ["layer.{}.weight", "{}]}},", '{}]}},"', "{}\\]}},", '"{}"]}},"x', "é\n{}"],
        ids=["plain", "entry's end", "with a quote", "backslash", "quotes", "escapes"],
    )
    def test_no_name_is_taken_for_the_border_of_entries(self, name: str) -> None:
        """An encoder that takes all at once writes the same bytes."""
        rows = ((name.format(n), "F32", (1,), 4) for n in range(MANY))
        manifest = large(entries=entries_of(*rows))
        text = text_of(bytes(manifest.header))
        assert msgspec.json.encode(msgspec.json.decode(text)) == text
        assert decode_header(manifest.header, limits=LIMITS) == manifest

    @pytest.mark.parametrize("shift", range(7))
    @pytest.mark.parametrize("text", ['"', "\\", '\\",', "é,", "€", "\n,", "🦊"])
    def test_no_character_is_cut(self, text: str, shift: int) -> None:
        """The tree is a string in the header: its escapes are escaped once more."""
        tree: Any = ["list", ["x" * shift, *[text * 9_000] * 12]]
        manifest = build_manifest(**VALID | {"tree": tree})
        assert decode_header(manifest.header, limits=LIMITS) == manifest

    @pytest.mark.parametrize(
        "tree",
        [
            ["list", ["x" * 100] * 5 * MANY],
            ["list", [["list", [["list", ["y" * 1000] * 400]] * 3]]],
            [
                "dict",
                [*range(2 * MANY)],
                [["tuple", [n, None]] for n in range(2 * MANY)],
            ],
            ["str", "x" * 600_000],
        ],
        ids=["wide", "deep", "dict", "one string"],
    )
    def test_a_long_tree_is_read_whole(self, tree: Any) -> None:
        """Item by item, on as many levels as it takes."""
        manifest = build_manifest(**VALID | {"tree": tree})
        decoded = decode_header(manifest.header, limits=LIMITS)
        assert isinstance(decoded, Manifest)
        assert decoded.tree == tree

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (b"[16,20]", b"[16, 20]"),
            (b"layer.8999", b"la\\u0079er.8999"),
            (b'"layer.1.', b'"layer.0.'),
            (b'"layer.8999.', b'"layer.0.'),
            (b'"layer.8000.weight":{', b'"layer.8000.weight":{{'),
            (b'"layer.100.weight"', b'"layer.100.weight'),
        ],
        ids=["space", "escape", "twice", "twice, later", "malformed", "unclosed"],
    )
    def test_damage_is_noticed_in_any_piece(self, old: bytes, new: bytes) -> None:
        """One checkpoint has one header, and no name twice."""
        entries = text_of(bytes(large().header))
        entries = b"{" + entries[entries.index(b',"layer.0.') + 1 :]
        facts: Any = {"count": MANY, "digests": UNSEALED}
        assert isinstance(
            decode_header(forged(entries=entries, **facts), limits=LIMITS), Manifest
        )
        assert old in entries
        damaged = forged(entries=entries.replace(old, new, 1), **facts)
        with pytest.raises(RemoteProtocolError):
            decode_header(damaged, limits=LIMITS)

    @pytest.mark.parametrize("space", [b" ],[0,", b"], [0,"])
    @pytest.mark.parametrize("nth", [1, 8_000])
    def test_a_view_has_one_spelling(self, nth: int, space: bytes) -> None:
        """A space is noticed in the first piece and in a later one."""
        views = [[0, "float32", [1], [1], 0, 0]] * MANY
        header = forged(views=views)
        assert isinstance(decode_header(header, limits=LIMITS), Manifest)
        parts = msgspec.json.encode(views).split(between := b"],[0,")
        spaced = between.join(parts[:nth]) + space + between.join(parts[nth:])
        document = parts_of(header)[0] | {"views": msgspec.Raw(spaced)}
        with pytest.raises(RemoteProtocolError, match="canonical"):
            decode_header(forged(manifest=msgspec.json.encode(document)), limits=LIMITS)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (b'"},"w":', b'"}"w":'),
            (b'\\"step\\"', b"\\u0022step\\u0022"),
            (b'","format":"pt","', b'","format":"np","'),
            (b'","format":"pt","', b'", "format":"pt","'),
            (b"]}}", b"]}}" + b" " * 64),
        ],
        ids=["comma", "escape", "format", "space", "padding"],
    )
    def test_the_metadata_has_one_spelling(self, old: bytes, new: bytes) -> None:
        """Any other spelling is refused, also if nothing else would notice it."""
        text = text_of(forged())
        assert text.count(old) == 1
        assert isinstance(decode_header(sealed(text), limits=LIMITS), Manifest)
        with pytest.raises(RemoteProtocolError, match="canonical"):
            decode_header(sealed(text.replace(old, new)), limits=LIMITS)


class TestLength:
    """The first 8 bytes say how much to read, and are not believed blindly."""

    @pytest.mark.parametrize(
        "first8", [b"", b"\0" * 7, b"\0" * 9, b"\0" * 8, b"<!DOCTYP"]
    )
    def test_an_error_page_is_no_large_checkpoint(self, first8: bytes) -> None:
        """What is no header is told from one that is too long."""
        with pytest.raises(RemoteProtocolError, match="no safetensors header"):
            header_length(first8, limits=LIMITS)

    def test_a_long_header_is_refused_by_its_first_bytes(self) -> None:
        """It is refused before a byte of its text is read."""
        limits = Limits(max_header_bytes=1000)
        assert header_length(struct.pack("<Q", 1000), limits=limits) == 1008
        with pytest.raises(LimitExceededError) as caught:
            header_length(struct.pack("<Q", 1001), limits=limits)
        assert (caught.value.limit, caught.value.actual) == (1000, 1001)


class TestForeign:
    """Headers of other tools."""

    @staticmethod
    def decode(document: object, padding: bytes = b"") -> ForeignHeader:
        """Decode a header as another tool writes it."""
        text = msgspec.json.encode(document) + padding
        header = decode_header(prefixed(text), limits=LIMITS)
        assert isinstance(header, ForeignHeader)
        return header

    def test_it_may_be_in_any_order(self) -> None:
        """Unaligned entries, white space and unknown codes are read, too."""
        header = self.decode(
            {
                "b": {"dtype": "F4", "shape": [3, 2], "data_offsets": [5, 8]},
                "__metadata__": {"format": "pt", "by": "someone"},
                "a": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]},
            },
            b" \n ",
        )
        assert header.names == ["a", "b"]
        assert header.metadata == {"format": "pt", "by": "someone"}
        assert header.segment_bytes == 8
        assert header.header_bytes == len(header.header)
        assert header.header_bytes % 64 != 0
        empty = self.decode({})
        assert (empty.names, empty.metadata, empty.segment_bytes) == ([], {}, 0)

    def test_it_may_be_unwanted(self, manifest: Manifest) -> None:
        """A foreign header is refused before it is decoded if only ours will do."""
        decode_header(manifest.header, limits=LIMITS, ours=True)
        text = b'{"a":"nonsense"}'
        with pytest.raises(RemoteProtocolError, match="no manifest of aiockpt"):
            decode_header(prefixed(text), limits=LIMITS, ours=True)


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
)


def count_values(value: object) -> int:
    """Return the number of JSON values (keys are part of their members)."""
    if isinstance(value, dict):
        return 1 + sum(map(count_values, value.values()))
    return 1 + sum(map(count_values, value)) if isinstance(value, list) else 1


class TestLimits:
    """Limits are exact, and name what exceeded them."""

    def test_a_limit_may_be_reached(self) -> None:
        """A value that equals its limit is accepted."""
        enforce("it", 5, 5)
        enforce("it", 10**100, None)
        with pytest.raises(
            LimitExceededError, match="it is 6, more than the limit of 5"
        ):
            enforce("it", 6, 5)

    @given(JSON)
    def test_no_document_holds_more_values_than_are_counted(
        self, value: object
    ) -> None:
        """The bound is never below the truth, so it can be trusted before decoding."""
        text = msgspec.json.encode(value)
        with pytest.raises(LimitExceededError) as caught:
            enforce_values("it", text, -1)
        assert caught.value.actual >= count_values(value)
        enforce_values("it", text, caught.value.actual)
        if count_values(value) > 1:
            with pytest.raises(LimitExceededError):
                enforce_values("it", text, count_values(value) - 1)

    @pytest.mark.parametrize("long", ["tree", "views", "entries"])
    def test_every_long_part_is_decoded_in_pieces(self, long: str) -> None:
        """The event loop gets its turn in between, and a cancel ends it at once."""
        names = [f"a{n}" for n in range(5 * MANY)]
        changes: dict[str, Any] = {
            "tree": ["list", [["list", [n / 7 for n in range(5 * MANY)]]]],
            "views": [VIEW] * 5 * MANY,
            "entries": entries_of(*((name, "F32", (4,), 16) for name in names)),
        }
        facts = VALID | {long: changes[long]}
        if long == "entries":
            facts["digests"] = [UNSEALED] * len(ChunkGrid(16 * 5 * MANY, CHUNK))
        before = asked_while_decoding(build_manifest(**VALID).header)
        header = build_manifest(**facts).header
        pieces = asked_while_decoding(header)
        assert pieces > before + 8
        for allowed in range(0, pieces, 5):
            assert asked_while_decoding(header, allowed) == allowed + 1

    def test_a_deep_tree_is_not_read_again_on_every_level(self) -> None:
        """A header of 64 MiB would be read for minutes."""
        tree: Any = "x" * 300_000
        for _ in range(200):
            tree = ["list", [tree]]
        header = build_manifest(**VALID | {"tree": tree}).header
        assert asked_while_decoding(header) < 50


def asked_while_decoding(header: Any, allowed: int = 1 << 30) -> int:
    """Return how often a decoder asks whether to go on; it may do so this often."""
    asked = count(1)
    token = IS_CANCELLED.set(lambda: next(asked) > allowed)
    try:
        decode_header(header, limits=LIMITS)
    except WorkCancelledError:
        assert allowed < 1 << 30
    finally:
        IS_CANCELLED.reset(token)
    return next(asked) - 1


@pytest.mark.parametrize("ask", [dtypes.itemsize, dtypes.torch_name])
def test_an_unknown_dtype_is_the_peers_fault(ask: Callable[[str], object]) -> None:
    """A name is looked up in the table and nowhere else."""
    with pytest.raises(RemoteProtocolError, match="unknown"):
        ask("__class__" * 100)
