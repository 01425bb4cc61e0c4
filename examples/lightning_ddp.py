"""Lightning: gradients through a codec, by a callback or by a DDPStrategy with a hook.

    python examples/lightning_ddp.py --devices 2            # the callback
    python examples/lightning_ddp.py --devices 2 --hook     # the strategy

Needs the extra: pip install narrowcast[lightning]. Rank 0 prints one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from narrowcast.parallel.integrations.lightning import callback, strategy


class Regression(pl.LightningModule):
    """Learns a fixed linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
        self.last = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.last = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def data() -> DataLoader[tuple[Tensor, ...]]:
    torch.manual_seed(1)
    x = torch.randn(512, 32)
    return DataLoader(TensorDataset(x, x @ torch.randn(32, 8)), batch_size=16)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="int4/128+ef", help="the wire of the gradients")
    parser.add_argument("--devices", type=int, default=2, help="processes on this machine")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--hook", action="store_true", help="by the strategy instead of the callback")
    return parser.parse_args()


def main() -> None:
    args = options()
    pl.seed_everything(0)
    model = Regression()
    callbacks = [] if args.hook else [callback(args.spec, min_values=1000)]
    plain, gloo = DDPStrategy(process_group_backend="gloo"), {"process_group_backend": "gloo"}
    chosen = strategy(args.spec, options={"min_values": 1000}, **gloo) if args.hook else plain
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=chosen,
            accelerator="cpu",
            devices=args.devices,
            max_epochs=args.epochs,
            callbacks=callbacks,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        trainer.fit(model, data())
    stats = chosen.hook_state.stats() if args.hook else callbacks[0].totals
    if trainer.is_global_zero:
        print(json.dumps({"loss": model.last, "steps": stats["steps"], "ratio": stats["ratio"]}), flush=True)


if __name__ == "__main__":
    main()
