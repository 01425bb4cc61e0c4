"""`attach` for DDP: the hook that a model gets once and keeps, and the handle."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import ErrorReport, KeptFactors, name_and_side
from narrowcast.collectives import all_reduce
from narrowcast.parallel import policy
from narrowcast.parallel.autopilot import Autopilot, Replay
from narrowcast.parallel.ddp import buckets, mixed_precision, torch_parts
from narrowcast.parallel.ddp.backend import plain_all_reduce
from narrowcast.parallel.ddp.hook import Bucket, DDPState
from narrowcast.parallel.fsdp import optimizer_check
from narrowcast.parallel.handle import GONE, Handle, StateReference, announced, check_strict
from narrowcast.parallel.ranks import FACTORS, check_same
from narrowcast.parallel.residuals import check_factors, check_saved
from narrowcast.parallel.stats import CallEvent, TensorRow, render


class Reducer(Protocol):
    """What a bucket is given to."""

    def reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]: ...


class ModelHook:
    """The one hook that a DDP model ever gets from us: DDP takes one and never gives it back.

    The model holds it, and the reducer holds it weakly: garbage collectors do not look into a reducer, so that what
    leads from there to the model, as a policy of the user may, would keep both for ever.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.state: Reducer | None = None
        self._group = group

    def reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        if self.state is not None:
            return self.state.reduce(bucket)
        return plain_all_reduce(bucket.buffer(), self._group)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of a model, in memory or in a file, has none: it is a model that nobody attached to."""
        return type(None), ()


def _reduce(weak_hook: weakref.ref[ModelHook], bucket: Bucket) -> torch.futures.Future[Tensor]:
    hook = weak_hook()
    assert hook is not None, "the model that is in its backward pass holds it"
    return hook.reduce(bucket)


# DDP compares annotations with its own classes and would not know these strings
_reduce.__annotations__.clear()


class _Uncopied(list[Any]):
    """The hooks of a DDP model, of which a copy has none: DDP copies the list and not what its reducer knows."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return list, ()


class DDPHandle(Handle):
    """The handle of a DDP model."""

    def __init__(self, model: DistributedDataParallel, hook: ModelHook, state: DDPState) -> None:
        self._weak_model, self._hook = weakref.ref(model), weakref.ref(hook)
        self._reference, self._stats = StateReference(state), state.stats
        self._pilot = state.policy if isinstance(state.policy, Autopilot | Replay) else None

    @property
    def _state(self) -> DDPState:
        return self._reference.get()

    @property
    def step(self) -> int:
        return self._stats.steps

    @property
    def seed(self) -> int:
        return self._state.seed

    def link(self) -> str:
        state = self._state
        if state.channel.world == 1:
            return policy.ONE_RANK
        return state.probe.verdict(state.lossy()) if state.probe else ""

    def stats(self) -> dict[str, float]:
        return self._stats.as_dict() | (self._pilot.counters() if self._pilot is not None else {})

    def events(self) -> list[CallEvent]:
        return list(self._stats.events)

    def rows(self) -> list[TensorRow]:
        return self._state.rows()

    def explain(self) -> str:
        return render(self.rows(), [*_notes(model_of(self._weak_model)), *self._state.warnings()])

    def errors(self) -> dict[str, ErrorReport]:
        return dict(self._stats.sampled)

    def history(self) -> list[dict[str, Any]]:
        return self._pilot.history() if self._pilot is not None else []

    def observe(self, loss: float) -> None:
        if self._pilot is not None:
            self._pilot.observe(loss)

    def check_ranks(self) -> None:
        kept = {"parameters": model_of(self._weak_model).module.parameters(), FACTORS: self._state.factors.contents}
        check_same(self._state.channel, kept)

    def state_dict(self) -> dict[str, Tensor]:
        state = self._state
        residuals = state.residuals.by_parameter()
        mean = {
            name: buckets.view_like(residuals[name], p).to(p.device, copy=True, memory_format=torch.contiguous_format)
            for name, p in state.reduced.items()
            if name in residuals
        }
        all_reduce(list(mean.values()), "fp32", dist.ReduceOp.AVG, channel=state.channel.called("state_dict"))
        # the factors of low rank are the same on every rank
        for key, vectors in state.factors.state_dict().items():
            name, on_left = name_and_side(key)
            parameter = state.reduced[name]
            mean[key] = vectors if on_left else buckets.index_order(vectors.to(parameter.device), parameter)
        return mean

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        known = self._state.reduced
        residuals, factors = KeptFactors.split(state)
        check_saved(residuals, {name: parameter.shape for name, parameter in known.items()})
        check_factors(factors, {name: buckets.matrix_of(p) for name, p in known.items() if p.dim() > 1 and p.numel()})
        self._state.residuals.load({name: buckets.flat_copy(saved, known[name]) for name, saved in residuals.items()})
        sides = {key: name_and_side(key) for key in factors}
        loaded = {k: f if sides[k][1] else buckets.memory_order(f, known[sides[k][0]]) for k, f in factors.items()}
        self._state.factors.load(loaded)

    def detach(self) -> None:
        """DDP keeps our hook; a later attach uses it again."""
        state, hook = self._reference.keep(), self._hook()
        if hook is not None and hook.state is state:
            hook.state = None
        if state is not None:
            state.close()


def model_of(reference: weakref.ref[DistributedDataParallel]) -> DistributedDataParallel:
    """The model of a handle; raises where it is gone."""
    model = reference()
    if model is None:
        raise RuntimeError(GONE)
    return model


def _notes(model: DistributedDataParallel) -> list[str]:
    """What travels as it is beside the gradients, with its bytes."""
    notes = []
    buffers = sum(b.numel() * b.element_size() for b in model.module.buffers())
    if buffers and model.broadcast_buffers:
        notes.append(f"buffers: {buffers} bytes broadcast by DDP before each forward pass, as they are")
    if model.find_unused_parameters:
        count = sum(1 for _ in model.module.parameters())
        notes.append(f"unused-parameter bitmap: {4 * count} bytes all-reduced by DDP each step, as it is")
    synced = [m.num_features for m in model.module.modules() if isinstance(m, torch.nn.SyncBatchNorm)]
    if synced:
        # forward: mean, inverse deviation and count of each rank; backward: two sums
        sent = sum(4 * (2 * features + 1) + 8 * features for features in synced)
        notes.append(f"SyncBatchNorm: {sent} bytes of statistics a rank and step, by its own collectives, as they are")
    return notes


def attach_ddp(model: DistributedDataParallel, gradients: object, strict: bool, **options: Any) -> Handle:
    """`attach` for DDP. options: those of `DDPState`."""
    torch_parts.check(model)
    buckets.check_group(model, options["group"])
    hook = _free_hook(model)

    state = _make_state(model, gradients, **options)
    check_strict(state, strict)
    try:
        register(model, hook)
    except RuntimeError:
        state.close()
        raise
    hook.state = state
    if policy.may_round(gradients):
        weak_hook = weakref.ref(hook)
        optimizer_check.watch(model, (), lambda: getattr(weak_hook(), "state", None) is not None)
    return announced(DDPHandle(model, hook, state))


def _make_state(model: DistributedDataParallel, gradients: object, **options: Any) -> DDPState:
    if isinstance(gradients, Autopilot | Replay):
        from narrowcast.parallel.autopilot.ddp import PilotedState

        return PilotedState(model, gradients, **options)
    return DDPState(model, gradients, **options)


def _free_hook(model: DistributedDataParallel) -> ModelHook:
    """The model's own of an earlier attach, or a new one; raises where it is in use or another one is there."""
    hook: ModelHook | None = getattr(model, "_narrowcast_hook", None)
    if hook is None and model._comm_hooks and mixed_precision.state_of(model) is None:
        raise RuntimeError("attach: the model has a communication hook already; DDP takes only one, remove that one")
    if hook is not None and hook.state is not None:
        raise RuntimeError("attach: the model is attached already; call detach() on its handle first")
    return hook or ModelHook(model.process_group)


def register(model: DistributedDataParallel, hook: ModelHook) -> None:
    """Give the model our hook, once: on its own, or behind the one that mixed precision brings."""
    if getattr(model, "_narrowcast_hook", None) is not None:
        return
    taken = mixed_precision.state_of(model)
    if taken is None:
        model.register_comm_hook(weakref.ref(hook), _reduce)
        model._comm_hooks = _Uncopied(model._comm_hooks)
    else:
        mixed_precision.take_detour(taken, functools.partial(_reduce, weakref.ref(hook)))
    object.__setattr__(model, "_narrowcast_hook", hook)
