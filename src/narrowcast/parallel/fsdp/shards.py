"""FSDP2 (`fully_shard`) through codecs: gradients, parameters, and HSDP's replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from narrowcast.codecs import Codec, KeptFactors
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Channel, Exchange, Reduction, Residuals, TorchTransport, all_reduce, segment_ranges
from narrowcast.parallel import policy, scaling
from narrowcast.parallel.autopilot import Autopilot, Replay
from narrowcast.parallel.autopilot.fsdp import unit_pilot
from narrowcast.parallel.fsdp import layout, optimizer_check
from narrowcast.parallel.fsdp.comm import BETWEEN, Between, Gradients, Parameters, check_parameters
from narrowcast.parallel.fsdp.layout import Sharded, Unit
from narrowcast.parallel.fsdp.matrices import factors_of, load_factors, refuse_replicas
from narrowcast.parallel.fsdp.sharded_rows import Rows, reduce_scatter
from narrowcast.parallel.fsdp.torch_parts import (
    DefaultAllGather,
    DefaultReduceScatter,
    at_end_of_backward,
    param_groups,
)
from narrowcast.parallel.policy import GRADIENT, PARAMETER, Watch
from narrowcast.parallel.probe import probe
from narrowcast.parallel.ranks import agree, digest, local_part, propagate_errors
from narrowcast.parallel.residuals import ModelResiduals, check_saved
from narrowcast.parallel.seeds import own_seed
from narrowcast.parallel.stats import Stats, TensorRow, lossy

Undo = Callable[[], None]


class FSDPState:
    """What all units of a model share: the policies, the channels, residuals and counters."""

    def __init__(
        self,
        model: nn.Module,
        gradients: object,
        *,
        parameters: object = None,
        between: object = None,
        scaler: torch.amp.GradScaler | None = None,
        min_values: int = policy.MIN_VALUES,
        seed: int = 0,
        sample_every: int = 0,
    ) -> None:
        self.model, self.units = model, layout.units(model)
        self.policies = {GRADIENT: gradients, BETWEEN: gradients if between is None else between}
        if parameters is not None:
            self.policies[PARAMETER] = parameters
        self.min_values, self.sample_every = min_values, sample_every
        self.seed = own_seed("FSDP", seed, self.units[0].mesh.mesh.mesh.flatten().tolist())
        # of the seed as it is given: a checkpoint goes on with the same factors in another object
        self.factors = KeptFactors(seed)
        self.stats = {role: Stats() for role in (GRADIENT, PARAMETER, BETWEEN)}
        self.notes: dict[tuple[int, str], str] = {}
        self.compares = False
        """Whether parameters are gathered to be compared, and not to be computed with."""
        self.gathers: list[Parameters] = []
        shard, replicas = layout.groups_of(self.units)
        self.channel = Channel(TorchTransport(shard))
        self.replicas = Channel(TorchTransport(replicas)) if replicas is not None else None
        self.row_residuals, self.replica_residuals = self._new_residuals(scaler)
        self._step, self._in_step, self._watch = 0, False, Watch(gradients, min_values)
        self._undo: list[Undo] = []
        self._trained = {tensor.name for unit in self.units for tensor in unit.tensors if tensor.trainable}
        """Those that were trainable at first: they may have residuals although they are frozen now."""
        if isinstance(gradients, Autopilot):
            gradients.claim()
        try:
            # with the channels open, so that whoever fails is heard; ranks that disagree find out here already
            with propagate_errors(*self.channels):
                agree(self.channel, "attach", policy.spelled(gradients))
                self._check(between is not None)
                self.pilot = unit_pilot(self, gradients, shard)
                device = torch.device(self.units[0].mesh.mesh.device_type)
                asks = self.channel.world > 1 and self.pilot is None
                self.probe = probe(self.channel, lossy(self.rows()), device) if asks else None
        except Exception:
            self.close()
            raise

    def _new_residuals(self, scaler: torch.amp.GradScaler | None) -> tuple[ModelResiduals, ModelResiduals]:
        """Of the reduce-scatters, by parameter and row, and of the all-reduces between replicas, by parameter."""
        world, units = self.channel.world, self.units

        def parameters() -> dict[str, Tensor]:
            return {tensor.name: tensor.private.sharded_param for unit in units for tensor in unit.tensors}

        def rows() -> dict[str, Tensor]:
            return {_key(row, name): p for name, p in parameters().items() for row in range(world)}

        replicas = self.replicas.world if self.replicas is not None else 1
        of_rows = ModelResiduals(world, scaling.watch_scaler(scaler, rows), shots=1)
        return of_rows, ModelResiduals(replicas, scaling.watch_scaler(scaler, parameters))

    @property
    def channels(self) -> tuple[Channel, Channel | None]:
        """Where others may wait for this rank."""
        return self.channel, self.replicas

    def _check(self, has_between: bool) -> None:
        for role, of in self.policies.items():
            policy.check(of, PARAMETER if role == PARAMETER else GRADIENT)
            _check_watchers(role, of, of is self.policies[GRADIENT])
        if has_between and self.replicas is None:
            shape = tuple(self.units[0].mesh.mesh.shape)
            raise ValueError(
                f"attach: between= is the wire between replicas, and the model has none: its mesh is {shape}; "
                "shard it over a 2-D mesh (replicas, shards), or leave between= out"
            )
        for unit, tensor in ((u, t) for u in self.units for t in u.tensors):
            check_parameters(unit, tensor, self.choice(unit, tensor, PARAMETER).codec)

    def choice(self, unit: Unit, tensor: Sharded, role: str) -> policy.CodecChoice:
        """The codec of one tensor in one role at this step."""
        if role not in self.policies:
            return policy.CodecChoice(policy.AS_IS, policy.ASKED_FOR)
        dtype = _dtype_in(role, unit, tensor)
        info = policy.TensorInfo(tensor.name, tensor.shape, dtype, "parameter" if role == PARAMETER else "gradient")
        choice = policy.choose(self.policies[role], info, self.step, self.min_values)
        refuse_replicas(self, tensor.name, choice.codec)
        return choice

    def rows(self) -> list[TensorRow]:
        """Every tensor in every role: its wire, or why it stays as it is."""
        roles = [GRADIENT] + [BETWEEN] * (self.replicas is not None) + [PARAMETER] * (PARAMETER in self.policies)
        return [
            self._row(unit, t, role) for role in roles for unit in self.units for t in unit.tensors if _has(t, role)
        ]

    def _row(self, unit: Unit, tensor: Sharded, role: str) -> TensorRow:
        choice, numel = self.choice(unit, tensor, role), int(torch.Size(tensor.shape).numel())
        return TensorRow.of(tensor.name, numel, choice, _dtype_in(role, unit, tensor), role, tensor.shape)

    def warnings(self) -> list[str]:
        """What else travels, what the policies miss, and where compression is likely to lose."""
        notes = [*self.notes.values(), *map(policy.no_match, self.unmatched())]
        kept = sum(map(self._kept_bytes, self.units))
        if kept:
            notes.append(f"parameters with +diff: {kept} bytes on each rank keep what was last gathered")
        if PARAMETER not in self.policies:
            notes.append("parameters: FSDP's own all-gather, as they are; give parameters= to send them in few bits")
        notes += [f"{n}: not sharded by FSDP, which leaves its gradient alone" for n in self._unsharded()]
        if isinstance(of := self.policies[GRADIENT], Autopilot | Replay):
            notes += of.notes()
        if self.channel.world == 1:
            return [*notes, "one rank: nothing travels, and nothing is rounded"]
        if self.probe is None:
            return notes
        slow = (self.probe.note(codec, values) for codec, values in lossy(self.rows()).items())
        return notes + [text for text in slow if text is not None]

    def _kept_bytes(self, unit: Unit) -> int:
        """What a rank keeps of a unit's parameters for their differences."""
        world = self.channel.world
        sizes = ((t, world * t.part(world) * t.private.gather_dtype.itemsize) for t in unit.tensors)
        return sum(size for t, size in sizes if self.choice(unit, t, PARAMETER).codec.differences) if world > 1 else 0

    def unmatched(self) -> list[str]:
        """The patterns of the policies that match no parameter."""
        names = [tensor.name for unit in self.units for tensor in unit.tensors]
        return list(dict.fromkeys(p for of in self.policies.values() for p in policy.unmatched(of, names)))

    def _unsharded(self) -> list[str]:
        return [name for name, _ in layout.unsharded_parameters(self.model, self.units)]

    @property
    def step(self) -> int:
        """Backward passes that communicated."""
        self.settle()
        return self._step

    def begin_backward(self) -> None:
        """Called by every reduce-scatter; the first of a backward pass begins a step, which ends with the pass."""
        step = self.step
        if self._in_step:
            return
        self._in_step = True
        self.row_residuals.begin_step()
        self.replica_residuals.begin_step()
        self._watch.decide(step - 1, self._sum, self.channel.world * (self.replicas.world if self.replicas else 1))
        at_end_of_backward(self.settle)

    def settle(self) -> None:
        """End the step if FSDP's backward pass is over: checkpoints run passes of autograd inside of it."""
        if self._in_step and not self.units[0].private.in_backward:
            self._in_step = False
            self._step += 1
            if self.pilot is not None:
                self.pilot.road.times.end()
            for stats in self.stats.values():
                stats.steps += 1

    def _sum(self, numbers: Tensor) -> Tensor:
        """Over all ranks, the replicas' too: all must decide alike."""
        for channel in (self.channel, self.replicas):
            if channel is not None:
                all_reduce(numbers, "as-is", algorithm="one_shot", channel=channel)
        return numbers

    def show(self, unit: Unit, tensors: Sequence[Sharded], x: Tensor) -> None:
        """Let the policies that watch see this rank's gradients."""
        if not self._watch.active or (self.pilot is not None and not self.pilot.looks(self.step)):
            return
        x_WL = x.view(self.channel.world, -1)
        for tensor, (low, high) in zip(tensors, segment_ranges([t.part(len(x_WL)) for t in tensors]), strict=True):
            info = policy.TensorInfo(tensor.name, tensor.shape, unit.reduce_dtype)
            self._watch.look(info, tensor.whole(x_WL[:, low:high]), self.step, "local")

    def residuals(self, unit: Unit, names: Sequence[str], lengths: Sequence[int], x: Tensor) -> Residuals:
        """This rank's residuals of the rows of a reduce-scatter, kept by parameter and row, in units of a gradient."""
        world = self.channel.world
        keys = tuple(_key(row, name) for row in range(world) for name in names)
        kept = self.row_residuals.residuals(keys, x.split(list(lengths) * world))
        return replace(kept, unit=kept.unit / unit.divisor)

    def residuals_between(self, unit: Unit, names: tuple[str, ...], parts: Sequence[Tensor]) -> Residuals:
        """Of an all-reduce between replicas, whose values are reduced already; kept by parameter, in the same units."""
        kept = self.replica_residuals.residuals(names, parts)
        return replace(kept, unit=kept.unit * unit.gain)

    def sample(self, name: str, gradient: Tensor, codec: Codec) -> None:
        """What a codec would lose on this gradient; it takes time, so it is off by default."""
        if self.sample_every and self.step % self.sample_every == 0:
            self.stats[GRADIENT].sample(name, gradient, codec, seed=self.seed, rank=self.channel.rank, step=self.step)

    def install(self) -> None:
        """Put our collectives into every unit."""
        for unit in self.units:
            self._install(unit)
        self._undo.append(
            optimizer_check.watch(self.model, [t.private.sharded_param for u in self.units for t in u.tensors])
        )
        lasts = [gather.last for gather in self.gathers]

        def forget(*_: object) -> None:
            for last in lasts:
                last.forget()

        for module in self.model.modules() if lasts else ():
            self._undo.append(module.register_load_state_dict_post_hook(forget).remove)

    def _install(self, unit: Unit) -> None:
        if self.pilot is not None and unit is self.units[0]:
            self._undo.append(self.model.register_forward_pre_hook(self.pilot.before_forward).remove)
        module, (reduce_scatter, all_gather, _) = unit.module, unit.private.collectives
        gradients = Gradients(self, unit, reduce_scatter)
        module.set_custom_reduce_scatter(gradients)
        self._undo.append(lambda: module.set_custom_reduce_scatter(gradients.plain))
        if PARAMETER in self.policies:
            parameters = Parameters(self, unit, all_gather)
            self.gathers.append(parameters)
            module.set_custom_all_gather(parameters)
            self._undo.append(lambda: module.set_custom_all_gather(parameters.plain))
        if self.replicas is not None:
            self._undo.append(unit.private.take_over_replicas())
            module.set_all_reduce_hook(Between(self, unit, gradients))
            self._undo.append(lambda: module.set_all_reduce_hook(None))  # type: ignore[arg-type]
        unit.watch(self.settle)
        self._undo.append(unit.unwatch)

    def close(self) -> None:
        """Back to FSDP's own collectives."""
        while self._undo:
            self._undo.pop()()
        for channel in self.channels:
            if channel is not None:
                channel.close()

    def with_residuals(self) -> list[tuple[Unit, Sharded]]:
        """The parameters that may have a residual, at whatever step."""
        if not any(policy.may_feed_back(of) for role, of in self.policies.items() if role != PARAMETER):
            return []
        every = [(unit, tensor) for unit in self.units for tensor in unit.tensors]
        return [(unit, tensor) for unit, tensor in every if tensor.trainable or tensor.name in self._trained]

    def state_dict(self) -> dict[str, Tensor]:
        """The mean of all ranks' residuals, sharded as the parameters are, and the factors of low rank (collective)."""
        rows, between = self.row_residuals.by_parameter(), self.replica_residuals.by_parameter()
        residuals = {t.name: _as_shard(t, self._mean(t, rows, between)) for _, t in self.with_residuals()}
        return residuals | factors_of(self)

    def _mean(self, tensor: Sharded, rows: Mapping[str, Tensor], between: Mapping[str, Tensor]) -> Tensor:
        """This rank's part, in units of a rank's gradient."""
        world = self.channel.world
        part = tensor.part(world)
        nothing = torch.zeros(part, dtype=torch.float32)
        x = torch.cat([rows.get(_key(row, tensor.name), nothing).cpu() for row in range(world)])
        total = torch.empty(part, dtype=torch.float32)
        plan = Rows(world, [part], [codec_named("fp32")], x.dtype)
        signature = {"call": "state_dict", "tensor": tensor.name, "length": part}

        def job(exchange: Exchange) -> None:
            total.copy_(reduce_scatter(plan, exchange, x, Reduction(divide=float(world))))

        self.channel.submit(signature, job).wait()
        if self.replicas is not None:
            total += between.get(tensor.name, nothing).cpu()
            all_reduce(total, "fp32", dist.ReduceOp.AVG, channel=self.replicas.called("state_dict"))
        return total

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Start from the mean, on every rank, whatever the world size was."""
        known = {t.name: t for _, t in self.with_residuals()}
        state, factors = KeptFactors.split(state)
        check_saved(state, {name: tensor.shape for name, tensor in known.items()})
        load_factors(self, factors)
        rows: dict[str, Tensor] = {}
        for name, value in state.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            parts = known[name].rows(whole.detach().float().cpu(), self.channel.world)
            rows |= {_key(row, name): part for row, part in enumerate(parts)}
        self.row_residuals.load(rows)
        self.replica_residuals.load({})
        for gather in self.gathers:
            gather.last.forget()


def _key(row: int, name: str) -> str:
    return f"{row}|{name}"


def _has(tensor: Sharded, role: str) -> bool:
    return role == PARAMETER or tensor.trainable


def _as_shard(tensor: Sharded, part: Tensor) -> Tensor:
    """A rank's part, less its padding, as a DTensor like the parameter, where the mesh can gather it."""
    size: torch.Size = tensor.private.sharded_size
    return tensor.private.to_sharded_dtensor(part[: size.numel()].view(size).to(tensor.private.device, copy=True))


def _dtype_in(role: str, unit: Unit, tensor: Sharded) -> torch.dtype:
    """The type in which a tensor travels."""
    return tensor.private.gather_dtype if role == PARAMETER else unit.reduce_dtype


def _check_watchers(role: str, of: object, sees_gradients: bool) -> None:
    """A policy that learns sees a rank's own gradients here, and nothing else."""
    for watcher in policy.all_watchers(of):
        name = type(watcher).__name__
        if not sees_gradients:
            raise ValueError(
                f"attach: {name} learns from a rank's gradients; as the policy of {role} it would see none"
            )
        if watcher.looks_at != "local":
            raise ValueError(f"attach: {name} looks at the mean gradient, which no rank has whole with FSDP2; use DDP")


def check_free(model: nn.Module) -> None:
    """Refuse a model that has collectives of its own, or ours."""
    for module in model.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            comms = group.collectives
            if any(isinstance(comm, (Gradients, Parameters, Between)) for comm in comms):
                raise RuntimeError("attach: the model is attached already; call detach() on its handle first")
            if type(comms[0]) is not DefaultReduceScatter or type(comms[1]) is not DefaultAllGather or comms[2]:
                raise RuntimeError(
                    "attach: the model has custom collectives or an all-reduce hook already; FSDP takes one of each, "
                    "remove those"
                )


def gathered_digest(state: FSDPState) -> Tensor:
    """A digest of all parameters as this rank sees them when they are gathered, and of what differences are taken to.

    Collective. It leaves the latter as they are.
    """
    parts, state.compares = [digest(last for gather in state.gathers for last in gather.last.memory)], True
    try:
        for unit in state.units:
            unit.module.unshard()
            parts.append(digest(local_part(whole) for whole in unit.wholes(state.channel.world)))
            unit.module.reshard()
    finally:
        state.compares = False
    return digest(parts)
