"""Triton as an implementation, where it is installed: loaded at the first CUDA tensor, never before."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module, util
from typing import Any

from torch import Tensor

from narrowcast.formats import Format
from narrowcast.kernels.plan import CastPlan, Plan, TransformPlan

DEVICE = "cuda"
LARGEST_BIAS = 127
"""Formats whose smallest normal number is below float32's need another arithmetic."""


@cache
def load() -> tuple[Any, str]:
    """The module that launches kernels and Triton's version, or None and why not."""
    if util.find_spec("triton") is None:
        return None, "triton is not installed; it comes with torch's CUDA builds, or `pip install triton`"
    try:
        import narrowcast.kernels.triton.launch as launch
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"triton does not load: {error}"
    return launch, launch.VERSION


def available() -> bool:
    return load()[0] is not None


def name() -> str:
    return load()[1]


def why_not(plan: Plan | CastPlan | TransformPlan | None) -> str | None:
    """Why this plan cannot run here, or None. Without a plan: why none can."""
    if not available():
        return load()[1]
    if plan is None or isinstance(plan, CastPlan):
        return None
    if isinstance(plan, TransformPlan):
        why: str | None = _transforms().why_not(plan)
        return why or why_not(plan.inner)
    if plan.l2 and not plan.block:
        return "an L2 norm over a whole tensor is on the CPU only"
    return _why_not_format(plan.format)


def why_not_round(fmt: Format, rounding: str, rules: str) -> str | None:
    """Why this rounding cannot run here, or None; both `rules` can."""
    if not available():
        return load()[1]
    if rounding not in ("nearest", "stochastic"):
        return f"rounding {rounding!r} is on the CPU only"
    return "formats without a zero are on the CPU only" if fmt.positive_only else _why_not_format(fmt)


def _transforms() -> Any:
    """The module that launches the kernels of transforms."""
    return import_module("narrowcast.kernels.triton.transforms")


def low_rank() -> Any:
    """The module that launches the products of low rank."""
    return import_module("narrowcast.kernels.triton.low_rank")


def _why_not_format(fmt: Format) -> str | None:
    if getattr(fmt, "bias", 0) > LARGEST_BIAS:
        return "formats whose smallest normal number is below float32's are on the CPU only"
    return None


def kernels(plan: Plan | CastPlan | TransformPlan) -> Any:
    if isinstance(plan, TransformPlan) and not _transforms().is_step(plan):
        return _transforms()
    return load()[0]


def rounding() -> Callable[..., Tensor]:
    run: Callable[..., Tensor] = load()[0].round_to
    return run
