"""Dettmers' scheme on Fashion-MNIST: convolutions data parallel, fully connected layers model parallel in sub-batches.

Everything that travels (features, activations, their errors, and the gradients of the convolutions) goes through one
codec. Rank 0 prints one JSON line at the end. The data is Debian's package dataset-fashion-mnist.

    torchrun --nproc-per-node 2 examples/dettmers_fashion_mnist.py --wire dtree8
    narrowcast lab run --hosts 4 --rate 1gbit -- python examples/dettmers_fashion_mnist.py --wire int8/256

`--wire fp32` is the same in float32. `--updates sub-batch` updates the fully connected layers after each sub-batch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from narrowcast_research.dettmers import SubBatchMLP
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel.wires import stats

DATA = Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = 0.2860, 0.3530
IMAGE_HEADER, LABEL_HEADER = 16, 8


def read(path: Path, header: int) -> Tensor:
    if not path.exists():
        raise SystemExit(f"{path} is missing: install the package dataset-fashion-mnist, or give --data")
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header:]), dtype=torch.uint8)


def load(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Normalised images and labels."""
    images = read(folder / f"{part}-images-idx3-ubyte.gz", IMAGE_HEADER).view(-1, 1, 28, 28)
    labels = read(folder / f"{part}-labels-idx1-ubyte.gz", LABEL_HEADER)
    return (images.float() / 255 - MEAN) / DEVIATION, labels.long()


def convolutions() -> nn.Sequential:
    def block(wide: int, narrow: int) -> list[nn.Module]:
        return [nn.Conv2d(wide, narrow, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(1, 8), *block(8, 16), nn.Flatten())


@torch.no_grad()
def accuracy(features: nn.Module, layers: SubBatchMLP, images: Tensor, labels: Tensor) -> float:
    """All ranks take part: the fully connected layers are spread over them."""
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    return sum(int((layers(features(x)).argmax(1) == y).sum()) for x, y in pairs) / len(labels)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="dtree8", help="a codec spec for all that travels")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128, help="of each rank: a sub-batch")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--updates", choices=["batch", "sub-batch"], default="batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=60_000, help="train on the first so many")
    parser.add_argument("--data", type=Path, default=DATA)
    return parser.parse_args()


class Trainer:
    """The two halves of the network, their optimizers, and one step."""

    def __init__(self, args: argparse.Namespace, steps: int) -> None:
        torch.manual_seed(args.seed)
        self.features = DDP(convolutions())
        self.layers = SubBatchMLP([784, 512, 256, 10], args.wire, seed=args.seed)
        # as the paper: the gradients of the convolutions, small as they are, in the same type
        self.handle = nc.attach(self.features, args.wire, min_values=1, seed=args.seed)
        self.optimizers = [
            torch.optim.SGD(half.parameters(), lr=args.lr, momentum=0.9) for half in (self.features, self.layers)
        ]
        # to zero in a straight line: the last steps then settle, and runs can be compared
        self.schedules = [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps) for optimizer in self.optimizers
        ]
        self.each = args.updates == "sub-batch"

    def update_layers(self) -> None:
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()

    def step(self, images: Tensor, labels: Tensor) -> float:
        features = self.features(images)
        after = self.update_layers if self.each else None
        loss, error = self.layers.train_step(features.detach(), labels, cross_entropy, after)
        self.optimizers[0].zero_grad()
        features.backward(error)
        self.optimizers[0].step()
        if not self.each:
            self.update_layers()
        for schedule in self.schedules:
            schedule.step()
        return loss


def main() -> None:
    args = options()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = load(args.data, "train")
    images, labels = images[: args.samples], labels[: args.samples]
    steps = args.epochs * (len(labels) // world // args.batch)
    trainer, order = Trainer(args, steps), torch.Generator().manual_seed(args.seed)
    start = time.perf_counter()
    losses: list[float] = []
    for epoch in range(args.epochs):
        mine = torch.randperm(len(labels), generator=order)[rank::world]
        batches = mine[: len(mine) // args.batch * args.batch].view(-1, args.batch)
        losses += [trainer.step(images[batch], labels[batch]) for batch in batches]
        if rank == 0:
            mean = sum(losses[-100:]) / len(losses[-100:])
            print(f"epoch {epoch + 1} of {args.epochs}: loss {mean:.4f}", flush=True)
    dist.barrier()
    seconds, sent, gradients = time.perf_counter() - start, stats(trainer.layers), trainer.handle.stats()

    trainer.handle.check_ranks()
    found = accuracy(trainer.features.module, trainer.layers, *load(args.data, "t10k"))
    if rank == 0:
        facts = {"wire": args.wire, "updates": args.updates, "seed": args.seed, "ranks": world, "accuracy": found}
        facts |= {"steps": len(losses), "seconds": seconds}
        facts |= {key: sent[key] for key in sent if "bytes" in key}
        print(json.dumps({**facts, "gradient_sent_bytes": gradients["sent_bytes"]}), flush=True)
    trainer.handle.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
