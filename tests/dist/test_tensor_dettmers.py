"""Dettmers' scheme computes what one process computes, overlaps what it says, and learns with 8 bits as with 32."""

from __future__ import annotations

import argparse
import importlib.util
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of
from dist.pool import Crew, Pool
from narrowcast_research.dettmers import SubBatchMLP
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel import wires

SIZES, ROWS = [12, 20, 16, 10], 8
EXAMPLE = Path(__file__).parents[2] / "examples" / "dettmers_fashion_mnist.py"


def whole_numbers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss without roundings."""
    return (outputs * labels[:, None]).sum() / ROWS


def inputs(rank: int) -> tuple[Tensor, Tensor]:
    return whole_numbers(rank, ROWS, SIZES[0]), torch.arange(ROWS) - rank


def parameters() -> list[tuple[Tensor, Tensor]]:
    return [(whole_numbers(50 + i, o, n), whole_numbers(60 + i, o)) for i, (n, o) in enumerate(pairwise(SIZES))]


def network() -> nn.Sequential:
    """All layers in one process."""
    parts: list[tuple[str, nn.Module]] = []
    for number, (weight, bias) in enumerate(parameters()):
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.weight.data, linear.bias.data = weight, bias
        parts += [(f"linear{number}", linear), (f"relu{number}", nn.ReLU())]
    return nn.Sequential(OrderedDict(parts[:-1]))


def cut(group: dist.ProcessGroup, *specs: str) -> SubBatchMLP:
    made = SubBatchMLP(SIZES, *specs, group=group)
    for layer, shards, (weight, bias) in zip(made.layers, made.shards, parameters(), strict=True):
        layer.weight.data = weight.split(shards)[made.rank].clone()
        layer.bias.data = bias.split(shards)[made.rank].clone()
    return made


def stepped(group: dist.ProcessGroup, specs: tuple[str, ...], each: bool) -> Any:
    layers = cut(group, *specs)
    optimizer = torch.optim.SGD(layers.parameters(), lr=2.0**-10)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    features, labels = inputs(layers.rank)
    loss, error = layers.train_step(features, labels, weighted, update if each else None)
    gradients = [p.grad for p in layers.parameters()]
    with torch.no_grad():
        outputs = layers(inputs(0)[0])
    return loss, error, gradients, [p.detach() for p in layers.parameters()], outputs, wires.stats(layers)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_with_fp32_a_step_is_that_of_one_process_bit_for_bit(pool: Pool, world: int) -> None:
    """Whole numbers, so that the order of sums does not matter; ten outputs do not divide by four."""
    ranks = pool.run(world, stepped, ("fp32",), False)
    whole, xs = network(), [inputs(rank)[0].requires_grad_() for rank in range(world)]
    losses = [weighted(whole(x), inputs(rank)[1]) for rank, x in enumerate(xs)]
    (sum(losses) / world).backward()
    for place, expected in enumerate(whole.parameters()):
        assert torch.equal(torch.cat([rank[2][place] for rank in ranks]), expected.grad)
    for rank, (loss, error, _, _, outputs, _) in enumerate(ranks):
        assert loss == float(sum(losses).detach()) / world
        assert torch.equal(error, xs[rank].grad * world)
        assert torch.equal(outputs, whole(inputs(0)[0]))


def test_updates_after_each_sub_batch_are_those_of_one_process(pool: Pool) -> None:
    ranks = pool.run(2, stepped, ("fp32",), True)
    whole = network()
    optimizer = torch.optim.SGD(whole.parameters(), lr=2.0**-10)
    for rank in range(2):
        x = inputs(rank)[0].requires_grad_()
        optimizer.zero_grad()
        weighted(whole(x), inputs(rank)[1]).backward()
        optimizer.step()
        # after the first update the numbers are no longer whole
        torch.testing.assert_close(ranks[rank][1], x.grad, rtol=1e-5, atol=1e-3)
    for place, expected in enumerate(whole.parameters()):
        torch.testing.assert_close(torch.cat([rank[3][place] for rank in ranks]), expected, rtol=1e-5, atol=1e-5)


def narrow(group: dist.ProcessGroup, specs: tuple[str, str]) -> Any:
    """A step on values that are not whole."""
    layers = cut(group, *specs)
    for p in layers.parameters():
        p.data *= 0.3
    features, labels = inputs(layers.rank)
    _, error = layers.train_step(0.7 * features, labels, weighted)
    return error, [p.grad for p in layers.parameters()], wires.stats(layers)


def through(x: Tensor, spec: str) -> Tensor:
    return nc.codec(spec).decode(nc.codec(spec).encode(x.detach()), x.numel()).view(x.shape)


def emulated(world: int, there: str, back: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The same step, all ranks in one process: computed share by share, each message through its codec."""
    shares = [[tensor.mul(0.3).chunk(world) for tensor in pair] for pair in parameters()]
    own = [[[pair[0][r].requires_grad_(), pair[1][r].requires_grad_()] for pair in shares] for r in range(world)]
    errors = []
    for owner in range(world):
        features, labels = inputs(owner)
        x, tape = through(0.7 * features, there), []
        for number in range(len(shares)):
            xs = [x.clone().requires_grad_() for _ in range(world)]
            ys = [nn.functional.linear(xs[r], *own[r][number]) for r in range(world)]
            ys = [y.relu() for y in ys] if number < len(shares) - 1 else ys
            tape.append((xs, ys))
            x = torch.cat([through(y, there) for y in ys], dim=1)
        x.requires_grad_()
        (weighted(x, labels) / world).backward()
        wanted = list(x.grad.chunk(world, dim=1))
        for xs, ys in reversed(tape):
            for y, error in zip(ys, wanted, strict=True):
                y.backward(error)
            parts = [xs[r].grad.chunk(world, dim=1) if xs is not tape[0][0] else [xs[r].grad] for r in range(world)]
            wanted = [sum_in_order([through(part[s], back) for part in parts]) for s in range(len(parts[0]))]
        errors.append(wanted[0] * world)
    return errors, [[p.grad for pair in own[r] for p in pair] for r in range(world)]


def sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("specs", [("dtree8", "dtree8"), ("int8/16", "e5m2/16")], ids=str)
def test_with_8_bits_a_step_is_what_the_codecs_make_of_it_bit_for_bit(pool: Pool, specs: tuple[str, str]) -> None:
    errors, gradients = emulated(2, *specs)
    for rank, (error, found, counted) in enumerate(pool.run(2, narrow, specs)):
        assert torch.equal(error, errors[rank])
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[rank], strict=True))
        # scales weigh: one of 4 bytes for each message of 80 values or so, or for each block of 16
        assert counted["forward_ratio"] > (3.7 if specs[0] == "dtree8" else 3.1)


def events(group: dist.ProcessGroup) -> list[str]:
    """What was started, computed and waited for, in order."""
    layers, log = cut(group, "int8/16"), []
    for name in ("_distributed", "_gathered", "_reduced", "_computed"):
        original = getattr(layers, name)

        def logged(*args: Any, name: str = name, original: Any = original) -> Any:
            log.append(name)
            return original(*args)

        setattr(layers, name, logged)
    for layer in layers.layers:
        layer.register_full_backward_hook(lambda *_: log.append("backward"))
    waiting = wires.Sending.wait

    def waited(self: wires.Sending) -> None:
        log.append("wait")
        waiting(self)

    wires.Sending.wait = waited
    try:
        layers.train_step(*inputs(layers.rank), weighted)
    finally:
        wires.Sending.wait = waiting
    return log


def test_the_next_sub_batch_is_on_the_wire_while_one_is_computed(pool: Pool) -> None:
    """A message is waited for when its turn to be computed with has come: after another sub-batch was computed."""
    world, count = 3, len(SIZES) - 1
    forward = ["wait", "_computed", "_gathered"] * world * count
    # all ranks compute the loss, so the last layer's errors are there already
    backward = ["backward", "_reduced"] * world + ["wait", "backward", "_reduced"] * world * (count - 1)
    for log in pool.run(world, events):
        assert log == ["_distributed"] * world + forward + ["wait"] * world + backward + ["wait"] * world


# ---- it learns -------------------------------------------------------------------------------------------------------

CLASSES = 6


def pictures(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Noisy 8 x 8 pictures of a few patterns."""
    patterns = torch.randn(CLASSES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=made)
    return patterns[labels] + 1.5 * torch.randn(count, 1, 8, 8, generator=made), labels


def trained(group: dist.ProcessGroup, wire: str) -> tuple[float, float]:
    """Accuracy on pictures not seen, and how many times fewer bytes."""
    torch.manual_seed(0)
    features = DDP(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), process_group=group
    )
    layers = SubBatchMLP([128, 64, 32, CLASSES], wire, group=group)
    handle = nc.attach(features, wire, min_values=1)
    optimizer = torch.optim.SGD([*features.parameters(), *layers.parameters()], lr=0.1, momentum=0.9)
    for step in range(60):
        x, labels = pictures(10 * step + layers.rank + 1, 32)
        optimizer.zero_grad()
        y = features(x)
        y.backward(layers.train_step(y.detach(), labels, cross_entropy)[1])
        optimizer.step()
    handle.check_ranks()
    handle.detach()
    x, labels = pictures(99_999, 1000)
    with torch.no_grad():
        found = layers(features.module(x)).argmax(1)
    return float((found == labels).float().mean()), wires.stats(layers)["forward_ratio"]


@pytest.mark.slow
def test_with_the_papers_type_it_learns_as_with_float32(pool: Pool) -> None:
    (plain, _), _ = pool.run(2, trained, "fp32")
    ranks = pool.run(2, trained, "dtree8")
    assert ranks[0] == ranks[1]
    narrow, ratio = ranks[0]
    assert plain > 0.85
    assert narrow > plain - 0.03
    assert ratio > 3.9


def example(group: dist.ProcessGroup, updates: str) -> list[float]:
    """The example's own network on one batch, again and again."""
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trainer = module.Trainer(argparse.Namespace(seed=0, wire="dtree8", lr=0.05, updates=updates), 24)
    made = torch.Generator().manual_seed(dist.get_rank(group))
    images, labels = torch.randn(16, 1, 28, 28, generator=made), torch.randint(0, 10, (16,), generator=made)
    losses = [trainer.step(images, labels) for _ in range(12)]
    trainer.handle.check_ranks()
    assert 0 <= module.accuracy(trainer.features.module, trainer.layers, images, labels) <= 1
    trainer.handle.detach()
    return losses


@pytest.mark.parametrize("updates", ["batch", "sub-batch"])
def test_the_example_learns(updates: str) -> None:
    with Crew(2, example, updates, timeout=20) as crew:
        first, second = (crew.outcome(rank) for rank in range(2))
    assert (first.error, second.error) == ("", "")
    assert first.value == second.value, "all ranks compute the loss of all sub-batches"
    assert first.value[-1] < 0.9 * first.value[0]


def faults(group: dist.ProcessGroup) -> list[str]:
    layers = SubBatchMLP([4, 4], group=group)
    return [
        error_of(lambda: SubBatchMLP([4], group=group)),
        error_of(lambda: SubBatchMLP([4, 4], "int8/16+ef", group=group)),
        error_of(lambda: layers.train_step(torch.zeros(2, 4).long(), torch.zeros(2), weighted)),
        error_of(lambda: layers.train_step(torch.zeros(8 - layers.rank, 4), torch.zeros(8 - layers.rank), weighted)),
    ]


def test_wrong_uses_say_what_is_wrong(pool: Pool) -> None:
    for sizes, feedback, dtype, rows in pool.run(2, faults):
        assert "give at least the features in and the outputs" in sizes
        assert "leave out +ef" in feedback
        assert "codecs take float32" in dtype
        assert "rank 1: numel=7 (others 8), rows=7 (others 8)" in rows
