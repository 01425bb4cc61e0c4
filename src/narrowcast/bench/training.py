"""What the benches of DDP and FSDP2 train, and how: tasks, and steps of one task with several wires, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

from narrowcast.bench.ranks import Row
from narrowcast.data import help_text
from narrowcast.measure import DeviceClock, Timing, interleaved, link_bytes, tell_progress, until_all_done
from narrowcast.parallel import Handle

WIDTHS, MLP_BATCH = (784, 4096, 4096, 1024, 10), 16
HEADS = 4
WIDTH, LAYERS, LENGTH = 320, 8, 64
GPT2_BATCH, GPT2_LENGTH, GPT2_VOCABULARY = 8, 1024, 50304

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """A model, the batch of each rank, and an optimizer."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    """Of a rank, always the same."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    bf16: bool = False
    """Computes in bf16: autocast under DDP, mixed precision under FSDP2."""

    def model_on(self, device: torch.device) -> nn.Module:
        """The same on every rank."""
        torch.manual_seed(0)
        with device:
            return self.build()

    def batch_on(self, rank: int, device: torch.device) -> Batch:
        return tuple(x.to(device) for x in self.batch(rank))


class Classifier(nn.Module):
    """24 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(WIDTHS):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.layers(x), y)


class ConvNet(nn.Module):
    """Six convolutions and a layer: 4.8 million parameters, most of them in the last ones, as in VGG."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 256, 512, 512)
        layers: list[nn.Module] = []
        for number, (wide, narrow) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(wide, narrow, 3, padding=1, stride=1 + number % 2), nn.ReLU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(512 * 4, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.head(self.layers(x).flatten(1)), y)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm: 12 width² parameters."""

    def __init__(self, width: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Tokens in, the next token out; a tied head is the embedding."""

    def __init__(
        self, width: int, layers: int, length: int, heads: int = HEADS, vocabulary: int = 256, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), None if tied else nn.Linear(width, vocabulary)

    def forward(self, x_BL: Tensor) -> Tensor:
        """The loss of predicting every token but the first."""
        hidden = self.embed(x_BL[:, :-1]) + self.place(torch.arange(x_BL.shape[1] - 1, device=x_BL.device))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        scores = linear(hidden, self.embed.weight) if self.head is None else self.head(hidden)
        return cross_entropy(scores.flatten(0, 1).float(), x_BL[:, 1:].flatten())


def text_batch(data: Tensor, seed: int, size: int, length: int) -> Tensor:
    """Pieces of length + 1 bytes from places that the seed decides."""
    starts = torch.randint(len(data) - length - 1, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[start : start + length + 1] for start in starts.tolist()])


def _random_digits(rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(MLP_BATCH, WIDTHS[0], generator=generator)
    return x, torch.randint(0, WIDTHS[-1], (MLP_BATCH,), generator=generator)


def _random_pictures(rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(4, 3, 16, 16, generator=generator)
    return x, torch.randint(0, 10, (4,), generator=generator)


def _help_pages(rank: int) -> Batch:
    return (text_batch(help_text(), rank, 1, LENGTH),)


def _random_tokens(rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1 + rank)
    return (torch.randint(0, GPT2_VOCABULARY, (GPT2_BATCH, GPT2_LENGTH + 1), generator=generator),)


SGD = partial(torch.optim.SGD, lr=0.01)
MLP = Task("an MLP (24 M parameters), batch 16", Classifier, _random_digits, SGD)
CONV = Task("a small VGG (4.8 M parameters), 4 pictures of 16 x 16", ConvNet, _random_pictures, SGD)
TEXT = Task(
    "a transformer (10 M parameters), one piece of 64 bytes",
    partial(Transformer, WIDTH, LAYERS, LENGTH),
    _help_pages,
    SGD,
)
GPT2 = Task(
    "GPT-2 (124 M parameters), batch 8 x 1024, bf16",
    partial(Transformer, 768, 12, GPT2_LENGTH, 12, GPT2_VOCABULARY, True),
    _random_tokens,
    partial(torch.optim.AdamW, lr=1e-4, fused=True),
    bf16=True,
)


WARM_UP = 3
"""Buckets are rebuilt after the first step; PowerSGD starts compressing after its second."""
STEPS = 7


class WireTrainer:
    """A model with one wire. In steps before `go` its weights stay, so that wires can be compared."""

    def __init__(
        self, task: Task, model: nn.Module, handle: Handle | None, device: torch.device, autocast: bool
    ) -> None:
        self.model, self.handle, self.device = model, handle, device
        self.batch = task.batch_on(dist.get_rank(), device)
        self.optimizer = task.optimizer(model.parameters())
        self.loss = torch.zeros(())
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._set_rates([0.0] * len(self._rates))

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def go(self) -> None:
        """From now on weights move."""
        self._set_rates(self._rates)

    def step(self, communicate: bool = True) -> None:
        with nullcontext() if communicate else self.model.no_sync():  # type: ignore[operator]
            self.optimizer.zero_grad()
            with self._autocast:
                loss = self.model(*self.batch)
            loss.backward()
            self.optimizer.step()
        self.loss = loss.detach()

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def close(self) -> None:
        if self.handle is not None:
            self.handle.detach()


def warm_up(wire: str, trainer: WireTrainer) -> float:
    """The first steps of a wire; what this host's links carried in the last one, in bytes. Collective."""
    tell_progress(f"{wire}: {WARM_UP} steps that do not count")
    for _ in range(WARM_UP - 1):
        trainer.step()
    DeviceClock(trainer.device).wait()
    dist.barrier()
    before = link_bytes()
    trainer.step()
    DeviceClock(trainer.device).wait()
    dist.barrier()
    return float(link_bytes() - before)


def in_turn(candidates: Mapping[str, Callable[[], object]], steps: int, device: torch.device) -> dict[str, Timing]:
    """Steps of all candidates, one after another in each round, until the slowest rank is done. Collective."""
    clock = DeviceClock(device)

    def tell(seconds: Mapping[str, Sequence[float]]) -> None:
        so_far = ", ".join(f"{name} {1e3 * median(times):.1f}" for name, times in seconds.items())
        tell_progress(f"round {len(next(iter(seconds.values())))} of {steps}, median ms: {so_far}")

    def timed(call: Callable[[], object], calls: int) -> float:
        return until_all_done(call, clock, calls)

    return interleaved(candidates, steps, first_calls=0, timed=timed, after_round=tell)


def times_of(timing: Timing) -> Row:
    return {"step": timing.median, "fastest": min(timing.seconds), "slowest": max(timing.seconds)}
