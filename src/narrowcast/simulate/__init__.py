"""The customised-precision simulator: any precision, any number of workers, one process, the bits of a cluster.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.lazy import homes_of, lazy_front
from narrowcast.simulate.stack import largest_WS as largest_WS

if TYPE_CHECKING:
    from narrowcast.kernels import derive as derive
    from narrowcast.parallel import DescribedLink as DescribedLink
    from narrowcast.parallel import LocalUpdates as LocalUpdates
    from narrowcast.simulate import compat as compat
    from narrowcast.simulate.exchange import GradientExchange as GradientExchange
    from narrowcast.simulate.local import LocalWorld as LocalWorld
    from narrowcast.simulate.precision import optim as optim
    from narrowcast.simulate.precision.casts import Caster as Caster
    from narrowcast.simulate.precision.casts import LayerScale as LayerScale
    from narrowcast.simulate.precision.casts import Quantizer as Quantizer
    from narrowcast.simulate.precision.casts import cast as cast
    from narrowcast.simulate.precision.gemm import conv1d as conv1d
    from narrowcast.simulate.precision.gemm import conv2d as conv2d
    from narrowcast.simulate.precision.gemm import linear as linear
    from narrowcast.simulate.precision.gemm import matmul as matmul
    from narrowcast.simulate.precision.loss_scale import LossScale as LossScale
    from narrowcast.simulate.precision.lowering import Lowered as Lowered
    from narrowcast.simulate.precision.lowering import lower as lower
    from narrowcast.simulate.run import Run as Run
    from narrowcast.simulate.settings import Batches as Batches
    from narrowcast.simulate.settings import MicroBatches as MicroBatches
    from narrowcast.simulate.settings import Record as Record
    from narrowcast.simulate.settings import read_log as read_log
    from narrowcast.simulate.training import train as train
    from narrowcast.simulate.world import World as World

HOMES = homes_of(
    {
        "precision.casts": "cast Quantizer Caster LayerScale",
        "precision.gemm": "matmul linear conv1d conv2d",
        "precision.lowering": "lower Lowered",
        "precision.loss_scale": "LossScale",
        ".kernels": "derive",
        ".parallel": "DescribedLink LocalUpdates",
        "exchange": "GradientExchange",
        "settings": "Batches MicroBatches Record read_log",
        "local": "LocalWorld",
        "world": "World",
        "training": "train",
        "run": "Run",
    }
)
"""Every public name and the module that holds it."""

__getattr__, __dir__, __all__ = lazy_front(__name__, HOMES | {"optim": "precision.optim:", "compat": "compat:"})
