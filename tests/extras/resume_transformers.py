"""A rank of torchrun: `train` with error feedback, a checkpoint, and another `train` that goes on from it.

resume_transformers.py (ddp | fsdp) FOLDER. Every rank writes the residuals before and after as FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from narrowcast.parallel.integrations.transformers import callback

State = dict[str, Tensor]
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        # 33 rows: the last rank's part is smaller
        self.net = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x).square().mean()}


class Numbers(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(16, generator=torch.Generator().manual_seed(index))}


class ShardedByHand(Trainer):
    """On CPUs Accelerate leaves its FSDP plugin out and takes DDP; the Trainer saves such a model only with it."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = lambda model, **_: model

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Weights are not what is looked at."""
        Path(str(output_dir)).mkdir(parents=True, exist_ok=True)

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nor here."""


class Look(TrainerCallback):
    """The residuals when training starts, and when it is saved; it comes after the callback that attaches."""

    def __init__(self, narrow: Any) -> None:
        self._narrow = narrow
        self.first: State = {}
        self.saved: State = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.first = self._residuals()

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saved = self._residuals()

    def _residuals(self) -> State:
        found = self._narrow.handle.state_dict()
        return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in found.items()}


def train(how: str, steps: int, folder: Path, spec: str = "int4/64+ef", **more: Any) -> tuple[Look, Any]:
    narrow = callback(spec, min_values=1)
    look = Look(narrow)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=STEPS,
        optim="sgd",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    model, kind = Net(), Trainer
    if how == "fsdp":
        args.device  # noqa: B018  makes the process group
        kind = ShardedByHand
        fully_shard(model, mesh=init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)))
    trainer = kind(model=model, args=args, train_dataset=Numbers(), callbacks=[narrow, look])
    trainer.train(**more)
    return look, narrow


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    look, narrow = train(how, STEPS, folder / "out")
    checkpoint = folder / "out" / f"checkpoint-{STEPS}"
    again, _ = train(how, STEPS + 1, folder / "out", resume_from_checkpoint=str(checkpoint))
    # a checkpoint that was made without: nothing to load
    _, _ = train(how, STEPS, folder / "plain", spec="int8/64")
    without, _ = train(how, STEPS + 1, folder / "plain", resume_from_checkpoint=True)
    torch.save(
        {
            "saved": look.saved,
            "again": again.first,
            "without": without.first,
            "steps": {"steps": torch.tensor(narrow.totals["steps"])},
        },
        folder / f"{os.environ['RANK']}.pt",
    )


if __name__ == "__main__":
    main()
