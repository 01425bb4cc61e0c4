"""A model whose gradients are what it is given, whatever its parameters are: so what is wanted is known exactly."""

from __future__ import annotations

import random

import torch
from dist.law8.cases import Case
from torch import Tensor, nn

SHAPES = ((37, 20), (1,), (300,), (6, 5, 3, 3), (0,), (16, 24), (3, 1), (129,))
ALWAYS = "q0"
"""Is used in every pass: a loss needs something to go back to."""


def dtype_of(case: Case, number: int) -> torch.dtype:
    if case.dtypes == "mixed" and case.kind in ("ddp", "local"):
        return (torch.float32, torch.bfloat16)[number % 2]
    return torch.bfloat16 if case.dtypes == "bfloat16" else torch.float32


class Part(nn.Module):
    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """Of which the gradient by each parameter named is what was given for it."""
        zero = torch.zeros((), requires_grad=True)
        terms = [(p * gradients[name]).float().sum() for name, p in self._parameters.items() if name in gradients]
        return zero + sum(terms)


class Toy(Part):
    """Tensors of many shapes, in the model itself and in a part, which is a unit of FSDP2 of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        draw = random.Random(case.seed)
        self.part = Part()
        self.register_parameter(ALWAYS, nn.Parameter(torch.zeros(70, 3, dtype=dtype_of(case, 0))))
        # FSDP2 takes no empty ones
        allowed = [shape for shape in SHAPES if case.kind in ("ddp", "local") or shape != (0,)]
        shapes = draw.sample(allowed, draw.randint(3, len(allowed)))
        for number, shape in enumerate(shapes, 1):
            owner = (self, self.part)[number % 2]
            owner.register_parameter(f"p{number}", nn.Parameter(_laid_out(case, shape, dtype_of(case, number))))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return super().forward(gradients) + self.part(gradients)


def _laid_out(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    made = torch.zeros(shape, dtype=dtype)
    if case.strides and len(shape) == 4:
        return made.to(memory_format=torch.channels_last)
    return made.t().contiguous().t() if case.strides and len(shape) == 2 else made


def short(name: str) -> str:
    return name.rpartition(".")[2]


def values(case: Case, at: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random ones; for 16 bits such that those of an iteration add up exactly. at: iteration, pass, rank, parameter."""
    generator = torch.Generator().manual_seed(hash((case.seed, *at)) % 2**63)
    size = 2.0 ** random.Random(hash((case.seed, at[0], at[3]))).randint(-3, 3)
    if dtype == torch.float32:
        return torch.randn(shape, generator=generator) * size
    return (torch.randint(-40, 41, shape, generator=generator) * size).to(dtype)


def uses(case: Case, iteration: int, pass_: int, rank: int, number: int) -> bool:
    """Whether a rank uses a parameter in a pass. With FSDP2 all ranks do or none: it knows nothing else."""
    if number == 0 or not case.unused:
        return True
    alike = random.Random(hash((case.seed, iteration, number)))
    if alike.random() < case.unused:
        return False
    own = random.Random(hash((case.seed, iteration, pass_, rank, number)))
    return case.kind in ("fsdp", "hsdp") or own.random() >= case.unused
