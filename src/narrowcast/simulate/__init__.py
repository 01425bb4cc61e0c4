"""The customised-precision simulator: any precision, any number of workers, one process, the bits of a cluster.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "cast": "precision.casts",
    "Quantizer": "precision.casts",
    "Caster": "precision.casts",
    "LayerScale": "precision.casts",
    "matmul": "precision.gemm",
    "linear": "precision.gemm",
    "conv1d": "precision.conv",
    "conv2d": "precision.conv",
    "lower": "precision.lowering",
    "Lowered": "precision.lowering",
    "optim": "precision.optim",
    "LossScale": "precision.loss_scale",
    "compat": "compat",
    "derive": ".kernels.noise",
    "Batches": "training.batches",
    "World": "world.world",
    "train": "training.train",
}
"""Every public name and the file that holds it."""

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
