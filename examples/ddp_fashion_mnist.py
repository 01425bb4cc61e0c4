"""Train an MLP on Fashion-MNIST with DDP, its gradients through a codec; rank 0 prints one JSON line at the end.

In a cluster in a box (root; the data is Debian's package dataset-fashion-mnist):

    narrowcast lab run --hosts 4 --rate 1gbit -- python examples/ddp_fashion_mnist.py --wire int8/256

or with torchrun anywhere. `--wire plain` is DDP without narrowcast.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc

DATA = Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = 0.2860, 0.3530
IMAGE_HEADER, LABEL_HEADER = 16, 8


def read(path: Path, header: int) -> Tensor:
    if not path.exists():
        raise SystemExit(f"{path} is missing: install the package dataset-fashion-mnist, or give --data")
    return torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())[header:]), dtype=torch.uint8)


def load(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Normalised images, flat, and labels."""
    images = read(folder / f"{part}-images-idx3-ubyte.gz", IMAGE_HEADER).view(-1, 784)
    labels = read(folder / f"{part}-labels-idx1-ubyte.gz", LABEL_HEADER)
    return (images.float() / 255 - MEAN) / DEVIATION, labels.long()


def mlp(width: int) -> torch.nn.Sequential:
    sizes = [784, width, width]
    layers: list[torch.nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    right = sum(
        int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(1000), labels.split(1000), strict=True)
    )
    return right / len(labels)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="int8/256", help="a codec spec, or 'plain'")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=128, help="of each rank")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DATA)
    return parser.parse_args()


def main() -> None:
    args = options()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = load(args.data, "train")
    torch.manual_seed(args.seed)
    model = DDP(mlp(args.width))
    handle = None if args.wire == "plain" else nc.attach(model, args.wire, seed=args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    order, start, steps = torch.Generator().manual_seed(args.seed), time.perf_counter(), 0
    for _ in range(args.epochs):
        mine = torch.randperm(len(labels), generator=order)[rank::world]
        for batch in mine[: len(mine) // args.batch * args.batch].view(-1, args.batch):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    dist.barrier()
    seconds = time.perf_counter() - start

    if handle is not None:
        handle.check_ranks()
    if rank == 0:
        found = accuracy(model.module, *load(args.data, "t10k"))
        stats = handle.stats() if handle is not None else {}
        facts = {"wire": args.wire, "seed": args.seed, "accuracy": found, "seconds": seconds, "steps": steps}
        print(json.dumps({**facts, "sent_bytes": stats.get("sent_bytes")}), flush=True)
    if handle is not None:
        handle.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
