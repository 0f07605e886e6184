"""Training under torchft's Manager and Lighthouse: a replica dies, and is healed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.torchft_job import SECONDS, Job, killed

pytestmark = pytest.mark.timeout(2 * SECONDS)


@pytest.mark.parametrize(("replicas", "quorum"), [(2, "sync"), (3, "async")])
def test_a_killed_replica_is_healed(tmp_path: Path, replicas: int, quorum: str) -> None:
    """The others train on; in the end all have the same model and optimizer."""
    options = {"async_quorum": quorum == "async", "wrapper": True}
    few = max(replicas - 1, 2)
    with Job(tmp_path, replicas=replicas, min_replicas=few, **options) as job:
        for replica in range(replicas - 1):
            job.start(replica)
        (victim,) = job.start(replicas - 1, die_at=4)
        assert killed(victim)
        (heir,) = job.start(replicas - 1)
        first, *_ = job.finish()
    assert [each["error"] for each in heir.events("recv")] == [""]
    assert heir.events("healed")
    assert any(each["error"] == "" for each in first.events("send"))
    assert max(each["seconds"] for each in first.events("disallow")) < 5  # the grace


@pytest.mark.parametrize("transport", ["pg", "pg in place"])
def test_over_the_manager_s_own_group(tmp_path: Path, transport: str) -> None:
    """The group is configured anew in every quorum; the transport is the same one.

    In place the first receive heals, too: that replica's Adam has no state yet.
    """
    with Job(tmp_path, replicas=2, min_replicas=2, transport=transport) as job:
        (survivor,) = job.start(0)
        (victim,) = job.start(1, die_at=4)
        assert killed(victim)
        (heir,) = job.start(1)
        job.finish()
    assert [each["error"] for each in heir.events("recv")] == [""]
    assert [each["error"] for each in survivor.events("send")][-1] == ""
    found = [each["in_place"] for each in heir.events("healed")]
    assert found == [transport == "pg in place"]
