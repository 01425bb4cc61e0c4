"""FSDP2: a small language model, gradients and parameters in few bits, and a checkpoint with what is owed.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_text.py --gradients int4/128+ef --parameters e4m3fn/128

or in a cluster in a box (root):

    narrowcast lab run --hosts 4 --rate 200mbit -- python examples/fsdp_text.py

Rank 0 prints one JSON line at the end. The text is Python's own help, which every Python brings along.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import narrowcast as nc

LENGTH = 64


class LanguageModel(nn.Module):
    """Bytes in, the loss of the next byte out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x[:, :-1]) + self.place
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), x[:, 1:].flatten())


def batch(data: Tensor, seed: int, size: int) -> Tensor:
    starts = torch.randint(len(data) - LENGTH - 1, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gradients", default="int8/256", help="a codec spec")
    parser.add_argument("--parameters", help="a codec spec; by default parameters travel as they are")
    parser.add_argument("--plain", action="store_true", help="FSDP2 without narrowcast")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="of each rank")
    parser.add_argument("--checkpoint", type=Path, help="a folder: loaded if it is there, saved at the end")
    return parser.parse_args()


def main() -> None:
    args = options()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = LanguageModel(args.width, args.layers)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    handle = None if args.plain else nc.attach(model, args.gradients, parameters=args.parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = {"model": model.state_dict(), **({"narrowcast": handle} if handle is not None else {})}
    if args.checkpoint and args.checkpoint.exists():
        dcp.load(state, checkpoint_id=args.checkpoint)
        model.load_state_dict(state["model"])

    loss, start = torch.tensor(0.0), time.perf_counter()
    for step in range(args.steps):
        loss = model(batch(data, 1000 * step + rank, args.batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start

    if args.checkpoint:
        state["model"] = model.state_dict()
        dcp.save(state, checkpoint_id=args.checkpoint)
    facts = {"loss": loss.item(), "seconds": seconds}
    if handle is not None:
        handle.check_ranks()
        facts |= {key: handle.stats()[key] for key in ("steps", "sent_bytes", "ratio")}
        handle.detach()
    if rank == 0:
        print(json.dumps(facts), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
