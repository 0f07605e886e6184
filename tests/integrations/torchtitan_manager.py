"""A checkpoint manager for torchtitan that saves in the background."""

from dataclasses import dataclass

import torch.distributed as dist
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.tools import filesystem

import aiockpt
from aiockpt.checkpointers import CheckpointWriterConfig


class BackgroundManager(BaseCheckpointManager):
    """Each rank saves its shards; other meshes can load them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """What torchtitan's other managers take, too."""

    def __init__(
        self,
        config,
        *,
        dataloader,
        model_parts,
        optimizers,
        lr_schedulers,
        states,
        sd_adapter=None,
        base_folder="",
    ):
        self.enable, self.interval = config.enable, config.interval
        self.save_future = self.handle = None
        if not self.enable:
            return
        self.folder = filesystem.join(base_folder, config.folder)
        self.excluded = config.exclude_from_loading
        self.initial = config.initial_load_path
        self.adapter = None
        if config.initial_load_in_hf:
            self.adapter = sd_adapter
            self.initial = self.initial or sd_adapter.hf_assets_path
        self.states = states | {
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
        }
        keep = CheckpointWriterConfig(keep_last=config.keep_latest_k or None)
        self.checkpointer = aiockpt.make_background_checkpointer(
            aiockpt.CheckpointerConfig(writer_config=keep)
        )

    def _state(self, excluded=()):
        return {
            name: each.state_dict()
            for name, each in self.states.items()
            if each is not None and name not in excluded
        }

    def _save(self, curr_step, last_step=False):
        if curr_step % self.interval and not last_step:
            return False
        if self.handle:
            self.handle.result()  # raises if the save before has failed
        path = f"{self.folder}/step-{curr_step}"
        self.handle = self.checkpointer.save(self._state(), path)
        return True

    def _load(self, step=-1):
        newest = aiockpt.latest(self.folder)
        found = [newest if step < 0 else f"{self.folder}/step-{step}"]
        dist.broadcast_object_list(found)  # all ranks take the one that rank 0 sees
        if found[0] is None:
            return self._load_weights()  # those of `initial_load_path`, if any
        template = self._state(self.excluded)
        state = aiockpt.load(found[0], into=template, rank_values="keep")
        for name in state:
            self.states[name].load_state_dict(state[name])
        return True

    def _load_weights(self):
        if not self.initial:
            return False
        model = self.states[MODEL]
        weights = model.state_dict()
        if self.adapter:  # from Hugging Face's names
            theirs = aiockpt.load(self.initial, into=self.adapter.to_hf(weights))
            weights = self.adapter.from_hf(theirs)
        else:
            aiockpt.load(self.initial, into=weights)
        model.load_state_dict(weights)
        return True

    def _maybe_wait_for_staging(self):
        pass  # `save` has returned when the copy is made

    def _wait_for_saving(self):
        self.handle.result()

    def _close(self):
        if self.handle:
            self.handle.result()
        self.checkpointer.close()
