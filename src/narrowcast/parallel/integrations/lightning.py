"""Lightning: a callback that attaches when training begins, and a DDPStrategy with our hook. Needs its package."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from narrowcast.parallel import policy
from narrowcast.parallel.attachment import attach
from narrowcast.parallel.ddp.hook import ddp_hook
from narrowcast.parallel.handle import Handle
from narrowcast.parallel.integrations.hooks import HookState
from narrowcast.parallel.residuals import WholeResiduals

if TYPE_CHECKING:
    from torch import Tensor


def _package() -> Any:
    for package, name in (("lightning", "lightning.pytorch"), ("pytorch_lightning", "pytorch_lightning")):
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(name)
    raise ImportError("narrowcast for Lightning: there is no package lightning; install narrowcast[lightning]")


def callback(gradients: object, *, log_every: int = 0, **options: Any) -> Any:
    """A callback for `Trainer(callbacks=[...])`: attaches to the strategy's model, DDP or sharded, and detaches after.

    options: as for `nc.attach`. log_every: write the counters to the trainer's loggers every so many batches (0:
    never). The residuals of error feedback are in the trainer's checkpoints. `.handle` is that of `nc.attach` while
    training runs; `.explained` and `.totals` remain, in the process that trained.
    """
    policy.check(gradients)
    return _callback_class()(gradients, log_every, options)


@functools.cache
def _callback_class() -> Any:
    class Narrowcast(_package().Callback):  # type: ignore[misc]
        """Gradients through codecs while `fit` runs."""

        def __init__(self, gradients: object, log_every: int, options: dict[str, Any]) -> None:
            super().__init__()
            self._gradients, self._log_every, self._options = gradients, log_every, options
            self.handle: Handle | None = None
            self.explained, self.totals = "", dict[str, float]()
            self._residuals: WholeResiduals | None = None
            self._model: Any = None  # a spawned trainer drops its DDP model before fit ends
            # while nothing is attached: what the next fit begins with, and what a checkpoint gets
            self._loaded: dict[str, Tensor] = {}
            self._left: dict[str, Tensor] = {}

        @property
        def state_key(self) -> str:
            """As it is in checkpoints that exist."""
            return "callback.<locals>.Narrowcast"

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self._model = trainer.strategy.model
            self.handle = attach(self._model, self._gradients, **self._options)
            self._residuals = WholeResiduals(self.handle, writes=trainer.is_global_zero)
            loaded, self._loaded, self._left = self._loaded, {}, {}
            if loaded:
                self._residuals.load_state_dict(loaded)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            every = self._log_every
            if every and trainer.global_step % every == 0 and self.handle is not None:
                counters = {f"narrowcast/{key}": value for key, value in self.handle.stats().items()}
                for logger in trainer.loggers:
                    logger.log_metrics(counters, step=trainer.global_step)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            # for a trainer.save_checkpoint() that comes after fit
            self._left = self.state_dict()
            self._stop()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._stop()

        def _stop(self) -> None:
            if self.handle is not None:
                self.explained, self.totals = self.handle.explain(), self.handle.stats()
                self.handle.detach()
                self.handle = self._residuals = self._model = None

        def state_dict(self) -> dict[str, Any]:
            return self._residuals.state_dict() if self._residuals is not None else self._left

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            # strategies differ: DDP restores before on_fit_start, a sharded model after it
            if self._residuals is not None:
                self._residuals.load_state_dict(state_dict)
            else:
                self._loaded = self._left = state_dict

    return _by_name(Narrowcast, "Narrowcast")


def strategy(gradients: object, *, options: dict[str, Any] | None = None, **of_lightning: Any) -> Any:
    """A `DDPStrategy` with our hook, for `Trainer(strategy=...)`; `.hook_state` is its `HookState`.

    options: as for `nc.DDPState`. The rest is DDPStrategy's. `DDPStrategy(ddp_comm_state=, ddp_comm_hook=)` does the
    same on GPUs; on CPUs Lightning leaves such a hook out without a word.
    """
    policy.check(gradients)
    return _strategy_class()(gradients, options or {}, of_lightning)


@functools.cache
def _strategy_class() -> Any:
    base: Any = importlib.import_module(f"{_package().__name__}.strategies").DDPStrategy

    class NarrowcastDDP(base):  # type: ignore[misc]
        """Registers our hook on whatever device."""

        hook_state: HookState | None = None

        def __init__(self, gradients: object, options: dict[str, Any], of_lightning: dict[str, Any]) -> None:
            super().__init__(**of_lightning)
            self._gradients, self._options = gradients, options

        def configure_ddp(self) -> None:
            self.hook_state = HookState(self.model, self._gradients, **self._options)
            super().configure_ddp()
            self.model.register_comm_hook(self.hook_state, ddp_hook)

        def teardown(self) -> None:
            if self.hook_state is not None:
                self.hook_state.close()
            super().teardown()

    return _by_name(NarrowcastDDP, "NarrowcastDDP")


def _by_name(kind: type, name: str) -> type:
    """Found in this module under its name, as processes that are spawned look for it; made where it is asked for."""
    kind.__qualname__, kind.__module__ = name, __name__
    return kind


def __getattr__(name: str) -> Any:
    makers = {"Narrowcast": _callback_class, "NarrowcastDDP": _strategy_class}
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return makers[name]()
