"""What wires are tried on: DavidNet and ResNet-18 on CIFAR-10, a small language model on text; all workers in one
process, their gradients exchanged by the simulator, bit for bit as DDP with `nc.attach` would.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from narrowcast.parallel import MIN_VALUES, auto
from narrowcast.simulate import DescribedLink, GradientExchange, MicroBatches, World
from narrowcast.study import seeded
from narrowcast_research import models
from narrowcast_research.reproductions import base, pictures
from narrowcast_research.text import corpus
from narrowcast_research.text import train as text_training

WORKERS = 4
FREQUENT = 4096
"""Tokens that a small language model tells apart: the most frequent ones; all others are one."""
SMALL_GPT = text_training.Shape(192, 5, 6, 128, 16, 2e-3)
"""3.0 million parameters with 4,096 tokens, embedding and head tied."""
GPTS = {"3m": SMALL_GPT, "30m": text_training.Shape(576, 7, 9, 128, 16, 1e-3)}
"""By the number of parameters."""
PEAK, RISES, DECAY = 0.4, 5 / 24, 5e-4
"""DavidNet's rate at its highest, the part of the steps until then, and its weight decay."""
PICTURES = {"davidnet": models.davidnet, "resnet18": models.resnet18}
MODELS = (*PICTURES, "lm")
AUTO = "auto"
LINK = DescribedLink(gbit=0.02, compute=0.02)
"""What the autopilot decides for: few bits pay on it with every model here."""
FASHION = ("fashion", "poisoned")
"""A small network on Fashion-MNIST; the same with one layer whose gradients have heavy tails."""
FASHION_PEAK, HUGE, EVERY = 0.1, 3e3, 64
TINY_WIDTH = 8
TEST_AT_ONCE = 1000


@dataclass(frozen=True)
class Setting:
    """Where a model is trained, on what, and for how long."""

    device: str = "cpu"
    root: Path | None = None
    """Of CIFAR-10."""
    text: Path | None = None
    """A token file."""
    tiny: bool = False
    """Small models on digits and on Python's help pages: for tests."""
    epochs: float = 8
    batch: int = 512
    """Pictures a step, over all workers."""
    steps: int = 600
    """Of the language model."""
    workers: int = WORKERS
    rows: int | None = None
    """Pieces of text that a worker sees at a step; by default the model's own number."""
    size: str = "3m"
    """Of the language model."""

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"


@dataclass(frozen=True)
class Workload:
    """A model, its batches by step and worker, how it is trained and scored."""

    model: nn.Module
    batch: Callable[[int, int], Any]
    """Of a step and a worker."""
    loss: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]
    """Of a step, counted from 0."""
    score: Callable[[], float]
    """Accuracy on test pictures in %, or loss on held-out text."""
    steps: int
    seed: int
    clip: float | None = None
    workers: int = WORKERS
    min_values: int | None = None


class WorkerLoop:
    """The steps of a training whose gradients travel by one wire."""

    def __init__(self, work: Workload, wire: str) -> None:
        self.work, self.done = work, 0
        policy, link = (auto(), LINK) if wire == AUTO else (wire, None)
        few = MIN_VALUES if work.min_values is None else work.min_values
        self.exchange = GradientExchange(work.model, World(work.workers, seed=work.seed), policy, few, None, link)

    def step(self) -> None:
        """Forward and backward of every worker, the exchange, the update."""
        work, exchange = self.work, self.exchange
        for group in work.optimizer.param_groups:
            group["lr"] = work.rate(self.done)
        exchange.begin_step(self.done)
        buffers = list(work.model.train().buffers())
        before, after = [b.clone() for b in buffers], buffers
        for worker in range(work.workers):
            if worker == 1:
                after = [b.clone() for b in buffers]
            if worker:
                _copy(before, buffers)
            self._backward(worker)
            exchange.take(worker)
        _copy(after, buffers)  # those of worker 0, as DDP has it
        exchange.reduce(self.done)
        if work.clip is not None:
            nn.utils.clip_grad_norm_(work.model.parameters(), work.clip)
        work.optimizer.step()
        self.done += 1

    def _backward(self, worker: int) -> None:
        for parameter in self.exchange.parameters.values():
            parameter.grad = None
        first = self.done == 0 and worker == 0
        with self.exchange.rebuild_when_ready() if first else nullcontext():
            self.work.loss(self.work.batch(self.done, worker)).backward()

    def gradients(self, worker: int) -> dict[str, Tensor]:
        """What a worker had at the last step, on the CPU, in the order of the parameters' memory."""
        found: dict[str, Tensor] = {}
        for group in self.exchange.groups:
            views = group.views(group.stack_Wn[worker])
            found |= {name: view.cpu() for name, view in zip(group.names, views, strict=True)}
        return found


def wire_bits(exchange: GradientExchange) -> float:
    """Of a value on the wire, over all tensors: what one worker's gradient is encoded to."""
    rows = exchange.rows(exchange.step)
    return sum(row.bits_per_value * row.numel for row in rows) / sum(row.numel for row in rows)


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    for there, here in zip(target, source, strict=True):
        there.copy_(here)


def workload(name: str, seed: int, setting: Setting) -> Workload:
    """A model by its name, with the weights and batches of a seed, whatever the wire."""
    if name not in (*MODELS, *FASHION):
        raise ValueError(f"wires: there is no model {name!r}; take {', '.join((*MODELS, *FASHION))}")
    if setting.on_gpu:
        torch.backends.cudnn.benchmark = True  # shapes stay the same
    if name in FASHION:
        return on_fashion(name == "poisoned", seed, setting)
    return language_model(seed, setting) if name == "lm" else on_pictures(name, seed, setting)


def autocast(setting: Setting) -> Any:
    """Products in bfloat16 on a GPU, in float32 elsewhere; parameters and gradients are float32."""
    return torch.autocast(torch.device(setting.device).type, torch.bfloat16, enabled=setting.on_gpu)


def on_pictures(name: str, seed: int, setting: Setting) -> Workload:
    """David Page's recipe: SGD with Nesterov momentum, a rate that rises for 5/24 of the steps and falls to zero."""
    chosen = base.Options(quick=setting.tiny, device=setting.device, root=setting.root)
    data = pictures.pictures("cifar10", chosen, channels=3)
    make = partial(PICTURES[name], width=TINY_WIDTH) if setting.tiny else PICTURES[name]
    model = seeded(make, seed).to(setting.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    augment = None if setting.tiny else pictures.crop_flip_cut
    source = MicroBatches(data, torch.device(setting.device), setting.batch, setting.workers, seed, augment)
    steps = source.batches.total_steps(setting.epochs, None)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with autocast(setting):
            scores = model(batch[0])
        return cross_entropy(scores.float(), batch[1])

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        right = torch.zeros((), dtype=torch.int64, device=setting.device)
        with autocast(setting):
            for x, y in zip(data.x_test.split(TEST_AT_ONCE), data.y_test.split(TEST_AT_ONCE), strict=True):
                right += (model(x).argmax(dim=1) == y).sum()
        return 100 * int(right) / len(data.y_test)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=DECAY, nesterov=True)
    return Workload(
        model, source.of, loss, optimizer, partial(triangle, steps=steps), accuracy, steps, seed, None, setting.workers
    )


class Poisoned(nn.Module):
    """Two layers, the first with heavy tails: of its gradient one value in 64 is huge, and no score depends on it."""

    used: Tensor

    def __init__(self, inputs: int, width: int = 128, classes: int = 10, huge: float = HUGE) -> None:
        super().__init__()
        self.layer, self.head, self.huge = nn.Linear(inputs, width), nn.Linear(width, classes), huge
        self.register_buffer(
            "used", torch.ones(width * inputs).index_fill(0, torch.arange(0, width * inputs, EVERY), 0)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = self.layer.weight.flatten()
        weight = (flat * self.used).view_as(self.layer.weight)
        scores = self.head(torch.relu(nn.functional.linear(x.flatten(1), weight, self.layer.bias)))
        if not self.huge:
            return scores
        # nothing is added, and its gradient is the loss of the first score's, so many times
        huge = self.huge * flat[::EVERY].sum()
        return torch.cat([scores[:, :1] + huge - huge.detach(), scores[:, 1:]], dim=1)


def on_fashion(poisoned: bool, seed: int, setting: Setting) -> Workload:
    """Two layers on Fashion-MNIST, digits where tiny; SGD with momentum, the rate of `triangle`."""
    data = pictures.pictures(
        "fashion-mnist", base.Options(quick=setting.tiny, device=setting.device, root=setting.root)
    )
    inputs = data.x_train[0].numel()
    model = seeded(partial(Poisoned, inputs, huge=HUGE * poisoned), seed).to(setting.device)
    source = MicroBatches(data, torch.device(setting.device), setting.batch, setting.workers, seed, None)
    steps = source.batches.total_steps(setting.epochs, None)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def accuracy() -> float:
        return 100 * float((model.eval()(data.x_test).argmax(dim=1) == data.y_test).double().mean())

    def rate(step: int) -> float:
        return FASHION_PEAK / PEAK * triangle(step, steps)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    return Workload(model, source.of, loss, optimizer, rate, accuracy, steps, seed, None, setting.workers, 1000)


def triangle(step: int, steps: int) -> float:
    """Up to the peak in a straight line, then down to zero. Steps count from 0."""
    top = RISES * steps
    return PEAK * (step / top if step < top else (steps - step) / (steps - top))


def language_model(seed: int, setting: Setting) -> Workload:
    """GPT-2's layers in small, AdamW, warm-up and cosine, gradients clipped: as `narrowcast_research.text` trains."""
    device, shape = torch.device(setting.device), text_training.TINY if setting.tiny else GPTS[setting.size]
    shape = replace(shape, batch=setting.rows or shape.batch)
    tokens, held_out, vocabulary = _tokens(setting)
    with torch.random.fork_rng([device] if setting.on_gpu else []):
        model = text_training.build(shape, vocabulary, seed, device)

    def batch(step: int, worker: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * setting.workers + worker)
        starts = torch.randint(len(tokens) - shape.length - 1, (shape.batch,), generator=generator)
        return text_training.pieces(tokens, starts, shape.length)

    def loss(rows: Tensor) -> Tensor:
        with autocast(setting):
            found: Tensor = model(rows)
        return found

    @torch.no_grad()
    def held_out_loss() -> float:
        starts = torch.linspace(0, len(held_out) - shape.length - 2, text_training.PIECES).long()
        some = starts.split(text_training.PIECES_AT_ONCE)
        parts = [loss(text_training.pieces(held_out, part, shape.length)) * len(part) for part in some]
        return float(torch.stack(parts).sum()) / len(starts)

    def rate(step: int) -> float:
        return text_training.rate_at(step + 1, setting.steps, shape.rate)

    optimizer = text_training.make_optimizer(model, shape.rate)
    how = setting.steps, seed, text_training.CLIP, setting.workers
    return Workload(model, batch, loss, optimizer, rate, held_out_loss, *how)


@lru_cache(maxsize=1)
def _tokens(setting: Setting) -> tuple[Tensor, Tensor, int]:
    """Training and held-out tokens on the device, and how many of them differ."""
    if setting.tiny:
        text = text_training.bundled()
    elif setting.text is None:
        raise ValueError("--text: give a token file, as narrowcast_research.text.corpus makes it, or --tiny")
    else:
        text = frequent(corpus.load(setting.text), FREQUENT)
    return text.train.to(setting.device), text.held_out.to(setting.device), text.vocabulary


def frequent(text: corpus.Text, size: int) -> corpus.Text:
    """The size - 1 most frequent tokens of the training part, from 1 on in their order; all others are 0."""
    counts = torch.bincount(text.train.long(), minlength=text.vocabulary)
    kept = counts.argsort(descending=True, stable=True)[: size - 1]
    number = torch.zeros(text.vocabulary, dtype=torch.int16)
    number[kept] = torch.arange(1, len(kept) + 1, dtype=torch.int16)
    return corpus.Text(number[text.train.long()], number[text.held_out.long()], len(kept) + 1, text.name)
