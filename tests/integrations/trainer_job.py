"""Train with transformers' Trainer: a killed run goes on within its epoch."""

import dataclasses
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback, TrainerState

import aiockpt


class BackgroundTrainer(Trainer):
    """A Trainer that saves in the background."""

    def train_on(self, checkpointer):
        """Train on from the checkpoint that was committed last."""
        self.checkpointer, self.handle = checkpointer, None
        found = [aiockpt.latest(self.args.output_dir)]
        broadcast_object_list(found)  # all ranks take the one that rank 0 sees
        if found[0] is None:
            return self.train()
        whole = ["model", "optimizer", "scheduler", "trainer"]
        self.saved = aiockpt.load(found[0], select=[*whole, "random"])
        with tempfile.TemporaryDirectory() as place:  # tells it where to go on
            state = TrainerState(**self.saved["trainer"])
            state.save_to_json(f"{place}/trainer_state.json")
            return self.train(resume_from_checkpoint=place)

    def _save_checkpoint(self, model, trial):
        if self.handle:
            self.handle.result()  # raises if the save before has failed
        torchs = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
        state = {"random": [random.getstate(), np.random.get_state(), *torchs]}
        if self.is_world_process_zero():  # once, not once a rank
            state["model"] = self.model.state_dict()
            state["optimizer"] = self.optimizer.state_dict()
            state["scheduler"] = self.lr_scheduler.state_dict()
            state["trainer"] = dataclasses.asdict(self.state)
        path = f"{self.args.output_dir}/step-{self.state.global_step}"
        self.handle = self.checkpointer.save(state, path)

    def _load_from_checkpoint(self, place, model=None):
        self.model.load_state_dict(self.saved["model"])

    def _load_optimizer_and_scheduler(self, place):
        if place:
            self.optimizer.load_state_dict(self.saved["optimizer"])
            self.lr_scheduler.load_state_dict(self.saved["scheduler"])

    def _load_rng_state(self, place):
        if place:
            python, numpy, cpu, *gpus = self.saved["random"]
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            torch.cuda.set_rng_state_all(gpus)


class Publish(TrainerCallback):
    """Publishes the model after each step; receivers skip what they do not need."""

    def on_train_begin(self, args, state, control, **rest):
        if state.is_world_process_zero:
            self.transport = aiockpt.make_background_transport()
            Path("metadata").touch(mode=0o600)  # it will contain the token
            Path("metadata").write_text(self.transport.metadata())

    def on_step_end(self, args, state, control, model=None, **rest):
        if state.is_world_process_zero:
            self.transport.send_checkpoint(
                step=state.global_step, state_dict=model.state_dict()
            )

    def on_train_end(self, args, state, control, **rest):
        if state.is_world_process_zero:
            self.transport.shutdown()


def main():
    torch.manual_seed(0)
    words = torch.randint(64, (64, 8))
    data = [{"input_ids": each, "labels": each} for each in words]
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes))
    args = TrainingArguments(
        "run",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        save_steps=5,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = BackgroundTrainer(model, args, train_dataset=data, callbacks=[Publish()])
    with aiockpt.make_background_checkpointer() as checkpointer:
        trainer.train_on(checkpointer)
        if trainer.handle:  # None if nothing was left to do
            trainer.handle.result()


if __name__ == "__main__":
    main()
