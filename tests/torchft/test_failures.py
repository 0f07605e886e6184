"""What failures do to a job under torchft: nobody dies who did not fail.

Each is injected once, into replicas that train under a real Manager and Lighthouse.
With torchft's own transport most of them end every replica's training, or fork the
model without a word. ``Job.finish`` demands that every rank ends well and that all
have the same weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.torchft_job import SECONDS, Job, Life

pytestmark = pytest.mark.timeout(2 * SECONDS)

TRANSIENT = ["Refuse()", "CutAfter(150)", "StallAfter(150)", "CutAfter(700, True)"]


def train(path: Path, *, source: str = "", heir: str = "", **options: object) -> Job:
    """Run two replicas, the second of which is healed by the first; return the job."""
    # Until then a replica waits for one whose receive has failed.
    options = {"group_timeout": 5.0, **options}
    with Job(path, replicas=2, min_replicas=2, **options) as job:
        job.start(0, fail=source)
        job.start(1, fail=heir)
        job.finish()
    return job


def lives(job: Job) -> tuple[Life, Life]:
    """Return the source and the heir."""
    return job.lives[0, 0][0], job.lives[1, 0][0]


def errors(life: Life, kind: str) -> list[str]:
    """Return how each call ended."""
    return [each["error"] for each in life.events(kind)]


def test_a_receive_that_fails_is_made_again(tmp_path: Path) -> None:
    """Row 1: the step is not committed, the next quorum heals."""
    _, heir = lives(train(tmp_path, heir="recv"))
    first, *_, last = errors(heir, "recv")
    assert "injected" in first
    assert last == ""


@pytest.mark.parametrize("quorum", ["async", "sync"])
def test_a_send_that_fails_is_told_at_once(tmp_path: Path, quorum: str) -> None:
    """Rows 2 and 3: the receiver does not wait for its deadline."""
    asynchronous = quorum == "async"
    job = train(tmp_path, source="send", timeout=30.0, async_quorum=asynchronous)
    source, heir = lives(job)
    assert "UnsupportedLeafError" in errors(source, "send")[0]
    first, *_, last = heir.events("recv")
    assert "gave up: UnsupportedLeafError" in first["error"]
    assert last["error"] == ""


def test_a_receive_that_is_too_slow_ends_before_the_group_gives_up(
    tmp_path: Path,
) -> None:
    """Row 4: the timeout is one for the whole call, however the bytes trickle."""
    faults = ["StallAfter(150)"] * 3
    with Job(tmp_path, replicas=2, min_replicas=2, group_timeout=8.0) as job:
        job.start(0, timeout=30.0, faults=faults)
        job.start(1, timeout=4.0)
        job.finish()
    _, heir = lives(job)
    first, *_, last = heir.events("recv")
    assert "timed out" in first["error"]
    assert first["seconds"] < 8
    assert last["error"] == ""


def test_a_reader_that_is_stuck_does_not_hold_up_the_source(tmp_path: Path) -> None:
    """Row 5: disallow returns at once, and nothing raises."""
    source, _ = lives(train(tmp_path, source="stuck reader", width=200_000))
    assert source.events("stuck")[0]["head"] == "HTTP/1.1 200"
    calls = source.events("disallow")
    assert {each["error"] for each in calls} == {""}
    assert max(each["seconds"] for each in calls) < 5  # the grace


def test_metadata_that_is_too_long_is_refused_at_the_start(tmp_path: Path) -> None:
    """Row 8: of a replica that has not joined yet, so the others go on."""
    with Job(tmp_path, replicas=2) as job:
        job.start(0)
        (wrong,) = job.start(1, fail="long metadata")
        assert wrong.wait() == 1
        assert "characters are more than 4096" in wrong.log.read_text()
        job.start(1)
        _, heir = job.finish()
    assert errors(heir, "recv")[-1] == ""


def test_a_transient_network_error_does_not_fork_the_model(tmp_path: Path) -> None:
    """Row 9: one rank's connection breaks in every way, and each receive heals.

    Had it failed, the manager might have taken its group for healed all the same.
    """
    patient = {"timeout": 40.0, "group_timeout": 40.0}
    with Job(tmp_path, replicas=2, ranks=2, min_replicas=2, until=6, **patient) as job:
        job.start(0, faults_of=[[], TRANSIENT], faults_at=3)
        for victim in job.start(1, die_at=3):
            assert victim.wait() != 0
        heirs = job.start(1)
        job.finish()
    for heir in heirs:
        assert {*errors(heir, "recv")} == {""}
    proxied = job.lives[0, 1][0]
    before = proxied.events("armed")[0]["before"]
    assert proxied.events("proxy")[0]["connections"] - before > len(TRANSIENT)
