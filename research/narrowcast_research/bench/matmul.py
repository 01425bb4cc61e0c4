"""Speed of matrix products with a chosen accumulator beside torch's own, and of a lowered model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from narrowcast.formats import Kind
from narrowcast.formats import format as format_named
from narrowcast.kernels import FLOAT32, accumulator, reference, round_to
from narrowcast.kernels import matmul as kernels
from narrowcast.measure import interleaved, torch_threads

SIZE = 256
ROUNDS = 7
_FORMATS = ("bf16", "fp16", "e4m3fn", "e5m2", "fixed8.8", "fp32+sequential")
_METHODS = ("fp16/64", "bf16+fma", "bf16+mul=fp32", "bf16+sr")
_COMPENSATED = ("bf16+kahan", "fp16+kahan", "e4m3fn+kahan", "fp32+kahan", "fp16+fma+kahan")
TARGETS = {**dict.fromkeys((*_FORMATS, *_METHODS), 2.0), **dict.fromkeys(_COMPENSATED, 0.7)}
"""GFLOP/s that we promise for each core, a product and a sum counting as two."""
UNPROMISED = ("fp16+pairwise", "bf16+mogami", "fp16+sr", "e4m3fn+sr", "fp32+sr", "fixed8.8+sr")
MODEL_RATIOS = {"cpu": 2.0, "cuda": 1.5}
"""A lowered model with float32 sums takes at most this many times the plain one."""


@dataclass(frozen=True)
class Row:
    """One accumulator on square matrices whose values are numbers of its own format."""

    spec: str
    runs: str
    gflops: float
    torch_gflops: float
    spread: float
    """Interquartile range of the time over its median."""
    target: float | None
    failed: str | None = None

    @property
    def met(self) -> bool | None:
        if self.failed:
            return False
        return None if self.target is None else self.gflops >= self.target

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"met": self.met}


def operands(spec: str, size: int) -> tuple[Tensor, Tensor]:
    """Random matrices, rounded to the sums' format where that is narrow."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=g) for _ in range(2))
    name = accumulator(spec).sums
    if name == FLOAT32 or format_named(name).kind is not Kind.FLOAT:
        return a, b
    return round_to(a, name), round_to(b, name)


def failure(spec: str) -> str | None:
    """What is wrong with the bits, before anything is timed."""
    a, b = operands(spec, 9)
    want = reference.matmul.matmul(a[None], b[None], accumulator(spec), 1, torch.empty(1, 9, 9))[0]
    got = kernels.matmul(a, b, spec, seed=1)
    same = torch.equal(want.nan_to_num(), got.nan_to_num()) and torch.equal(want.isnan(), got.isnan())
    return None if same else "differs from the reference"


def run(specs: Iterable[str], size: int = SIZE, rounds: int = ROUNDS) -> Iterator[Row]:
    """Every accumulator on one thread."""
    for spec in specs:
        a, b = operands(spec, size)
        with torch_threads(1):
            times = interleaved({"ours": lambda: kernels.matmul(a, b, spec, seed=1), "torch": lambda: a @ b}, rounds)  # noqa: B023
        ours, work = times["ours"], 2e-9 * size**3
        spread = (ours.high - ours.low) / ours.median
        choice = kernels.explain(spec).implementation
        yield Row(
            spec, choice, work / ours.median, work / times["torch"].median, spread, TARGETS.get(spec), failure(spec)
        )


class Block(nn.Module):
    """The block of ResNet-18 for 32 x 32 images."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


def resnet18() -> nn.Sequential:
    """ResNet-18 with the stem of its CIFAR variant."""
    torch.manual_seed(0)
    widths, layers = (64, 128, 256, 512), list[nn.Module]()
    layers += [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for i, width in enumerate(widths):
        layers += [Block(before, width, 1 if i == 0 else 2), Block(width, width, 1)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


@dataclass(frozen=True)
class ModelRow:
    """A training step of ResNet-18, lowered and plain."""

    formats: str
    batch: int
    plain_seconds: float
    lowered_seconds: float
    target: float

    @property
    def ratio(self) -> float:
        return self.lowered_seconds / self.plain_seconds

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"ratio": self.ratio, "met": self.ratio <= self.target}


FORMATS = {"weights": "e4m3", "activations": "e4m3", "gradients": "e5m2"}


def run_model(batch: int = 32, rounds: int = 5, device: str = "cpu") -> ModelRow:
    """Forward and backward on random images, both models in turn."""
    from narrowcast.simulate import lower

    plain, low = resnet18().to(device), resnet18().to(device)
    lower(low, weights=FORMATS["weights"], activations=FORMATS["activations"], gradients=FORMATS["gradients"])
    x = torch.randn(batch, 3, 32, 32, device=device)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        if device != "cpu":
            torch.cuda.synchronize()

    times = interleaved({"plain": lambda: step(plain), "lowered": lambda: step(low)}, rounds)
    formats = ", ".join(f"{role} {fmt}" for role, fmt in FORMATS.items())
    return ModelRow(formats, batch, times["plain"].median, times["lowered"].median, MODEL_RATIOS[device])
