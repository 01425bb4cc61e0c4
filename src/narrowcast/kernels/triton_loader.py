"""Triton, where it is installed: loaded at the first CUDA tensor, never before."""

from __future__ import annotations

from functools import cache
from importlib import util
from types import ModuleType

from narrowcast.formats import Format
from narrowcast.kernels.plan import AnyPlan, CastPlan, OwnPlan

LARGEST_BIAS = 127
"""Formats whose smallest normal number is below float32's need another arithmetic."""


@cache
def load() -> tuple[ModuleType | None, str]:
    """The kernels and Triton's version, or None and why not."""
    if util.find_spec("triton") is None:
        return None, "triton is not installed; it comes with torch's CUDA builds, or `pip install triton`"
    try:
        import narrowcast.kernels.triton.launch as found
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return None, f"triton does not load: {error}"
    return found, found.VERSION


def available() -> bool:
    return load()[0] is not None


def why_not(plan: AnyPlan) -> str | None:
    """Why this plan cannot run here, or None."""
    if isinstance(plan, CastPlan):
        return None
    if isinstance(plan, OwnPlan):
        return "the codec's own code is for the CPU"
    if plan.l2 and not plan.block:
        return "an L2 norm over a whole tensor is on the CPU only"
    return _why_not_format(plan.format)


def why_not_round(fmt: Format, rounding: str, rules: str) -> str | None:
    """Why this rounding cannot run here, or None; both `rules` can."""
    if rounding not in ("nearest", "stochastic"):
        return f"rounding {rounding!r} is on the CPU only"
    return "formats without a zero are on the CPU only" if fmt.positive_only else _why_not_format(fmt)


def _why_not_format(fmt: Format) -> str | None:
    if getattr(fmt, "bias", 0) > LARGEST_BIAS:
        return "formats whose smallest normal number is below float32's are on the CPU only"
    return None
