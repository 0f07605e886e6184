"""``HTTPTransport(digest=)``: the sender chooses, and every receiver follows."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import blake3
import pytest
import torch
import xxhash

from aiockpt import HTTPTransport, Progress, load
from aiockpt.errors import (
    IntegrityError,
    MissingExtraError,
    RemoteProtocolError,
)
from aiockpt.format.chunks import ALGORITHM, ALGORITHMS, DEVICE_ALGORITHM, digest
from aiockpt.format.header import build_manifest
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.format.manifest import Manifest
from aiockpt.storage.checkpoint_file import opened, read_header, verify_chunks
from aiockpt.storage.partfile import PartFile
from aiockpt.testing import assert_same
from tests.support.headers import entries_of, header_of, parts_of
from tests.support.proofs import proves
from tests.support.rangepeer import RangePeer, noise, serving_peer
from tests.support.transports import (
    CHUNK,
    Transport,
    chunked,
    receive,
    transport,
)

pytestmark = pytest.mark.usefixtures("no_blocking")

each = pytest.mark.parametrize("algorithm", ALGORITHMS)

HASHES: dict[str, Callable[[bytes], Any]] = {
    "xxh3-128": xxhash.xxh3_128,
    "sha256": hashlib.sha256,
    "blake3": blake3.blake3,
}
STEP = 1


@asynccontextmanager
async def sending(
    state: object, **options: Any
) -> AsyncIterator[tuple[Transport, Transport]]:
    """Send a state dict; yield the sender and a receiver that chose nothing."""
    async with transport(**options) as sender, transport() as receiver:
        await sender.send_checkpoint([], STEP, state)
        yield sender, receiver


async def answer_of(sender: Transport, path: str) -> tuple[Any, bytes]:
    """Return the headers and the body of what a sender answers to another client."""
    url, _, token = sender.metadata().partition("#")
    bearer = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=bearer) as session,
        session.get(f"{url}{STEP}/{path}") as answer,
    ):
        return answer.headers, await answer.read()


def cleared() -> dict[str, Any]:
    """Return a template."""
    return {key: value * 0 for key, value in chunked().items()}


def missing(library: str) -> Any:
    """Make the import of a library fail."""
    return mock.patch.dict(sys.modules, {library: None})


class TestReceive:
    """Each kind of receive, of each algorithm, without an option at the receiver."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("algorithm", "options"),
        [
            ("sha256", {}),
            ("blake3", {"process": True}),
            ("blake3", {"keep_base": True}),
            ("sha256", {"zero_copy": True}),
        ],
        ids=["loop", "process", "base", "live"],
    )
    async def test_it_is_what_was_sent(
        self, algorithm: str, options: dict[str, Any]
    ) -> None:
        """Anew, in place, directly, in part, and with most of it there."""
        async with sending(chunked(), digest=algorithm, **options) as (sender, other):
            assert_same(await receive(sender, other), chunked())
            for direct in (False, True):
                into = cleared()
                got = await receive(sender, other, into=into, direct=direct)
                assert_same(got, chunked())
                assert got["w3"] is into["w3"]
            some = await receive(sender, other, select=["w2"])
            assert_same(some, {"w2": chunked()["w2"]})
            have = chunked()
            have["w4"][7] += 1
            for options in {"have": have}, {"into": have, "have": True}:
                seen: list[Progress] = []
                got = await receive(sender, other, progress=seen.append, **options)
                assert_same(got, chunked())
                assert seen[-1].bytes_reused == 7 * CHUNK

    @pytest.mark.asyncio
    @each
    async def test_the_next_step_comes_as_a_delta(self, algorithm: str) -> None:
        """The patched chunks are compared with the digests of that algorithm."""
        state = chunked()
        options = {"keep_base": True, "digest": algorithm}
        async with sending(state, **options) as (sender, receiver):
            held = await receive(sender, receiver)
            for n in range(8):
                state[f"w{n}"][n] += 1
            await sender.send_checkpoint([], 2, state)
            sent = sender.statistics().bytes_sent
            got = await receive(sender, receiver, 2, into=held, have=True)
            assert_same(got, state)
            assert sender.statistics().bytes_sent - sent < CHUNK

    @pytest.mark.asyncio
    @each
    @pytest.mark.parametrize("share", [False, True])
    async def test_shared_memory_is_compared(self, algorithm: str, share: bool) -> None:
        """It is copied, or mapped and verified."""
        state = chunked()
        options = {"same_host": True, "digest": algorithm}
        verified = {"share": True, "verify_shared": True} if share else {}
        async with sending(state, **options) as (sender, receiver):
            assert_same(await receive(sender, receiver, **verified), state)
            assert sender.statistics().lent == 1

    @pytest.mark.asyncio
    @each
    async def test_several_sources_agree_by_the_id(self, algorithm: str) -> None:
        """A source with other digests of the same bytes is another snapshot."""
        theirs = "sha256" if algorithm != "sha256" else "blake3"
        async with (
            sending(chunked(), digest=algorithm) as (one, receiver),
            sending(chunked(), digest=algorithm) as (same, _),
            sending(chunked(), digest=theirs) as (other, _),
        ):
            urls = [one.metadata(), same.metadata()]
            got = await receiver.recv_checkpoint(0, urls, STEP)
            assert_same(got, chunked())
            urls = [other.metadata(), other.metadata(), one.metadata()]
            assert_same(await receiver.recv_checkpoint(0, urls, STEP), chunked())


@pytest.mark.asyncio
@each
@pytest.mark.parametrize("process", [False, True])
async def test_other_programs_can_check_it(algorithm: str, process: bool) -> None:
    """The id is a digest of the header, and each chunk has one in its full length."""
    function, digits = HASHES[algorithm], 32 if algorithm == ALGORITHM else 64
    options = {"digest": algorithm, "process": process}
    async with sending(chunked(2), **options) as (sender, _):
        headers, header = await answer_of(sender, "metadata")
        manifest, _ = parts_of(header)
        chunks = [await answer_of(sender, str(n)) for n in range(2)]
    assert manifest["algorithm"] == algorithm
    start = len(b'12345678{"__metadata__":{"aiockpt.snapshot":"')
    stop = start + 32
    unsigned = header[8:start] + b"0" * 32 + header[stop:]
    assert header[start:stop].decode() == xxhash.xxh3_128(unsigned).hexdigest()
    assert headers["ETag"] == f'"{function(unsigned).hexdigest()}"'
    found = [function(body).hexdigest() for _, body in chunks]
    assert "".join(found) == manifest["digests"]
    assert {len(one) for one in found} == {digits}
    for (fields, _), one in zip(chunks, found, strict=True):
        assert fields["Aiockpt-Digest"] == f"{algorithm}={one}"
        assert fields["ETag"] == headers["ETag"]


@pytest.mark.asyncio
async def test_the_default_is_as_ever() -> None:
    """Who chooses nothing sends the bytes of earlier releases."""
    heads = []
    for options in ({}, {"digest": "xxh3-128"}):
        async with sending(chunked(2), **options) as (sender, _):
            heads.append(await answer_of(sender, "metadata"))
    (first, one), (second, other) = heads
    assert one == other
    assert first["ETag"] == second["ETag"]
    assert b'\\"algorithm\\":\\"xxh3-128\\"' in one


class TestDamage:
    """A changed byte is noticed, whoever changed it."""

    @pytest.mark.asyncio
    @each
    async def test_a_peer_that_has_other_bytes(self, algorithm: str) -> None:
        """The error names the chunk and both digests; the template is untouched."""
        segment = bytearray(noise(3 * CHUNK))
        manifest = described(bytes(segment), algorithm)
        segment[CHUNK + 5] ^= 1
        wrong = HASHES[algorithm](bytes(segment[CHUNK : 2 * CHUNK])).hexdigest()
        into = {"weight": torch.zeros(3 * CHUNK, dtype=torch.uint8)}
        with pytest.raises(IntegrityError) as caught:
            await received_from(RangePeer(bytes(segment), manifest), into=into)
        error = caught.value
        assert error.chunk == 1
        assert (error.expected, error.actual) == (manifest.digests[1], wrong)
        assert not into["weight"].any()

    @pytest.mark.asyncio
    @proves("threat T9")
    @each
    async def test_a_chunk_with_the_same_fast_digest(self, algorithm: str) -> None:
        """It passes for the right one, unless the digests are cryptographic."""
        good, forged = colliding()
        peer = RangePeer(forged, described(good, algorithm))
        if algorithm == ALGORITHM:
            got = await received_from(peer)
            assert got["weight"].numpy().tobytes() == forged != good
        else:
            with pytest.raises(IntegrityError) as caught:
                await received_from(peer)
            assert caught.value.chunk == 0


def colliding() -> tuple[bytes, bytes]:
    """Return two different chunks that XXH3 cannot tell apart.

    XXH3 adds up products of the halves of ``word XOR key``. Its keys are public, so a
    word can be chosen whose product is 0 whatever its other half is. Such a word is
    added to a sum as it is, and so two of them can be exchanged.
    """
    found = []
    for halves in (b"\5\0\0\0", b"\7\0\0\0"), (b"\7\0\0\0", b"\5\0\0\0"):
        chunk = bytearray(noise(CHUNK))
        chunk[0:8] = bytes.fromhex("b8fe6c39") + halves[0]
        chunk[64:72] = bytes.fromhex("7c01812c") + halves[1]
        found.append(bytes(chunk))
    one, other = found
    assert one != other
    assert digest([one]) == digest([other])
    return one, other


def described(segment: bytes, algorithm: str) -> Manifest:
    """Return the manifest of one tensor of bytes."""
    chunks = [segment[at : at + CHUNK] for at in range(0, len(segment), CHUNK)]
    return build_manifest(
        step=7,
        chunk_bytes=CHUNK,
        entries=entries_of(("weight", "U8", (len(segment),), len(segment))),
        tree=["dict", ["weight"], [["tensor", 0]]],
        digests=[HASHES[algorithm](chunk).hexdigest() for chunk in chunks],
        algorithm=algorithm,
    )


async def received_from(peer: RangePeer, **options: Any) -> Any:
    """Receive what a peer of these tests serves."""
    async with serving_peer(peer), transport() as receiver:
        return await receiver.recv_checkpoint(metadata=peer.base_url, step=7, **options)


def lying(algorithm: str, /, **members: object) -> Manifest:
    """Return a manifest whose header says something else."""
    manifest = described(noise(2 * CHUNK), algorithm)
    document, entries = parts_of(bytes(manifest.header))
    return replace(manifest, header=header_of(document | members, entries))


class TestRefused:
    """A receiver refuses these manifests before it asks for data."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        "algorithm", ["sha512", "SHA256", "", "md5", "x" * 1000, DEVICE_ALGORITHM]
    )
    async def test_an_unknown_algorithm(self, algorithm: str) -> None:
        """The message names it and those that are known, as that of older ones does."""
        peer = RangePeer(noise(2 * CHUNK), lying("sha256", algorithm=algorithm))
        with pytest.raises(RemoteProtocolError) as caught:
            await received_from(peer)
        said = f"digest algorithm {algorithm[:40]!r}; known: 'xxh3-128', 'sha256', "
        assert said in str(caught.value)
        assert not peer.ranges()

    @pytest.mark.asyncio
    @pytest.mark.parametrize("sources", [1, 2])
    async def test_a_missing_library(self, sources: int) -> None:
        """The receiver names the extra, asks once, and asks for no data."""
        peer = RangePeer(noise(2 * CHUNK), described(noise(2 * CHUNK), "blake3"))
        async with serving_peer(peer), transport() as receiver:
            with missing("blake3"), pytest.raises(MissingExtraError) as caught:
                await receiver.recv_checkpoint(0, [peer.base_url] * sources, 7)
        assert (caught.value.library, caught.value.extra) == ("blake3", "blake3")
        assert "pip install 'aiockpt[blake3]'" in str(caught.value)
        assert not peer.ranges()
        assert len(peer.requests) <= 2 * sources

    @pytest.mark.asyncio
    async def test_a_missing_library_for_one_of_two_senders(self) -> None:
        """The other sender's checkpoint needs none, so the receive succeeds."""
        data = noise(2 * CHUNK)
        first = RangePeer(data, described(data, "blake3"))
        second = RangePeer(data, described(data, ALGORITHM))
        async with serving_peer(first), serving_peer(second), transport() as receiver:
            urls = [first.base_url, second.base_url]
            with missing("blake3"):
                state = await receiver.recv_checkpoint(0, urls, 7)
        assert state["weight"].numpy().tobytes() == data
        assert not first.ranges()

    def test_a_sender_without_the_library(self) -> None:
        """It says so at once; the other algorithms need none."""
        with missing("blake3"):
            with pytest.raises(MissingExtraError, match=r"aiockpt\[blake3\]"):
                transport(digest="blake3")
            transport(digest="sha256")

    @pytest.mark.parametrize(
        "digest", ["", "sha512", "XXH3-128", DEVICE_ALGORITHM, None, 5]
    )
    def test_a_sender_cannot_choose_another(self, digest: Any) -> None:
        """The message names those that there are."""
        with pytest.raises(ValueError, match="'xxh3-128', 'sha256', 'blake3', got"):
            HTTPTransport(digest=digest)


class TestFiles:
    """A file keeps the digests that its sender chose."""

    @each
    def test_it_is_verified_and_loaded(self, tmp_path: Path, algorithm: str) -> None:
        """The chunks have digests of full length, and the error names damaged ones."""
        path, segment = tmp_path / "a.safetensors", noise(2 * CHUNK)
        manifest = described(segment, algorithm)
        path.write_bytes(bytes(manifest.header) + segment)
        found = read_header(path, limits=FILE_LIMITS)
        assert found == manifest
        with opened(path) as file:
            assert [*verify_chunks(file, manifest)] == []
        assert load(path)["weight"].numpy().tobytes() == segment
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        actual = HASHES[algorithm](bytes(data[-CHUNK:])).hexdigest()
        with opened(path) as file:
            (error,) = verify_chunks(file, manifest)
        assert (error.chunk, error.actual) == (1, actual)
        assert error.expected == manifest.digests[1]
        with pytest.raises(IntegrityError):
            load(path)

    @each
    def test_a_fetch_is_resumed(self, tmp_path: Path, algorithm: str) -> None:
        """The chunks that are there are known by their digests."""
        segment = noise(3 * CHUNK)
        for commit in (False, True):
            part = PartFile.open(tmp_path / "f", described(segment, algorithm))
            held = [chunk for chunk in part.candidates if part.holds(chunk)]
            for chunk in (0, 1, 2) if commit else (0, 2):
                if chunk not in held:
                    start, stop = chunk * CHUNK, (chunk + 1) * CHUNK
                    part.buffers(start, stop)[0][:] = segment[start:stop]
            if commit:
                assert held == [0, 2]
                part.commit()
            part.close()
        assert load(tmp_path / "f")["weight"].numpy().tobytes() == segment

    def test_a_missing_library_is_named(self, tmp_path: Path) -> None:
        """It is no fault of the file."""
        path, segment = tmp_path / "a.safetensors", noise(CHUNK)
        path.write_bytes(bytes(described(segment, "blake3").header) + segment)
        with missing("blake3"), pytest.raises(MissingExtraError):
            load(path)
