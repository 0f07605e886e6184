"""A job of 4 ranks is killed; 2 ranks of another mesh go on, then 1 process."""

import os
import tempfile
from itertools import combinations

from resume_elsewhere_parts.jobs import Job  # type: ignore[import-not-found]
from resume_elsewhere_parts.model import checksum  # type: ignore[import-not-found]

import aiockpt

JOBS = (Job("fsdp", 4), Job("tp", 2), Job("one", 1))
LAST = int(os.environ.get("STEPS", "60"))  # the last step of the run


def look_at(saved: aiockpt.checkpointers.Checkpoint, job: Job) -> None:
    # This process has no process group, so `load` returns full tensors.
    state = aiockpt.load(saved, select=["model", "optimizer"])
    assert checksum(state) == job.saved[saved.step], "not what the job has saved"
    try:
        own = aiockpt.load(saved, select=["own"])["own"]
        print(f"  all its ranks saved the same position, {own['position']}")
    except aiockpt.errors.RankValuesError as error:
        print("  its ranks saved different values at", ", ".join(error.paths))
        for rank in range(job.ranks):
            own = aiockpt.load(saved, select=["own"], rank_values=rank)["own"]
            print(f"    rank {rank}: position {own['position']}")


def difference(one: dict[int, float], other: dict[int, float]) -> float:
    return max(abs(one[step] - other[step]) for step in range(1, LAST + 1))


def main() -> None:
    run: dict[int, float] = {}
    sums: dict[int, str] = {}  # of what was saved, by step
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        for job in JOBS:
            is_first, is_last = job is JOBS[0], job is JOBS[-1]
            job.run(place, kill=not is_last)
            assert len(job.resumed) == (not is_first)
            for step, value in job.resumed.items():
                assert value == sums[step], "the resumed state is not the saved one"
                print(f"{job.ranks} of {job.mesh}: resumed step {step}, bit for bit")
            done, saved = max(job.losses["run"]), aiockpt.latest(f"{place}/run")
            assert saved
            assert done == LAST if is_last else saved.step < done < LAST
            how = "ended" if is_last else "killed"
            print(f"{job.ranks} of {job.mesh}: {how} at {done}, saved {saved.step}")
            look_at(saved, job)
            run |= job.losses["run"]
            sums |= job.saved
    undisturbed = [job.losses[job.mesh] for job in JOBS]
    torchs = max(difference(*pair) for pair in combinations(undisturbed, 2))
    ours = difference(undisturbed[0], run)
    print(f"losses of undisturbed runs on these meshes differ by up to {torchs:.1e};")
    print(f"those of the run that was killed twice differ by up to {ours:.1e}")
    assert ours <= torchs


if __name__ == "__main__":
    main()
