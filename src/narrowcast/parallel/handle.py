"""`attach`: one line, and a handle to look at what it does."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import ErrorReport
from narrowcast.collectives.api import all_reduce
from narrowcast.parallel import policy
from narrowcast.parallel.ddp import buckets, mixed_precision, torch_parts
from narrowcast.parallel.ddp.hook import Bucket, DDPState, plain_all_reduce
from narrowcast.parallel.fingerprint import differing, digest
from narrowcast.parallel.stats import Row, Stats, render, total
from narrowcast.parallel.timeline import Event

log = logging.getLogger("narrowcast")


class _Reducing(Protocol):
    """What a bucket is given to."""

    def reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]: ...


class _Hook:
    """The one hook that a DDP model ever gets from us: DDP takes one and never gives it back.

    The model holds it, and the reducer holds it weakly: garbage collectors do not look into a reducer, so that what
    leads from there to the model, as a policy of the user may, would keep both for ever.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.state: _Reducing | None = None
        self._group = group

    def reduce(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        if self.state is not None:
            return self.state.reduce(bucket)
        return plain_all_reduce(bucket.buffer(), self._group)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of a model, in memory or in a file, has none: it is a model that nobody attached to."""
        return type(None), ()


def _reduce(hook: weakref.ref[_Hook], bucket: Bucket) -> torch.futures.Future[Tensor]:
    found = hook()
    assert found is not None, "the model that is in its backward pass holds it"
    return found.reduce(bucket)


# DDP compares annotations with its own classes and would not know these strings
_reduce.__annotations__.clear()


class _Uncopied(list[Any]):
    """The hooks of a DDP model, of which a copy has none: DDP copies the list and not what its reducer knows."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return list, ()


class _Gone:
    """What a handle has left of a state whose model is gone: the counters."""

    def __init__(self, state: Any) -> None:
        self.step, self.stats = state.step, getattr(state, "stats", Stats())

    def close(self) -> None: ...

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(GONE)


GONE = "handle: its model is gone, and with it what error feedback kept; stats(), events() and errors() remain"


class Handle:
    """What `attach` returns. It does not keep the model alive."""

    def __init__(self, model: DistributedDataParallel, hook: _Hook, state: DDPState) -> None:
        self._hook, self._state = hook, state
        # no bound method: that would be a cycle, and a handle that nobody keeps would wait for a garbage collector
        me = weakref.ref(self)
        self._weak_model = weakref.ref(model, lambda _: _forget(me()))

    @property
    def _model(self) -> DistributedDataParallel:
        model = self._weak_model()
        if model is None:
            raise RuntimeError(GONE)
        return model

    @property
    def step(self) -> int:
        """Backward passes so far."""
        return self._state.step

    @property
    def seed(self) -> int:
        """Of the noise: the one that was given, or for a further model in a run one that follows from it.

        A `simulate.World` with this seed draws the same noise.
        """
        return self._state.seed

    def stats(self) -> dict[str, float]:
        """Bytes, effective ratio and milliseconds of this rank, summed since attach."""
        return self._state.stats.as_dict()

    def events(self) -> list[Event]:
        """The last calls, for a trace."""
        return list(self._state.stats.events)

    def rows(self) -> list[Row]:
        """Every tensor: its wire, or why it stays as it is."""
        return self._state.rows()

    def explain(self) -> str:
        """Every tensor in a table, and what travels beside the gradients."""
        return render(self.rows(), [*_notes(self._model), *self._state.warnings()])

    def errors(self) -> dict[str, ErrorReport]:
        """What the codecs lost on each gradient when it was last sampled (`sample_every`)."""
        return dict(self._state.stats.sampled)

    def check_ranks(self) -> None:
        """Compare a hash of all parameters over the ranks (collective); raise where one differs."""
        different = differing(self._state.channel, digest(self._model.module.parameters()))
        if different:
            raise RuntimeError(f"check_ranks: the parameters of ranks {different} differ from those of rank 0")

    def state_dict(self) -> dict[str, Tensor]:
        """What error feedback owes, as the mean over all ranks (collective): valid for any world size."""
        owed = self._state.memory.by_parameter()
        mean = {
            name: buckets.view_like(owed[name], p).to(p.device, copy=True, memory_format=torch.contiguous_format)
            for name, p in self._state.reduced.items()
            if name in owed
        }
        all_reduce(list(mean.values()), "fp32", dist.ReduceOp.AVG, channel=self._state.channel.called("state_dict"))
        return mean

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint owes."""
        known = self._state.reduced
        unknown = sorted(set(state) - set(known))
        if unknown:
            raise ValueError(f"load_state_dict: the model has no parameter {unknown[0]!r}; load the model's own state")
        for name, owed in state.items():
            if owed.shape != known[name].shape:
                shape = tuple(known[name].shape)
                raise ValueError(f"load_state_dict: {name} has shape {shape}, the state for it {tuple(owed.shape)}")
        self._state.memory.load({name: buckets.flat_copy(owed, known[name]) for name, owed in state.items()})

    def detach(self) -> None:
        """Back to the plain all-reduce. DDP keeps our hook; a later attach uses it again."""
        if self._hook.state is self._state:
            self._hook.state = None
        self._state.close()


def _forget(handle: Handle | None) -> None:
    """The model of a handle is gone: let go of what it sent with, which closes by itself."""
    if handle is not None:
        handle._hook.state = None
        handle._state = _Gone(handle._state)  # type: ignore[assignment]


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


def attach(
    model: torch.nn.Module,
    gradients: object,
    *,
    parameters: object = None,
    between: object = None,
    scaler: torch.amp.GradScaler | None = None,
    group: dist.ProcessGroup | None = None,
    nodes: Sequence[Sequence[int]] | None = None,
    algorithm: str = "auto",
    min_values: int = policy.MIN_VALUES,
    seed: int = 0,
    sample_every: int = 0,
    strict: bool = False,
) -> Handle:
    """Send the gradients of a DDP or FSDP2 model through codecs. Collective over the model's ranks.

    gradients: a spec, a mapping of name patterns to specs, a `schedule`, a function of (tensor info, step), or "auto":
    watch a few steps, measure the link, take 16 or 8 bits where they pay (`explain()` and the log say why; DDP only).
    parameters: the same for FSDP2's all-gather of parameters; by default they travel as they are. between: the same for
    gradients between the replicas of HSDP; by default as `gradients`.
    scaler: a GradScaler, so that error feedback survives changes of the loss scale. nodes: the ranks of each node, for
    full precision inside and few bits between. sample_every: measure what the codecs lose every so many steps (0:
    never). strict: raise where a tensor cannot be compressed.
    """
    model = uncompiled(model)
    if is_sharded(model):
        from narrowcast.parallel.fsdp.handle import attach_sharded, given

        refused = given(
            group=(group, None, "the groups are those of its mesh"),
            nodes=(nodes, None, "shard over a 2-D mesh (replicas, shards) and give between="),
            algorithm=(algorithm, "auto", "there is one way to reduce and scatter"),
        )
        options = {"scaler": scaler, "min_values": min_values, "seed": seed, "sample_every": sample_every}
        return attach_sharded(model, gradients, strict, refused, parameters=parameters, between=between, **options)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"attach: got {type(model).__name__}; wrap the model in DistributedDataParallel first, or shard it with "
            "fully_shard"
        )
    if parameters is not None or between is not None:
        raise ValueError("attach: parameters= and between= are for FSDP2; DDP sends gradients alone, leave them out")
    torch_parts.check(model)
    buckets.check_group(model, group)
    hook = _free_hook(model)

    def make(model: DistributedDataParallel, chosen: object) -> DDPState:
        made = DDPState(
            model,
            chosen,
            scaler=scaler,
            group=group,
            nodes=nodes,
            algorithm=algorithm,
            min_values=min_values,
            seed=seed,
            sample_every=sample_every,
        )
        check_strict(made, strict)
        return made

    if isinstance(gradients, str) and gradients == "auto":
        from narrowcast.parallel.auto import watch

        return watch(model, hook, make)
    state = make(model, gradients)
    try:
        register(model, hook)
    except RuntimeError:
        state.close()
        raise
    hook.state = state
    return Handle(model, hook, state)


def _free_hook(model: DistributedDataParallel) -> _Hook:
    """The model's own of an earlier attach, or a new one; raises where it is in use or another one is there."""
    hook: _Hook | None = getattr(model, "_narrowcast_hook", None)
    if hook is None and model._comm_hooks and mixed_precision.state_of(model) is None:
        raise RuntimeError("attach: the model has a communication hook already; DDP takes only one, remove that one")
    if hook is not None and hook.state is not None:
        raise RuntimeError("attach: the model is attached already; call detach() on its handle first")
    return hook or _Hook(model.process_group)


def register(model: DistributedDataParallel, hook: _Hook) -> None:
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


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model that torch.compile was given: it wraps one in a module of its own."""
    found: torch.nn.Module = getattr(model, "_orig_mod", model)
    return found


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called on a module of this model. Nobody did without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


class _Explained(Protocol):
    """A state that can say what travels how."""

    def rows(self) -> list[Row]: ...
    def unmatched(self) -> list[str]: ...
    def close(self) -> None: ...


def check_strict(state: _Explained, strict: bool) -> None:
    """Say what the policy misses and whether nothing is compressed; where strict, raise."""
    rows, missed = state.rows(), [policy.missed(pattern) for pattern in state.unmatched()]
    asked = (policy.ASKED_FOR, policy.POLICY_SAYS_SO)
    left = [row for row in rows if row.why and row.why not in asked]
    if strict and (left or missed):
        state.close()
        raise ValueError(
            f"attach with strict=True: {left[0].name} stays as it is: it {left[0].why}"
            if left
            else f"attach with strict=True: {missed[0]}"
        )
    if left and not any(row.compressed for row in rows):
        missed.append(total(rows))
    for text in missed if dist.get_rank() == 0 else ():
        log.warning("attach: %s", text)
