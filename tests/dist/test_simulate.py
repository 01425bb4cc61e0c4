"""Law 9: the simulator holds the bits of real processes, for every algorithm that exists in both."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from dist.algorithms import simulated_names, specs_for
from dist.pool import Pool
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives import Residuals
from narrowcast.collectives.algorithms.record import ALGORITHMS
from narrowcast.simulate import World

SPECS = ("e5m2+aps", "int4/128+sr+ef", "dtree8", "mxfp4", "int8/64+top16+sr+ef95", "bf16/128+top9", "int4/64+spike2+ef")
STEPS, SEED = 3, 11

SEGMENTS: dict[str, list[tuple[int, ...]]] = {
    "one odd tensor": [(1237,)],
    "segments": [(33, 7), (1,), (0,), (400,), (129,)],
    "shorter than the world": [(3,)],
}


@dataclass(frozen=True)
class Case:
    algorithm: str
    spec: str
    segments: str = "segments"
    dtype: torch.dtype = torch.float32
    average: bool = True
    low: bool = False
    node: int = 0
    inner: str = "as-is"
    bad: float | None = None
    """A value that is not finite, on one worker at one step."""
    huge: bool = False
    """Every third value is so large that sums of them leave float32."""

    def nodes(self, world: int) -> list[list[int]] | None:
        if not self.node:
            return None
        return [list(range(first, first + self.node)) for first in range(0, world, self.node)]

    def tensors(self, worker: int, step: int) -> list[Tensor]:
        made = torch.Generator().manual_seed(1000 * step + worker)
        found = []
        for shape in SEGMENTS[self.segments]:
            size = 2.0 ** torch.randint(-8, 4, shape, generator=made)
            found.append((torch.randn(shape, generator=made) * size).to(self.dtype))
            if self.huge:
                flat = found[-1].view(-1)
                flat[::3] = torch.finfo(self.dtype).max * torch.where(flat[::3] < 0.5, 1.0, -1.0)
        if self.bad is not None and worker == 1 and step == 1:
            found[0].view(-1)[2] = self.bad
        return found

    def world(self, n: int) -> World:
        groups = self.node or None
        accumulate = "low" if self.low else "fp32"
        return World(n, self.algorithm, self.spec, groups=groups, inner=self.inner, accumulate=accumulate, seed=SEED)


def bits(tensors: list[Tensor]) -> bytes:
    """With one NaN for all: which of its payloads survives a sum, the processor decides."""
    flat = torch.cat([t.reshape(-1) for t in tensors])
    return torch.where(flat.isnan(), torch.nan, flat).contiguous().view(torch.uint8).numpy().tobytes()


def real(group: dist.ProcessGroup, cases: list[Case]) -> list[tuple[list[bytes], bytes, bytes]]:
    """On one rank: the result of each step, and what is owed in the end."""
    rank, world, found = dist.get_rank(group), dist.get_world_size(group), []
    for case in cases:
        ef = nc.codec(case.spec).feedback
        residuals = Residuals.zeros(sum(t.numel() for t in case.tensors(0, 0))) if ef else None
        results = []
        for step in range(STEPS):
            tensors = case.tensors(rank, step)
            nc.all_reduce(
                tensors,
                case.spec,
                dist.ReduceOp.AVG if case.average else dist.ReduceOp.SUM,
                group,
                algorithm=case.algorithm,
                step=step,
                seed=SEED,
                nodes=case.nodes(world),
                inner=case.inner,
                accumulator="low" if case.low else "float32",
                residuals=residuals,
            )
            results.append(bits(tensors))
        owed = (bits([residuals.first]), bits([residuals.second])) if residuals else (b"", b"")
        found.append((results, *owed))
    return found


def check(pool: Pool, world: int, cases: list[Case]) -> None:
    ranks = pool.run(world, real, cases)
    for number, case in enumerate(cases):
        simulated = case.world(world)
        for step in range(STEPS):
            workers = [case.tensors(worker, step) for worker in range(world)]
            got = simulated.all_reduce(workers, "avg" if case.average else "sum", step=step)
            for rank in range(world):
                assert bits(got[rank]) == ranks[rank][number][0][step], f"{case}, step {step}: rank {rank} differs"
        if simulated.codec.feedback:
            check_owed(case, simulated, [ranks[rank][number] for rank in range(world)])


def check_owed(case: Case, simulated: World, ranks: list[tuple[list[bytes], bytes, bytes]]) -> None:
    names = tuple(str(i) for i in range(len(SEGMENTS[case.segments])))
    lengths = [torch.Size(shape).numel() for shape in SEGMENTS[case.segments]]
    owed = simulated.residuals.of_group(names, lengths, torch.device("cpu"))
    second = torch.zeros_like(owed.first_Wn)
    for owner, (low, high) in owed.owners:
        second[owner, low:high] = owed.second_n[low:high]
    for rank, (_, first_bits, second_bits) in enumerate(ranks):
        assert bits([owed.first_Wn[rank]]) == first_bits, f"{case}: rank {rank} owes something else"
        assert bits([second[rank]]) == second_bits, f"{case}: rank {rank} owes something else for its shard"


def cases_of(world: int, specs: tuple[str, ...]) -> list[Case]:
    """Every algorithm with every spec that it takes, and every kind of segments."""
    cases = []
    for name in simulated_names(world):
        sizes = [k for k in (1, 2, 4, world) if world % k == 0 and k <= world]
        ways = [{"node": k, "inner": inner} for k in sizes for inner in ("as-is", "int4/16+sr")]
        for spec in specs_for(name, specs, world):
            if ALGORITHMS[name].takes_nodes:
                cases += [Case(name, spec, **way) for way in ways]
                cases += fed_back(name, spec, sizes) if nc.codec(spec).feedback else []
                continue
            cases += [Case(name, spec, segments) for segments in SEGMENTS]
            cases.append(Case(name, spec, dtype=torch.bfloat16, average=False))
            if ALGORITHMS[name].takes_accumulator:
                cases.append(Case(name, spec, low=True))
    return cases


def fed_back(name: str, spec: str, sizes: list[int]) -> list[Case]:
    """Error feedback between nodes and inside of them, in nodes of all sizes, in 16 bits, where shards are empty."""
    inners = ("as-is", "int4/16+sr", "int4/16+sr+ef", "int4+ef")
    cases = [Case(name, spec, node=k, inner="int4/16+sr+ef") for k in sizes]
    cases += [Case(name, spec, dtype=torch.bfloat16, node=sizes[-2], inner=inner) for inner in inners]
    cases += [Case(name, "e3m0+aps+ef", node=sizes[-2], inner=inner, average=False) for inner in inners]
    return [*cases, Case(name, spec, "shorter than the world", node=sizes[-2], inner="int4/16+ef")]


# the two that differ most, a scale for the tensor and one a block with noise and feedback, and all on three ranks
SHORT = [(2, SPECS[:2]), (3, (*SPECS, "int8/64")), (4, SPECS[:2])]
LONG = [(2, (*SPECS[2:], "int8/64")), (4, SPECS[2:5]), (8, SPECS[:2])]


@pytest.mark.parametrize("world, specs", [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)])
def test_a_world_holds_the_bits_of_real_processes(pool: Pool, world: int, specs: tuple[str, ...]) -> None:
    check(pool, world, cases_of(world, specs))


BAD = (*SPECS, "as-is", "int8/32+se8m0", "nvfp4", "int8/64")


@pytest.mark.parametrize(
    "bad, specs",
    [
        *((torch.nan, BAD[::2]), (torch.inf, BAD[1::2])),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((torch.nan, BAD[1::2]), (torch.inf, BAD[::2]))),
    ],
)
def test_non_finite_values_go_the_same_way(pool: Pool, bad: float, specs: tuple[str, ...]) -> None:
    check(
        pool,
        4,
        [
            Case(name, spec, bad=bad, node=2 if ALGORITHMS[name].takes_nodes else 0)
            for name in simulated_names(4)
            for spec in specs_for(name, specs, 4)
        ],
    )


@pytest.mark.parametrize("average", [False, True])
def test_sums_that_are_too_large_are_held_in_the_same_way(pool: Pool, average: bool) -> None:
    specs = ("as-is", "bf16+ef", "int4/128+sr+ef", "nvfp4", "int8", "int8/64")
    cases = []
    for name in simulated_names(4):
        options = {"average": average, "huge": True, "node": 2 if ALGORITHMS[name].takes_nodes else 0}
        dtypes = (torch.float32, torch.bfloat16) * 3
        cases += [
            Case(name, spec, dtype=dtype, **options)
            for spec, dtype in zip(specs_for(name, specs, 4), dtypes, strict=False)
        ]
    check(pool, 4, cases)
    for case in cases:
        workers = [case.tensors(worker, 0) for worker in range(4)]
        found = case.world(4).all_reduce(workers, "avg" if average else "sum", step=0)
        assert all(tensor.isfinite().all() for tensor in found[0]), case


CHUNKED = ("e5m2+aps", "int4/128+sr+ef", "int8")


def chunks(group: dist.ProcessGroup, numel: int) -> list[bytes]:
    found = []
    for spec in CHUNKED:
        residuals = Residuals.zeros(numel) if nc.codec(spec).feedback else None
        x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank(group)))
        nc.all_reduce(
            list(x.split([numel // 3, numel - numel // 3])),
            spec,
            group=group,
            algorithm="two_shot",
            step=1,
            residuals=residuals,
            buffer=x,
        )
        found.append(bits([x]))
    return found


def test_a_large_tensor_is_cut_into_the_same_chunks(pool: Pool) -> None:
    numel = 1_500_007
    ranks = pool.run(2, chunks, numel)
    x = torch.stack([torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(2)])
    for number, spec in enumerate(CHUNKED):
        got = World(2, "two_shot", spec).all_reduce(x, step=1, segments=[numel // 3, numel - numel // 3])
        assert bits([got[0]]) == ranks[0][number] == ranks[1][number], spec


PLAIN = ("e5m2+aps", "int4/128+sr", "dtree8", "mxfp4", "as-is", "nvfp4")


def values(worker: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(77 + worker))


def lengths_of(world: int) -> list[int]:
    return [(53 * rank) % 150 for rank in range(world)]


def others(group: dist.ProcessGroup) -> list[list[Tensor]]:
    rank, world, found = dist.get_rank(group), dist.get_world_size(group), []
    lengths = lengths_of(world)
    for spec in PLAIN:
        options = {"group": group, "step": 4, "seed": SEED}
        scattered, equal = torch.empty(lengths[rank]), torch.empty(40)
        nc.reduce_scatter(
            scattered, list(values(rank, sum(lengths)).split(lengths)), spec, dist.ReduceOp.AVG, **options
        )
        nc.reduce_scatter(equal, values(rank, 40 * world), spec, **options)
        gathered = [torch.empty(n) for n in lengths]
        nc.all_gather(gathered, values(rank, lengths[rank]), spec, **options)
        sent = list(values(rank, 30 * world).split(30))
        arrived = [torch.empty(30) for _ in range(world)]
        nc.all_to_all(arrived, sent, spec, **options)
        shared = [values(rank, 100), values(rank + 9, 33)]
        nc.broadcast(shared, spec, group_src=1, **options)
        found.append([scattered, equal, torch.cat(gathered), torch.cat(arrived), torch.cat(shared)])
    return found


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_other_collectives_hold_the_bits_of_real_processes(pool: Pool, world: int) -> None:
    ranks, lengths, every = pool.run(world, others), lengths_of(world), range(world)
    for number, spec in enumerate(PLAIN):
        simulated = World(world, spec=spec, seed=SEED)
        parts = [list(values(worker, sum(lengths)).split(lengths)) for worker in every]
        scattered = simulated.reduce_scatter(parts, "avg", step=4)
        equal = simulated.reduce_scatter(torch.stack([values(worker, 40 * world) for worker in every]), step=4)
        gathered = simulated.all_gather([values(worker, lengths[worker]) for worker in every], step=4)
        arrived = simulated.all_to_all([list(values(worker, 30 * world).split(30)) for worker in every], step=4)
        shared = simulated.broadcast([[values(w, 100), values(w + 9, 33)] for w in every], 1, step=4)
        for rank in every:
            row = [gathered[rank], arrived[rank], shared[rank]]
            got = [scattered[rank], equal[rank], *(torch.cat(part) for part in row)]
            for ours, theirs in zip(got, ranks[rank][number], strict=True):
                assert bits([ours]) == bits([theirs]), f"{spec}, rank {rank}"
