"""World in one process: against an emulation written from the docs, against definitions, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from dist.algorithms import flat_names, nodes_of
from dist.test_all_reduce import CODECS, FACTOR, Case, bits, rotated
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives.algorithms.workers import Workers
from narrowcast.collectives.segments import Coder
from narrowcast.simulate import World

WORLDS = (1, 2, 3, 8)


def workers(world: int, *shape: int, seed: int = 0, spread: int = 6) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    size = 2.0 ** torch.randint(-spread, spread, (world, *shape), generator=made)
    return torch.randn(world, *shape, generator=made) * size


def check(world: int, cases: list[Case]) -> None:
    for case in cases:
        value, sent = case.expected(world)
        tensors = [case.tensors(rank) for rank in range(world)]
        if not tensors[0]:
            continue
        low = "low" if case.accumulator == "low" else "fp32"
        simulated = World(world, case.algorithm, case.spec, nodes=case.nodes, inner=case.inner, accumulate=low, seed=5)
        got = simulated.all_reduce(tensors, {"premul": FACTOR}.get(case.op, case.op), step=case.step)
        assert all(bits(row) == bits([value]) for row in got), case
        assert simulated.sent_bytes([t.numel() for t in tensors[0]], case.dtype) == sent, case


@pytest.mark.parametrize("algorithm, world", [(name, world) for world in WORLDS for name in flat_names(world)])
def test_every_codec_dtype_op_and_shape_gives_the_bits_of_the_emulation(algorithm: str, world: int) -> None:
    check(world, rotated(algorithm, CODECS, every=4))


@pytest.mark.parametrize("inner", ["as-is", "int4/16+sr"])
@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((3, 1), (0, 2)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,))])
def test_hierarchical_gives_the_bits_of_the_emulation(nodes: tuple[tuple[int, ...], ...], inner: str) -> None:
    check(4, rotated("hierarchical", CODECS, every=6, nodes=nodes, inner=inner))


def test_a_ring_that_casts_own_values_and_shared_scale_give_the_bits_of_the_emulation() -> None:
    check(3, rotated("ring", CODECS, every=9, accumulator="low"))
    check(3, rotated("shared_scale", ("int8/32", "int8/64"), every=2))


SIZES = {1: 1.0, 17: 0.0, 300: 1e-38, 64: 1e30, 5: 1e36, 1000: 1e-6, 33: 7.0, 129: 1e-44}
"""Lengths of tensors, and how large their values are."""


@pytest.mark.parametrize("accumulate, kahan", [("fp32", False), ("low", False), ("e5m2", True)])
@pytest.mark.parametrize("spec", ["e4m3+aps", "e3m0+aps+cpd", "e5m2+aps"])
def test_many_tensors_of_a_ring_with_aps_are_few_calls_with_the_same_bits(
    spec: str, accumulate: str, kahan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against each tensor by itself; a NaN spoils its own tensor alone."""
    made, calls, encode = torch.Generator().manual_seed(3), list[int](), Coder.encode
    x = [[size * torch.randn(n, generator=made) for n, size in SIZES.items()] for _ in range(4)]
    spread = [[t * torch.exp2(torch.randint(-149, 120, t.shape, generator=made).float()) for t in x[0]] for _ in x]
    broken = [[t.clone() for t in row] for row in x]
    broken[2][6][5], broken[1][0][0], broken[3][5][7], broken[0][4][1] = math.nan, math.inf, -math.inf, 3e38
    monkeypatch.setattr(Coder, "encode", lambda *given: (calls.append(1), encode(*given))[1])

    def summed(given: list[list[Tensor]]) -> bytes:
        return bits(World(4, "ring", spec, accumulate=accumulate, kahan=kahan).all_reduce(given, "avg")[0])

    mild = [[t.sign() * t.abs().clamp(1e-12, 1e12) for t in row] for row in x]
    quick, few = summed(mild), len(calls)
    others = [x, broken, spread, [[1e38 * torch.ones(4)]] * 4]
    also = [summed(other) for other in others]
    monkeypatch.setattr(Workers, "agreed_unit", lambda _: None)
    assert (quick, also) == (summed(mild), [summed(other) for other in others])
    assert few <= 2 * 4


def test_groups_are_nodes_of_neighbours() -> None:
    x = workers(8, 500)
    by_size = World(8, "hierarchical", "int8/64", groups=4).all_reduce(x)
    by_list = World(8, "hierarchical", "int8/64", nodes=nodes_of(8, 4)).all_reduce(x)
    assert torch.equal(by_size, by_list)


def test_auto_chooses_as_all_reduce_does() -> None:
    small, large = workers(4, 100), workers(4, 40_000)
    for x, algorithm in [(small, "one_shot"), (large, "two_shot")]:
        assert torch.equal(World(4, "auto", "int4/128").all_reduce(x), World(4, algorithm, "int4/128").all_reduce(x))
    grouped = World(4, "auto", "int4/128", groups=2)
    assert torch.equal(grouped.all_reduce(large), World(4, "hierarchical", "int4/128", groups=2).all_reduce(large))


def test_noise_follows_seed_and_step() -> None:
    x = workers(3, 999)
    found = [World(3, spec="int4/64+sr", seed=seed).all_reduce(x, step=step) for seed, step in [(0, 0), (0, 1), (1, 0)]]
    assert len({bits([rows[0]]) for rows in found}) == 3
    assert torch.equal(found[0], World(3, spec="int4/64+sr").all_reduce(x, step=0))


def test_a_stack_a_list_and_lists_of_segments_are_the_same_call() -> None:
    x, world = workers(3, 90), World(3, spec="int8")
    stacked = world.all_reduce(x.view(3, 9, 10))
    assert stacked.shape == (3, 9, 10)
    listed = world.all_reduce(list(x.view(3, 9, 10)))
    assert [row.shape for row in listed] == [(9, 10)] * 3
    assert torch.equal(torch.stack(listed), stacked)
    parts = world.all_reduce([list(row.split([30, 60])) for row in x])
    cut = world.all_reduce(x, segments=[30, 60])
    assert torch.equal(torch.stack([torch.cat(row) for row in parts]), cut)
    # one scale for a segment, so the cut matters
    assert not torch.equal(cut, stacked.flatten(1))


def test_the_inputs_stay_as_they_are_and_results_share_one_memory() -> None:
    x = workers(4, 5000)
    before = x.clone()
    for algorithm in flat_names(4):
        got = World(4, algorithm, "int8/64").all_reduce(x, "avg")
        assert torch.equal(x, before)
        assert {row.data_ptr() for row in got} == {got[0].data_ptr()}


def test_one_worker_rounds_nothing() -> None:
    x = workers(1, 77)
    assert torch.equal(World(1, spec="int2/16").all_reduce(x), x)
    assert torch.equal(World(1, spec="int2/16").all_reduce(x, 0.5), x * 0.5)


def test_an_empty_tensor_is_no_fault() -> None:
    assert World(3, spec="int8/64").all_reduce(torch.empty(3, 0)).shape == (3, 0)


def aps_unit(x: Tensor, upper: int) -> float:
    """papers.md 2.2: M = max ceil(log2(N |g|)), and a value on the wire is its code times 2 ** (M - ub)."""
    exponent = torch.ceil(torch.log2(x.double().abs().max() * len(x)))
    return float(2.0 ** (exponent - upper))


def cpd_sum(x: Tensor, upper: int, kahan: bool) -> Tensor:
    """CPD's emulated all-reduce (papers.md 2.3): cast, then rank order with a cast after each operation."""
    unit = aps_unit(x, upper)

    def cast(values: Tensor) -> Tensor:
        return nc.round_to(values, "e5m2")

    total = correction = torch.zeros(x.shape[1])
    for g in cast(x / unit):
        if kahan:
            y = cast(g - correction)
            t = cast(total + y)
            correction = cast(cast(t - total) - y)
            total = t
        else:
            total = cast(total + g)
    return total * unit


@pytest.mark.parametrize("kahan", [False, True])
@pytest.mark.parametrize("world", [2, 7, 16])
def test_a_low_precision_accumulator_is_what_cpd_emulates(world: int, kahan: bool) -> None:
    x = workers(world, 3000, spread=3)
    simulated = World(world, "one_shot", "e5m2+aps", accumulate="e5m2", kahan=kahan)
    assert torch.equal(simulated.all_reduce(x)[0], cpd_sum(x, 15, kahan))


@pytest.mark.parametrize("algorithm", [*flat_names(4), "hierarchical"])
def test_an_accumulator_without_a_scale_rounds_every_sum(algorithm: str) -> None:
    """With a wire that rounds nothing, the sums of a bfloat16 accumulator are bfloat16 numbers."""
    x = workers(4, 300)
    got = World(4, algorithm, "fp32", accumulate="bf16", groups=2 if algorithm == "hierarchical" else None).all_reduce(
        x
    )
    assert torch.equal(got[0], got[0].bfloat16().float())
    orders = {"one_shot": (0, 1, 2, 3), "two_shot": (0, 1, 2, 3)}
    if algorithm in orders:
        total = x[0].bfloat16().float()
        for row in x[1:]:
            total = (total + row).bfloat16().float()
        assert torch.equal(got[0], total)


def test_a_constant_scale_is_the_unit_of_the_accumulator() -> None:
    x = workers(3, 500, spread=2) * 2.0**-20
    got = World(3, "one_shot", "e5m2@1e-6", accumulate="e5m2").all_reduce(x)[0]
    assert bool(got.any())
    assert not bool(World(3, "one_shot", "fp32", accumulate="e5m2").all_reduce(x * 2.0**-4).any())


def error(got: Tensor, x: Tensor) -> float:
    exact = x.double().sum(dim=0)
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("algorithm", ["one_shot", "ring"])
def test_kahan_makes_long_low_precision_sums_better(algorithm: str) -> None:
    x = torch.rand(64, 2000, generator=torch.Generator().manual_seed(1)) + 0.5
    plain, corrected = (
        error(World(64, algorithm, "e5m2+aps", accumulate="e5m2", kahan=kahan).all_reduce(x)[0], x)
        for kahan in (False, True)
    )
    assert corrected < plain / 2


def test_a_ring_is_worse_than_two_shot_in_low_precision() -> None:
    x = workers(64, 4000, spread=1)
    ring, two_shot = (error(World(64, a, "e5m2+aps").all_reduce(x)[0], x) for a in ("ring", "two_shot"))
    assert ring > 2 * two_shot


def test_an_order_says_which_worker_sits_at_each_rank() -> None:
    x, seats = workers(5, 400), [3, 0, 4, 1, 2]
    for algorithm in flat_names(5):
        plain = World(5, algorithm, "int8/64")
        assert torch.equal(World(5, algorithm, "int8/64", order=seats).all_reduce(x), plain.all_reduce(x[seats]))
        backwards = World(5, algorithm, "int8/64", order="reversed").all_reduce(x)
        assert torch.equal(backwards, plain.all_reduce(x.flip(0)))
        assert not torch.equal(backwards, plain.all_reduce(x))


def test_noise_belongs_to_the_worker_and_not_to_the_seat() -> None:
    # integers below 8 times a constant scale: every sum is exact, so only the noise could make a difference
    x = torch.randint(-7, 8, (5, 640), generator=torch.Generator().manual_seed(0)).float() / 3
    results = {
        bits([World(5, "one_shot", "fixed4.0@1+sr", order=order, seed=2).all_reduce(x, step=3)[0]])
        for order in ("cluster", "reversed", "random", "pairwise", [2, 0, 1, 4, 3])
    }
    assert len(results) == 1


def test_a_random_order_changes_with_the_step_and_can_be_repeated() -> None:
    world = World(16, order="random", seed=4)
    assert world.seats(0) == World(16, order="random", seed=4).seats(0)
    assert sorted(world.seats(0)) == list(range(16))
    assert world.seats(0) != world.seats(1) != World(16, order="random", seed=5).seats(1)


@pytest.mark.parametrize("world", range(2, 12))
def test_pairwise_adds_neighbours_and_lets_an_odd_one_wait(world: int) -> None:
    x = workers(world, 200)
    level = list(x)
    while len(level) > 1:
        paired = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    assert torch.equal(World(world, "one_shot", order="pairwise").all_reduce(x)[0], level[0])


def test_sent_and_owed_is_what_was_wanted() -> None:
    world, n, wanted, got = World(4, spec="int4/64+sr+ef"), 1000, 0.0, 0.0
    for step in range(8):
        x = workers(4, n, seed=step, spread=1)
        wanted = wanted + x.double().mean(dim=0)
        got = got + world.all_reduce(x, "avg", step=step)[0].double()
    owed = world.state_dict()["0"].double()
    assert float(owed.abs().max()) > 0
    assert float((got + owed - wanted).abs().max() / wanted.abs().max()) < 1e-6


def after_steps(world: World, steps: range, **options: object) -> Tensor:
    row = torch.empty(0)
    for step in steps:
        row = world.all_reduce(workers(world.n, 600, seed=step), "avg", step=step, **options)[0]
    return row


def test_the_exact_state_goes_on_with_the_same_bits_and_the_mean_with_another_number() -> None:
    spec = "int4/128+sr+ef"
    whole, first, second = World(4, spec=spec), World(4, spec=spec), World(4, spec=spec)
    after_steps(first, range(3))
    second.residuals.load_exact(first.residuals.exact())
    assert torch.equal(after_steps(second, range(3, 6)), after_steps(whole, range(6)))
    mean = first.state_dict()
    for n in (2, 4, 7):
        other = World(n, spec=spec)
        other.load_state_dict(mean)
        assert torch.allclose(other.state_dict()["0"], mean["0"], rtol=1e-6, atol=0)
        before = workers(n, 600, seed=9).double().mean(dim=0) + mean["0"].double()
        sent = other.all_reduce(workers(n, 600, seed=9), "avg", step=9)[0].double()
        assert float((sent + other.state_dict()["0"].double() - before).abs().max()) < 1e-4
    with pytest.raises(ValueError, match="the state is of 4 workers, here are 3"):
        World(3, spec=spec).residuals.load_exact(first.residuals.exact())


def test_a_world_of_one_pays_what_it_owes_at_once() -> None:
    world, owed, x = World(1, spec="int4/64+ef"), torch.linspace(-1.0, 1.0, 300), workers(1, 300, seed=1)
    world.load_state_dict({"0": owed})
    assert torch.equal(world.all_reduce(x, "avg")[0], x[0] + owed)
    assert not world.state_dict()["0"].any()
    assert torch.equal(world.all_reduce(x, "avg")[0], x[0])


def test_nothing_is_lost_when_tensors_are_grouped_anew_or_the_codec_changes() -> None:
    world, got, wanted = World(3), torch.zeros(600, dtype=torch.float64), torch.zeros(600, dtype=torch.float64)
    plans = [(["a", "b"], "int4/64+ef"), (["a", "b"], "int4/128+ef"), (["b"], "int4/64+ef"), (["a", "b"], "int2/64+ef")]
    for step, (names, spec) in enumerate(plans):
        x = workers(3, 600, seed=step, spread=1)
        part = slice(0, 600) if len(names) == 2 else slice(250, 600)
        segments = [250, 350] if len(names) == 2 else [350]
        wanted[part] += x[:, part].double().mean(dim=0)
        got[part] += world.all_reduce(x[:, part], "avg", step=step, spec=spec, segments=segments, names=names)[
            0
        ].double()
    owed = torch.cat([world.state_dict()[name] for name in ("a", "b")]).double()
    assert float((got + owed - wanted).abs().max() / wanted.abs().max()) < 1e-5


def test_a_loss_scale_is_the_unit_of_what_is_owed() -> None:
    plain, scaled = World(2, spec="int4/64+ef"), World(2, spec="int4/64+ef")
    for step, scale in enumerate([1.0, 256.0, 1024.0]):
        x = workers(2, 500, seed=step)
        ours, theirs = plain.all_reduce(x), scaled.all_reduce(x * scale, unit=scale)
        assert torch.equal(ours, theirs / scale)
    assert torch.equal(plain.state_dict()["0"], scaled.state_dict()["0"])


REFUSED = [
    (lambda: World(0), "one worker at least, got 0"),
    (lambda: World(3, "tree"), "power-of-two world, got 3"),
    (lambda: World(4, "hierarchical"), "needs nodes="),
    (lambda: World(4, "hierarchical", groups=3), "groups=3 do not divide 4 workers"),
    (lambda: World(4, "hierarchical", groups=2, nodes=[[0, 1], [2, 3]]), "give one of them"),
    (lambda: World(4, "fastest"), "unknown algorithm 'fastest'"),
    (lambda: World(4, "native", "bf16"), "an order of its own; take 'ring'"),
    (lambda: World(4, "ring", "int4/64+ef"), "error feedback goes with two_shot, one_shot, hierarchical; got 'ring'"),
    (lambda: World(4, order="sideways"), "unknown order 'sideways'; take cluster"),
    (lambda: World(4, order=[0, 1, 2, 2]), "must name each of the workers 0 to 3 once"),
    (lambda: World(4, "ring", order="pairwise"), "does not go with 'ring'"),
    (lambda: World(4, order="pairwise", kahan=True), "does not go with kahan=True"),
    (lambda: World(4, "tree", kahan=True), "'tree' adds in pairs"),
    (lambda: World(4, accumulate="low"), "accumulate='low' is for 'ring'"),
    (lambda: World(4, "shared_scale", "int8/64", kahan=True), "adds integers exactly"),
    (lambda: World(4, accumulate="e99m99"), "e99m99"),
    (lambda: World(2, spec="int4/16+sr").all_reduce(torch.ones(2, 40)), "stochastic rounding needs step="),
    (lambda: World(2).all_reduce(torch.ones(3, 40)), "it must be 2, got shape (3, 40)"),
    (lambda: World(2).all_reduce([torch.ones(3)]), "a list of 1 for 2 workers"),
    (lambda: World(2).all_reduce([torch.ones(3), torch.ones(4)]), "worker 1 has shapes [(4,)], worker 0 [(3,)]"),
    (lambda: World(2).all_reduce(torch.ones(2, 9), segments=[4, 4]), "add up to 8, a worker has 9 values"),
    (lambda: World(2).all_reduce(torch.ones(2, 9), "max"), "is not a sum; take SUM, AVG"),
    (lambda: World(2, spec="int8/16+ef").broadcast(torch.ones(2, 9)), "only all_reduce has error feedback"),
    (lambda: World(2).broadcast(torch.ones(2, 9), 2), "no worker 2 among 2"),
    (lambda: World(2).reduce_scatter(torch.ones(2, 9)), "9 values do not divide into 2 parts"),
    (lambda: World(2).all_gather([torch.ones(2)]), "got 1 tensors for 2 workers"),
    (lambda: World(2).all_to_all([[torch.ones(2)], [torch.ones(2)]]), "a list of 2 tensors for each of the 2"),
]


@pytest.mark.parametrize("attempt, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_means_nothing_is_refused(attempt: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the message is looked at below, brackets and all
        attempt()
    assert message in str(caught.value)


def test_another_dtype_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"got torch\.float64"):
        World(2).all_reduce(torch.ones(2, 4, dtype=torch.float64))


def test_residuals_of_another_size_are_refused() -> None:
    world = World(2, spec="int8/16+ef")
    world.all_reduce(torch.ones(2, 40))
    with pytest.raises(ValueError, match="give each tensor its own names="):
        world.all_reduce(torch.ones(2, 41))
