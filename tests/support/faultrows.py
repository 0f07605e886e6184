"""The faults that the library is put through: one row each, in the order of the page.

A row is data. The tests of `tests/faults` carry its number, and `docs/reliability.md`
shows it with what the last run measured::

    @proves("fault 8")
    async def test_it(record: Record) -> None:
        for seed in range(record.pick(20, 1000)):
            ...  # make it happen; assert what must hold
            record.ran()
            record.within("to the error", seconds, 0.2)  # the worst is shown
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from typing import Final

__all__ = ["ROWS", "Row", "fingerprint"]


@dataclass(frozen=True, slots=True)
class Row:
    """One fault: what goes wrong, how it is made to, and what must hold then."""

    number: int
    fault: str
    how: str
    passes: str


ROWS: Final = (
    Row(
        1,
        "A sender is killed in the middle of a transfer",
        "SIGKILL of its process",
        "typed error ≤ 0.2 s after the kill",
    ),
    Row(
        2,
        "A sender is killed, and comes back with the same step a second later",
        "SIGKILL; a new process on the same port",
        "the transfer finishes; fetched again: ≤ 1 chunk per connection",
    ),
    Row(
        3,
        "A sender stands still, for a while and for ever",
        "SIGSTOP; SIGCONT after 4 s with a stall timeout of 2 s",
        "for ever: error ≤ stall timeout + 0.5 s; for a while: the transfer finishes",
    ),
    Row(
        4,
        "A receiver is killed, or stands still for ever",
        "SIGKILL and SIGSTOP of its process",
        "the sender lets go of it ≤ stall timeout + 0.5 s; `disallow_checkpoint` ≤ "
        "grace + 0.1 s",
    ),
    Row(
        5,
        "Connections are reset in the middle of a body",
        "proxy: RST after a random byte, once per connection; RST every 3 MB",
        "the transfer finishes; once: ≤ 1 chunk per connection extra; every 3 MB: "
        "≤ 15 % extra",
    ),
    Row(
        6,
        "The link goes down and no packet says so",
        "a link between network namespaces, taken down",
        "both sides give up ≤ stall timeout + 0.5 s",
    ),
    Row(
        7,
        "An answer ends early",
        "proxy: FIN and RST after every byte of a small transfer; answers without a "
        "length, in chunks, and with a wrong length",
        "always noticed: bit-exact after another attempt, or a typed error",
    ),
    Row(
        8,
        "One bit arrives inverted",
        "proxy: a random bit of the answers, 1,000 seeds",
        "none accepted; only the chunk that it hit is fetched again",
    ),
    Row(
        9,
        "The sender's memory differs from its manifest",
        "the staged memory is changed after sealing",
        "`IntegrityError` after 3 attempts; it names chunk and peer",
    ),
    Row(
        10,
        "Bytes drip: never silent, far too slow",
        "proxy: 20 kB/s on every connection, random deadlines",
        "the deadline is kept + 0.5 s at most",
    ),
    Row(
        11,
        "A long, lossy way: 50 ms ± 10 ms delay each way, 1 % loss",
        "a TUN link between network namespaces, 8 ranges",
        "bit-exact, and ≥ 0.8 of 8 raw TCP streams; corrupted packets change nothing",
    ),
    Row(
        12,
        "2 of 4 connections stall for ever",
        "proxy",
        "time ≤ stall timeout + 1.2 times the clean time",
    ),
    Row(
        13,
        "The sender has no descriptors left",
        "`exhausted_fds` in the serving process",
        "a running transfer finishes; others wait and are served when some are free",
    ),
    Row(
        14,
        "The receiver has no descriptors left",
        "`exhausted_fds`, with 0 to 8 left",
        "bit-exact over fewer connections, or a typed error; works at once afterwards",
    ),
    Row(
        15,
        "Local ports run short",
        "`few_ports`: 20 ports in a network namespace, 200 transfers",
        "all bit-exact; connections opened ≤ those at work at a time + retries",
    ),
    Row(
        16,
        "The disk is full while a checkpoint is written",
        "a tmpfs of a few MiB; ENOSPC at each write",
        "the old checkpoint is whole, no temporary file stays, the error names the "
        "place and the free space",
    ),
    Row(
        17,
        "A system call of the writer fails",
        "strace: EIO, ENOSPC and EINTR at each openat, write, fsync, close, rename",
        "0 torn; a failed fsync is a failed save",
    ),
    Row(
        18,
        "The writer is killed at any system call",
        "strace: SIGKILL at each call",
        "0 torn; what it left is swept at the next save",
    ),
    Row(
        19,
        "/dev/shm is full",
        "a mount namespace with a /dev/shm of 4 MiB",
        "works, or a typed error; never SIGBUS",
    ),
    Row(
        20,
        "The writer's process is killed in the middle of a save",
        "SIGKILL of the checkpoint process",
        "the save fails or is done anew; the previous checkpoint is whole; the next "
        "save works",
    ),
    Row(
        21,
        "The whole process group is killed",
        "SIGKILL of trainer and checkpoint process",
        "nothing is left in /dev/shm, no process lives on",
    ),
    Row(
        22,
        "The sender goes to another step in the middle of a transfer",
        "a send, and a retraction, at every hundredth of the bytes",
        "the old bits exactly, or a typed error; never a mixture",
    ),
    Row(
        23,
        "Slow readers outlast the writer's timeout, 100 times",
        "readers that hold the lock; writers with a deadline",
        "after each timeout the lock is as before",
    ),
    Row(
        24,
        "Cancels anywhere in the reader-writer lock",
        "4,000 random schedules against a model",
        "0 violations",
    ),
    Row(
        25,
        "A cancel at every suspension point of every public coroutine",
        "each await in turn, on both loops",
        "cancelled or finished; nothing left; the object still works",
    ),
    Row(
        26,
        "An exception at every await",
        "each await in turn raises OSError",
        "a typed error, or finished; nothing left",
    ),
    Row(
        27,
        "The event loop is blocked for 0.1 to 5 s, on either side",
        "a callback that sleeps; a thread that keeps the interpreter's lock",
        "no stall is reported that was the loop's own",
    ),
    Row(
        28,
        "1, 8, 32 and 128 receivers at once",
        "receivers on loopback, the sender in a process of its own",
        "all bit-exact; the sender's memory grows ≤ 2 MiB each; Jain fairness ≥ 0.9",
    ),
    Row(
        29,
        "A flood: more receivers than are admitted; 200 slow or idle attackers",
        "`readers` of 4 for 32 receivers; raw sockets",
        "all receivers finish in the end; a good client's time + 10 % at most",
    ),
    Row(
        30,
        "The wall clock jumps by an hour, forwards and backwards",
        "libfaketime in a process of its own",
        "no deadline moves; a token expires by the wall clock",
    ),
    Row(
        31,
        "Both ends are suspended for 10 s",
        "SIGSTOP and SIGCONT of both",
        "goes on, or a typed error",
    ),
    Row(
        32,
        "Another job's server takes the port after a crash",
        "a sender of other content, token, or manifest key on the same port",
        "typed error; no byte of it is accepted",
    ),
    Row(
        33,
        "A cache between the ends serves what is stale",
        "nginx with a slice cache; the sender goes to another run of the same step",
        "the old bits, the new bits, or a typed error; never a mixture",
    ),
    Row(
        34,
        "TLS: a wrong or expired certificate, and an end without close_notify",
        "trustme; proxy: FIN and RST after random bytes",
        "typed error; a truncated stream is a truncated body",
    ),
    Row(
        35,
        "A peer of a process group is killed, or stands still",
        "gloo; SIGKILL and SIGSTOP",
        "error ≤ timeout + 0.5 s; the group is marked broken; the process can exit",
    ),
    Row(
        36,
        "A deadline of 0, expired, or huge",
        "every public verb",
        "expired: `TransferTimeoutError` at once; huge: as none",
    ),
    Row(
        37,
        "A fork while transfers run",
        "os.fork in a running loop",
        "the child gets a clear error; the parent goes on",
    ),
    Row(
        38,
        "The interpreter exits while transfers run",
        "a script that ends in the middle",
        "gone ≤ 2 s, no complaint on stderr, the exit code as the script set it",
    ),
    Row(
        39,
        "A random mix for ten minutes",
        "`nox -s soak`: all of the proxy's faults, kills, stops, sends and retractions",
        "≥ 1,000 transfers, 0 corrupt",
    ),
    Row(
        40,
        "One of three sources is killed half way",
        "SIGKILL of its process; each source behind a line of 50 MB/s",
        "bit-exact, and ≤ 1.3 times the clean time with two",
    ),
    Row(
        41,
        "A data loader is forked beside staged checkpoints, and while one is staged",
        "os.fork in a process of its own; the child takes memory, and drops all it has",
        "the child neither maps staged memory nor has a descriptor of it, and ends by "
        "itself; what was received can be read and changed there",
    ),
    Row(
        42,
        "Very many readers that hold the token ask at once",
        "2,000 connections from another process, each for the whole checkpoint",
        "as many as are admitted read; the others are told to come back, and do; "
        "nobody is cut off; the loop's longest stall ≤ 0.5 s",
    ),
    Row(
        43,
        "A state cannot be sent over a process group, and the receiver is not there",
        "gloo; SIGSTOP, then SIGCONT, and SIGKILL of the receiver's process",
        "the state's own error ≤ 0.5 s; a receiver that goes on is told why, and gets "
        "the next send",
    ),
    Row(
        44,
        "A trainer publishes faster than its followers receive",
        "a receive takes as long as two publications; one follower, then three",
        "alone ≥ 3/4 of the receives end, of three each ≥ 1/2; none is torn",
    ),
    Row(
        45,
        "A sender dies and starts again at a lower step",
        "a shutdown without grace; a new transport on the same port",
        "followers receive the lower step ≤ 3 s after it is published",
    ),
    Row(
        46,
        "A server process is starved, or stands still, when it is to retract",
        "100 readers that never read; two busy processes per core; SIGSTOP",
        "`disallow_checkpoint` ≤ grace + 0.3 s; nobody gets the rest; a slow process "
        "is not killed; the next step is served",
    ),
    Row(
        47,
        "A checkpoint is retracted between two server processes",
        "SIGKILL; `disallow_checkpoint` before the next process is there",
        "its memory is given back at once; the next step is served",
    ),
    Row(
        48,
        "One of two receivers of a send that failed asks a second time",
        "a leaf that cannot travel; `recv_checkpoint` again before the next attempt",
        "the other is told why ≤ 0.5 s; the first one gets the next attempt",
    ),
    Row(
        49,
        "A sender claims 4 GiB and sends none of it",
        "raw sockets: a manifest, then silence, the heads of ranges, or a MiB of each",
        "the receiver's memory grows ≤ 150 MiB",
    ),
    Row(
        50,
        "A peer sends informational answers (HTTP 1xx) for ever",
        "raw sockets, as fast as they take it; when asked, and unasked",
        "`RemoteProtocolError` ≤ deadline + 0.5 s; the loop stands still ≤ 0.05 s",
    ),
    Row(
        51,
        "The receiver can open no connection, or start no thread",
        "`exhausted_fds`; threads that do not start",
        "`StagingError` ≤ 0.5 s, which names the limit; works at once afterwards",
    ),
    Row(
        52,
        "The checkpoint process of one of two ranks is killed while both save",
        "SIGKILL at a random moment; the same step is saved again at once",
        "0 torn; no rank denies a checkpoint that is there; all know ≤ 10 s; the next "
        "save is committed",
    ),
    Row(
        53,
        "A rank leaves out a save, cannot resolve its path, or dies after the commit",
        "two ranks over a TCP store, in a random order",
        "a lost path is told ≤ 2 s; rank 0 does not deny its commit; the next save to "
        "the same path and step is committed",
    ),
    Row(
        54,
        "A checkpoint process starts beside two busy processes",
        "all on one core, and the checkpoint process at the lowest priority",
        "ready ≤ 30 s",
    ),
)


def fingerprint() -> str:
    """Return what changes with every word of the list."""
    text = repr([astuple(each) for each in ROWS])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
