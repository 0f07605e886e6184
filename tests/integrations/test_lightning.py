"""What Lightning may remove, and when; and what a worker gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import aiockpt
from aiockpt.errors import StorageError
from tests.integrations.lightning_job import BackgroundIO, Publish


@pytest.mark.allow_error_logs  # the save that fails
def test_an_older_checkpoint_goes_after_the_commit_of_a_newer_one(tmp_path) -> None:
    """If the newer one is not committed, the older one stays."""
    io, old = BackgroundIO(), tmp_path / "old.ckpt"
    io.save_checkpoint({"global_step": 1}, old)
    io.finish()
    (tmp_path / "file").touch()
    io.save_checkpoint({"global_step": 2}, tmp_path / "file/new.ckpt")
    io.remove_checkpoint(old)  # Lightning's next call
    with pytest.raises(StorageError):
        io.finish()
    assert aiockpt.load(old) == {"global_step": 1}
    io.checkpointer.close()


def test_a_stage_without_training_publishes_nothing() -> None:
    """Lightning ends `validate` and `test` in the same way as `fit`."""
    Publish().teardown(SimpleNamespace(is_global_zero=True), None, "validate")


def test_a_worker_follows(tmp_path, monkeypatch) -> None:
    """It has the weights of the epoch that was published."""
    monkeypatch.chdir(tmp_path)
    trainer, publish = SimpleNamespace(is_global_zero=True, global_step=7), Publish()
    trained, model = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    publish.on_fit_start(trainer, trained)
    publish.on_train_epoch_end(trainer, trained)
    with aiockpt.make_background_transport() as receiver:
        metadata = Path("metadata").read_text()
        for step, _ in receiver.follow(metadata, into=model.state_dict()):
            print(f"the model has the weights of step {step}")
            break
    publish.teardown(trainer, trained, "fit")
    assert step == 7
    assert torch.equal(model.weight, trained.weight)
