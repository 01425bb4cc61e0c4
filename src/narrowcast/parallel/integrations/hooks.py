"""For frameworks that wrap the model and register communication hooks themselves."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel import policy
from narrowcast.parallel.ddp.hook import Bucket, DDPState
from narrowcast.parallel.stats import CallEvent, Stats, TensorRow, render


class HookState:
    """What `nc.DDPState` is, for a model that is wrapped later: give it and `nc.ddp_hook` to the framework.

    module: the model as it is before DDP wraps it. Connections are made in the first backward pass, on all ranks.
    options: as for `nc.DDPState`. DDP's `join()` with `divide_by_initial_world_size=False` needs `nc.attach`.
    """

    def __init__(self, module: nn.Module, gradients: object, **options: Any) -> None:
        policy.check(gradients)
        self._module, self._gradients, self._options = module, gradients, options
        self._state: DDPState | None = None

    @property
    def state(self) -> DDPState:
        """The state behind it; there is none before the first backward pass."""
        if self._state is None:
            raise RuntimeError("HookState: no gradient has come yet; look after the first backward pass")
        return self._state

    def reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """What `nc.ddp_hook` calls."""
        if self._state is None:
            self._state = DDPState(
                _model_around(self._module, self._options.get("group")), self._gradients, **self._options
            )
        return self._state.reduce(bucket)

    def stats(self) -> dict[str, float]:
        return (self._state.stats if self._state is not None else Stats()).as_dict()

    def events(self) -> list[CallEvent]:
        return list(self.state.stats.events)

    def rows(self) -> list[TensorRow]:
        return self.state.rows()

    def explain(self) -> str:
        """Every tensor in a table."""
        return render(self.rows(), self.state.warnings())

    def close(self) -> None:
        """Close the connections. DDP keeps the hook, which cannot be used afterwards."""
        if self._state is not None:
            self._state.close()


def _model_around(module: nn.Module, group: dist.ProcessGroup | None) -> Any:
    """The DDP model around this module, which whoever registered the hook did not hand on."""
    # A search, once in a training: DDP leaves no reference to itself in the module, the reducer gives a hook nothing
    # but the bucket, and torch has no list of DDP models. That it names the model in its forward pass is private, and
    # too late for a hook that is registered between a forward and a backward pass.
    models = (o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel) and o.module is module)
    return next(models, None) or _stand_in(module, group)


class _StandIn(SimpleNamespace):
    """One that can be held weakly."""


def _stand_in(module: nn.Module, group: dist.ProcessGroup | None) -> Any:
    """As much of the DDP model as the state looks at."""
    return _StandIn(
        module=module,
        process_group=group or dist.group.WORLD,
        parameters_to_ignore=(),
        find_unused_parameters=False,
        static_graph=False,
        _join_config=SimpleNamespace(enable=False),
        _divide_by_initial_world_size=True,
    )
