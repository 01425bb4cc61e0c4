"""The customised-precision simulator: any precision, any number of workers, one process, the bits of a cluster.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowcast.simulate.world.stack import largest_WS as largest_WS

if TYPE_CHECKING:
    from narrowcast.kernels import derive as derive
    from narrowcast.simulate import compat as compat
    from narrowcast.simulate.precision import optim as optim
    from narrowcast.simulate.precision.casts import Caster as Caster
    from narrowcast.simulate.precision.casts import LayerScale as LayerScale
    from narrowcast.simulate.precision.casts import Quantizer as Quantizer
    from narrowcast.simulate.precision.casts import cast as cast
    from narrowcast.simulate.precision.conv import conv1d as conv1d
    from narrowcast.simulate.precision.conv import conv2d as conv2d
    from narrowcast.simulate.precision.gemm import linear as linear
    from narrowcast.simulate.precision.gemm import matmul as matmul
    from narrowcast.simulate.precision.loss_scale import LossScale as LossScale
    from narrowcast.simulate.precision.lowering import Lowered as Lowered
    from narrowcast.simulate.precision.lowering import lower as lower
    from narrowcast.simulate.training.batches import Batches as Batches
    from narrowcast.simulate.training.files import Record as Record
    from narrowcast.simulate.training.files import read_log as read_log
    from narrowcast.simulate.training.train import Run as Run
    from narrowcast.simulate.training.train import train as train
    from narrowcast.simulate.world.world import World as World

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
    "LossScale": "precision.loss_scale",
    "derive": ".kernels.noise",
    "Batches": "training.batches",
    "World": "world.world",
    "train": "training.train",
    "Run": "training.train",
    "Record": "training.files",
    "read_log": "training.files",
}
"""Every public name and the file that holds it."""
MODULES = {"optim": "precision.optim", "compat": "compat"}
"""The files that are public themselves."""

__all__ = list(HOMES | MODULES)


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(f".{MODULES[name]}", __name__)
    if name in HOMES:
        return getattr(import_module(f".{HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
