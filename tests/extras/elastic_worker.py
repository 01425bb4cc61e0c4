"""A member of an elastic training: argv are the lighthouse's address, a file, its own number, the exchanges to make,
at which one it dies, and before which it waits for the file (0: it makes the file itself, and joins).

It prints a line of JSON for each exchange.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager

from narrowcast.parallel.integrations import torchft

SECONDS = timedelta(seconds=20)


class Watched(torchft.Elastic):
    """Says what each attempt begins with, and dies in the middle of one."""

    dies_at = 0
    begun: list[str]

    def _means(self, *args):
        self.begun = [*getattr(self, "begun", []), digest(self.residuals())]
        return super()._means(*args)

    def _start(self, *args):
        if self.dies_at and self.exchanges + 1 == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)  # the others have counted it, and encode
        return super()._start(*args)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(bytes(t.numpy().tobytes()) for t in tensors.values())).hexdigest()[:12]


def main(lighthouse: str, file: Path, number: int, exchanges: int, dies_at: int, waits_at: int) -> None:
    torch.manual_seed(number)  # each its own: the first exchange makes them alike
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = torchft.process_group(SECONDS)
    manager = Manager(
        pg=group, load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False,
        timeout=SECONDS, quorum_timeout=SECONDS, rank=0, world_size=1, store_addr="localhost", store_port=store.port,
        lighthouse_addr=lighthouse, replica_id=f"member{number}", hostname="localhost", max_retries=5,
        checkpoint_transport=torchft.checkpoint_transport(SECONDS, "localhost"),
    )  # fmt: skip
    Watched.dies_at = dies_at
    (file if not waits_at else file.with_suffix(f".{number}")).touch()
    while len(list(file.parent.glob(f"{file.name}*"))) < 3:
        time.sleep(0.02)  # the lighthouse has heard of all three
    elastic = Watched(model, optimizer, manager, group, every=3, spec="int4/64+ef", min_values=0)
    print(json.dumps({"joined": elastic.exchanges}), flush=True)
    while elastic.exchanges < exchanges:
        while elastic.exchanges == waits_at - 1 and not file.exists():
            time.sleep(0.02)
        before, elastic.begun, began = elastic.exchanges, [], time.monotonic()
        x = torch.randn(32, 64)
        optimizer.zero_grad()
        (model(x) - x[:, :8]).square().mean().backward()
        optimizer.step()
        if elastic.exchanges > before:
            print(
                json.dumps(
                    {
                        "exchange": elastic.exchanges,
                        "members": elastic.members,
                        "anchors": digest(elastic._anchors),
                        "begun": elastic.begun,
                        "owes": sum(float(r.abs().sum()) for r in elastic.residuals().values()),
                        "seconds": time.monotonic() - began,
                        "repeated": elastic.repeated,
                        "left": elastic.left,
                    }
                ),
                flush=True,
            )
    elastic.close()
    group.shutdown()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
    os._exit(0)  # threads of torchft may stay
