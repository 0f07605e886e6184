"""Train with Lightning: aiockpt saves in the background, and publishes each epoch."""

import os
import shutil
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

import aiockpt
from aiockpt.checkpointers import RankInfo


class BackgroundIO(CheckpointIO):
    """Saves Lightning's checkpoints in the background."""

    def __init__(self):
        self.checkpointer = self.handle = None
        self.outdated = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.finish()  # one save at a time
        if self.checkpointer is None:  # rank 0 saves for all
            self.checkpointer = aiockpt.make_background_checkpointer(
                rank_info=RankInfo(0, 1)
            )
        step = checkpoint["global_step"]
        self.handle = self.checkpointer.save(checkpoint, path, step=step)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        self.finish()
        return aiockpt.load(path)

    def remove_checkpoint(self, path):
        self.outdated.append(path)  # the newer one is not committed yet

    def finish(self):
        if self.handle:
            self.handle.result()  # committed, or this raises the reason
        while self.outdated:
            shutil.rmtree(self.outdated.pop())

    def teardown(self):
        self.finish()
        if self.checkpointer:
            self.checkpointer.close()
        self.checkpointer = self.handle = None


class Publish(lightning.Callback):
    """Publishes the model after each epoch."""

    def on_fit_start(self, trainer, module):
        if trainer.is_global_zero:
            self.transport = aiockpt.make_background_transport()
            Path("metadata").touch(mode=0o600)  # it will contain the token
            Path("metadata").write_text(self.transport.metadata())

    def on_train_epoch_end(self, trainer, module):
        if trainer.is_global_zero:
            self.transport.send_checkpoint(
                step=trainer.global_step, state_dict=module.state_dict()
            )

    def teardown(self, trainer, module, stage):
        if stage == "fit" and trainer.is_global_zero:
            self.transport.shutdown()


class Model(lightning.LightningModule):
    """A small model with randomness in each step."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
        )

    def on_train_batch_start(self, batch, batch_idx):
        # Lightning does not save the state of random numbers.
        torch.manual_seed(self.global_step * self.trainer.world_size + self.global_rank)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(resume=None):
    ranks = int(os.environ.get("RANKS", "1"))
    lightning.seed_everything(0)
    data = torch.randn(64, 8)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    sampler = torch.utils.data.DistributedSampler(data, ranks, rank)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    keep = ModelCheckpoint("run", monitor="loss", save_top_k=2)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",  # for the test; leave it out on a GPU
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        plugins=[BackgroundIO()],
        callbacks=[keep, Publish()],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(), loader, ckpt_path=resume)


if __name__ == "__main__":
    main(*sys.argv[1:])
