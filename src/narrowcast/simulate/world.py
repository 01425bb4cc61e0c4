"""N workers in one process: the collectives of a cluster, bit for bit, and what a study may change about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec, KeptFactors, Matrix, refuse_differences, refuse_low_rank
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import (
    ALGORITHMS,
    Algorithm,
    Coder,
    Order,
    Reduction,
    Scales,
    Spec,
    StackedResiduals,
    Step,
    SumRule,
    Workers,
    agreed_scale_S,
    noise_of,
    record,
    reduction_of,
    segment_ranges,
    store,
)
from narrowcast.formats import Format
from narrowcast.formats import format as format_named
from narrowcast.kernels import FLOATS, Noise, derive
from narrowcast.simulate.low_rank import MatrixCall
from narrowcast.simulate.stack import Stack, Tensors, WorldResiduals, flat_row, largest_WS, own_scales, stacked

OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
ORDERS = ("cluster", "reversed", "random", "pairwise")


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
        wide = accumulate in ("fp32", "float32", "low")
        narrow = format_named(accumulate) if isinstance(accumulate, str) and not wide else accumulate
        self.sums = SumRule(narrow if isinstance(narrow, Format) else None, kahan, order == "pairwise")
        self.residuals, self.factors = WorldResiduals(n), KeptFactors(seed)
        self._algorithms: dict[tuple[str, Codec, int], str] = {}
        if isinstance(order, str) and order not in ORDERS:
            raise ValueError(f"World: unknown order {order!r}; take {', '.join(ORDERS)} or a list of all workers")
        if not isinstance(order, str) and sorted(order) != list(range(n)):
            raise ValueError(f"World: order={order} must name each of the workers 0 to {n - 1} once")
        self.algorithm_for(self.codec, 1 << 30)

    def __repr__(self) -> str:
        return f"World({self.n}, {self.algorithm!r}, {str(self.codec)!r})"

    def all_reduce(
        self,
        tensors: Tensors,
        op: object = "sum",
        *,
        step: Step | None = None,
        spec: Spec | None = None,
        inner: Spec | None = None,
        segments: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
        matrices: Sequence[Matrix] | None = None,
        unit: float = 1.0,
    ) -> Any:
        """What every worker holds afterwards, in the form of `tensors`; all are views of one result.

        tensors: W x ..., or a list with one entry for each worker, a tensor or a list of tensors (segments). op: "sum",
        "avg", a factor, or a ReduceOp. spec, inner: instead of the world's own. segments: cuts the rows of a single
        tensor. names: of the segments, so that error feedback finds their residuals, and low rank their factors.
        matrices: the shapes of segments that are matrices, for low rank. unit: the loss scale, for error feedback.
        """
        stack = stacked("World.all_reduce", tensors, self.n, segments)
        codec = self.codec if spec is None else codec_named(spec)
        inside = self.inner if inner is None else codec_named(inner)
        out, reduction = torch.empty_like(stack.x_Wn[0]), self._reduction(op)
        residuals = self._residuals_of(codec, stack, names, unit)
        if codec.rank:
            call = MatrixCall.of(stack, out, reduction, self._names(stack, names), matrices)
            self._reduce_matrices(call, codec, inside, step, residuals)
            return stack.for_all(out)
        algorithm = ALGORITHMS[self.algorithm_for(codec, out.numel())]
        noise = noise_of("World.all_reduce", codec, self.seed, step)
        record.check_inner(codec, inside)
        if inside.stochastic:
            noise_of("World.all_reduce inside a node", inside, self.seed, step)
        if self.n == 1 or out.numel() == 0:
            record.reduce_alone(stack.x_Wn[0], out, reduction, residuals.of_one() if residuals else None)
            return stack.for_all(out)
        if algorithm.residual_shots == 1 and residuals is not None:
            residuals.fold(reduction.gain)  # before scales are found: it counts too
        workers = self._workers(stack, out, codec, reduction, step, noise, residuals)
        if algorithm.takes_nodes:
            workers.nodes, workers.inner = self.nodes or (), stack.coder(inside)
            workers.noise = noise.derive if inside.stochastic else workers.noise
        assert algorithm.simulate is not None
        algorithm.simulate(workers)
        return stack.for_all(out)

    def _reduce_matrices(
        self, call: MatrixCall, codec: Codec, inside: Codec, step: Step | None, residuals: StackedResiduals | None
    ) -> None:
        """By low rank: factors are summed as tensors of their own."""
        path = step if isinstance(step, tuple) else (step or 0,)
        how: dict[str, Any] = {"spec": codec.factors, "inner": replace(inside, feedback=False)}

        def add(factors_Wn: Tensor, lengths: list[int], number: int) -> Tensor:
            total: Tensor = self.all_reduce(factors_Wn, call.reduction, step=(*path, number), segments=lengths, **how)[
                0
            ]
            return total

        call.run(codec, self.factors, residuals, add)

    def reduce_scatter(self, tensors: Tensors, op: object = "sum", *, step: Step | None = None) -> list[Tensor]:
        """Worker r gets the sum of everybody's part r: of a list of W tensors, or of W equal parts of a tensor."""
        noise = self._plain_noise("reduce_scatter", step)
        stack = _with_a_part_for_each(stacked("World.reduce_scatter", tensors, self.n), self.n)
        ranges, out, reduction = segment_ranges(stack.lengths), torch.empty_like(stack.x_Wn[0]), self._reduction(op)
        workers = self._workers(stack, out, self.codec, reduction, step, noise)
        store(out, reduction.finish(workers.sum_of_own(ranges)))
        parts = stack.shaped(out) if not stack.is_one_tensor else None
        # a list of tensors gives back tensors of their shapes, one tensor flat parts of it
        return list(parts) if isinstance(parts, list) else [out[low:high] for low, high in ranges]

    def all_gather(self, tensors: Sequence[Tensor] | Tensor, *, step: Step | None = None) -> list[list[Tensor]]:
        """By worker: everybody's tensor as the codec brings it back; sizes may differ."""
        noise, parts = self._plain_noise("all_gather", step), list(tensors)
        _check_each("all_gather", parts, self.n)
        arrived = _passages(self.codec, parts, [noise.derive(worker, 1) for worker in range(self.n)])
        return [list(arrived) for _ in range(self.n)]

    def all_to_all(self, tensors: Sequence[Sequence[Tensor]], *, step: Step | None = None) -> list[list[Tensor]]:
        """By worker: what each worker sent to it. tensors[r][p] goes from worker r to worker p."""
        noise, rows, sent = self._plain_noise("all_to_all", step), [list(row) for row in tensors], []
        if len(rows) != self.n or any(len(row) != self.n for row in rows):
            raise ValueError(f"World.all_to_all: give a list of {self.n} tensors for each of the {self.n} workers")
        for worker, row in enumerate(rows):
            _check_each("all_to_all", row, self.n)
            sent.append(_passages(self.codec, row, [noise.derive(worker, 0)] * self.n))
        return [[sent[source][target] for source in range(self.n)] for target in range(self.n)]

    def broadcast(self, tensors: Tensors, src: int = 0, *, step: Step | None = None) -> Any:
        """What worker `src` has, as the codec brings it back, for every worker."""
        stack, noise = stacked("World.broadcast", tensors, self.n), self._plain_noise("broadcast", step)
        if not 0 <= src < self.n:
            raise ValueError(f"World.broadcast: there is no worker {src} among {self.n}")
        own, whole = stack.x_Wn[src], (0, stack.x_Wn.shape[1])
        out = torch.empty_like(own)
        stack.coder(self.codec).passage(own, whole, noise.derive(src, 0), None, out)
        return stack.for_all(out)

    def state_dict(self) -> dict[str, Tensor]:
        """Residuals of error feedback by name, as the mean over all workers: as `Handle.state_dict`, for any n."""
        return self.residuals.mean() | self.factors.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Every worker has the mean now, whatever number of workers it came from."""
        own, factors = KeptFactors.split(state)
        self.residuals.load_mean(own)
        self.factors.load(factors)

    def sent_bytes(
        self,
        segments: Sequence[int],
        dtype: torch.dtype = torch.float32,
        matrices: Sequence[Matrix] | None = None,
    ) -> list[int]:
        """How many bytes each worker sends in an all_reduce of such segments. matrices: their shapes, for low rank."""
        if self.codec.rank:
            return self._sent_factor_bytes(matrices)
        name, inner = self.algorithm_for(self.codec, sum(segments)), Coder(self.inner, segments, dtype)
        setting = record.Setting(Coder(self.codec, segments, dtype), self.n, self.nodes or (), inner)
        return record.sent_bytes(name, setting)

    def _sent_factor_bytes(self, matrices: Sequence[Matrix] | None) -> list[int]:
        """Of both factors; with one of them a call, half of that."""
        if matrices is None:
            raise ValueError(f"World.sent_bytes with {self.codec}: bytes follow from shapes; give matrices=")
        total, factors = (
            [0] * self.n,
            World(self.n, self.algorithm, self.codec.factors, nodes=self.nodes, inner=self.inner),
        )
        for on_left in (True, False):
            sent = factors.sent_bytes([self.codec.rank * matrix.length(on_left) for matrix in matrices])
            total = [before + more for before, more in zip(total, sent, strict=True)]
        return [count // 2 for count in total] if self.codec.sends_one_factor else total

    def algorithm_for(self, codec: Codec, numel: int) -> str:
        """The algorithm of a call; raises where it cannot be, or cannot be simulated."""
        codec = codec.factors
        known = self._algorithms.get((self.algorithm, codec, numel))
        if known is not None:
            return known
        name = record.choose(self.algorithm, codec, numel, self.n, bool(self.nodes))
        record.check(name, codec, self.n, self.nodes, "World")
        _check_sums(ALGORITHMS[name], self.sums)
        if self.low:
            record.check_accumulator(name, "World: accumulate", "casts a worker's own values")
        if self.low and self.sums.kahan:
            raise ValueError("World: accumulate='low' and kahan=True: choose one")
        self._algorithms[self.algorithm, codec, numel] = name
        return name

    def _reduction(self, op: object) -> Reduction:
        if isinstance(op, Reduction):
            return op
        if isinstance(op, int | float):
            return Reduction(multiply=float(op))
        return reduction_of(OPS.get(op, op) if isinstance(op, str) else op, self.n)

    def _plain_noise(self, what: str, step: Step | None) -> Noise:
        """The noise of a call that keeps nothing from one to the next."""
        refuse_low_rank(f"World.{what}", self.codec)
        refuse_differences(f"World.{what}", self.codec)
        if self.codec.feedback:
            raise ValueError(f"World.{what} with {self.codec}: only all_reduce has error feedback; leave out +ef")
        return noise_of(f"World.{what}", self.codec, self.seed, step)

    def _residuals_of(
        self, codec: Codec, stack: Stack, names: Sequence[str] | None, unit: float
    ) -> StackedResiduals | None:
        if not codec.feedback:
            return None
        residuals = self.residuals.of_group(self._names(stack, names), stack.lengths, stack.x_Wn.device)
        residuals.unit = unit
        return residuals

    def _names(self, stack: Stack, names: Sequence[str] | None) -> tuple[str, ...]:
        listed = tuple(names) if names is not None else tuple(str(i) for i in range(len(stack.lengths)))
        if len(listed) != len(stack.lengths):
            raise ValueError(f"World: {len(listed)} names for {len(stack.lengths)} segments; give one for each")
        return listed

    def _workers(
        self,
        stack: Stack,
        out: Tensor,
        codec: Codec,
        reduction: Reduction,
        step: Step | None,
        noise: Noise,
        residuals: StackedResiduals | None = None,
    ) -> Workers:
        scales, unit_n = self.scales(stack, codec, residuals)
        sums = self.sums if unit_n is None else replace(self.sums, unit_n=unit_n)
        seats, coder = self.seats(step), stack.coder(codec)
        by_worker = noise.derive if codec.stochastic else lambda worker, phase: noise
        return Workers(stack.x_Wn, out, coder, seats, by_worker, scales, reduction, sums, residuals, low=self.low)

    def seats(self, step: Step | None) -> list[int]:
        """The worker at each rank."""
        if not isinstance(self.order, str):
            return self.order
        if self.order == "random":
            path = step if isinstance(step, tuple) else (step or 0,)
            generator = torch.Generator().manual_seed(derive(self.seed, *path))
            return torch.randperm(self.n, generator=generator).tolist()
        return list(range(self.n))[:: -1 if self.order == "reversed" else 1]

    def scales(
        self, stack: Stack, codec: Codec, residuals: StackedResiduals | None
    ) -> tuple[list[Scales], Tensor | None]:
        """The scales of each worker's own values, and the unit of each value in a low-precision accumulator."""
        if not codec.takes_scale:
            constant = codec.constant_scale
            unit = None if constant is None else torch.full_like(stack.x_Wn[0], constant, dtype=torch.float32)
            return [None] * self.n, unit
        # residuals count too: a scale for the gradient alone would cut them off or flush them
        top_WS = largest_WS(
            stack.x_Wn if residuals is None else residuals.added_to(stack.x_Wn, codec.decay), stack.lengths
        )
        if not codec.agrees_on_scales:
            return own_scales(codec, top_WS), None
        agreed_S = agreed_scale_S(codec, top_WS)
        unit_n = None
        if self.sums.format is not None:
            unit_n = agreed_S.repeat_interleave(torch.tensor(stack.lengths, device=agreed_S.device))
        return [list(agreed_S.view(-1, 1).unbind())] * self.n, unit_n


def _nodes(n: int, groups: int | None, nodes: Sequence[Sequence[int]] | None) -> list[list[int]] | None:
    if groups is None:
        return [list(members) for members in nodes] if nodes else None
    if nodes is not None:
        raise ValueError("World: groups= and nodes= say the same thing; give one of them")
    if groups < 1 or n % groups:
        raise ValueError(f"World: groups={groups} do not divide {n} workers; take a divisor of {n}")
    return [list(range(first, first + groups)) for first in range(0, n, groups)]


def _check_sums(algorithm: Algorithm, sums: SumRule) -> None:
    """Refuse what has no meaning."""
    name, order = repr(algorithm.name), algorithm.order
    if algorithm.simulate is None:
        raise ValueError(f"World: in {name} the backend adds in an order of its own; take 'ring' or 'two_shot'")
    if sums.pairwise and (sums.kahan or order in (Order.RING, Order.PAIRS)):
        what = "kahan=True" if sums.kahan else f"{name}, which has an order of its own"
        raise ValueError(f"World: order='pairwise' does not go with {what}")
    if sums.kahan and order is Order.PAIRS:
        raise ValueError(f"World: kahan=True needs one sum after another; {name} adds in pairs")
    if order is Order.EXACT and (sums.kahan or sums.format is not None):
        raise ValueError(f"World: {name} adds integers exactly; leave accumulate and kahan alone")


def _with_a_part_for_each(stack: Stack, world: int) -> Stack:
    if len(stack.lengths) == world and world > 1:
        return stack
    numel = stack.x_Wn.shape[1]
    if len(stack.lengths) > 1:
        raise ValueError(
            f"World.reduce_scatter: got a list of {len(stack.lengths)} tensors for {world} workers; give one for each"
        )
    if numel % world:
        raise ValueError(f"World.reduce_scatter: {numel} values do not divide into {world} parts; pad, or give a list")
    return Stack(stack.x_Wn, [numel // world] * world, stack.shaped, is_one_tensor=world > 1 or stack.is_one_tensor)


def _passages(codec: Codec, tensors: Sequence[Tensor], noises: Sequence[Noise]) -> list[Tensor]:
    """What arrives of each tensor, encoded by itself at its place in the whole."""
    coder, flat = Coder(codec, [t.numel() for t in tensors], tensors[0].dtype), flat_row(tensors)
    out = torch.empty_like(flat)
    for (low, high), noise in zip(coder.segments, noises, strict=True):
        coder.passage(flat[low:high], (low, high), noise, None, out[low:high])
    return [out[low:high].view(t.shape) for t, (low, high) in zip(tensors, coder.segments, strict=True)]


def _check_each(what: str, tensors: Sequence[Tensor], world: int) -> None:
    if len(tensors) != world:
        raise ValueError(f"World.{what}: got {len(tensors)} tensors for {world} workers; give one for each")
    if len({(t.dtype, t.device) for t in tensors}) > 1 or tensors[0].dtype not in FLOATS:
        raise TypeError(f"World.{what}: all tensors must be float32, float16 or bfloat16, of one type, on one device")
