"""Low rank in DDP on real processes: the same bits on unlike ranks, and beside torch's own PowerSGD hook."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of
from dist.pool import Pool
from dist.shards import mesh_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast import data
from narrowcast.parallel import Wires
from narrowcast.predict import Cluster, Device, Level, Profile, Setup, Sweep, TensorTime
from narrowcast.predict.profile import profile

STEPS, LATE, RANK = 60, 50, 4


def mlp() -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def wrapped(group: dist.ProcessGroup) -> DDP:
    # torch's hook waits inside a callback: with two buckets under way on Gloo it waits for ever
    return DDP(mlp(), process_group=group, bucket_cap_mb=64)


def late_error(group: dist.ProcessGroup, attach: Callable[[DDP, dist.ProcessGroup], object]) -> float:
    """Of the mean gradient against the exact one, in the last steps of a training on digits. Its steps are the exact
    ones, so that whatever is attached meets the same gradients."""
    digits, rank = data.load("digits").normalised(), dist.get_rank(group)
    x, y, model = digits.x_train.flatten(1), digits.y_train.long(), wrapped(group)
    attach(model, group)
    optimizer, errors = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        chosen = torch.randint(0, len(x), (32,), generator=draw)
        with model.no_sync():
            exact = flat_gradient(model, optimizer, x[chosen], y[chosen])
        dist.all_reduce(exact, group=group)
        exact /= dist.get_world_size(group)
        got = flat_gradient(model, optimizer, x[chosen], y[chosen])
        errors.append(float((got - exact).norm() / exact.norm()))
        nn.utils.vector_to_parameters(exact, [p.grad for p in model.parameters()])
        optimizer.step()
    return sum(errors[LATE:]) / (STEPS - LATE)


def flat_gradient(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def by_torch(model: DDP, group: dist.ProcessGroup) -> None:
    options = {"matrix_approximation_rank": RANK, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    model.register_comm_hook(powerSGD_hook.PowerSGDState(group, **options), powerSGD_hook.powerSGD_hook)


def by_us(model: DDP, group: dist.ProcessGroup) -> None:
    nc.attach(model, f"bf16+rank{RANK}+ef", min_values=300)


def both_errors(group: dist.ProcessGroup) -> tuple[float, float]:
    return late_error(group, by_us), late_error(group, by_torch)


def test_the_error_is_no_larger_than_that_of_torchs_hook(pool: Pool) -> None:
    ours, torchs = pool.run(2, both_errors)[0]
    assert ours < 1.02 * torchs, (ours, torchs)


def gradients_of(group: dist.ProcessGroup, spec: str) -> bytes:
    """All that arrived in a few steps. Ranks have other numbers of threads, as on unlike machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + dist.get_rank(group))
    try:
        model, arrived = DDP(mlp(), process_group=group, bucket_cap_mb=0.1), []
        handle = nc.attach(model, spec, min_values=300)
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + dist.get_rank(group))
            model.zero_grad()
            model(torch.randn(16, 64, generator=draw)).square().mean().backward()
            arrived += [p.grad.flatten() for p in model.parameters()]
        handle.check_ranks()
        handle.detach()
        return torch.cat(arrived).numpy().tobytes()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("spec", ["bf16+rank4+ef", "int8/256+rank4+ef", "fp32+acp4+ef", "fp32+rank2"])
def test_ranks_with_other_numbers_of_threads_have_the_same_bits(pool: Pool, spec: str) -> None:
    assert len(set(pool.run(3, gradients_of, spec))) == 1


SENT_STEPS = 4


def sent_bytes(group: dist.ProcessGroup, spec: str) -> tuple[float, Profile]:
    """What a rank sends in a step, by its own count, of a model of three buckets; and when gradients were ready."""
    model = DDP(nn.Sequential(nn.Linear(64, 700), nn.Linear(700, 900), nn.Linear(900, 10)), process_group=group)
    handle = nc.attach(model, spec, min_values=100)
    counts = []
    for _ in range(1 + SENT_STEPS):
        model.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        counts.append(handle.stats()["sent_bytes"])
    # after the first step DDP builds its buckets anew
    sent = (counts[-1] - counts[0]) / SENT_STEPS
    handle.detach()
    tensors = [(name, p.numel(), tuple(p.shape)) for name, p in reversed(list(model.module.named_parameters()))]
    times = (TensorTime(name, numel, float(at), shape) for at, (name, numel, shape) in enumerate(tensors))
    return sent, Profile("net", 4, 1.0, 1.0, 1.0, tuple(times))


@pytest.mark.parametrize("spec", ["bf16+rank4+ef", "int8/256+rank4+ef", "fp32+acp4+ef", "fp32+rank2", "int4/64+rank8"])
def test_the_predicted_bytes_are_those_that_ranks_send(pool: Pool, spec: str) -> None:
    found = pool.run(2, sent_bytes, spec)
    place = Cluster("place", (Level("link", 0, 1.0, 1.0),), Device("cpu", memory_gbyte=10.0))
    predicted = Sweep(found[0][1], place, draws=0).steps.predict(Setup(2, spec, min_values=100))
    assert sum(sent for sent, _ in found) / 2 == predicted.bytes_sent


class Strided(nn.Module):
    """Of each of these the memory is another matrix than the indices, and rank 4 pays for one of the two at times."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"few_rows": (torch.zeros(2, 90, 90), (1, 0, 2)), "many_rows": (torch.zeros(90, 2, 90), (1, 0, 2))}
        shapes |= {
            "channels_last": (torch.zeros(40, 5, 5, 30), (0, 3, 1, 2)),
            "transposed": (torch.zeros(200, 70), (1, 0)),
        }
        for name, (made, order) in shapes.items():
            self.register_parameter(name, nn.Parameter(made.permute(order)))

    def forward(self, x: Tensor) -> Tensor:
        return sum(p.square().sum() for p in self.parameters()) + x.sum()


def strided_bytes(group: dist.ProcessGroup, spec: str) -> tuple[float, Profile]:
    profiled = profile(Strided(), torch.ones(2, 3), name="strided", steps=2)
    model = DDP(Strided(), process_group=group)
    handle, counts = nc.attach(model, spec, min_values=100), []
    for _ in range(3):
        model(torch.ones(2, 3)).backward()
        counts.append(handle.stats()["sent_bytes"])
    handle.detach()
    return counts[-1] - counts[-2], profiled


@pytest.mark.parametrize("spec", ["bf16+rank4+ef", "fp32+rank2", "int8/64+rank1"])
def test_the_predicted_bytes_of_permuted_parameters_are_those_sent(pool: Pool, spec: str) -> None:
    found = pool.run(2, strided_bytes, spec)
    place = Cluster("place", (Level("link", 0, 1.0, 1.0),), Device("cpu", memory_gbyte=10.0))
    predicted = Sweep(found[0][1], place, draws=0).steps.predict(Setup(2, spec, min_values=100))
    assert sum(sent for sent, _ in found) / 2 == predicted.bytes_sent


class Weight(nn.Module):
    """A parameter that lies in memory by columns; its gradient is of rank one, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(200, 300).t())

    def forward(self) -> Tensor:
        return (torch.arange(1.0, 301.0)[:, None] * self.w * torch.arange(1.0, 201.0)).sum()


def transposed_error(group: dist.ProcessGroup) -> float:
    model = DDP(Weight(), process_group=group)
    exact = torch.arange(1.0, 301.0)[:, None] * torch.arange(1.0, 201.0)
    handle = nc.attach(model, "fp32+rank2")
    model().backward()
    handle.detach()
    return float((model.module.w.grad - exact).norm() / exact.norm())


def test_a_transposed_parameter_is_the_matrix_that_it_is(pool: Pool) -> None:
    assert max(pool.run(2, transposed_error)) < 1e-3


def unlike_factors(group: dist.ProcessGroup, how: str) -> str:
    model, rank = DDP(mlp(), process_group=group), dist.get_rank(group)
    handle = nc.attach(model, "fp32+acp4+ef", min_values=300, seed=rank if how == "seed" else 0)
    if how == "state":
        handle.load_state_dict({"2.weight:right factor": torch.full((4, 256), 1.0 + rank)})
    return error_of(lambda: model(torch.ones(4, 64)).sum().backward())


@pytest.mark.parametrize("how", ["seed", "state"])
def test_ranks_that_start_from_unlike_factors_find_out(pool: Pool, how: str) -> None:
    for text in pool.run(2, unlike_factors, how):
        assert "ranks disagree about this call, so nothing was sent" in text
        assert "factors=" in text


def other_factors(group: dist.ProcessGroup, how: str) -> list[str]:
    """A rank that loads another state than the others, or none; and one where a bit turned."""
    model, said = DDP(mlp(), process_group=group), []
    handle = nc.attach(model, "bf16+rank4+ef", min_values=300)
    model(torch.ones(4, 64)).sum().backward()
    said.append(error_of(handle.check_ranks))
    state = handle.state_dict()
    if dist.get_rank(group) == 1:
        if how == "bit":
            handle._state.factors._kept["2.weight"].vectors[3, 7] += 1.0
        else:
            handle.load_state_dict({key: value for key, value in state.items() if not key.endswith("factor")})
    said.append(error_of(handle.check_ranks))
    handle.detach()
    return said


@pytest.mark.parametrize("how", ["bit", "none"])
def test_check_ranks_names_those_whose_factors_differ(pool: Pool, how: str) -> None:
    for before, after in pool.run(3, other_factors, how):
        assert before == ""
        assert after == (
            "RuntimeError: check_ranks: the kept factors of low rank of ranks [1] differ from those of rank 0"
        )


class TwoMatrices(nn.Module):
    """Of which one may be transposed, and a vector; the gradients are those given."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        b = torch.zeros(40, 50).t()
        self.a, self.b = nn.Parameter(torch.zeros(60, 45)), nn.Parameter(b if transposed else b.contiguous())
        self.c = nn.Parameter(torch.zeros(333))

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return sum((p * given[name]).sum() for name, p in self.named_parameters())


def sampled(group: dist.ProcessGroup) -> tuple[dict[str, nc.ErrorReport], dict[str, nc.ErrorReport]]:
    """What a handle of DDP samples, and one of FSDP2."""
    draw, found = torch.Generator().manual_seed(dist.get_rank(group)), []
    given = {name: torch.randn(p.shape, generator=draw) for name, p in TwoMatrices(False).named_parameters()}
    for model in (DDP(TwoMatrices(True), process_group=group), fully_shard(TwoMatrices(False), mesh=mesh_of(group))):
        handle = nc.attach(model, "bf16+rank4+ef", min_values=1, sample_every=2)
        model(given).backward()
        found.append(handle.errors())
        handle.detach()
    return found[0], found[1]


def test_the_errors_of_low_rank_are_sampled(pool: Pool) -> None:
    for rank, kinds in enumerate(pool.run(2, sampled)):
        for errors in kinds:
            assert [errors[name].codec for name in "abc"] == ["bf16+rank4+ef", "bf16+rank4+ef", "bf16+ef"]
            draw = torch.Generator().manual_seed(rank)
            x = torch.randn(60, 45, generator=draw)
            expected = nc.error_report(x, "bf16+rank4+ef").relative_error
            # another start, which after some calls leads to about the same
            assert errors["a"].relative_error == pytest.approx(expected, rel=0.02)
            assert errors["a"].nbytes == nc.error_report(x, "bf16+rank4+ef").nbytes
            assert 0.5 < errors["b"].relative_error < 0.95


def vectors_kept(group: dist.ProcessGroup) -> tuple[float, float]:
    """What is kept of the biases before and after a switch to a wire that loses nothing of them."""
    model, kept = DDP(mlp(), process_group=group), []
    handle = nc.attach(model, nc.schedule({0: "int4/64+ef", 2: "fp32+rank4+ef"}), min_values=100)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        kept.append(float(handle.state_dict()["0.bias"].abs().sum()))
    handle.detach()
    return kept[1], kept[2]


def test_a_switch_to_low_rank_leaves_nothing_of_a_vector_behind(pool: Pool) -> None:
    for before, after in pool.run(2, vectors_kept):
        assert before > 0
        assert after == 0


def by_default_type(group: dist.ProcessGroup, dtype: torch.dtype) -> bytes:
    """Gradients of a float32 model, whatever torch's default type is while they travel."""
    model, before = DDP(mlp(), process_group=group), torch.get_default_dtype()
    x = torch.ones(4, 64)
    torch.set_default_dtype(dtype)
    try:
        handle = nc.attach(model, {"0.*": "bf16+rank4+ef", "2.*": "int4/64+ef", "*": "fp32+acp2"}, min_values=100)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
        handle.detach()
    finally:
        torch.set_default_dtype(before)
    return torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().tobytes()


def test_torchs_default_type_changes_no_number(pool: Pool) -> None:
    found = [pool.run(2, by_default_type, d)[0] for d in (torch.float32, torch.bfloat16, torch.float64)]
    assert len(set(found)) == 1


class Permuted(nn.Module):
    """Memory has two rows, the indices 300."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 300, 300).permute(1, 0, 2))

    def forward(self) -> Tensor:
        return self.w.square().sum()


def strided(group: dist.ProcessGroup) -> tuple[str, float]:
    model = DDP(Permuted(), process_group=group)
    handle = nc.attach(model, "bf16+rank4+ef", min_values=100)
    model().backward()
    text, ratio = handle.explain(), handle.stats()["ratio"]
    handle.detach()
    return text, float(ratio)


def test_low_rank_is_chosen_by_the_matrix_that_the_memory_is(pool: Pool) -> None:
    for text, ratio in pool.run(2, strided):
        assert "is 2 x 90000, where rank 4 saves too little" in text
        assert ratio > 1.9


def loaded_twice(group: dist.ProcessGroup) -> bool:
    """One rank loads its state twice, and one vector of it is lost."""
    model = DDP(mlp(), process_group=group, bucket_cap_mb=64)
    handle = nc.attach(model, "bf16+rank4+ef", min_values=100)
    model(torch.randn(4, 64)).sum().backward()
    state = handle.state_dict()
    state["2.weight:right factor"][1] = torch.nan
    for _ in range(1 + dist.get_rank(group)):
        handle.load_state_dict(state)
    model.zero_grad()
    model(torch.randn(4, 64)).sum().backward()
    handle.detach()
    return all(bool(p.grad.isfinite().all()) for p in model.parameters())


def test_who_loads_twice_agrees_and_lost_factors_are_drawn(pool: Pool) -> None:
    assert pool.run(2, loaded_twice) == [True, True]


def explained(group: dist.ProcessGroup) -> tuple[str, str, str, dict[str, float]]:
    model = DDP(mlp(), process_group=group)
    handle = nc.attach(model, "bf16+rank4+ef", min_values=100)
    model(torch.randn(4, 64)).sum().backward()
    text, stats, state = handle.explain(), handle.stats(), handle.state_dict()
    wrong = error_of(lambda: handle.load_state_dict({"2.weight:right factor": torch.zeros(4, 7)}))
    handle.load_state_dict(state)
    handle.detach()
    strict = error_of(lambda: nc.attach(model, "bf16+rank4+ef", min_values=100, strict=True))
    return text, wrong, strict, stats


def test_what_goes_another_way_is_listed_with_its_reason(pool: Pool) -> None:
    text, wrong, strict, stats = pool.run(2, explained)[0]
    assert "is no matrix" in text
    assert "is 10 x 256, where rank 4 saves too little" not in text
    assert "no such matrix" in wrong
    assert "travels by bf16+ef: it is no matrix" in strict
    # 4 values of 16 bits for each row and column, and the vectors
    assert stats["ratio"] > 20


def probed(group: dist.ProcessGroup) -> tuple[float, float, str]:
    """Seconds a value as it is and by low rank, and what is said of it."""
    model = DDP(mlp(), process_group=group)
    handle = nc.attach(model, "int8/256+rank4+sr+ef", min_values=100)
    (found,), text = [p for p in [handle._state.probe] if p is not None], handle.explain()
    codec = nc.codec("int8/256+rank4+sr+ef")
    handle.detach()
    assert (codec in found.codecs) == (len(found.codecs) > 0)
    return found.plain, found.ours(codec), text


def test_attach_measures_a_sum_of_matrices_with_its_products(pool: Pool) -> None:
    for plain, ours, text in pool.run(2, probed):
        assert 0 < ours < 1
        said = [line for line in text.splitlines() if "likely to lose" in line and "with int8/256+rank4" in line]
        assert bool(said) == (ours >= 0.95 * plain)


def refusals(group: dist.ProcessGroup) -> list[str]:
    x = torch.randn(8, 8)
    return [
        error_of(lambda: nc.all_reduce(x, "bf16+rank2", group=group)),
        error_of(lambda: nc.all_gather([x, x], x, "bf16+rank2", group=group)),
        error_of(lambda: Wires("bf16+rank2", group=group)),
    ]


def test_who_has_no_matrices_to_sum_again_and_again_says_so(pool: Pool) -> None:
    for text in pool.run(2, refusals)[0]:
        assert "low rank is for gradients (`attach`, `LocalSGD`)" in text
