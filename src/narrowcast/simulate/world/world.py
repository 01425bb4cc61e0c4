"""N workers in one process: the collectives of a cluster, bit for bit, and what a study may change about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives.algorithms import record
from narrowcast.collectives.algorithms.context import Reduction
from narrowcast.collectives.algorithms.hierarchical import checked_nodes
from narrowcast.collectives.algorithms.one_shot import store
from narrowcast.collectives.api import Spec, Step, noise_of, reduction_of
from narrowcast.collectives.residuals import Residuals as Owed
from narrowcast.collectives.segments import concrete
from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.kernels.noise import derive
from narrowcast.simulate.world import primitives, sent_bytes
from narrowcast.simulate.world.algorithms import SIMULATED, Job
from narrowcast.simulate.world.residuals import Memory, Residuals
from narrowcast.simulate.world.stack import Stack, Tensors, stacked
from narrowcast.simulate.world.sums import Sums
from narrowcast.simulate.world.wire import Scales, Wire, agreed_scale_S, largest_WS, own_scales

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
ORDERS = ("cluster", "reversed", "random", "pairwise")
FLOAT32 = ("fp32", "float32")


class World:
    """`n` workers that exchange tensors through `spec`; with the defaults, exactly as real processes do.

    algorithm, nodes, inner, seed: as for `nc.all_reduce`. groups: nodes of that many neighbours. accumulate: the format
    of partial sums ("fp32" as on a cluster; "low" casts a ring's own values first, as `accumulator="low"` does); kahan:
    with Kahan's correction. order: "cluster", "reversed", "random" (another one each step), "pairwise", or a list that
    says which worker sits at each rank. docs/simulate.md defines each.
    """

    def __init__(
        self,
        n: int,
        algorithm: str = "two_shot",
        spec: Spec = "as-is",
        *,
        order: str | Sequence[int] = "cluster",
        groups: int | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
        inner: Spec = "as-is",
        accumulate: str | Format = "fp32",
        kahan: bool = False,
        seed: int = 0,
    ) -> None:
        if n < 1:
            raise ValueError(f"World: there must be one worker at least, got {n}")
        self.n, self.algorithm, self.codec, self.seed = n, algorithm, codec_named(spec), seed
        self.nodes, self.inner = _nodes(n, groups, nodes), codec_named(inner)
        self.order: str | list[int] = order if isinstance(order, str) else list(order)
        self.low = accumulate == "low"
        self.sums = Sums(_accumulator(accumulate), kahan, order == "pairwise")
        self.memory = Memory(n)
        _check_order(self.order, n)
        self.algorithm_for(self.codec, 1 << 30)

    def __repr__(self) -> str:
        return f"World({self.n}, {self.algorithm!r}, {str(self.codec)!r})"

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensors: Tensors,
        op: object = "sum",
        *,
        step: Step | None = None,
        spec: Spec | None = None,
        segments: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        unit: float = 1.0,
    ) -> Any:
        """What every worker holds afterwards, in the form of `tensors`; all are views of one result.

        tensors: W x ..., or a list with one entry for each worker, a tensor or a list of tensors (segments). op: "sum",
        "avg", a factor, or a ReduceOp. spec: instead of the world's own. segments: cuts the rows of a single tensor.
        names: of the segments, so that error feedback finds what it owes. unit: the loss scale, for error feedback.
        """
        stack = stacked("World.all_reduce", tensors, self.n, segments)
        codec = self.codec if spec is None else codec_named(spec)
        row = torch.empty_like(stack.x_Wn[0])
        self._reduce(stack, codec, self._reduction(op), step, self._residuals(codec, stack, names, unit), row)
        return stack.for_all(row)

    def reduce_scatter(self, tensors: Tensors, op: object = "sum", *, step: Step | None = None) -> list[Tensor]:
        """Worker r gets the sum of everybody's part r: of a list of W tensors, or of W equal parts of a tensor."""
        stack = stacked("World.reduce_scatter", tensors, self.n)
        return primitives.reduce_scatter(self, stack, self._reduction(op), step)

    def all_gather(self, tensors: Sequence[Tensor] | Tensor, *, step: Step | None = None) -> list[list[Tensor]]:
        """By worker: everybody's tensor as the codec brings it back; sizes may differ."""
        return primitives.all_gather(self, list(tensors), step)

    def all_to_all(self, tensors: Sequence[Sequence[Tensor]], *, step: Step | None = None) -> list[list[Tensor]]:
        """By worker: what each worker sent to it. tensors[r][p] goes from worker r to worker p."""
        return primitives.all_to_all(self, [list(row) for row in tensors], step)

    def broadcast(self, tensors: Tensors, src: int = 0, *, step: Step | None = None) -> Any:
        """What worker `src` has, as the codec brings it back, for every worker."""
        stack = stacked("World.broadcast", tensors, self.n)
        return stack.for_all(primitives.broadcast(self, stack, src, step))

    # ---- error feedback ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What error feedback owes by name, as the mean over all workers: as `Handle.state_dict`, for any n."""
        return self.memory.mean()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Every worker owes the mean now, whatever number of workers it came from."""
        self.memory.load_mean(state)

    def sent_bytes(self, segments: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        """How many bytes each worker sends in an all_reduce of such segments."""
        chosen = self.algorithm_for(self.codec, sum(segments))
        return sent_bytes.sent_bytes(chosen, self, list(segments), dtype)

    # ---- how it is done ----------------------------------------------------------------------------------------------

    def algorithm_for(self, codec: Codec, numel: int) -> str:
        """The algorithm of a call; raises where it cannot be, or cannot be simulated."""
        name = record.choose(self.algorithm, codec, numel, self.n, bool(self.nodes))
        record.check(name, codec, self.n, self.nodes)
        _check_sums(name, self.sums, self.low)
        if codec.feedback and name not in record.WITH_FEEDBACK:
            allowed = ", ".join(record.WITH_FEEDBACK)
            raise ValueError(f"World: {codec}: error feedback goes with {allowed}; got {name!r}")
        return name

    def _reduction(self, op: object) -> Reduction:
        if isinstance(op, int | float):
            return Reduction(multiply=float(op))
        return reduction_of(OPS.get(op, op) if isinstance(op, str) else op, self.n)

    def _residuals(self, codec: Codec, stack: Stack, names: Sequence[str] | None, unit: float) -> Residuals | None:
        if not codec.feedback:
            return None
        listed = tuple(names) if names is not None else tuple(str(i) for i in range(len(stack.lengths)))
        if len(listed) != len(stack.lengths):
            raise ValueError(f"World: {len(listed)} names for {len(stack.lengths)} segments; give one for each")
        found = self.memory.residuals(listed, stack.lengths, stack.x_Wn.device)
        found.unit = unit
        return found

    def _reduce(
        self, stack: Stack, codec: Codec, reduction: Reduction, step: Step | None, owed: Residuals | None, out: Tensor
    ) -> None:
        chosen = self.algorithm_for(codec, stack.x_Wn.shape[1])
        noise = noise_of("World.all_reduce", codec, self.seed, step)
        noise_of("World.all_reduce inside a node", self.inner, self.seed, step)
        if self.n == 1 or out.numel() == 0:
            # nothing travels, so nothing is rounded, and all that is owed can be paid
            total = stack.x_Wn[0].float().clone()
            if owed is None:
                store(out, reduction.finish(total))
                return
            ours = Owed(owed.first_Wn[0], owed.second_n, owed.unit)
            total = ours.pay(reduction.finish(ours.pay(total, 0)), 1)
            store(out, total)
            ours.keep(total, out, 0, (0, out.numel()), reduction.gain)
            return
        if chosen == "one_shot" and owed is not None:
            owed.fold(reduction.gain)  # before scales are found: it counts too
        scales, unit_n = self.scales(stack, codec, owed)
        job = Job(
            stack.x_Wn,
            out,
            self.wire(codec, stack),
            self.seats(step),
            noise.derive,
            scales,
            reduction,
            Sums(self.sums.format, self.sums.kahan, self.sums.pairwise, unit_n),
            owed,
            self.nodes or (),
            self.wire(self.inner, stack) if chosen == "hierarchical" else None,
            self.low,
        )
        SIMULATED[chosen](job)

    def wire(self, codec: Codec, stack: Stack) -> Wire:
        return Wire(codec, stack.lengths, stack.x_Wn.dtype, stack.x_Wn.device)

    def seats(self, step: Step | None) -> list[int]:
        """The worker at each rank."""
        if not isinstance(self.order, str):
            return self.order
        if self.order == "random":
            path = step if isinstance(step, tuple) else (step or 0,)
            made = torch.Generator().manual_seed(derive(self.seed, *path))
            return torch.randperm(self.n, generator=made).tolist()
        return list(range(self.n))[:: -1 if self.order == "reversed" else 1]

    def scales(self, stack: Stack, codec: Codec, owed: Residuals | None) -> tuple[list[Scales], Tensor | None]:
        """The scales of each worker's own values, and the unit of each value in a low-precision accumulator."""
        codec = concrete(codec, stack.x_Wn.dtype)
        if not codec.takes_scale:
            return [None] * self.n, _constant_unit(codec, stack)
        # what is owed counts too: a scale for the gradient alone would cut it off or flush it
        wanted = stack.x_Wn if owed is None else owed.wanted(stack.x_Wn, owed.first_Wn)
        top_WS = largest_WS(wanted, stack.lengths)
        if not codec.agrees_on_scales:
            return own_scales(codec, top_WS), None
        agreed_S = agreed_scale_S(codec, top_WS)
        unit_n = None
        if self.sums.format is not None:
            unit_n = agreed_S.repeat_interleave(torch.tensor(stack.lengths, device=agreed_S.device))
        return [list(agreed_S.view(-1, 1).unbind())] * self.n, unit_n


def _constant_unit(codec: Codec, stack: Stack) -> Tensor | None:
    if codec.constant_scale is None:
        return None
    return torch.full_like(stack.x_Wn[0], codec.constant_scale, dtype=torch.float32)


def _accumulator(accumulate: str | Format) -> Format | None:
    if isinstance(accumulate, Format):
        return accumulate
    return None if accumulate in (*FLOAT32, "low") else format_named(accumulate)


def _nodes(n: int, groups: int | None, nodes: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    if groups is None:
        return [list(members) for members in nodes] if nodes else None
    if nodes is not None:
        raise ValueError("World: groups= and nodes= say the same thing; give one of them")
    if groups < 1 or n % groups:
        raise ValueError(f"World: groups={groups} do not divide {n} workers; take a divisor of {n}")
    return checked_nodes([list(range(first, first + groups)) for first in range(0, n, groups)], n)


def _check_order(order: str | list[int], n: int) -> None:
    if isinstance(order, str):
        if order not in ORDERS:
            raise ValueError(f"World: unknown order {order!r}; take {', '.join(ORDERS)} or a list of all workers")
    elif sorted(order) != list(range(n)):
        raise ValueError(f"World: order={order} must name each of the workers 0 to {n - 1} once")


def _check_sums(algorithm: str, sums: Sums, low: bool) -> None:
    """Refuse what has no meaning."""
    if algorithm == "native":
        raise ValueError("World: in 'native' the backend adds in an order of its own; take 'ring' or 'two_shot'")
    if low and algorithm != "ring":
        raise ValueError(f"World: accumulate='low' is for 'ring'; {algorithm!r} always casts a worker's own values")
    if low and sums.kahan:
        raise ValueError("World: accumulate='low' and kahan=True: choose one")
    if sums.pairwise and (sums.kahan or algorithm in ("ring", "tree")):
        what = "kahan=True" if sums.kahan else f"{algorithm!r}, which has an order of its own"
        raise ValueError(f"World: order='pairwise' does not go with {what}")
    if sums.kahan and algorithm == "tree":
        raise ValueError("World: kahan=True needs one sum after another; 'tree' adds in pairs")
    if algorithm == "shared_scale" and (sums.kahan or sums.format is not None):
        raise ValueError("World: 'shared_scale' adds integers exactly; leave accumulate and kahan alone")
