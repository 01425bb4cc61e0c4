"""A rank of torchrun: `fit` with error feedback, a checkpoint, and another `fit` that goes on from it.

resume_lightning.py (ddp | fsdp) FOLDER. Every rank writes what was owed before and after as FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from narrowcast.parallel.integrations.lightning import callback

State = dict[str, Tensor]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # 33 rows: the last rank's part is smaller
        self.net = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 8))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ShardedNet(Net):
    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Look(pl.Callback):
    """What is owed when training starts, and when it ends."""

    def __init__(self, narrow: Any) -> None:
        self._narrow = narrow

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.first = self._owed()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.last = self._owed()

    def _owed(self) -> State:
        found = self._narrow.handle.state_dict()
        return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in found.items()}


def fit(how: str, epochs: int, folder: Path, **options: Any) -> tuple[pl.Trainer, Look, ModelCheckpoint]:
    narrow = callback("int4/64+ef", min_values=1)
    look, checkpoint = Look(narrow), ModelCheckpoint(folder / f"epochs-{epochs}", filename="saved")
    sharded = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    trainer = pl.Trainer(
        strategy=sharded if how == "fsdp" else DDPStrategy(process_group_backend="gloo"),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=[narrow, look, checkpoint],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(ShardedNet() if how == "fsdp" else Net(), DataLoader(TensorDataset(x), batch_size=8), **options)
    return trainer, look, checkpoint


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    trainer, before, checkpoint = fit(how, 1, folder)
    trainer.save_checkpoint(folder / "later.ckpt")
    found = {"before": before.last}
    for name, path in (("during", checkpoint.best_model_path), ("later", folder / "later.ckpt")):
        found[name] = fit(how, 2, folder, ckpt_path=path)[1].first
    torch.save(found, folder / f"{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
