"""A plain loop that is watched: counters to TensorBoard, and a trace of all ranks for Perfetto.

    torchrun --standalone --nproc-per-node 2 examples/watch_training.py --folder /tmp/watched

Then `tensorboard --logdir /tmp/watched`, and open /tmp/watched/trace.json in ui.perfetto.dev. TensorBoard needs the
extra: pip install narrowcast[tensorboard]; without it the counters are printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel.integrations import perfetto
from narrowcast.parallel.integrations.tensorboard import TensorBoard


class Printer:
    """A writer for whoever has no TensorBoard: anything with `add_scalar` will do."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if "ms_per_step" in name or name.endswith("ratio"):
            print(f"step {step}: {name} = {value:.3f}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="int8/256", help="the wire of the gradients")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("watched"))
    parser.add_argument("--print", action="store_true", help="print instead of TensorBoard")
    return parser.parse_args()


def main() -> None:
    args = options()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)))
    handle = nc.attach(model, args.spec, min_values=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    args.folder.mkdir(parents=True, exist_ok=True)
    board = TensorBoard(handle, Printer() if args.print else args.folder) if rank == 0 else None
    for step in range(args.steps):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        if board is not None and (step + 1) % 5 == 0:
            board.write(step + 1)

    traces = [args.folder / f"trace-{r}.json" for r in range(world)]
    perfetto.write(handle, traces[rank])
    dist.barrier()
    if board is not None:
        board.close()
        perfetto.merge(traces, args.folder / "trace.json")
        events = json.loads((args.folder / "trace.json").read_text())["traceEvents"]
        calls = [event for event in events if event["ph"] == "X"]
        print(json.dumps({"calls": len(calls), "ranks": len({event["pid"] for event in calls})}), flush=True)
    handle.detach()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
