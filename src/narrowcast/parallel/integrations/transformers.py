"""Hugging Face's `Trainer`: a callback that attaches when training begins. Needs the package transformers."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.parallel import policy
from narrowcast.parallel.attachment import attach, is_sharded
from narrowcast.parallel.handle import Handle
from narrowcast.parallel.idle import processes
from narrowcast.parallel.integrations import saved
from narrowcast.parallel.wrappers import inner_model

log = logging.getLogger("narrowcast")


def callback(gradients: object, *, resume_from: str | Path | None = None, **options: Any) -> Any:
    """A callback for `Trainer(callbacks=[...])`: attaches to the wrapped model, DDP or FSDP2, and detaches at the end.

    options: as for `nc.attach`. The loss scaler is the Trainer's. Each checkpoint folder has `narrowcast.pt` where
    there are residuals; `train(resume_from_checkpoint=...)` goes on with those of `output_dir/checkpoint-STEP`, or of
    resume_from, a checkpoint folder elsewhere, which the Trainer tells no callback. `.handle` is that of `nc.attach`
    while training runs; `.explained` and `.totals` remain.
    """
    policy.check(gradients)
    return _class()(gradients, resume_from, options)


@functools.cache
def _class() -> Any:
    try:
        base: Any = importlib.import_module("transformers").TrainerCallback
    except ImportError as error:
        raise ImportError(f"narrowcast for the Trainer: {error}; install narrowcast[transformers]") from error

    class NarrowcastCallback(base):  # type: ignore[misc]
        """Gradients through codecs while `train` runs."""

        def __init__(self, gradients: object, resume_from: str | Path | None, options: dict[str, Any]) -> None:
            super().__init__()
            self._gradients, self._resume_from, self._options = gradients, resume_from, options
            self.handle: Handle | None = None
            self.explained, self.totals = "", dict[str, float]()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._detach()  # of a training that ended in an exception
            trainer = _trainer_of(self)
            options = {"scaler": trainer.accelerator.scaler, **self._options}
            self.handle = attach(_check(trainer.model_wrapped), self._gradients, **options)
            if state.global_step:
                folder = Path(self._resume_from or _folder(args, state))
                saved.load(self.handle, folder / saved.FILE, args.device)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.handle is None or args.save_only_model:
                return
            folder = _folder(args, state)
            if args.should_save and not folder.is_dir():
                log.warning("%s is not there: the residuals of this checkpoint are not saved", folder)
            saved.save(self.handle, folder / saved.FILE, args.should_save and folder.is_dir())

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.handle is not None:
                self.explained, self.totals = self.handle.explain(), self.handle.stats()
                self._detach()

        def _detach(self) -> None:
            if self.handle is not None:
                self.handle.detach()
                self.handle = None

    return NarrowcastCallback


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _trainer_of(callback: Any) -> Any:
    """The Trainer that has this callback."""
    # A search, once in a training: a Trainer hands its callbacks the model as it was before it was wrapped, and no way
    # to itself. The wrapped one may be one of several around that model: each train() may make another.
    kind = importlib.import_module("transformers").Trainer
    trainers = (o for o in gc.get_objects() if issubclass(type(o), kind))
    found = next((o for o in trainers if any(c is callback for c in o.callback_handler.callbacks)), None)
    if found is None:
        raise RuntimeError("narrowcast: no Trainer has this callback; give it to Trainer(callbacks=[...])")
    return found


def _check(model: nn.Module) -> nn.Module:
    """What the Trainer trains, or why nothing can be attached to it."""
    inner = inner_model(model)
    if processes(None) > 1 and not (isinstance(inner, DistributedDataParallel) or is_sharded(inner)):
        raise TypeError(
            f"narrowcast: the Trainer trains {type(inner).__name__} in {processes(None)} processes, which is neither "
            "DDP nor FSDP2; set fsdp_version=2 for FSDP, and with DeepSpeed leave this callback out"
        )
    return model
