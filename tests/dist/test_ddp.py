"""`attach` on DDP: one line that changes the wire and nothing else."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from dist.models import (
    batch,
    bits,
    error_of,
    gradients,
    in_bf16,
    local_gradients,
    loss,
    mlp,
    rank_order_mean,
    same,
    streams_of_the_cpu,
    wrapped,
)
from dist.pool import Pool
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc

STEPS = 3


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


# ---- the mean --------------------------------------------------------------------------------------------------------


def exact_mean(group: dist.ProcessGroup, options: dict[str, object]) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = wrapped(group, **options)
    handle = nc.attach(model, "as-is")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        expected = rank_order_mean(model.module, world, step)
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        assert same(gradients(model.module), expected), step
        optimizer.step()
    handle.check_ranks()
    assert handle.step == STEPS
    handle.detach()


OPTIONS = {
    "plain": {},
    "one bucket": {"bucket_cap_mb": 25},
    "gradients are views": {"gradient_as_bucket_view": True},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "static graph, views": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_as_is_gives_exactly_the_rank_order_mean(pool: Pool, world: int, options: dict[str, object]) -> None:
    pool.run(world, exact_mean, options)


def as_plain_ddp(group: dist.ProcessGroup) -> None:
    """With two ranks there is one order, and with the mean of halves every rounding is the same as DDP's own."""
    rank = dist.get_rank(group)
    plain, ours = wrapped(group, mlp(1)), wrapped(group, mlp(1))
    handle = nc.attach(ours, "as-is")
    for model in (plain, ours):
        train(model, torch.optim.Adam(model.parameters()), rank, 0, 5)
    assert bits(plain.module) == bits(ours.module)
    handle.detach()


def test_as_is_is_bit_equal_to_plain_ddp_on_two_ranks(pool: Pool) -> None:
    pool.run(2, as_plain_ddp)


def lossy_mean(group: dist.ProcessGroup, spec: str) -> tuple[float, bytes]:
    """Relative error of one step's gradients, and the parameters after some steps."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = wrapped(group)
    handle = nc.attach(model, spec, min_values=1)
    expected = torch.cat([g.flatten() for g in rank_order_mean(model.module, world, 0)])
    loss(model, rank, 0).backward()
    error = torch.cat([g.flatten() for g in gradients(model.module)]) - expected
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 1, STEPS)
    handle.check_ranks()
    handle.detach()
    return float(error.norm() / expected.norm()), bits(model.module)


@pytest.mark.parametrize("spec, bound", [("bf16", 0.01), ("int8/256", 0.02), ("e5m2+aps", 0.2), ("int4/128", 0.2)])
def test_a_lossy_mean_is_near_and_the_same_on_every_rank(pool: Pool, spec: str, bound: float) -> None:
    found = pool.run(4, lossy_mean, spec)
    assert 0 < found[0][0] < bound
    assert len(set(found)) == 1


# ---- how people train ------------------------------------------------------------------------------------------------


def accumulated(group: dist.ProcessGroup, use_no_sync: bool) -> None:
    """Three micro-batches: with no_sync they are added before they travel, without it each travels."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = wrapped(group)
    handle = nc.attach(model, "as-is")
    for step in range(3):
        with model.no_sync() if use_no_sync and step < 2 else contextlib.nullcontext():
            loss(model, rank, step).backward()
    if use_no_sync:
        local = [local_gradients(model.module, world, step) for step in range(3)]
        sums = [[sum_of(local[s][r][i] for s in range(3)) for r in range(world)] for i in range(len(local[0][0]))]
        expected = [sum_of(parts) / world for parts in sums]
    else:
        means = [rank_order_mean(model.module, world, step) for step in range(3)]
        # DDP reduces what has been added so far: the mean of (mean + new) is taken again
        expected = means[0]
        for step in (1, 2):
            local = local_gradients(model.module, world, step)
            expected = [sum_of(expected[i] + local[r][i] for r in range(world)) / world for i in range(len(expected))]
    assert same(gradients(model.module), expected)
    assert handle.step == (1 if use_no_sync else 3)
    handle.detach()


def sum_of(parts: object) -> Tensor:
    first, *rest = list(parts)
    for part in rest:
        first = first + part
    return first


@pytest.mark.parametrize("use_no_sync", [True, False])
def test_gradients_accumulate(pool: Pool, use_no_sync: bool) -> None:
    pool.run(2, accumulated, use_no_sync)


class Branches(nn.Module):
    """Uses another branch on each rank: the other one has no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.left, self.right = nn.Linear(24, 30), nn.Linear(30, 30), nn.Linear(30, 30)
        self.never = nn.Linear(30, 30)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(self.stem(x))


def branch_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step), rank % 2 == 0).square().mean()


def unused(group: dist.ProcessGroup) -> str:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = wrapped(group, Branches(), find_unused_parameters=True)
    handle = nc.attach(model, "as-is")
    for step in range(STEPS):
        expected = rank_order_mean(model.module, world, step, branch_loss)
        model.zero_grad()
        branch_loss(model, rank, step).backward()
        for (name, p), mean in zip(model.module.named_parameters(), expected, strict=True):
            if name.startswith("never"):
                assert p.grad is None
            else:
                assert torch.equal(p.grad, mean), name
    text = handle.explain()
    handle.detach()
    return text


def test_unused_parameters_count_as_zero_and_their_bitmap_is_listed(pool: Pool) -> None:
    for text in pool.run(3, unused):
        assert "unused-parameter bitmap: 32 bytes" in text


def clipped(group: dist.ProcessGroup) -> float:
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, "int8/256", min_values=1)
    loss(model, rank, 0).mul(100).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    after = torch.cat([g.flatten() for g in gradients(model.module)]).norm()
    assert float(norm) > 0.5
    assert float(after) == pytest.approx(0.5, rel=1e-4)
    handle.detach()
    return float(norm)


def test_gradient_clipping_sees_the_same_norm_on_every_rank(pool: Pool) -> None:
    assert len(set(pool.run(3, clipped))) == 1


def scaled(group: dist.ProcessGroup) -> list[float]:
    """GradScaler: an Inf on one rank alone makes every rank skip the step and halve the scale."""
    rank = dist.get_rank(group)
    model, scaler = wrapped(group), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    handle = nc.attach(model, "int8/256", scaler=scaler, min_values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for step in range(4):
        before = bits(model.module)
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and rank == 1 else 1.0
        scaler.scale(loss(model, rank, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (bits(model.module) == before) == (step == 1)
        scales.append(scaler.get_scale())
    handle.check_ranks()
    handle.detach()
    return scales


def test_a_loss_scaler_sees_an_inf_of_one_rank_on_every_rank_and_the_next_step_is_clean(pool: Pool) -> None:
    assert pool.run(3, scaled) == [[1024.0, 512.0, 512.0, 512.0]] * 3


def uneven(group: dist.ProcessGroup, by_initial: bool, spec: str) -> list[float]:
    """Rank r has 2 + r inputs; the gradient of a rank is 1 + r."""
    rank = dist.get_rank(group)
    module = nn.Linear(1, 1, bias=False)
    model = DDP(module, process_group=group)
    handle = nc.attach(model, spec, min_values=1)
    found = []
    with model.join(divide_by_initial_world_size=by_initial):
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()
            found.append(float(module.weight.grad))
    handle.check_ranks()
    handle.detach()
    return found


@pytest.mark.parametrize("spec", ["as-is", "int8/256", "int4/128+ef"])
@pytest.mark.parametrize("by_initial", [True, False])
def test_join_divides_by_the_initial_or_by_the_remaining_ranks(pool: Pool, by_initial: bool, spec: str) -> None:
    found = pool.run(3, uneven, by_initial, spec)
    live = [[1, 2, 3], [1, 2, 3], [2, 3], [3]]
    means = [sum(ranks) / (3 if by_initial else len(ranks)) for ranks in live]
    for rank in range(3):
        assert found[rank] == pytest.approx(means[: 2 + rank], rel=1e-6)


def with_zero(group: dist.ProcessGroup) -> bytes:
    rank = dist.get_rank(group)
    model = wrapped(group)
    handle = nc.attach(model, "int8/256", min_values=1)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, process_group=group, parameters_as_bucket_view=False, lr=0.01
    )
    train(model, optimizer, rank, 0, 4)
    handle.check_ranks()
    handle.detach()
    return bits(model.module)


def with_adam(group: dist.ProcessGroup) -> bytes:
    model = wrapped(group)
    handle = nc.attach(model, "int8/256", min_values=1)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), dist.get_rank(group), 0, 4)
    handle.detach()
    return bits(model.module)


def test_zero_redundancy_optimizer_gives_the_same_bits_as_the_plain_one(pool: Pool) -> None:
    assert len({*pool.run(2, with_zero), *pool.run(2, with_adam)}) == 1


def compiled(group: dist.ProcessGroup, outside: bool) -> bytes:
    rank = dist.get_rank(group)
    torch._dynamo.reset()
    module = mlp()
    model = wrapped(group, module if outside else torch.compile(module, backend="aot_eager"), bucket_cap_mb=25)
    handle = nc.attach(model, "int8/256", min_values=1)
    called = torch.compile(model, backend="aot_eager") if outside else model
    for step in range(STEPS):
        loss(called, rank, step).backward()
    assert handle.step == STEPS
    assert all(name.endswith(("weight", "bias")) for name in (row.name for row in handle.rows()))
    found = b"".join(p.grad.numpy().tobytes() for p in module.parameters())
    handle.detach()
    return found


@pytest.mark.parametrize("outside", [True, False])
def test_a_compiled_model_is_reduced_like_any_other(pool: Pool, outside: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(set(pool.run(2, compiled, outside))) == 1


def mixed_precision(group: dist.ProcessGroup) -> tuple[list[float], int, str]:
    model = in_bf16(group)
    handle = nc.attach(model, "int8/256", min_values=1)
    (_, state), values = model._comm_hooks[0], torch.full((512,), 1.0 + dist.get_rank(group))
    asked = state.ddp_weakref()
    assert asked.mixed_precision is model.mixed_precision
    assert asked.module is model.module
    parameter = next(iter(model.module.parameters()))
    asked.reducer._run_allreduce_hook(FakeBucket(values, parameter)).wait()
    try:
        model(batch(0, 0))
    except RuntimeError as error:
        told = str(error)
    handle.detach()
    return sorted(set(values.tolist())), asked.process_group.size(), told


class FakeBucket:
    """One gradient, as the reducer hands it over."""

    def __init__(self, values: torch.Tensor, parameter: torch.nn.Parameter) -> None:
        self._values, self._parameter = values, parameter

    def buffer(self) -> torch.Tensor:
        return self._values

    def gradients(self) -> list[torch.Tensor]:
        return [self._values]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self._parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def test_mixed_precision_of_ddp_keeps_its_hook_which_asks_ours_for_the_mean(pool: Pool) -> None:
    """The pass itself needs an accelerator, which torch says; tests/gpu/check_cuda.py runs it."""
    for values, size, told in pool.run(2, mixed_precision):
        assert (values, size) == ([1.5], 1)
        # a torch with CUDA says it in its own words
        assert "doesn't support" in told or "NVIDIA" in told or "CUDA" in told


def in_half(group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[bytes, float]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = wrapped(group, mlp().to(dtype))
    handle = nc.attach(model, "int8/256", min_values=1)
    for step in range(2):
        model.zero_grad()
        model(batch(rank, step).to(dtype)).square().mean().backward()
    assert all(g.dtype == dtype for g in gradients(model.module))
    stats = handle.stats()
    handle.detach()
    return b"".join(g.view(torch.uint8).numpy().tobytes() for g in gradients(model.module)), stats[
        "plain_bytes"
    ] * world


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_stay_16_bit(pool: Pool, dtype: torch.dtype) -> None:
    found = pool.run(2, in_half, dtype)
    assert found[0] == found[1]


# ---- what passes through ---------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """A sparse embedding, float64, complex, a 0-d parameter, a frozen one, buffers, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(40, 6, sparse=True)
        self.wide = nn.Parameter(torch.randn(50, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(20, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 30)

    def forward(self, index: Tensor) -> Tensor:
        x = self.layer(self.norm(self.table(index))) * self.gain
        return x.square().mean() + (self.wide * float(index[0])).sum() + (self.phase * float(index[1])).abs().sum()


def everything_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(torch.arange(8) * 3 % 17 + rank + step)


def everything(group: dist.ProcessGroup) -> tuple[str, list[tuple[str, str, str]], dict[str, float]]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model = wrapped(group, Everything())
    handle = nc.attach(model, "as-is")
    for step in range(STEPS):
        parts = local_gradients(model.module, world, step, everything_loss)
        model.zero_grad()
        everything_loss(model, rank, step).backward()
        for i, (name, p) in enumerate(model.module.named_parameters()):
            if name == "frozen":
                continue
            expected = sum_of(part[i] for part in parts) / world
            if p.grad.is_sparse:
                assert torch.allclose(p.grad.to_dense(), expected.to_dense(), rtol=1e-6), name
            else:
                assert torch.allclose(p.grad, expected, rtol=1e-6), name
                assert name in ("wide", "phase") or torch.equal(p.grad, expected), name
    handle.check_ranks()
    handle.detach()
    handle = nc.attach(model, "int8/256", min_values=1)
    everything_loss(model, rank, STEPS).backward()
    rows = [(row.name, row.wire, row.why) for row in handle.rows()]
    found = handle.explain(), rows, handle.stats()
    handle.detach()
    return found


def test_what_codecs_do_not_take_passes_through_and_is_listed_with_its_reason(pool: Pool) -> None:
    for text, rows, stats in pool.run(2, everything):
        listed = {name: (wire, why) for name, wire, why in rows}
        assert "frozen" not in listed
        assert listed["table.weight"] == ("as-is", "has sparse gradients, which DDP's own all-reduce adds")
        assert listed["wide"] == ("as-is", "is torch.float64; codecs take 16- and 32-bit floats")
        assert listed["phase"] == ("as-is", "is torch.complex64; codecs take 16- and 32-bit floats")
        assert listed["layer.weight"] == ("int8/256", "")
        assert all(name in text for name in listed)
        # two times 6 float32 and an int64 counter
        assert "buffers: 56 bytes broadcast by DDP before each forward pass" in text
        # float64 and complex: 2 (W-1)/W times their size
        assert stats["plain_bytes"] >= 50 * 8 + 20 * 8


def synchronised(group: dist.ProcessGroup) -> str:
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(24, 8), nn.BatchNorm1d(8)), group)
    try:
        DDP(model, process_group=group)(batch(0, 0))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_sync_batch_norm_is_for_gpus_so_there_is_nothing_to_list_on_the_cpu(pool: Pool) -> None:
    for message in pool.run(2, synchronised):
        assert "SyncBatchNorm" in message


# ---- policies --------------------------------------------------------------------------------------------------------


def policies(group: dist.ProcessGroup) -> dict[str, list[tuple[str, str, str]]]:
    by_step = nc.schedule({0: "as-is", 2: {"4.*": "as-is", "*": "int8/256"}})
    chosen = {
        "spec": "int8/256",
        "pattern": {"0.*": "as-is", "*.weight": "int4/128"},
        "schedule": by_step,
        "function": lambda info, step: "bf16" if info.name.endswith("bias") else None,
        "small": "int8/256",
    }
    found = {}
    for name, policy in chosen.items():
        model = wrapped(group)
        handle = nc.attach(model, policy, min_values=1000 if name == "small" else 1)
        for step in range(3):
            loss(model, dist.get_rank(group), step).backward()
        found[name] = [(row.name, row.wire, row.why) for row in handle.rows()]
        handle.check_ranks()
        assert all(row.name in handle.explain() for row in handle.rows())
        handle.detach()
    return found


def test_policies_choose_by_name_size_step_and_function(pool: Pool) -> None:
    for found in pool.run(2, policies):
        wires = {name: {tensor: (wire, why) for tensor, wire, why in rows} for name, rows in found.items()}
        assert set(wires["spec"].values()) == {("int8/256", "")}
        assert wires["pattern"]["0.weight"] == ("as-is", "asked for")
        assert wires["pattern"]["2.weight"] == ("int4/128", "")
        assert wires["pattern"]["2.bias"] == ("as-is", "no pattern matches its name")
        assert wires["schedule"]["4.weight"] == ("as-is", "asked for")
        assert wires["schedule"]["0.weight"] == ("int8/256", "")
        assert wires["function"]["0.bias"] == ("bf16", "")
        assert wires["function"]["0.weight"] == ("as-is", "the policy says so")
        assert wires["small"]["0.weight"] == ("as-is", "has 960 values, under 1000")
        assert wires["small"]["2.weight"] == ("int8/256", "")


def by_role(group: dist.ProcessGroup) -> list[tuple[str, tuple[int, ...], str, int]]:
    """What a function is told."""
    seen = []

    def policy(info: object, step: int) -> str:
        seen.append((info.name, info.shape, info.role, info.numel))
        return "as-is"

    model = wrapped(group)
    nc.attach(model, policy).detach()
    return seen[:2]


def test_a_policy_is_told_name_shape_role_and_size(pool: Pool) -> None:
    assert pool.run(1, by_role) == [[("0.weight", (40, 24), "gradient", 960), ("0.bias", (40,), "gradient", 40)]]


def counted(group: dist.ProcessGroup, spec: str) -> dict[str, float]:
    model = wrapped(group, bucket_cap_mb=25)
    handle = nc.attach(model, spec, min_values=1, algorithm="two_shot")
    for step in range(4):
        loss(model, dist.get_rank(group), step).backward()
    stats = handle.stats()
    handle.detach()
    return stats


@pytest.mark.parametrize("spec", ["as-is", "int8/256", "int4/128"])
def test_stats_count_every_byte(pool: Pool, spec: str) -> None:
    world, codec = 2, nc.codec(spec)
    numel = sum(p.numel() for p in mlp().parameters())
    shards = [-(-numel // max(codec.block, 16)) // 2 * max(codec.block, 16)]
    shards.append(numel - shards[0])
    for stats in pool.run(world, counted, spec):
        assert stats["steps"] == 4
        assert stats["calls"] == 4
        assert stats["values"] == 4 * numel
        assert stats["plain_bytes"] == 4 * 4 * numel
        # two ranks: each sends one shard of its own values and one finished shard
        assert stats["sent_bytes"] == 4 * sum(codec.nbytes(n) for n in shards)
        assert stats["ratio"] == stats["plain_bytes"] / stats["sent_bytes"]
        assert min(stats["encode_ms"], stats["decode_ms"], stats["wire_ms"], stats["call_seconds"]) >= 0


# ---- attach and detach -----------------------------------------------------------------------------------------------


def refused(group: dist.ProcessGroup) -> list[str]:
    foreign, builtin, twice = wrapped(group), wrapped(group), wrapped(group)
    foreign.register_comm_hook(None, default_hooks.fp16_compress_hook)
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    handle = nc.attach(twice, "int8/256")
    fused = mlp()
    torch.distributed.optim._apply_optimizer_in_backward(torch.optim.SGD, fused.parameters(), {"lr": 0.1})
    overlapped = wrapped(group, fused)
    with streams_of_the_cpu():
        overlapped._setup_in_backward_optimizers()
    attempts = [
        lambda: nc.attach(foreign, "int8/256"),
        lambda: nc.attach(builtin, "int8/256"),
        lambda: nc.attach(twice, "int8/256"),
        lambda: nc.attach(overlapped, "int8/256"),
        lambda: nc.attach(mlp(), "int8/256"),
        lambda: nc.attach(wrapped(group), "int8/256", strict=True),
        lambda: nc.attach(wrapped(group), "int8/255"),
        lambda: nc.attach(wrapped(group), 8),
        lambda: nc.attach(wrapped(group), nc.schedule({1: "as-is"})),
        lambda: nc.attach(wrapped(group), "int8/256", algorithm="tree" if dist.get_world_size(group) == 3 else "x"),
        lambda: nc.attach(wrapped(group), "int4/128+ef", min_values=1, algorithm="ring"),
        lambda: nc.attach(wrapped(group), "int4/128", min_values=1, nodes=[[r] for r in range(3)], inner="int8/64+ef"),
        lambda: nc.attach(wrapped(group), "int8/256", nodes=[[0, 1]]),
        lambda: handle.load_state_dict({"nobody": torch.zeros(3)}),
        lambda: handle.load_state_dict({"0.bias": torch.zeros(3)}),
    ]
    found = [error_of(attempt) for attempt in attempts]
    handle.detach()
    nc.attach(twice, "int8/256", min_values=1, strict=True).detach()
    return found


def test_attach_says_why_it_refuses(pool: Pool) -> None:
    expected = [
        "RuntimeError: attach: the model has a communication hook already",
        "RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once",
        "RuntimeError: attach: the model is attached already; call detach()",
        "RuntimeError: attach: the model has a communication hook already",
        "TypeError: attach: got a plain Sequential in one of 8 processes; wrap the model in Dist",
        "ValueError: attach with strict=True: 0.weight stays as it is: it has 960 values, under 10000",
        "ValueError: codec spec 'int8/255'",
        "TypeError: attach: 8 is no policy",
        "ValueError: schedule: the first step must be 0",
        "all_reduce: algorithm 'tree' needs a power-of-two world",
        "ValueError: attach with int4/128+ef for 0.weight: all_reduce with int4/128+ef: error feedback goes with two",
        "all_reduce: inner=int8/64+ef with int4/128 between nodes: error feedback inside a node needs it between nodes",
        "all_reduce: nodes=[[0, 1]] must name each of the ranks 0 to 2 once",
        "ValueError: load_state_dict: the model keeps no residual of a parameter 'nobody'",
        "ValueError: load_state_dict: 0.bias has shape (40,), the state for it (3,)",
    ]
    for messages in pool.run(3, refused):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start) or start in message


def detached(group: dist.ProcessGroup) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model, twin = wrapped(group), wrapped(group)
    for round_ in range(3):
        handle = nc.attach(model, "int8/256", min_values=1)
        model.zero_grad()
        loss(model, rank, round_).backward()
        assert not same(gradients(model.module), rank_order_mean(model.module, world, round_))
        handle.detach()
        handle.detach()
        for of in (model, twin):
            of.zero_grad()
            loss(of, rank, round_).backward()
        assert same(gradients(model.module), gradients(twin.module)), "detached is not plain DDP"
    handle = nc.attach(model, "as-is")
    model.zero_grad()
    loss(model, rank, 9).backward()
    assert same(gradients(model.module), rank_order_mean(model.module, world, 9))
    handle.detach()


def test_detached_is_plain_ddp_and_attach_works_again(pool: Pool) -> None:
    pool.run(2, detached)


def two_models(group: dist.ProcessGroup) -> None:
    """Two models with different codecs in one backward pass, and user traffic beside it."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    one, two = wrapped(group, mlp(1)), wrapped(group, mlp(2))
    handles = [nc.attach(one, "as-is"), nc.attach(two, "int8/256", min_values=1)]
    for step in range(4):
        expected = rank_order_mean(one.module, world, step)
        one.zero_grad()
        two.zero_grad()
        x, y = torch.full((100,), float(rank)), torch.full((100,), float(rank))
        works = [dist.all_reduce(x, group=group, async_op=True), nc.all_reduce(y, "bf16", group=group, async_op=True)]
        (loss(one, rank, step) + loss(two, rank, step)).backward()
        for work in works:
            work.wait()
        assert float(x[0]) == float(y[0]) == sum(range(world))
        assert same(gradients(one.module), expected)
    for handle in handles:
        handle.check_ranks()
        handle.detach()


def test_two_models_and_user_traffic_do_not_get_in_each_others_way(pool: Pool) -> None:
    pool.run(3, two_models)


def by_hand(group: dist.ProcessGroup) -> bytes:
    model = wrapped(group)
    state = nc.DDPState(model, "int8/256", min_values=1)
    model.register_comm_hook(state, nc.ddp_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), dist.get_rank(group), 0, 3)
    assert state.step == 3
    state.close()
    return bits(model.module)


def by_attach(group: dist.ProcessGroup) -> bytes:
    model = wrapped(group)
    handle = nc.attach(model, "int8/256", min_values=1)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), dist.get_rank(group), 0, 3)
    handle.detach()
    return bits(model.module)


def test_the_hook_by_hand_gives_the_same_bits_as_attach(pool: Pool) -> None:
    assert len({*pool.run(2, by_hand), *pool.run(2, by_attach)}) == 1


def broken_policy(group: dist.ProcessGroup) -> tuple[str, str]:
    """A policy that fails in the second step, on one rank."""
    rank = dist.get_rank(group)

    def policy(info: object, step: int) -> str:
        if step == 1 and rank == 1:
            raise ZeroDivisionError("no codec today")
        return "int8/256"

    model = wrapped(group)
    handle = nc.attach(model, policy)
    loss(model, rank, 0).backward()
    told = [error_of(lambda step=step: loss(model, rank, step).backward()) for step in (1, 2)]
    handle.detach()
    loss(model, rank, 3).backward()
    return tuple(told)


def test_a_hook_that_fails_on_one_rank_raises_in_every_backward_and_the_model_lives(pool: Pool) -> None:
    for rank, outcome in enumerate(pool.outcomes(2, broken_policy)):
        assert not outcome.error, outcome.traceback
        assert outcome.seconds < 15
        first, second = outcome.value
        assert "ZeroDivisionError: no codec today" in first, rank
        assert "earlier collective failed" in second


def broken_from_the_start(group: dist.ProcessGroup) -> str:
    rank, model = dist.get_rank(group), wrapped(group)

    def policy(info: object, step: int) -> str:
        if rank == 1:
            raise ValueError("no codec at all")
        return "int8/256"

    found = error_of(lambda: nc.attach(model, policy, min_values=1))
    nc.attach(model, "int8/256").detach()
    return found


def test_a_policy_that_fails_on_one_rank_at_attach_is_an_error_on_all_of_them(pool: Pool) -> None:
    for outcome in pool.outcomes(2, broken_from_the_start):
        assert "no codec at all" in outcome.value, outcome
        assert outcome.seconds < 15


def different_parameters(group: dist.ProcessGroup) -> None:
    model = wrapped(group)
    handle = nc.attach(model, "as-is")
    if dist.get_rank(group) == 2:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1e-6
    try:
        handle.check_ranks()
    finally:
        handle.detach()


def test_check_ranks_names_the_rank_that_differs(pool: Pool) -> None:
    for outcome in pool.outcomes(3, different_parameters):
        assert outcome.error == "RuntimeError: check_ranks: the parameters of ranks [2] differ from those of rank 0"


def with_nodes(group: dist.ProcessGroup) -> bytes:
    model = wrapped(group)
    handle = nc.attach(model, "int8/256", min_values=1, nodes=[[0, 1], [2, 3]])
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), dist.get_rank(group), 0, 3)
    handle.check_ranks()
    handle.detach()
    return bits(model.module)


def test_attach_takes_nodes(pool: Pool) -> None:
    assert len(set(pool.run(4, with_nodes))) == 1


def deep_copied(group: dist.ProcessGroup) -> None:
    """Evaluation code copies the module of an attached model."""
    model = wrapped(group)
    handle = nc.attach(model, "int8/256")
    loss(model, dist.get_rank(group), 0).backward()
    assert bits(copy.deepcopy(model.module)) == bits(model.module)
    handle.detach()


def test_the_module_of_an_attached_model_can_be_copied(pool: Pool) -> None:
    pool.run(2, deep_copied)
