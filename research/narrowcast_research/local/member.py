"""A member of the training that `faults` disturbs; it writes a line of JSON for each step and attempt.

python -m narrowcast_research.local.member JSON      (started by narrowcast_research.local.faults)
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.collectives import Channel
from narrowcast.parallel import integrations

# one of the modules to import by name, since they need packages of their own
torchft: Any = importlib.import_module(".torchft", integrations.__name__)
NAME = "narrowcast_research.local.member"
INSIDE, CLASSES, LOOKS = 64, 16, 8


@dataclass(frozen=True)
class Course:
    """What makes two runs the same, but for their faults."""

    hosts: int = 4
    rate: str = "100mbit"
    delay: str = "5ms"
    """Of a packet, one way."""
    every: int = 10
    spacing: int = 200
    """Steps from a fault to the next."""
    steps: int = 0
    pace: float = 0.04
    """Seconds that a step takes at least."""
    timeout: float = 5.0
    """Until a member that stands still is given up."""
    spec: str = "int4/128+ef"
    width: int = 256
    seed: int = 0


class Watched(torchft.Elastic):  # type: ignore[misc]
    """Writes down what each attempt began with and came to, and dies in the middle of one where it is told to."""

    def __init__(self, diary: Diary, order: Path, *rest: Any, **more: Any) -> None:
        self.diary, self.order, self.signs = diary, order, Tensor()
        super().__init__(*rest, **more)

    def _means(self, channel: Channel, contributes: bool) -> tuple[int, dict[str, Tensor]]:
        had = self.look(self.residuals())
        moved = {name: self._start_of(name) - p.float() for name, p in self._parameters.items()}
        wanted = had + self.look(moved) * float(contributes)
        key = {"exchange": self.exchanges + 1, "attempt": self._manager._quorum_id, "members": channel.world}
        store = json.loads(self._group.handles[0])["store"].split(":")[0]
        self.diary.write("begins", **key, store=store, had=had.tolist(), wanted=wanted.tolist())
        try:
            count, means = super()._means(channel, contributes)
        except BaseException as error:
            self.diary.write("failed", **key, error=f"{type(error).__name__}: {error}")
            raise
        sent, residual = self.look(means) * count, self.look(self.residuals())
        self.diary.write("got", **key, sent=sent.tolist(), residual=residual.tolist())
        return count, means

    def _start(self, channel: Channel, number: int, *rest: Any) -> Any:
        work = super()._start(channel, number, *rest)
        if number == 0 and self.order.exists():
            os.kill(os.getpid(), signal.SIGKILL)  # the others have counted it, and its first call is under way
        return work

    def _apply(self, count: int, means: dict[str, Tensor]) -> None:
        super()._apply(count, means)
        every = b"".join(anchor.numpy().tobytes() for anchor in self._anchors.values())
        facts = {"exchange": self.exchanges, "members": self.members, "repeated": self.repeated, "left": self.left}
        self.diary.write("exchange", **facts, anchors=hashlib.sha256(every).hexdigest()[:12])

    def look(self, tensors: dict[str, Tensor]) -> Tensor:
        """Sums of all values with signs that every member has: of a sum of vectors they are the sum."""
        own = [tensors[n].flatten() if n in tensors else torch.zeros(p.numel()) for n, p in self._parameters.items()]
        whole = torch.cat(own).double()
        if not self.signs.numel():
            made = torch.Generator().manual_seed(0)
            self.signs = torch.randint(0, 2, (LOOKS, whole.numel()), generator=made).double() * 2 - 1
        return self.signs @ whole


class Diary:
    """A file of lines; times are of the machine, which all hosts share."""

    def __init__(self, path: Path) -> None:
        self.file, self.life = path.open("w", buffering=1), path.name

    def write(self, kind: str, **facts: Any) -> None:
        self.file.write(json.dumps({"kind": kind, "t": time.monotonic(), "life": self.life, **facts}) + "\n")


def build(width: int) -> nn.Module:
    """With running statistics, which are a second call of an exchange."""
    return nn.Sequential(
        nn.Linear(INSIDE, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


def join(host: int, port: int, timeout: timedelta) -> tuple[Any, Any]:
    """torchft's manager, and its group, which keeps who is in it."""
    from torchft import Manager

    group, name = torchft.process_group(timeout), f"host{host}"
    plain = group.reconfigure

    def reconfigure(options: Any) -> Any:
        group.handles = list(options.handles)
        return plain(options)

    group.reconfigure = reconfigure
    store = dist.TCPStore(name, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=group, load_state_dict=None, state_dict=None, min_replica_size=1, use_async_quorum=False,
        timeout=timeout, quorum_timeout=timedelta(minutes=3), connect_timeout=timeout, rank=0, world_size=1,
        store_addr=name, store_port=store.port, lighthouse_addr=f"http://host0:{port}", replica_id=name, hostname=name,
        checkpoint_transport=torchft.checkpoint_transport(timeout, name), quorum_retries=90,
    )  # fmt: skip
    return manager, group


def train(folder: Path, host: int, life: int, port: int, setting: Course) -> None:
    """Until all steps are done, whatever happens meanwhile."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, teacher = build(setting.width), torch.randn(INSIDE, CLASSES) / INSIDE**0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager, group = join(host, port, timedelta(seconds=setting.timeout))
    diary = Diary(folder / f"{host}.{life}.jsonl")
    how: dict[str, Any] = {"every": setting.every, "spec": setting.spec, "min_values": 0, "seed": setting.seed}
    elastic = Watched(diary, folder / f"die.{host}", model, optimizer, manager, group, **how)
    draw = torch.Generator().manual_seed(1000 * host + life + setting.seed)
    while elastic.steps < setting.steps:
        x = torch.randn(32, INSIDE, generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), torch.tanh(x @ teacher))
        loss.backward()
        optimizer.step()
        diary.write("step", step=elastic.steps, loss=loss.item())
        time.sleep(setting.pace)
    diary.write("ended", steps=elastic.steps, exchanges=elastic.exchanges)
    elastic.close()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    facts = json.loads(sys.argv[1])
    train(Path(facts.pop("folder")), setting=Course(**facts.pop("setting")), **facts)
    os._exit(0)  # threads of torchft may stay
