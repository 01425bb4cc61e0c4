"""Lightning as a script without torchrun: processes that are spawned or forked, one process, and Fabric.

spawn_lightning.py FOLDER. Rank 0 of each writes its counters as FOLDER/HOW.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import narrowcast as nc
from narrowcast.parallel.integrations.lightning import callback, strategy


class Net(L.LightningModule):
    def __init__(self, how: str, folder: str) -> None:
        super().__init__()
        self.net, self.how, self.folder = nn.Linear(64, 512), how, folder

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self) -> None:
        """In the process that trained: what a spawned one has does not come back."""
        handles = [h for h in (getattr(c, "handle", None) for c in self.trainer.callbacks) if h is not None]
        watched: Any = handles[0] if handles else self.trainer.strategy.hook_state
        if self.trainer.is_global_zero:
            write(self.folder, self.how, watched)


def write(folder: str, how: str, watched: Any) -> None:
    counters = watched.stats()
    facts = {"steps": counters["steps"], "ratio": counters["ratio"], "explained": watched.explain()}
    (Path(folder) / f"{how}.json").write_text(json.dumps(facts))


def fit(how: str, folder: str, devices: int, of: Any, with_callback: bool = True) -> None:
    data = DataLoader(TensorDataset(torch.randn(64, 64)), batch_size=8)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    callbacks = [callback("int8/256", min_values=1)] if with_callback else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=of,
        max_epochs=1,
        callbacks=callbacks,
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(Net(how, folder), data)


def with_fabric(fabric: Any, folder: str) -> None:
    model = nn.Linear(64, 512)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle = nc.attach(model, "int8/256", min_values=1)
    fabric.backward(model(torch.randn(8, 64)).square().mean())
    optimizer.step()
    if fabric.global_rank == 0:
        write(folder, "fabric", handle)


def main() -> None:
    folder = sys.argv[1]
    fit("one", folder, 1, "auto")
    fit("spawn", folder, 2, "ddp_spawn")
    spawned = strategy("int8/256", options={"min_values": 1}, start_method="spawn", process_group_backend="gloo")
    fit("strategy", folder, 2, spawned, with_callback=False)
    fit("fork", folder, 2, "ddp_fork")
    L.Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch(with_fabric, folder)


if __name__ == "__main__":
    main()
