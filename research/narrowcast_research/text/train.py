"""One rank of a training on text: DDP through one wire; rank 0 appends lines of JSON, one a step, to a file.

python -m narrowcast_research.text.train --wire int8/256 --text text.bin --runs runs.jsonl --gpu, with the environment
of torchrun. A seed decides weights and batches, whatever the wire. `seconds` of a line is training alone: neither
validation counts nor the first steps of a process, in which kernels are compiled and DDP rebuilds its buckets.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.bench import ddp, ranks, training
from narrowcast.data import help_text
from narrowcast.measure import DeviceClock, first_decides, mean, process_group, rank_device, tell_progress
from narrowcast_research.text import corpus
from narrowcast_research.text.corpus import Text

START = 3
"""Steps of a process that do not count in its time."""
CHUNK, VALIDATE = 10, 50
"""Steps until losses are averaged and written, and until held-out loss is taken: a multiple."""
PIECES, PIECES_AT_ONCE = 512, 16
"""Of held-out text, spread over it evenly: always the same."""
MARGIN = 1.5
"""Times the last chunk's seconds that must be left for another."""
BETAS, DECAY, CLIP, LAST_RATE = (0.9, 0.95), 0.1, 1.0, 0.1


@dataclass(frozen=True)
class Shape:
    """Of a model, and of a rank's batch."""

    width: int
    layers: int
    heads: int
    length: int
    batch: int
    rate: float


GPT2, TINY = Shape(768, 12, 12, 256, 8, 6e-4), Shape(64, 2, 2, 32, 4, 1e-2)


def build(shape: Shape, vocabulary: int, seed: int, device: torch.device) -> nn.Module:
    """GPT-2 with its own first weights: normal with 0.02, less where a layer adds to the stream (Radford et al. 2019).

    torch's own, of deviation 1 in an embedding that is the head as well, begin with a loss of hundreds.
    """
    torch.manual_seed(seed)
    with device:
        model = training.Transformer(shape.width, shape.layers, shape.length, shape.heads, vocabulary, tied=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            adds = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers if adds else 1))
    return model


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Vectors are not decayed."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def rate_at(step: int, horizon: int, rate: float) -> float:
    """Up over a tenth of the horizon, then down as a cosine to a tenth of the rate. Steps count from 1."""
    up = max(1, horizon // 10)
    if step <= up:
        return rate * step / up
    share = min(1.0, (step - up) / max(1, horizon - up))
    return rate * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * share)) / 2)


def pieces(tokens: Tensor, starts: Tensor, length: int) -> Tensor:
    """Rows of length + 1 tokens, the last one to be predicted only."""
    places = starts.to(tokens.device, non_blocking=True)[:, None] + torch.arange(length + 1, device=tokens.device)
    return tokens[places].long()


class Training:
    """A model, its wire and where it stands."""

    def __init__(self, text: Text, shape: Shape, wire: str, seed: int, horizon: int, device: torch.device) -> None:
        self.shape, self.seed, self.horizon, self.device = shape, seed, horizon, device
        self.tokens, self.held_out = text.train.to(device), text.held_out.to(device)
        module = build(shape, text.vocabulary, seed, device)
        ids = [device] if device.type == "cuda" else None
        self.model = DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
        self.handle = ddp.attach_wire(self.model, wire)
        self.optimizer = make_optimizer(self.model, shape.rate)
        self.done, self.seconds = 0, 0.0
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    @property
    def module(self) -> nn.Module:
        return self.model.module

    def batch(self, step: int) -> Tensor:
        """A rank's batch of a step."""
        key = (self.seed * 1_000_003 + step) * dist.get_world_size() + dist.get_rank()
        most = len(self.tokens) - self.shape.length - 1
        starts = torch.randint(most, (self.shape.batch,), generator=torch.Generator().manual_seed(key))
        return pieces(self.tokens, starts, self.shape.length)

    def step(self) -> Tensor:
        """This rank's loss, on its device."""
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.done, self.horizon, self.shape.rate)
        self.optimizer.zero_grad()
        with self._autocast:
            loss = self.model(self.batch(self.done))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss.detach()

    def chunk(self, steps: int, counts: bool) -> Iterator[dict[str, Any]]:
        """So many steps; then a line for each, with the loss averaged over ranks. Collective."""
        clock, losses = DeviceClock(self.device), []
        dist.barrier()
        marks = [clock.mark()]
        for _ in range(steps):
            losses.append(self.step())
            marks.append(clock.mark())
        clock.wait()
        averages = mean(torch.stack(losses).tolist())
        first, before = self.done - steps + 1, self.seconds
        for number, loss in enumerate(averages):
            self.seconds = before + clock.seconds(marks[0], marks[number + 1]) * counts
            yield {"step": first + number, "loss": round(loss, 5), "seconds": round(self.seconds, 4)}

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on the same pieces of held-out text, each rank on its share. Collective."""
        starts = torch.linspace(0, len(self.held_out) - self.shape.length - 2, PIECES).long()
        mine = starts[dist.get_rank() :: dist.get_world_size()].split(PIECES_AT_ONCE)
        with self._autocast:
            losses = [self.module(pieces(self.held_out, some, self.shape.length)) * len(some) for some in mine]
        whole = mean([float(torch.stack(losses).sum()), float(sum(map(len, mine)))])
        return whole[0] / whole[1]

    def save(self, path: Path) -> None:
        """Collective; rank 0 writes."""
        state: dict[str, Any] = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"done": self.done, "seconds": self.seconds, "seed": self.seed}
        state["residuals"] = self.handle.state_dict() if self.handle is not None else {}
        if dist.get_rank() == 0:
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Every rank reads it. Residuals are the mean of all ranks': nothing is lost, but bits differ with `+ef`."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["seed"] != self.seed:
            raise ValueError(f"--resume: {path} is of seed {state['seed']}, got --seed {self.seed}; take its own")
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.seconds = state["done"], state["seconds"]
        if self.handle is not None and state["residuals"]:
            self.handle.load_state_dict(state["residuals"])


def next_stop(done: int, began: int, steps: int) -> int:
    """The step after which losses are written: the first ones of a process alone, then by chunks."""
    if done < began + START:
        return min(began + START, steps)
    return min((done // CHUNK + 1) * CHUNK, steps)


def lines_of(training: Training, steps: int, deadline: float, began_at: float) -> Iterator[dict[str, Any]]:
    """A line a step, and at the end one that says how far it came."""
    began, start_seconds, last, late = training.done, 0.0, 0.0, False
    while training.done < steps and not late:
        until, chunk_began = next_stop(training.done, began, steps), time.monotonic()
        rows = list(training.chunk(until - training.done, counts=training.done >= began + START))
        if training.done % VALIDATE == 0 or training.done == steps:
            rows[-1]["held_out"] = round(training.validate(), 5)
            tell_progress(f"step {training.done}: {json.dumps(rows[-1])}")
        yield from rows
        last = max(last, time.monotonic() - chunk_began)
        if not start_seconds:
            start_seconds, last = time.monotonic() - began_at, 0.0
            tell_progress(f"{training.done} steps after {start_seconds:.1f} s; they do not count")
        late = first_decides(time.monotonic() + MARGIN * last > deadline)
    end = {"complete": training.done >= steps, "step": training.done, "seconds": round(training.seconds, 4)}
    yield {"end": {**end, "start_seconds": round(start_seconds, 2)}}


def describe(training: Training, text: Text, gpu: bool, steps: int) -> dict[str, Any]:
    parameters = sum(p.numel() for p in training.model.parameters())
    facts: dict[str, Any] = {
        "steps": steps,
        "horizon": training.horizon,
        "after": training.done,
        "parameters": parameters,
    }
    facts |= {"ranks": dist.get_world_size(), "backend": "nccl" if gpu else "gloo", "vocabulary": text.vocabulary}
    facts |= {"shape": asdict(training.shape), "text": text.name, "machine": ranks.describe_machine(gpu)}
    return {"run": facts}


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in lines))


def run(arguments: argparse.Namespace, began_at: float) -> None:
    """On a rank, inside of a process group."""
    if arguments.text is None and not arguments.tiny:
        raise ValueError("--text: give a token file, as narrowcast_research.text.corpus makes it, or --tiny")
    ddp.check_wire(arguments.wire, arguments.gpu)
    device = rank_device(arguments.gpu)
    text = corpus.load(arguments.text) if arguments.text else bundled()
    shape = TINY if arguments.tiny else GPT2
    training = Training(text, shape, arguments.wire, arguments.seed, arguments.horizon or arguments.steps, device)
    if arguments.resume and arguments.checkpoint is not None and arguments.checkpoint.exists():
        training.load(arguments.checkpoint)
    of = {"wire": arguments.wire, "seed": arguments.seed}
    waiting = [{**of, **describe(training, text, arguments.gpu, arguments.steps)}]
    for line in lines_of(training, arguments.steps, began_at + arguments.until_seconds, began_at):
        waiting.append({**of, **line})
        if dist.get_rank() == 0 and (line.get("step", 0) % CHUNK == 0 or "end" in line):
            append(arguments.runs, waiting)
            waiting = []
    if arguments.checkpoint is not None:
        training.save(arguments.checkpoint)
    if training.handle is not None:
        training.handle.detach()


def bundled() -> Text:
    """The interpreter's own help pages, as bytes: for a model that is tiny."""
    data = help_text()
    cut = len(data) * 9 // 10
    return Text(data[:cut], data[cut:], 256, "the help pages of Python")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", required=True, help="A codec's spec, plain, bf16-hook, fp16-hook or powersgd-RANK.")
    parser.add_argument("--runs", type=Path, required=True, help="The file that lines are appended to.")
    parser.add_argument("--text", type=Path, help="A token file; without it --tiny takes the help pages of Python.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--horizon", type=int, help="Steps that the learning rate is planned for; default all steps.")
    parser.add_argument("--seed", type=int, default=0, help="Decides weights and batches.")
    parser.add_argument("--until-seconds", type=float, default=math.inf, help="End in time, with what there is.")
    parser.add_argument("--checkpoint", type=Path, help="Written at the end.")
    parser.add_argument("--resume", action="store_true", help="Go on from the checkpoint, where there is one.")
    parser.add_argument("--tiny", action="store_true", help="A model of 120,000 parameters.")
    parser.add_argument("--gpu", action="store_true", help="With NCCL, on this rank's GPU.")
    return parser.parse_args(words)


def main() -> None:
    began_at, arguments = time.monotonic(), parse()
    with process_group(arguments.gpu):
        run(arguments, began_at)


if __name__ == "__main__":
    main()
