"""Laws 5, 7 and 8 with real processes: non-finite values, identical bits, error feedback."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from dist.algorithms import options, specs_for, with_feedback
from dist.models import bits, loss, mlp, wrapped
from dist.pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.codecs.base import Law
from narrowcast.codecs.registry import all_specs
from narrowcast.collectives import Residuals
from narrowcast.collectives.algorithms.record import ALGORITHMS

BLOCKS = (
    "int8/64",
    "int4/64",
    "e4m3fn/64",
    "mxfp8",
    "uint8/64",
    "sign/64",
    "onebit/64",
    "nf4/64",
    "qsgd4/64",
    "ternary/64",
)
EF = (
    *("int4/64+ef", "int2/64+ef", "sign/64+ef", "onebit/64+ef", "e3m0/64+ef", "bf16+ef", "mxfp4+ef", "int4/64+sr+ef"),
    *("int4+ef", "e3m0+aps+ef", "nvfp4+ef", "int4/64+ef90", "int4+ef95", "int4/64+top16+ef", "fp16/64+top9+ef95"),
)


# ---- law 5 -----------------------------------------------------------------------------------------------------------


def poisoned(group: dist.ProcessGroup, algorithm: str, bad: float) -> list[tuple[list[int], bool, bool]]:
    """One bad value on rank 1 in block 3 of 8: which blocks are non-finite; are others untouched; is the next call?"""
    rank, world, found = dist.get_rank(group), dist.get_world_size(group), []
    for spec in specs_for(algorithm, BLOCKS, world):
        n, block = 8 * 64, nc.codec(spec).block
        clean = torch.randn(n, generator=torch.Generator().manual_seed(rank))
        x, y, z = clean.clone(), clean.clone(), clean.clone()
        if rank == 1:
            x[3 * 64 + 5] = bad
        for tensor in (x, y, z):
            nc.all_reduce(tensor, spec, group=group, algorithm=algorithm, step=1, **options(algorithm, world))
        wrong = ~x.isfinite()
        hit = sorted({int(i) // block for i in wrong.nonzero()})
        assert not bool(x[3 * 64 + 5].isfinite()), spec
        found.append(([b * block // 64 for b in hit], torch.equal(x[~wrong], y[~wrong]), torch.equal(y, z)))
    return found


OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(3.0))


def too_large(group: dist.ProcessGroup, algorithm: str, every: int) -> list[str]:
    """Calls that bring something back that is not finite of values that are; or finite of one that was not."""
    found, world = [], dist.get_world_size(group)
    more = options(algorithm, world)
    specs = specs_for(algorithm, ("as-is", "fp32", "int8/64", "e5m2+aps", "nvfp4", "bf16", "fp16"), world)
    for i, spec in enumerate(specs):
        for j, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
            for k, op in enumerate(OPS):
                if (i + j + k) % every:
                    continue
                x = torch.ones(128, dtype=dtype)
                x[3], x[70] = torch.finfo(dtype).max, -torch.finfo(dtype).max
                y = x.clone()
                y[100] = torch.inf if dist.get_rank(group) == 1 else 1.0
                nc.all_reduce(x, spec, op, group, algorithm=algorithm, **more)
                nc.all_reduce(y, spec, op, group, algorithm=algorithm, **more)
                if not x.isfinite().all() or y[100].isfinite():
                    found.append(f"{spec} {dtype} {op}")
    return found


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_finite_values_never_give_infinities_and_those_that_were_stay(pool: Pool, algorithm: str, every: int) -> None:
    """Every codec with every type and with every operation; all three of them together in the long form."""
    for faults in pool.run(4, too_large, algorithm, every):
        assert faults == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if specs_for(name, BLOCKS, 4)])
def test_non_finite_on_one_rank_is_non_finite_on_every_rank_in_that_block_only(
    pool: Pool, algorithm: str, bad: float
) -> None:
    found = pool.run(4, poisoned, algorithm, bad)
    assert all(rank == found[0] for rank in found)
    for spec, (hit, untouched, clean) in zip(specs_for(algorithm, BLOCKS, 4), found[0], strict=True):
        assert set(hit) == {3}, spec
        assert untouched, f"{spec}: values outside the bad block changed"
        assert clean, f"{spec}: the next call is not clean"


def poisoned_any(group: dist.ProcessGroup, specs: list[str], bad: float) -> list[str]:
    """Every registered codec: those that let a bad value become finite, or touch the next call."""
    rank, faults = dist.get_rank(group), []
    for spec in specs:
        x = torch.linspace(-1, 1, 300) + rank
        if rank == 0:
            x[100] = bad
        options = {"group": group, "step": 2}
        if nc.codec(spec).feedback:
            options["residuals"] = Residuals.zeros(300)
        nc.all_reduce(x, spec, **options)
        y = torch.linspace(-1, 1, 300)
        nc.all_reduce(y, spec, **options)
        if bool(x[100].isfinite()) or not bool(y.isfinite().all()):
            faults.append(spec)
    return faults


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_every_codec_brings_a_non_finite_value_to_every_rank(pool: Pool, bad: float) -> None:
    specs = [spec for spec in all_specs() if Law.NONFINITE not in nc.codec(spec).exemptions]
    assert pool.run(2, poisoned_any, specs, bad) == [[], []]


# ---- law 7 -----------------------------------------------------------------------------------------------------------


def trained(group: dist.ProcessGroup, specs: list[str], steps: int) -> list[bytes]:
    """A tiny model for each codec, each with its own wire, trained in one loop."""
    rank = dist.get_rank(group)
    torch.manual_seed(1)
    module = nn.ModuleDict({str(i): nn.Linear(12, 12) for i in range(len(specs))})
    model = DDP(_All(module), process_group=group)
    policy = {f"parts.{i}.*": spec for i, spec in enumerate(specs)}
    handle = nc.attach(model, policy, min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    made = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 12, generator=made)).backward()
        optimizer.step()
    handle.check_ranks()
    assert handle.step == steps
    handle.detach()
    return [bits(part) for part in module.values()]


class _All(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x).tanh().square().mean() for part in self.parts.values())


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("world, steps", [(2, 10), pytest.param(2, 200, marks=pytest.mark.slow), (4, 3)])
def test_all_ranks_are_bit_identical_after_training_with_every_registered_codec(
    pool: Pool, world: int, steps: int, part: int
) -> None:
    """In four parts, since it takes long; on four ranks few steps, for there one costs five times as much."""
    specs = all_specs()[part::4]
    found = pool.run(world, trained, specs, steps, timeout=100)
    for number, spec in enumerate(specs):
        assert len({rank[number] for rank in found}) == 1, spec


# ---- law 8 -----------------------------------------------------------------------------------------------------------


def owed(
    group: dist.ProcessGroup, spec: str, algorithm: str, steps: int, dtype: torch.dtype, inner: str = "as-is"
) -> tuple[list[float], float, float]:
    """What was wanted and what was sent over many steps, for this rank's first shot and its shard's second. With decay
    less is wanted at each step: what of the residuals is forgotten."""
    rank, world, n = dist.get_rank(group), dist.get_world_size(group), 500
    made = torch.Generator().manual_seed(rank)
    residuals, worst = Residuals.zeros(n), 0.0
    more = {**options(algorithm, world), "inner": inner}
    wanted_sum, got_sum = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(steps):
        x = torch.randn(n, generator=made).to(dtype)
        everyone = [torch.empty(n, dtype=dtype) for _ in range(world)]
        dist.all_gather(everyone, x, group=group)
        before = residuals.first.clone(), residuals.second.clone()
        y = x.clone()
        nc.all_reduce(y, spec, dist.ReduceOp.AVG, group, step=step, algorithm=algorithm, residuals=residuals, **more)
        # the mean of all, and the means of what the first shots owe and the sums of what the second ones do
        forgotten = (1 - nc.codec(spec).decay) * _owed(group, *before)
        mean = torch.stack(everyone).double().mean(0) - forgotten
        change = _owed(group, residuals.first, residuals.second) - _owed(group, *before)
        worst = max(worst, float((y.double() + change - mean).abs().max()))
        wanted_sum += mean
        got_sum += y.double()
    total = float((got_sum + _owed(group, residuals.first, residuals.second) - wanted_sum).abs().max())
    return [float(residuals.first.abs().max()), float(residuals.second.abs().max())], worst, total


def _owed(group: dist.ProcessGroup, first: Tensor, second: Tensor) -> Tensor:
    """What all ranks together owe to the mean."""
    both = torch.stack([first.double(), second.double()])
    dist.all_reduce(both, group=group)
    return both[0] / dist.get_world_size(group) + both[1]


@pytest.mark.parametrize("algorithm", with_feedback())
@pytest.mark.parametrize(
    "spec, dtype",
    [*((spec, torch.float32) for spec in EF), *((s, d) for s in EF[:2] for d in (torch.bfloat16, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_what_was_sent_and_what_is_owed_is_what_was_wanted_over_many_steps(
    pool: Pool, spec: str, dtype: torch.dtype, algorithm: str, steps: int
) -> None:
    """In 16 bits, too: what the result's own type cannot hold is owed."""
    for kept, worst, total in pool.run(3, owed, spec, algorithm, steps, dtype):
        assert max(kept) > 0
        assert (kept[1] > 0) == (ALGORITHMS[algorithm].residual_shots == 2) or spec == "bf16+ef"
        # an ulp of values of some units: of each rank's sum, of the rank-order sum, and of the residual itself
        assert worst < 16 * 2.0**-22
        assert total < steps * 16 * 2.0**-22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner", ["as-is", "int4/64+ef", "int4/64+sr+ef", "int4+ef", "bf16+ef"])
@pytest.mark.parametrize("steps", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_nothing_is_lost_inside_of_nodes_nor_between_them(
    pool: Pool, inner: str, dtype: torch.dtype, steps: int
) -> None:
    for spec in ("int2/64+ef", "e3m0+aps+ef"):
        for kept, worst, total in pool.run(4, owed, spec, "hierarchical", steps, dtype, inner):
            assert min(kept) > 0
            assert worst < 24 * 2.0**-22
            assert total < steps * 24 * 2.0**-22


def after_another(group: dist.ProcessGroup, inner: str) -> float:
    """Residuals that another algorithm left, of all values on every rank: how much of them two calls miss."""
    rank, world, n = dist.get_rank(group), dist.get_world_size(group), 500
    residuals, made = Residuals.zeros(n), torch.Generator().manual_seed(rank)
    wanted, got = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step, algorithm in enumerate(("two_shot", "one_shot", "hierarchical", "hierarchical", "one_shot")):
        x = torch.randn(n, generator=made)
        more = {**options(algorithm, world), "inner": inner} if algorithm == "hierarchical" else {}
        wanted += mean_of(group, x)
        nc.all_reduce(
            x, "int4/64+ef", dist.ReduceOp.AVG, group, step=step, algorithm=algorithm, residuals=residuals, **more
        )
        got += x.double()
    return float((got + _owed(group, residuals.first, residuals.second) - wanted).abs().max())


def test_nodes_take_over_what_other_algorithms_left(pool: Pool) -> None:
    assert max(pool.run(4, after_another, "as-is")) < 2e-6
    assert max(pool.run(4, after_another, "int8/64+ef")) < 2e-6
    # a wire that loses inside of nodes and keeps nothing
    assert 1e-4 < max(pool.run(4, after_another, "int8/64")) < 0.2


def untouched(group: dist.ProcessGroup, bad: float, algorithm: str = "auto", **more: object) -> list[str]:
    rank, faults = dist.get_rank(group), []
    how = {"group": group, "algorithm": algorithm, **more}
    for spec in EF:
        residuals = Residuals.zeros(256)
        made = torch.Generator().manual_seed(rank)
        for step in range(3):
            nc.all_reduce(torch.randn(256, generator=made), spec, step=step, residuals=residuals, **how)
        before = residuals.first.clone(), residuals.second.clone()
        x = torch.randn(256, generator=made)
        if rank == 1:
            x[70] = bad
        nc.all_reduce(x, spec, step=3, residuals=residuals, **how)
        if not bool(torch.cat([residuals.first, residuals.second]).isfinite().all()):
            faults.append(f"{spec}: a residual is poisoned")
        wrong = ~x.isfinite()
        if rank == 1 and not torch.equal(before[0][wrong], residuals.first[wrong]):
            faults.append(f"{spec}: a residual of the bad block changed")
        y = torch.randn(256, generator=made)
        nc.all_reduce(y, spec, step=4, residuals=residuals, **how)
        if not bool(y.isfinite().all()):
            faults.append(f"{spec}: the next step is not clean")
    return faults


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_residual_is_never_poisoned(pool: Pool, bad: float) -> None:
    assert pool.run(2, untouched, bad) == [[], []]
    assert pool.run(4, poisoned_in_nodes, bad) == [[]] * 4


def poisoned_in_nodes(group: dist.ProcessGroup, bad: float) -> list[str]:
    inners = ("as-is", "int8/64+ef")
    return [f for i in inners for f in untouched(group, bad, "hierarchical", nodes=((0, 1), (2, 3)), inner=i)]


# ---- law 8 in DDP ----------------------------------------------------------------------------------------------------

SPEC = "int4/128+ef"


def flat(module: nn.Module, of: str = "grad") -> Tensor:
    return torch.cat([getattr(p, of).detach().flatten() for p in module.parameters()])


def remembered(handle: object, module: nn.Module) -> Tensor:
    """What all ranks together owe, flat in the model's order; state_dict is collective."""
    state = handle.state_dict()
    return torch.cat([state[name].flatten() for name, _ in module.named_parameters()])


def local(module: nn.Module, rank: int, step: int) -> Tensor:
    own = copy.deepcopy(module)
    own.zero_grad()
    loss(own, rank, step).backward()
    return flat(own)


def mean_of(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    total = x.double()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def through_rebuild(group: dist.ProcessGroup) -> float:
    """Buckets are rebuilt after the first step; nothing of what is owed may be lost by it."""
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, SPEC, min_values=1, algorithm="two_shot")
    wanted = got = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for step in range(6):
        wanted = wanted + mean_of(group, local(model.module, rank, step))
        model.zero_grad()
        loss(model, rank, step).backward()
        got = got + flat(model.module).double()
    error = (got + remembered(handle, model.module).double() - wanted).abs().max() / wanted.abs().max()
    assert float(remembered(handle, model.module).abs().max()) > 0
    handle.detach()
    return float(error)


@pytest.mark.parametrize("world", [2, 3])
def test_nothing_is_lost_when_ddp_rebuilds_its_buckets(pool: Pool, world: int) -> None:
    assert max(pool.run(world, through_rebuild)) < 1e-6


def through_accumulation(group: dist.ProcessGroup) -> float:
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, SPEC, min_values=1, algorithm="two_shot")
    wanted = got = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for step in range(4):
        model.zero_grad()
        micro = [3 * step + k for k in range(3)]
        wanted = wanted + mean_of(group, sum(local(model.module, rank, k) for k in micro))
        with model.no_sync():
            for k in micro[:2]:
                loss(model, rank, k).backward()
        loss(model, rank, micro[2]).backward()
        got = got + flat(model.module).double()
    error = (got + remembered(handle, model.module).double() - wanted).abs().max() / wanted.abs().max()
    handle.detach()
    return float(error)


def test_nothing_is_lost_when_gradients_accumulate(pool: Pool) -> None:
    assert max(pool.run(2, through_accumulation)) < 1e-6


def checkpointed(group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, SPEC, min_values=1, algorithm="two_shot")
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
    state = handle.state_dict()
    handle.detach()
    return state


def restarted(group: dist.ProcessGroup, state: dict[str, Tensor]) -> tuple[bool, float, bool]:
    """Another world size takes the state over: at once it owes the same, and the next step pays from it. Whether that
    paid all.
    """
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, SPEC, min_values=1, algorithm="two_shot")
    handle.load_state_dict(state)
    again = handle.state_dict()
    same = all(torch.allclose(again[name], state[name], rtol=1e-6, atol=0) for name in state)
    before = remembered(handle, model.module).double()
    wanted = mean_of(group, local(model.module, rank, 9))
    loss(model, rank, 9).backward()
    after = remembered(handle, model.module).double()
    error = (flat(model.module).double() + after - wanted - before).abs().max() / wanted.abs().max()
    handle.detach()
    return same, float(error), not after.any()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_restart_with_another_world_size_owes_the_mean(pool: Pool, world: int) -> None:
    states = pool.run(3, checkpointed)
    assert all(torch.equal(state[name], states[0][name]) for state in states for name in states[0])
    assert sum(float(t.abs().sum()) for t in states[0].values()) > 0
    assert set(states[0]) == {name for name, _ in mlp().named_parameters()}
    for same, error, all_paid in pool.run(world, restarted, states[0]):
        assert same
        assert error < 1e-6
        # one rank rounds nothing
        assert all_paid == (world == 1)


def test_a_state_without_error_feedback_is_empty(pool: Pool) -> None:
    assert pool.run(2, stateless) == [{}, {}]


def stateless(group: dist.ProcessGroup) -> dict[str, Tensor]:
    model = wrapped(group)
    handle = nc.attach(model, "int8/256", min_values=1)
    loss(model, dist.get_rank(group), 0).backward()
    state = handle.state_dict()
    handle.load_state_dict(state)
    handle.detach()
    return state


def with_scaler(group: dist.ProcessGroup, skipped: list[int], scales: list[float]) -> tuple[list[bool], float]:
    """Steps with a loss scale each; in some an Inf makes the scaler skip. Did residuals change; was anything lost?"""
    rank = dist.get_rank(group)
    model, scaler = wrapped(group), torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10**6)
    handle = nc.attach(model, SPEC, scaler=scaler, min_values=1, algorithm="two_shot")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    numel = sum(p.numel() for p in model.parameters())
    wanted = got = before = torch.zeros(numel, dtype=torch.float64)
    changed = []
    for step, scale in enumerate(scales):
        if scale > scaler.get_scale():
            scaler.update(scale)
        bad = step in skipped
        if not bad:
            wanted = wanted + mean_of(group, local(model.module, rank, step))
        optimizer.zero_grad()
        factor = torch.inf if bad and rank == 0 else 1.0
        scaler.scale(loss(model, rank, step) * factor).backward()
        scaler.unscale_(optimizer)
        if not bad:
            got = got + flat(model.module).double()
        scaler.step(optimizer)
        scaler.update()
        state = handle.state_dict()
        after = torch.cat([state[name].flatten() for name, _ in model.module.named_parameters()]).double()
        assert bool(after.isfinite().all())
        changed.append(not torch.equal(before, after))
        before = after
    error = (got + before - wanted).abs().max() / wanted.abs().max()
    handle.detach()
    return changed, float(error)


@pytest.mark.parametrize("skipped", [[], [0], [1], [2], [0, 1, 4]], ids=str)
def test_a_step_that_the_scaler_skips_leaves_residuals_and_a_changing_scale_loses_nothing(
    pool: Pool, skipped: list[int]
) -> None:
    """Step 0 makes the residuals, step 1 rebuilds the buckets: a skip there counts as well."""
    scales = [256.0, 256.0, 1024.0, 1024.0, 4096.0, 4096.0]
    for changed, error in pool.run(2, with_scaler, skipped, scales):
        assert changed == [step not in skipped for step in range(len(scales))]
        assert error < 2e-6


def scheduled(group: dist.ProcessGroup) -> float:
    """What is owed outlives a change of codec: int4 with feedback, then another block size."""
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, nc.schedule({0: SPEC, 3: "int4/64+ef"}), min_values=1, algorithm="two_shot")
    wanted = got = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for step in range(6):
        wanted = wanted + mean_of(group, local(model.module, rank, step))
        model.zero_grad()
        loss(model, rank, step).backward()
        got = got + flat(model.module).double()
    error = (got + remembered(handle, model.module).double() - wanted).abs().max() / wanted.abs().max()
    handle.detach()
    return float(error)


def test_nothing_is_lost_when_the_schedule_changes_the_codec(pool: Pool) -> None:
    assert max(pool.run(2, scheduled)) < 1e-6
