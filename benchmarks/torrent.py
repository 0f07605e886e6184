"""The rival of `benchmarks.swarm`: libtorrent sends a file to many hosts.

It has the best of conditions: everybody knows the address of everybody else, TCP only,
no limits, and files in memory where ``/dev/shm`` is there.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.swarm import Host

__all__ = ["hindrance", "receive", "send"]

libtorrent: Any = import_module("libtorrent") if find_spec("libtorrent") else None
_PORT: Final = 6881
_LOOK: Final = 0.01  # seconds
_NAME: Final = "checkpoint"
_SETTINGS: Final = {
    "listen_interfaces": f"0.0.0.0:{_PORT}",
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "unchoke_slots_limit": 8,
    "connection_speed": 1000,
    "smooth_connects": False,
    "alert_mask": 0,
}


def hindrance() -> str:
    """Return why the rival cannot run; empty if it can."""
    return "" if libtorrent else "--rival needs the package libtorrent"


def _folder() -> Path:
    ram = Path("/dev/shm")  # noqa: S108 - a private directory is made in it
    return Path(tempfile.mkdtemp(dir=ram if ram.is_dir() else None))


def _add(session: Any, torrent: bytes, folder: Path) -> Any:
    parameters = libtorrent.load_torrent_buffer(torrent)
    parameters.save_path = str(folder)
    parameters.flags &= ~libtorrent.torrent_flags.auto_managed
    parameters.flags &= ~libtorrent.torrent_flags.paused
    return session.add_torrent(parameters)


async def send(host: Host, nbytes: int, chunk_bytes: int) -> None:
    """Serve a file of so many bytes in pieces of ``chunk_bytes``."""
    folder = _folder()
    try:
        (folder / _NAME).write_bytes(os.urandom(nbytes))
        files = [libtorrent.create_file_entry(_NAME, nbytes)]
        made = libtorrent.create_torrent(
            files, piece_size=chunk_bytes, flags=libtorrent.create_torrent.v1_only
        )
        libtorrent.set_piece_hashes(made, str(folder))
        torrent = libtorrent.bencode(made.generate())
        session = libtorrent.session(_SETTINGS)
        handle = _add(session, torrent, folder)
        while not handle.status().is_seeding:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(_LOOK)
        began = time.process_time()
        host.say({"metadata": base64.b64encode(torrent).decode()})
        ends = False
        while not ends:
            ends = (await host.heard())["end"]
            cpu, sent = time.process_time() - began, handle.status().total_upload
            host.say({"sent": sent, "requests": 0, "cpu": cpu, "memory": 0})
    finally:
        shutil.rmtree(folder)


async def receive(host: Host, nbytes: int, *, star: bool) -> None:
    """Receive the file, and serve it on."""
    assert not star, "a swarm is all that it can do"
    folder = _folder()
    try:
        session = libtorrent.session(_SETTINGS)
        host.say({})
        said = await host.heard()
        began, used = time.monotonic(), time.process_time()
        handle = _add(session, base64.b64decode(said["metadata"]), folder)
        for address in said["hosts"]:
            if address != host.address:
                handle.connect_peer((address, _PORT))
        # All pieces are written, and have their digests.
        while not handle.status().is_seeding:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(_LOOK)
        seconds, cpu = time.monotonic() - began, time.process_time() - used
        right = (folder / _NAME).stat().st_size == nbytes
        host.say({"seconds": seconds, "cpu": cpu, "memory": 0, "right": right})
        used = time.process_time()
        await host.heard()
        sent, cpu = handle.status().total_upload, time.process_time() - used
        host.say({"sent": sent, "cpu": cpu, "memory": 0})
    finally:
        shutil.rmtree(folder)
