"""Small models, their inputs, and what the mean of their gradients must be, without DDP."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dist.emulation import summed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

Loss = Callable[[nn.Module, int, int], Tensor]
"""Of a model, a rank and a step."""


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def wrapped(group: dist.ProcessGroup, module: nn.Module | None = None, **options: Any) -> DDP:
    # about a kilobyte a bucket: several of them, and they are rebuilt after the first step
    return DDP(module or mlp(), process_group=group, **{"bucket_cap_mb": 0.001, **options})


def streams_of_the_cpu() -> AbstractContextManager[object]:
    """DDP asks for streams of any device, and a torch with CUDA then wants a GPU."""
    return mock.patch("torch.Stream", functools.partial(torch.Stream, device="cpu"))


def in_bf16(group: dist.ProcessGroup) -> DDP:
    """With DDP's mixed precision."""
    kind = torch.bfloat16
    with streams_of_the_cpu():
        return wrapped(group, mixed_precision=_MixedPrecision(param_dtype=kind, reduce_dtype=kind, buffer_dtype=kind))


def local_gradients(module: nn.Module, world: int, step: int, of: Loss = loss) -> list[list[Tensor | None]]:
    """The gradients that each rank has by itself, from copies of a model."""
    found = []
    for rank in range(world):
        own = copy.deepcopy(module)
        own.zero_grad()
        of(own, rank, step).backward()
        found.append([p.grad for p in own.parameters()])
    return found


def rank_order_mean(module: nn.Module, world: int, step: int, of: Loss = loss) -> list[Tensor]:
    """Exactly what `as-is` must give: summed in rank order, then divided."""
    by_parameter = zip(*local_gradients(module, world, step, of), strict=True)
    return [
        summed([torch.zeros_like(p) if g is None else g for g in parts]) / world
        for parts, p in zip(by_parameter, module.parameters(), strict=True)
    ]


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in module.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def error_of(attempt: Callable[[], object]) -> str:
    """The type and the text of what was raised; empty where nothing was."""
    try:
        attempt()
    except (RuntimeError, ValueError, TypeError, IndexError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bits(module: nn.Module) -> bytes:
    return b"".join(p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for p in module.parameters())
