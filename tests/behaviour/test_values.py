"""A number, a flag or a text of the wrong kind is refused by its name."""

from __future__ import annotations

from datetime import timedelta
from math import nan
from typing import Any

import numpy as np
import pytest

import aiockpt
from aiockpt.checkpointers import (
    CheckpointerConfig,
    CheckpointProcessConfig,
    CheckpointReader,
    CheckpointStagerConfig,
    CheckpointWriterConfig,
    RankInfo,
)

WRONG = ["5", True, None, nan, -1]
ERRORS = (TypeError, ValueError)


def given(**options: Any) -> dict[str, Any]:
    """Return options of any kind."""
    return options


RECORDS: list[tuple[Any, str]] = [
    (aiockpt.Server, "port"),
    (aiockpt.Server, "readers"),
    (aiockpt.Server, "grace"),
    (aiockpt.Server, "keep_superseded"),
    (aiockpt.Server, "keep_last"),
    (aiockpt.Server, "nice"),
    (aiockpt.Receive, "connections"),
    (aiockpt.Receive, "reconnect_timeout"),
    (aiockpt.Swarm, "linger"),
    (aiockpt.Swarm, "slots"),
    (aiockpt.Limits, "max_nodes"),
    (aiockpt.Limits, "max_depth"),
    (CheckpointWriterConfig, "write_barrier_timeout_secs"),
    (CheckpointWriterConfig, "chunk_bytes"),
    (CheckpointStagerConfig, "chunk_bytes"),
    (CheckpointProcessConfig, "subprocess_init_timeout_secs"),
    (CheckpointProcessConfig, "write_timeout_secs"),
    (CheckpointProcessConfig, "hang_timeout_secs"),
    (CheckpointProcessConfig, "nice"),
    (CheckpointProcessConfig, "keep_last_seconds"),
    (aiockpt.HTTPTransport, "timeout"),
    (aiockpt.HTTPTransport, "stall_timeout"),
    (aiockpt.HTTPTransport, "chunk_bytes"),
]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize(("make", "name"), RECORDS, ids=str)
def test_a_number_is_a_number(make, name, value) -> None:
    """Neither a text nor a flag, and neither negative nor NaN."""
    with pytest.raises(ERRORS, match=f"^{name} must"):
        make(**given(**{name: value}))


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (aiockpt.Server, "port", 70000),
        (aiockpt.Server, "port", 8.5),
        (aiockpt.Server, "process", "yes"),
        (aiockpt.Server, "host", 7),
        (aiockpt.Auth, "insecure", 1),
        (aiockpt.Receive, "connections", 1.5),
        (aiockpt.Receive, "keep_arena", "no"),
        (CheckpointWriterConfig, "keep_last", 1.5),
        (CheckpointWriterConfig, "keep_every", "2"),
        (CheckpointWriterConfig, "fsync", 0),
        (CheckpointerConfig, "use_process", "no"),
        (CheckpointerConfig, "busy_policy", "hope"),
        (aiockpt.HTTPTransport, "same_host", "yes"),
        (aiockpt.HTTPTransport, "zero_copy", 1),
        (aiockpt.HTTPTransport, "allow_pickle", "no"),
    ],
)
def test_an_option_has_its_own_type(make, name, value) -> None:
    """The message begins with the name of the option."""
    with pytest.raises(ERRORS, match=f"^{name} must"):
        make(**given(**{name: value}))


@pytest.mark.parametrize("value", ["1", True, 1.0])
def test_a_rank_is_an_integer(tmp_path, value) -> None:
    """The message says how to make it one."""
    calls: list[Any] = [
        lambda: aiockpt.load(tmp_path, rank=value),
        lambda: CheckpointReader(RankInfo(0, 1)).read(tmp_path, rank=value),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"rank must be an integer.*pass int\(rank"):
            call()
    with pytest.raises(TypeError, match="global_rank must be an integer"):
        RankInfo(value, 2)
    with pytest.raises(TypeError, match="global_world_size must be an integer"):
        RankInfo(0, value)


@pytest.mark.asyncio
async def test_a_timeout_of_a_call(tmp_path) -> None:
    """Each verb that takes a timeout names it, with the value."""
    async with aiockpt.HTTPTransport() as transport:
        for value in WRONG:
            if value is None:
                continue
            with pytest.raises(ERRORS, match=f"timeout must.*{value}"):
                await transport.send_checkpoint(step=1, state_dict={}, timeout=value)  # type: ignore[arg-type]
            with pytest.raises(ERRORS, match=f"reconnect_timeout must.*{value}"):
                transport.steps(transport.metadata(), reconnect_timeout=value)  # type: ignore[arg-type]
            with pytest.raises(ERRORS, match=f"lifetime must.*{value}"):
                transport.grant("a", lifetime=value)  # type: ignore[arg-type]


def test_numbers_of_numpy_and_spans_are_numbers(tmp_path) -> None:
    """They are what some programs compute with."""
    aiockpt.HTTPTransport(timedelta(seconds=1))
    aiockpt.HTTPTransport(**given(timeout=np.float32(1.5)))
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save(
            {"a": 1}, tmp_path / "a", step=given(step=np.int64(3))["step"]
        )
    assert aiockpt.load(tmp_path / "a", rank=given(rank=np.int32(0))["rank"]) == {
        "a": 1
    }


def test_every_file_is_written_in_the_same_chunks() -> None:
    """A load on another mesh reads as little of a background save as of another."""
    staged, written = CheckpointStagerConfig(), CheckpointWriterConfig()
    assert staged.chunk_bytes == written.chunk_bytes
