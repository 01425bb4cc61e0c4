"""The collectives of an FSDP2 module, through codecs: what `set_custom_reduce_scatter` and its kin are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.collectives import (
    Exchange,
    Reduction,
    Times,
    Work,
    agreement,
    all_reduce,
    host_waits,
    reduction_of,
    segment_ranges,
    store,
)
from narrowcast.kernels import FLOATS, Noise
from narrowcast.parallel.fsdp import sharded_rows
from narrowcast.parallel.fsdp.last_gathered import LastGathered, without_differences
from narrowcast.parallel.fsdp.layout import Sharded, Unit
from narrowcast.parallel.fsdp.matrices import Member, start_matrices
from narrowcast.parallel.fsdp.torch_parts import AllGather, ReduceScatter
from narrowcast.parallel.policy import GRADIENT, PARAMETER
from narrowcast.parallel.profiled import profiled
from narrowcast.parallel.ranks import propagate_errors
from narrowcast.parallel.seeds import seed_of
from narrowcast.parallel.stats import all_reduce_bytes, compressed_values

if TYPE_CHECKING:
    from narrowcast.parallel.fsdp.shards import FSDPState

BETWEEN = "between"
"""A third role: reduce-scatter of gradients, all-gather of parameters, all-reduce of gradients between replicas."""


class Gathering(dist.Work):
    """An all-gather under way. FSDP waits for it where it needs the parameters: compute goes on until then."""

    def __init__(self, work: Work, state: FSDPState) -> None:
        super().__init__()
        self._work, self._state = work, state

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with propagate_errors(*self._state.channels):
            return self._work.wait(timeout or None)


class _Comm:
    """What the three have in common: a unit of the model, and the state that all units share."""

    def __init__(self, state: FSDPState, unit: Unit) -> None:
        self.state, self.unit = state, unit

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _codecs(self, tensors: Sequence[Sharded], role: str) -> list[Codec]:
        return [self.state.choice(self.unit, tensor, role).codec for tensor in tensors]

    def _seed(self, role: str) -> int:
        """Of the noise: units and roles have their own, and the groups of one role that know nothing of each other.

        The parameters' is the same for all replicas, which must compute with the same ones.
        """
        state = self.state
        replica = state.replicas.rank if state.replicas is not None else 0
        group = {GRADIENT: replica, BETWEEN: state.channel.rank, PARAMETER: 0}[role]
        return seed_of(f"FSDP {state.seed} {role} {self.unit.number} {group}")

    def _rows(self, role: str, lengths: list[int], codecs: list[Codec], dtype: torch.dtype) -> sharded_rows.Rows:
        noise = Noise(self._seed(role)).derive(self.state.step)
        return sharded_rows.Rows(self.state.channel.world, lengths, codecs, dtype, noise, Times())

    def _signature(self, call: str, plan: sharded_rows.Rows, names: Sequence[str], **more: object) -> dict[str, object]:
        dtype = str(plan.dtype).removeprefix("torch.")
        specs = [codec.spec for codec in plan.codecs]
        common: dict[str, object] = {
            "version": agreement.VERSION,
            "seed": self.state.seed if any(codec.stochastic for codec in plan.codecs) else None,
        }
        common |= {"call": f"FSDP {call} of {self.unit.name or 'the root module'}"}
        return {**common, "dtype": dtype, "tensors": names, "lengths": plan.lengths, "specs": specs, **more}

    def _count(
        self, role: str, name: str, values: int, plain: int, times: Times, compressed: int
    ) -> Callable[[Work], None]:
        label = f"{name} {self.unit.name or 'root'}"
        return self.state.stats[role].counter(label, values, plain, times, compressed=compressed)


def _compressed_in(plan: sharded_rows.Rows) -> int:
    """How many values of a call with these rows travel in fewer bits than their type has."""
    lengths = zip(plan.lengths, plan.codecs, strict=True)
    return plan.world * sum(compressed_values(codec, plan.dtype, n, plan.world) for n, codec in lengths)


class Gradients(_Comm, ReduceScatter):
    """Reduce-scatter of a unit's gradients: encoded once, summed in float32 in rank order."""

    def __init__(self, state: FSDPState, unit: Unit, plain: ReduceScatter) -> None:
        super().__init__(state, unit)
        self.plain = plain
        self.last: list[Sharded] = []
        """What the last call reduced: an all-reduce between replicas goes on from there."""
        self.between: list[Codec] = []
        """With these codecs."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # on one rank FSDP asks for memory but calls nothing
        with propagate_errors(*self.state.channels):
            self.state.begin_backward()
        return super().allocate(size, dtype=dtype, device=device)

    @profiled("reduce_scatter")
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        with propagate_errors(*self.state.channels):
            self.prepare(input_tensor.numel())
            done = self._ready(input_tensor.numel())
            if input_tensor.dtype not in FLOATS or self._takes_own_road(input_tensor):
                self.plain(output_tensor, input_tensor, group, op)
            else:
                self._reduce(output_tensor.view(-1), input_tensor.view(-1), op)
            done()

    def _ready(self, values: int) -> Callable[[], None]:
        """Let an autopilot time this call."""
        pilot = self.state.pilot
        return pilot.unit(self.unit, tuple(t.name for t in self.last), values) if pilot is not None else lambda: None

    def _takes_own_road(self, x: Tensor) -> bool:
        """Whether an autopilot leaves it to FSDP, whose gradients it may want to see all the same."""
        pilot = self.state.pilot
        if pilot is None or not pilot.is_plain(self.state.step):
            return False
        self.state.show(self.unit, self.last, x.view(-1))
        return True

    def prepare(self, numel: int) -> None:
        """Find out what travels, and how it goes on: of a later failure this group no longer hears."""
        self.last = self.unit.tensors_in(numel, self.state.channel.world)
        goes_on = self.state.replicas is not None and self.unit.private.all_reduce_grads
        self.between = self._codecs(self.last, BETWEEN) if goes_on else []

    def _reduce(self, total: Tensor, x: Tensor, op: Any) -> None:
        state, world = self.state, self.state.channel.world
        codecs, reduction = self._codecs(self.last, GRADIENT), reduction_of(op, world)
        self.unit.divisor = self.unit.private.divisor_before(x.dtype, x.device)
        self.unit.gain = world * reduction.multiply / reduction.divide / self.unit.divisor
        state.show(self.unit, self.last, x)
        ranges = segment_ranges([t.part(world) for t in self.last])
        members = [Member(*one) for one in zip(self.last, codecs, ranges, strict=True)]
        matrices = [member for member in members if member.codec.rank]
        if not matrices:
            self._reduce_rows(total, x, members, reduction)
            return
        finish = start_matrices(state, self.unit, self._seed(GRADIENT), matrices, x, reduction, self._count_factors)
        rest = [member for member in members if not member.codec.rank]
        if rest:
            x_WL, parts = x.view(world, -1), [slice(*member.part) for member in rest]
            rows = torch.cat([x_WL[:, part] for part in parts], dim=1)
            own = total.new_empty(rows.shape[1])
            self._reduce_rows(own, rows.view(-1), rest, reduction)
            for part, values in zip(parts, own.split([part.stop - part.start for part in parts]), strict=True):
                total[part] = values
        finish(total)

    def _count_factors(self, values: int, plain: int, times: Times, compressed: int) -> Callable[[Work], None]:
        return self._count(GRADIENT, "all_reduce of factors", values, plain, times, compressed)

    def _reduce_rows(self, total: Tensor, x: Tensor, members: Sequence[Member], reduction: Reduction) -> None:
        """All that does not go by low rank."""
        state, world = self.state, self.state.channel.world
        codecs, names = [member.codec for member in members], [member.tensor.name for member in members]
        lengths = [member.tensor.part(world) for member in members]
        plan = self._rows(GRADIENT, lengths, codecs, x.dtype)
        residuals = state.residuals(self.unit, names, lengths, x) if any(codec.feedback for codec in codecs) else None
        for name, codec, (low, high) in zip(names, codecs, segment_ranges(lengths), strict=True):
            state.sample(name, x.view(world, -1)[:, low:high], codec)

        def job(exchange: Exchange) -> None:
            exact = sharded_rows.reduce_scatter(plan, exchange, x, reduction, residuals)
            store(total, exact)
            if residuals is not None:
                sharded_rows.keep(plan, exchange.rank, exact, total, reduction, residuals)

        plain = (world - 1) * x.numel() * x.element_size() // world
        count = self._count(GRADIENT, "reduce_scatter of gradients", x.numel(), plain, plan.times, _compressed_in(plan))
        between = [str(codec) for codec in self.between]
        signature = self._signature("reduce_scatter", plan, names, op=str(reduction), between=between)
        kept = [] if residuals is None else [residuals.first]
        # FSDP's own stream is the current one here: it waits, and this thread only until the device has the work
        waits = host_waits(codecs, x.device, x.dtype)
        work = state.channel.submit(signature, job, [x, total, *kept], waits=waits)
        work.wait()
        count(work)


def check_parameters(unit: Unit, tensor: Sharded, codec: Codec) -> None:
    """Whether parameters can travel so. Asked at every gather: a policy may choose another wire at any step."""
    if not codec.sends_all and not codec.differences:
        raise ValueError(
            f"attach: parameters of {tensor.name} have {codec}, with which most of them would be zero: write +diff, or "
            "take a wire that sends every value"
        )
    if codec.feedback:
        raise ValueError(
            f"attach: parameters of {tensor.name} have {codec}; parameters travel anew from the shard at every step, "
            "so there is no residual: leave out +ef, or write +diff"
        )
    # a second gather would bring others for backward
    if codec.differences and unit.private.reshards_after_forward:
        raise ValueError(
            f"attach: parameters of {tensor.name} have {codec}, and {unit.name or 'the root module'} is gathered again "
            "for backward; call fully_shard(..., reshard_after_forward=False) on it (on the root, too: it must be "
            "written there), or leave out +diff"
        )


class Parameters(_Comm, AllGather):
    """All-gather of a unit's parameters: every rank decodes the same bytes, its own too."""

    def __init__(self, state: FSDPState, unit: Unit, plain: AllGather) -> None:
        super().__init__(state, unit)
        self.plain = plain
        self.last = LastGathered()

    @profiled("all_gather")
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world = self.state.channel.world
        lengths = self.unit.gathered_lengths(group.size(), world)
        if self._left_out(input_tensor, group, lengths):
            return self.plain(output_tensor, input_tensor, group, async_op)
        with propagate_errors(*self.state.channels):
            return self._gather(output_tensor.view(-1), input_tensor.view(-1), lengths)

    def _gather(self, out: Tensor, own: Tensor, lengths: list[int]) -> Gathering:
        world = self.state.channel.world
        codecs, names = self._codecs(self.unit.tensors, PARAMETER), [t.name for t in self.unit.tensors]
        for tensor, codec in zip(self.unit.tensors, codecs, strict=True):
            check_parameters(self.unit, tensor, codec)
        plan, job = self._plan(lengths, codecs, own, out)

        plain = (world - 1) * own.numel() * own.element_size()
        values, compressed = own.numel() * world, _compressed_in(plan)
        count = self._count(PARAMETER, "all_gather of parameters", values, plain, plan.times, compressed)
        waits = host_waits(codecs, own.device, own.dtype)
        memory = [own, out, *self.last.memory]
        work = self.state.channel.submit(self._signature("all_gather", plan, names), job, memory, waits=waits)
        work.then(count)
        return Gathering(work, self.state)

    def _plan(
        self, lengths: list[int], codecs: list[Codec], own: Tensor, out: Tensor
    ) -> tuple[sharded_rows.Rows, Callable[[Exchange], None]]:
        """How the rows travel, and the call. Differences begin with a gather of the parameters as they are."""
        plan, last = self._rows(PARAMETER, lengths, codecs, own.dtype), self.last
        if not any(codec.differences for codec in codecs):
            last.forget()
            return plan, lambda exchange: sharded_rows.all_gather(plan, exchange, own, out)
        if last.knows(plan.runs, own.dtype) and not self.state.compares:
            return plan, lambda exchange: sharded_rows.all_gather(plan, exchange, own, out, last)
        whole, is_look = self._rows(PARAMETER, lengths, without_differences(codecs), own.dtype), self.state.compares

        def job(exchange: Exchange) -> None:
            sharded_rows.all_gather(whole, exchange, own, out)
            if not is_look:
                last.learn(plan.runs, out.view(plan.world, -1))

        return whole, job

    def _left_out(self, own: Tensor, group: dist.ProcessGroup, lengths: list[int]) -> bool:
        """Whether FSDP's own all-gather takes this one; explain() says why."""
        reason = ""
        if group.size() != self.state.channel.world:
            reason = f"gathered again over {group.size()} ranks in backward, as they are: they were rounded in forward"
        elif own.dtype not in FLOATS:
            reason = f"gathered as {own.dtype}, which holds several types; codecs take 16- and 32-bit floats"
        elif sum(lengths) != own.numel():
            reason = "gathered by an extension of their own, as they are"
        if reason:
            self.state.notes[self.unit.number, PARAMETER] = f"parameters of {self.unit.name or 'the root'}: {reason}"
        return bool(reason)


class Between(_Comm):
    """For HSDP: the all-reduce between replicas, as FSDP's all-reduce hook. Gets a rank's shard after its sum."""

    def __init__(self, state: FSDPState, unit: Unit, gradients: Gradients) -> None:
        super().__init__(state, unit)
        self.gradients = gradients
        self._partial: Tensor | None = None

    def __call__(self, shard: Tensor) -> None:
        if not self.unit.private.all_reduce_grads:
            self._keep(shard)
            return
        if self._partial is not None:
            shard.add_(self._partial)
            self._partial = None
        with propagate_errors(*self.state.channels):
            self._reduce(shard.view(-1))

    def _keep(self, shard: Tensor) -> None:
        """set_requires_all_reduce(False): later. FSDP adds to `.grad` what we leave in the shard, so leave nothing."""
        self._partial = shard.clone() if self._partial is None else self._partial.add_(shard)
        shard.zero_()

    def _reduce(self, flat: Tensor) -> None:
        state = self.state
        if state.channel.world == 1:
            # FSDP called no reduce-scatter
            self.gradients.prepare(flat.numel())
        tensors, codecs = self.gradients.last, self.gradients.between
        ranges = segment_ranges([t.part(state.channel.world) for t in tensors])
        parts: dict[Codec, list[tuple[str, Tensor]]] = {}
        for tensor, codec, (low, high) in zip(tensors, codecs, ranges, strict=True):
            parts.setdefault(codec, []).append((tensor.name, flat[low:high]))
        works = [self._start(i, codec, members, flat) for i, (codec, members) in enumerate(parts.items())]
        for work in works:
            work.wait()

    def _start(self, number: int, codec: Codec, members: list[tuple[str, Tensor]], flat: Tensor) -> Work:
        state, times = self.state, Times()
        channel = state.replicas
        assert channel is not None
        names, tensors = tuple(name for name, _ in members), [tensor for _, tensor in members]
        numel = sum(tensor.numel() for tensor in tensors)
        plain = all_reduce_bytes(numel, flat.element_size(), channel.world)
        compressed = compressed_values(codec, flat.dtype, numel, channel.world)
        count = self._count(BETWEEN, "all_reduce between replicas", numel, plain, times, compressed)
        work = all_reduce(
            tensors,
            codec,
            # FSDP divides by its own factor where it was given one
            dist.ReduceOp.AVG if self.unit.private.gradient_divide_factor is None else dist.ReduceOp.SUM,
            async_op=True,
            step=(state.step, number),
            seed=self._seed(BETWEEN),
            residuals=state.residuals_between(self.unit, names, tensors) if codec.feedback else None,
            times=times,
            channel=channel,
            buffer=flat if numel == flat.numel() else None,
        )
        assert work is not None
        work.then(count)
        return work
