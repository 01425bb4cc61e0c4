"""Tokens to their experts and back: uneven splits, gradients, specs for each way, and a layer of experts over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of
from dist.pool import Crew, Pool
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.parallel import wires
from narrowcast.parallel.expert import MoE, Routes, all_to_all
from narrowcast.parallel.wires import Wires

WORLDS = (1, 2, 3, 4)
WIDTH = 24


def rows_of(source: int, target: int) -> int:
    """How many rows one rank has for another: uneven, some none."""
    return (3 * source + 5 * target) % 7


def values(rank: int, rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))


def through(x: Tensor, spec: str) -> Tensor:
    return nc.codec(spec).decode(nc.codec(spec).encode(x), x.numel()).view(x.shape)


# ---- all_to_all ------------------------------------------------------------------------------------------------------


def exchanged(group: dist.ProcessGroup, specs: tuple[str, str], ask: bool) -> Any:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    leaving = [rows_of(rank, peer) for peer in range(world)]
    arriving = [rows_of(peer, rank) for peer in range(world)]
    used = Wires(*specs, group=group)
    x = values(rank, sum(leaving)).requires_grad_()
    y = all_to_all(x, used, leaving, None if ask else arriving)
    y.backward(values(rank, sum(arriving), seed=1))
    return y.detach(), x.grad, used.stats()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("specs", [("fp32", "fp32"), ("int8/32", "e5m2")], ids=str)
def test_rows_and_their_gradients_arrive_as_the_codecs_bring_them(
    pool: Pool, world: int, specs: tuple[str, str]
) -> None:
    ranks = pool.run(world, exchanged, specs, world == 3)
    there, back = specs if world > 1 else ("fp32", "fp32")
    sizes = [[rows_of(source, target) for target in range(world)] for source in range(world)]
    sent = [values(rank, sum(sizes[rank])).split(sizes[rank]) for rank in range(world)]
    arriving = [[sizes[source][rank] for source in range(world)] for rank in range(world)]
    returned = [values(rank, sum(arriving[rank]), seed=1).split(arriving[rank]) for rank in range(world)]
    for rank, (y, gradient, counted) in enumerate(ranks):
        assert torch.equal(y, torch.cat([through(sent[peer][rank], there) for peer in range(world)]))
        assert torch.equal(gradient, torch.cat([through(returned[peer][rank], back) for peer in range(world)]))
        away = [sizes[rank][peer] for peer in range(world) if peer != rank]
        # each message by itself; 16 W bytes of sizes to each peer where nobody asked for them before
        codec_bytes = sum(nc.codec(there).nbytes(rows * WIDTH) for rows in away)
        assert counted["forward_sent_bytes"] == codec_bytes + (world != 3) * 16 * world * (world - 1)
        assert counted["backward_sent_bytes"] == sum(
            nc.codec(back).nbytes(rows * WIDTH) for peer, rows in enumerate(arriving[rank]) if peer != rank
        )
        assert counted["forward_plain_bytes"] == 4 * WIDTH * sum(away)


def counts(group: dist.ProcessGroup) -> tuple[Routes, Routes]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    uneven = Routes.exchange([rows_of(rank, peer) for peer in range(world)], group)
    return uneven, Routes.exchange([5] * world, group)


def test_counts_are_asked_from_the_others(pool: Pool) -> None:
    for rank, (uneven, even) in enumerate(pool.run(3, counts)):
        there = tuple(rows_of(rank, peer) for peer in range(3))
        here = tuple(rows_of(peer, rank) for peer in range(3))
        assert uneven == (there, here, False)
        assert uneven.back() == (here, there, False)
        assert even == ((5, 5, 5), (5, 5, 5), True)


def with_routes(group: dist.ProcessGroup, even: bool) -> Any:
    """There and back by routes that were asked for once."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    routes = Routes.exchange([4 if even else rows_of(rank, peer) for peer in range(world)], group)
    there, back = Wires("int8/32", group=group), Wires("int8/32", group=group)
    x = values(rank, sum(routes.leaving)).requires_grad_()
    y = all_to_all(x, there, routes)
    z = all_to_all(y, back, routes.back())
    z.sum().backward()
    return y.detach(), z.detach(), there.stats()["forward_sent_bytes"], routes


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_routes_take_rows_there_and_back_and_no_size_travels_again(pool: Pool, even: bool) -> None:
    for rank, (y, z, sent, routes) in enumerate(pool.run(3, with_routes, even)):
        own = values(rank, sum(routes.leaving)).split(routes.leaving)
        assert torch.equal(z, torch.cat([through(through(part, "int8/32"), "int8/32") for part in own]))
        assert len(y) == sum(routes.arriving)
        away = [rows for peer, rows in enumerate(routes.leaving) if peer != rank]
        assert sent == sum(nc.codec("int8/32").nbytes(rows * WIDTH) for rows in away)


def misused_routes(group: dist.ProcessGroup) -> str:
    """One rank has other rows than its routes say: it raises, and the others do not wait for it."""
    routes, rank = Routes.exchange([2, 2], group), dist.get_rank(group)
    return error_of(lambda: all_to_all(torch.zeros(4 - rank, WIDTH), Wires("int8/16", group=group), routes))


def test_rows_that_do_not_fit_their_routes_are_an_error_everywhere() -> None:
    with Crew(2, misused_routes, timeout=20) as crew:
        first, second = (crew.outcome(rank).value for rank in range(2))
    assert "must be 2 counts that add up to the 3 rows of x" in second
    assert "add up to the 3 rows" in first


def faults(group: dist.ProcessGroup) -> dict[str, str]:
    used, rank = Wires("int8/16", group=group), dist.get_rank(group)
    x = torch.zeros(4, WIDTH)
    found = {
        "sum": lambda: all_to_all(x, used, [1, 2]),
        "world": lambda: all_to_all(x, used, [4]),
        "negative": lambda: all_to_all(x, used, [5, -1]),
        "dtype": lambda: all_to_all(x.long(), used, [2, 2]),
        "misfit": lambda: all_to_all(x, used, [2, 2], [2, 2 + rank]),
        "top_k": lambda: MoE(WIDTH, [nn.Identity()], top_k=3, group=group),
        "feedback": lambda: MoE(WIDTH, [nn.Identity()], group=group, combine="int8/16+ef"),
    }
    return {name: error_of(attempt) for name, attempt in found.items()}


def test_wrong_uses_say_what_is_wrong(pool: Pool) -> None:
    for found in pool.run(2, faults):
        for name in ("sum", "world", "negative"):
            assert "must be 2 counts that add up to the 4 rows of x" in found[name]
        assert "codecs take float32" in found["dtype"]
        assert "DisagreementError: all_to_all: rank 1 sends 48 values to rank 1, which expects 72" in found["misfit"]
        assert "top_k=3 of 2 experts" in found["top_k"]
        assert "leave out +ef" in found["feedback"]


def wrong_on_one(group: dist.ProcessGroup) -> list[str]:
    """One rank's counts do not fit its rows, or it has another number of experts; and it works afterwards."""
    rank, used = dist.get_rank(group), Wires("int8/16", group=group)
    x, leaving = torch.zeros(4, WIDTH), [2, 1] if rank == 1 else [2, 2]
    uneven = MoE(WIDTH, [nn.Identity()] * (2 - rank), top_k=1, group=group)
    found = [
        error_of(lambda: all_to_all(x, used, leaving)),
        error_of(lambda: all_to_all(x, used, leaving, [2, 2])),
        error_of(lambda: uneven(x)),
    ]
    assert all_to_all(x, used, [2, 2]).shape == (4, WIDTH)
    return found


def test_what_is_wrong_on_one_rank_is_an_error_on_all_of_them(pool: Pool) -> None:
    outcomes = pool.outcomes(2, wrong_on_one)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert max(outcome.seconds for outcome in outcomes) < 15
    (asked, given, uneven), (own_asked, own_given, own_uneven) = (outcome.value for outcome in outcomes)
    for own in (own_asked, own_given):
        assert own.startswith("ValueError: all_to_all: leaving=[2, 1] must be 2 counts")
    assert asked.startswith("DisagreementError: all_to_all: rank 1 has counts that")
    assert given.startswith("DisagreementError: all_to_all: rank 0 sends 48 values to rank 1, which expects 0")
    for message in (uneven, own_uneven):
        assert "rank 1: experts=1 (others 2)" in message


# ---- a layer of experts ----------------------------------------------------------------------------------------------

EXPERTS = 2
"""On each rank."""


def expert(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.ReLU(), nn.Linear(40, WIDTH))


def layer(group: dist.ProcessGroup, first: int, own: int, **specs: str) -> MoE:
    made = MoE(WIDTH, [expert(first + number) for number in range(own)], group=group, **specs)
    torch.manual_seed(1000)
    nn.init.normal_(made.router.weight)
    return made


def whole(model: nn.Module) -> None:
    """Small whole numbers everywhere but in the router, which must not tie: then sums do not depend on their order."""
    for name, p in model.named_parameters():
        if "router" not in name:
            p.data = (p.data * 30).round().clamp(-2, 2)


def moe(group: dist.ProcessGroup, specs: dict[str, str]) -> Any:
    """This rank's layer on its own tokens: output and gradients."""
    rank = dist.get_rank(group)
    model = layer(group, EXPERTS * rank, EXPERTS, **specs)
    whole(model)
    x = values(rank, 5 * rank).round().view(rank, 5, WIDTH).requires_grad_()  # rank 0 has no tokens of its own
    y = model(x)
    y.backward(torch.ones_like(y))
    gradients = [p.grad for p in model.experts.parameters()]
    return y.detach(), x.grad, gradients, model.router.weight.grad, wires.explain(model), wires.stats(model)


def alone(group: dist.ProcessGroup, world: int) -> Any:
    """All experts on one rank, with everybody's tokens."""
    model = layer(group, 0, EXPERTS * world)
    whole(model)
    xs = [values(rank, 5 * rank).round().requires_grad_() for rank in range(world)]
    ys = [model(x) for x in xs]
    sum(y.sum() for y in ys).backward()
    gradients = [p.grad for p in model.experts.parameters()]
    return [y.detach() for y in ys], [x.grad for x in xs], gradients


@pytest.mark.parametrize("world", [2, 3])
def test_a_layer_over_ranks_is_the_layer_on_one_rank(pool: Pool, world: int) -> None:
    ranks = pool.run(world, moe, {})
    ((ys, x_gradients, expert_gradients),) = pool.run(1, alone, world)
    each = len(expert_gradients) // world
    for rank, (y, x_gradient, gradients, *_) in enumerate(ranks):
        assert torch.equal(y.view(-1, WIDTH), ys[rank])
        # the router's weights are no whole numbers, and products of other shapes may add them in another order
        torch.testing.assert_close(x_gradient.view(-1, WIDTH), x_gradients[rank], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(gradients, expert_gradients[each * rank : each * (rank + 1)], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_dispatch_and_combine_have_specs_of_their_own(pool: Pool) -> None:
    specs = {"dispatch": "int8/64", "dispatch_backward": "bf16", "combine": "e4m3fn/64", "combine_backward": "fp32"}
    plain, ranks = pool.run(2, moe, {}), pool.run(2, moe, specs)
    for (y, *_), (rounded, *_, table, counted) in zip(plain, ranks, strict=True):
        lines = [line.split() for line in table.splitlines()]
        assert [(line[0], line[1], line[2]) for line in lines[1:]] == [
            ("dispatch", "forward", "int8/64"),
            ("dispatch", "backward", "bf16"),
            ("combine", "forward", "e4m3fn/64"),
            ("combine", "backward", "fp32"),
        ]
        if y.numel():
            assert 0 < float((rounded - y).norm() / y.norm()) < 0.1
        assert counted["forward_calls"] == counted["backward_calls"] == 2


def trained(group: dist.ProcessGroup, specs: dict[str, str]) -> list[float]:
    """A few steps towards a fixed map; the router and the experts learn."""
    rank = dist.get_rank(group)
    model = layer(group, EXPERTS * rank, EXPERTS, **specs)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for step in range(30):
        x = values(rank, 64, seed=step + 1)
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        # the router is on every rank: data parallel
        dist.all_reduce(model.router.weight.grad, group=group)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_learns_with_8_bits_as_with_32(pool: Pool) -> None:
    plain = pool.run(2, trained, {})[0]
    narrow = pool.run(2, trained, {"dispatch": "int8/64", "combine": "int8/64"})[0]
    assert plain[-1] < 0.9 * plain[0]
    assert abs(narrow[-1] - plain[-1]) < 0.02 * plain[-1]
