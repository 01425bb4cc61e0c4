"""Train a small language model by local updates: many steps alone, then an exchange in few bits; resumes after a crash.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/local_sgd.py --checkpoint /tmp/local.pt

or across slow links in a cluster in a box (root):

    narrowcast lab run --hosts 4 --rate 50mbit -- python examples/local_sgd.py

Rank 0 prints one JSON line at the end. Where a worker dies, torchrun starts all of them again, and they go on from the
last exchange. The text is Python's own help, which every Python brings along.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import narrowcast as nc

LENGTH = 48


class LanguageModel(nn.Module):
    """Bytes in, the next byte out; one layer of attention."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(LENGTH, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x) + self.place, src_mask=self.mask, is_causal=True))


def text() -> Tensor:
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def batch(data: Tensor, seed: int, size: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - LENGTH - 1, (size,), generator=torch.Generator().manual_seed(seed))
    x = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
    return x[:, :-1], x[:, 1:]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=100, help="steps between exchanges")
    parser.add_argument("--spec", default="int4/128+ef", help="the wire of an exchange")
    parser.add_argument("--batch", type=int, default=8, help="of each worker")
    parser.add_argument("--checkpoint", type=Path, help="saved after each exchange, resumed from")
    parser.add_argument(
        "--die-at", type=int, help="to try a restart: rank 1 ends itself at this step of its first life"
    )
    return parser.parse_args()


def save(path: Path, **parts: object) -> None:
    """All or nothing: a worker may die at any time."""
    if dist.get_rank() == 0:
        torch.save(parts, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)


def join() -> None:
    """As init_process_group does, but apart from an earlier life: torchrun's store still has the addresses of that."""
    store, rank, world = next(dist.rendezvous("env://"))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group("gloo", store=dist.PrefixStore(f"life {life}", store), rank=rank, world_size=world)


def main() -> None:
    args, data = options(), text()
    join()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    local = nc.LocalSGD(model, optimizer, every=args.every, spec=args.spec, min_values=1000)
    if args.checkpoint and args.checkpoint.exists():
        found = torch.load(args.checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        local.load_state_dict(found["local"])
    resumed = local.steps

    loss = torch.tensor(0.0)
    while local.steps < args.steps:
        if local.steps == args.die_at and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch(data, 1000 * local.steps + rank, args.batch)
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        exchanges = local.exchanges
        optimizer.step()  # counted by LocalSGD, which exchanges when it is time
        if args.checkpoint and local.exchanges > exchanges:
            state = local.state_dict()  # collective
            save(args.checkpoint, model=model.state_dict(), optimizer=optimizer.state_dict(), local=state)
    local.check_ranks()
    if rank == 0:
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        facts = {"loss": loss.item(), "steps": local.steps, "resumed_at": resumed, "exchanges": local.exchanges}
        facts |= {"sent_bytes": local.stats()["sent_bytes"], "digest": hashlib.sha256(bits).hexdigest()}
        print(json.dumps(facts), flush=True)
    local.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
