"""How much of the time is computing where links are slow: a language model, local updates and DDP, in a lab.

python -m narrowcast_research.slow_links --out runs.jsonl           (root: it builds a lab; 8 hosts, 100 Mb/s, 50 ms)
Each line of the file is a run; those that are in it are not done again. It prints a table of all of them.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.bench import ddp, ranks
from narrowcast.lab import Lab, LabError
from narrowcast.measure import mean, run_rank
from narrowcast.parallel import LocalUpdates
from narrowcast_research.text import corpus, train
from narrowcast_research.text.corpus import Text
from narrowcast_research.text.train import Shape

WIRES = ("fp32", "int4/128+ef", "int2/4096+top64+ef95")
TEN_MILLION, TINY = Shape(384, 6, 6, 64, 1, 1e-3), Shape(32, 2, 2, 16, 1, 1e-3)
WARM, ALONE = 3, 12
"""Steps of a process that do not count, and steps without an exchange that the others are compared with."""
ROUNDS = 3
"""Of exchanges that do not count."""
LONGEST = 1800.0


@dataclass(frozen=True)
class LinkRun:
    """What makes two runs the same."""

    method: str
    """ddp, blocking or streaming."""
    wire: str
    hosts: int
    rate: str
    delay: str
    """Of a packet, one way."""
    every: int
    fragments: int
    late: int
    """Steps after which what was exchanged arrives."""
    steps: int
    tiny: bool = False


def planned(like: LinkRun, wires: Sequence[str] = WIRES) -> list[LinkRun]:
    """Every method with its wires, in the setting of `like`, whose `every`, `fragments` and `late` are streaming's."""
    ddp_run = replace(like, method="ddp", wire="int8/256", every=1, fragments=1, late=0)
    blocking = [replace(like, method="blocking", wire=wire, fragments=1, late=0) for wire in wires]
    return [ddp_run, *blocking, *(replace(like, method="streaming", wire=wire) for wire in wires)]


class Trainer:
    """A rank's model and batches; every rank has its own text."""

    def __init__(self, text: Text, shape: Shape) -> None:
        self.shape, self.tokens = shape, text.train
        self.model = train.build(shape, text.vocabulary, 0, torch.device("cpu"))
        self.optimizer = train.make_optimizer(self.model, shape.rate)
        self.done = 0

    def step(self, model: nn.Module) -> Tensor:
        self.done += 1
        key = self.done * dist.get_world_size() + dist.get_rank()
        most = len(self.tokens) - self.shape.length - 1
        starts = torch.randint(most, (self.shape.batch,), generator=torch.Generator().manual_seed(key))
        self.optimizer.zero_grad()
        loss: Tensor = model(train.pieces(self.tokens, starts, self.shape.length))
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def seconds_of(trainer: Trainer, model: nn.Module, steps: int) -> tuple[float, list[Tensor]]:
    """From all ranks' start to the last one's end."""
    dist.barrier()
    began = time.perf_counter()
    losses = [trainer.step(model) for _ in range(steps)]
    dist.barrier()
    return time.perf_counter() - began, losses


def measure(text: str | None, **facts: Any) -> Iterator[dict[str, Any]]:
    """On a rank: the steps alone, then with the exchange."""
    run = LinkRun(**facts)
    torch.set_num_threads(1)
    words = corpus.load(Path(text)) if text else train.bundled()
    shape = TINY if run.tiny else TEN_MILLION
    alone = Trainer(words, shape)
    seconds_of(alone, alone.model, WARM)
    step_seconds = seconds_of(alone, alone.model, ALONE)[0] / ALONE
    trainer = Trainer(words, shape)
    model, exchange = _attached(trainer, run)
    # ranks connect and agree on each call once, over a link that is slow: that is not counted
    _, first = seconds_of(trainer, model, max(ROUNDS * run.every, WARM))
    before = exchange.stats()
    wall, losses = seconds_of(trainer, model, run.steps)
    after = exchange.stats()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    sent = after["sent_bytes"] - before["sent_bytes"]
    averages = mean(torch.stack([torch.stack(first).mean(), torch.stack(losses[-run.every :]).mean()]).tolist())
    yield {
        "run": asdict(run),
        "parameters": parameters,
        "alone": step_seconds,
        "wall": wall,
        "share": run.steps * step_seconds / wall,
        "bytes_per_parameter_and_step": sent / parameters / run.steps,
        "loss": averages,
        "stats": {key: after[key] - before[key] for key in ("wait_ms", "exchange_ms", "encode_ms") if key in after},
        "text": words.name,
        "machine": ranks.describe_machine(False),
    }
    if run.method != "ddp":
        exchange.close()


def _attached(trainer: Trainer, run: LinkRun) -> tuple[nn.Module, Any]:
    if run.method == "ddp":
        model = DistributedDataParallel(trainer.model, gradient_as_bucket_view=True)
        return model, nc.attach(model, run.wire)
    local = LocalUpdates(run.every, run.fragments, run.late)
    return trainer.model, nc.LocalSGD(trainer.model, trainer.optimizer, local=local, spec=run.wire)


def measured(run: LinkRun, text: Path | None) -> dict[str, Any]:
    """In a lab of its own."""
    arguments = json.dumps({"text": str(text.resolve()) if text else None, **asdict(run)})
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    found, last = None, []
    with Lab(run.hosts, run.rate, delay=run.delay) as lab:
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--rank", arguments]
        job = lab.start(command, env=ddp.KEEP_MEMORY, timeout=LONGEST, output=heard.put)
        for line in ranks.lines_of(job, heard):
            if line.rank == 0 and line.stream == "stdout" and line.text.startswith("{"):
                found = json.loads(line.text)
            else:
                last.append(str(line))
        result = job.wait()
    if found is None or not result.ok:
        raise LabError("\n".join([result.summary(), *last[-ranks.LAST_WORDS :]]))
    return found


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| method | wire | step alone, ms | a step of the run, ms | computing | bytes a parameter and step |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        run, alone, wall = row["run"], 1e3 * row["alone"], 1e3 * row["wall"] / row["run"]["steps"]
        sent = f"{row['bytes_per_parameter_and_step']:.4f}"
        lines.append(f"| {run['method']} | `{run['wire']}` | {alone:.0f} | {wall:.0f} | {row['share']:.1%} | {sent} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="The file of runs, a line each.")
    parser.add_argument("--text", type=Path, help="A token file; default the help pages of Python, as bytes.")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", default="50ms", help="Of a packet, one way.")
    parser.add_argument("--every", type=int, default=10, help="Inner steps between exchanges.")
    parser.add_argument("--fragments", type=int, default=5)
    parser.add_argument("--late", type=int, default=2, help="Steps until a fragment that was exchanged arrives.")
    parser.add_argument("--steps", type=int, default=60, help="That are timed.")
    parser.add_argument("--wires", nargs="+", default=list(WIRES), help="Of local updates.")
    parser.add_argument("--only", nargs="+", help="Methods: ddp, blocking, streaming.")
    parser.add_argument("--tiny", action="store_true", help="A model of 35,000 parameters.")
    chosen = parser.parse_args(words)
    if chosen.rank:
        run_rank(lambda: measure(**json.loads(chosen.rank)))
        return
    if chosen.out is None:
        parser.error("--out: name the file of runs")
    setting = {field.name: getattr(chosen, field.name) for field in fields(LinkRun)[2:]}
    for run in planned(LinkRun("", "", **setting), chosen.wires):
        if (chosen.only and run.method not in chosen.only) or asdict(run) in [row["run"] for row in read(chosen.out)]:
            continue
        sys.stderr.write(f"{run.method} {run.wire} ...\n")
        line = measured(run, chosen.text)
        with chosen.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    sys.stdout.write(table(read(chosen.out)) + "\n")


if __name__ == "__main__":
    main()
