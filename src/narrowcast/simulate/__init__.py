"""The customised-precision simulator: any precision, any number of workers, one process, the bits of a cluster.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "cast": "casts",
    "Quantizer": "casts",
    "Caster": "caster",
    "LayerScale": "caster",
    "matmul": "gemm",
    "linear": "gemm",
    "conv1d": "conv",
    "conv2d": "conv",
    "lower": "lowering",
    "Lowered": "lowering",
    "optim": "optim",
    "LossScale": "loss_scale",
    "compat": "compat",
    "derive": ".kernels.noise",
    "Batches": "train_batches",
    "World": "world",
    "train": "training",
}
"""Every public name and the file that holds it."""

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
