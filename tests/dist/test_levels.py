"""`attach(nodes=, inner=)`: what travels inside of nodes and between them, what is kept, and what is said of it."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of, loss, mlp, wrapped
from dist.pool import Pool
from dist.test_laws import flat, local, mean_of, remembered
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives import Coder, level_bytes, record
from narrowcast.parallel import list_nodes
from narrowcast.simulate import train

NODES = [[0, 1], [2, 3]]
SPEC, INNER = "int4/128+ef", "int8/64+ef"
LENGTHS = [p.numel() for p in mlp().parameters()]


def through_steps(group: dist.ProcessGroup, spec: str, levels: dict[str, Any]) -> tuple[float, float]:
    """What is missing after some steps, of what arrived and the residuals; and what of what arrived alone."""
    rank, model = dist.get_rank(group), wrapped(group)
    handle = nc.attach(model, spec, min_values=1, **levels)
    wanted = got = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    for step in range(8):
        wanted = wanted + mean_of(group, local(model.module, rank, step))
        model.zero_grad()
        loss(model, rank, step).backward()
        got = got + flat(model.module).double()
    kept = remembered(handle, model.module).double() if nc.codec(spec).feedback else 0.0
    handle.check_ranks()
    handle.detach()
    size = wanted.abs().max()
    return float((got + kept - wanted).abs().max() / size), float((got - wanted).abs().max() / size)


@pytest.mark.parametrize("inner", [None, INNER, "int4/16+sr+ef", "int4+ef"])
def test_nothing_is_lost_over_steps_and_rebuilt_buckets(pool: Pool, inner: str | None) -> None:
    for missing, lost in pool.run(4, through_steps, SPEC, {"nodes": NODES, "inner": inner}):
        assert missing < 1e-6
        assert lost > 1e-3, "nothing was rounded, so nothing was tested"


def test_a_wire_inside_of_nodes_without_feedback_loses_what_it_rounds(pool: Pool) -> None:
    missing = pool.run(4, through_steps, SPEC, {"nodes": NODES, "inner": "int8/64"})
    assert all(1e-5 < part < 0.02 for part, _ in missing)


def test_what_stays_as_it_is_does_so_inside_of_nodes_too(pool: Pool) -> None:
    """A codec that would lose most of every value, for tensors that a policy leaves out."""
    for missing, lost in pool.run(4, through_steps, "as-is", {"nodes": NODES, "inner": "sign/64"}):
        assert max(missing, lost) < 1e-6


def saved(group: dist.ProcessGroup, levels: dict[str, Any]) -> dict[str, Tensor]:
    model = wrapped(group)
    handle = nc.attach(model, SPEC, min_values=1, **levels)
    for step in range(3):
        model.zero_grad()
        loss(model, dist.get_rank(group), step).backward()
    state = handle.state_dict()
    handle.detach()
    return state


def continued(group: dist.ProcessGroup, state: dict[str, Tensor], levels: dict[str, Any]) -> float:
    """How much a step after a checkpoint misses of the gradient and of what the checkpoint holds."""
    rank, model = dist.get_rank(group), wrapped(group)
    handle = nc.attach(model, SPEC, min_values=1, **levels)
    handle.load_state_dict(state)
    wanted = mean_of(group, local(model.module, rank, 9)) + remembered(handle, model.module).double()
    loss(model, rank, 9).backward()
    left = flat(model.module).double() + remembered(handle, model.module).double() - wanted
    handle.detach()
    return float(left.abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    "world, levels", [(4, {"nodes": [[0, 2], [1, 3]], "inner": INNER}), (2, {}), (8, {"nodes": 4})]
)
def test_a_checkpoint_goes_on_with_other_nodes_and_other_numbers_of_ranks(
    pool: Pool, world: int, levels: dict[str, Any]
) -> None:
    state = pool.run(4, saved, {"nodes": NODES, "inner": INNER})[0]
    assert float(torch.cat([part.flatten() for part in state.values()]).abs().max()) > 0
    assert max(pool.run(world, continued, state, levels)) < 1e-6
    flat_state = pool.run(2, saved, {})[0]
    assert max(pool.run(4, continued, flat_state, {"nodes": 2, "inner": INNER})) < 1e-6


def scaled(group: dist.ProcessGroup) -> float:
    """A loss scale that changes, and a step that the scaler skips."""
    rank, model = dist.get_rank(group), wrapped(group)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    handle = nc.attach(model, SPEC, scaler=scaler, min_values=1, nodes=NODES, inner=INNER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wanted = got = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    for step in range(7):
        bad = step in (1, 4)
        optimizer.zero_grad()
        scaler.scale(loss(model, rank, step) * (torch.inf if bad and rank == 3 else 1.0)).backward()
        scaler.unscale_(optimizer)
        if not bad:
            wanted = wanted + mean_of(group, local(model.module, rank, step))
            got = got + flat(model.module).double()
        scaler.step(optimizer)
        scaler.update()
    error = (got + remembered(handle, model.module).double() - wanted).abs().max() / wanted.abs().max()
    handle.detach()
    return float(error)


def test_nothing_is_lost_under_a_loss_scaler(pool: Pool) -> None:
    assert max(pool.run(4, scaled)) < 2e-6


def counted(group: dist.ProcessGroup, nodes: object) -> tuple[str, dict[str, float], list[tuple[str, str, str]]]:
    model = wrapped(group, bucket_cap_mb=25)
    handle = nc.attach(model, {"*.weight": SPEC}, min_values=1, nodes=nodes, inner=INNER)
    loss(model, dist.get_rank(group), 0).backward()
    text, stats = handle.explain(), handle.stats()
    rows = [(row.name, row.role, row.wire) for row in handle.rows()]
    handle.detach()
    return text, stats, rows


@pytest.mark.parametrize("nodes", [NODES, 2], ids=str)
def test_the_bytes_of_both_levels_are_counted_and_explained(pool: Pool, nodes: object) -> None:
    named = dict(mlp().named_parameters())
    groups = [[p.numel() for n, p in named.items() if n.endswith(kind)][::-1] for kind in ("weight", "bias")]
    codecs = [(nc.codec(SPEC), nc.codec(INNER)), (nc.codec("as-is"), nc.codec("as-is"))]
    expected = []
    for lengths, pair in zip(groups, codecs, strict=True):
        outer, inner = (Coder(codec, lengths, torch.float32) for codec in pair)
        expected.append(level_bytes(record.Setting(outer, 4, NODES, inner)))
    for rank, (text, stats, rows) in enumerate(pool.run(4, counted, nodes)):
        inside, between = (sum(levels[level][rank] for levels in expected) for level in (0, 1))
        assert stats["inside_bytes"] == inside
        assert stats["sent_bytes"] == inside + between
        said = [int(n) for n in re.findall(r"about (\d+) bytes a rank and step", text)]
        # the order of tensors in a bucket is not that of the model, so parts are cut elsewhere
        assert said == [pytest.approx(inside, rel=0.05), pytest.approx(between, rel=0.05)]
        assert "inside of nodes of 2 ranks: int8/64+ef" in text
        assert "between 2 nodes" in text
        assert rows[:2] == [("0.weight", "inside", INNER), ("0.weight", "between", SPEC)]
        assert rows[2:4] == [("0.bias", "inside", "as-is"), ("0.bias", "between", "as-is")]


def on_hosts(group: dist.ProcessGroup, names: list[str]) -> tuple[object, str]:
    """names: of each rank's host, and where torchrun started it the number of its group."""
    model = wrapped(group)
    host, _, number = names[dist.get_rank(group)].partition("/")
    started = {"GROUP_RANK": number} if number else {}
    with mock.patch("socket.gethostname", return_value=host), mock.patch.dict("os.environ", started):
        error = error_of(lambda: nc.attach(model, "int8/64", min_values=1, nodes="auto").detach())
        nodes = None if error else nc.DDPState(model, "int8/64", min_values=1, nodes="auto").levels.nodes
    return nodes, error


def test_nodes_are_found_by_the_names_of_hosts(pool: Pool) -> None:
    assert {nodes for nodes, _ in pool.run(4, on_hosts, ["b", "a", "b", "a"])} == {((0, 2), (1, 3))}
    assert {nodes for nodes, _ in pool.run(4, on_hosts, ["a"] * 4)} == {((0, 1, 2, 3),)}
    assert {nodes for nodes, _ in pool.run(4, on_hosts, ["a/0", "a/0", "a/1", "a/1"])} == {((0, 1), (2, 3))}
    for _, error in pool.run(4, on_hosts, ["a", "b", "a", "a"]):
        assert "nodes='auto' found nodes of different sizes" in error
        assert "GROUP_RANK: [[0, 2, 3], [1]]; start" in error


def test_a_number_is_that_of_the_nodes() -> None:
    assert list_nodes("attach", 2, 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert list_nodes("attach", 4, 8) == ((0, 1), (2, 3), (4, 5), (6, 7))


def refused(group: dist.ProcessGroup) -> list[str]:
    def attached(spec: str = SPEC, **levels: object) -> str:
        return error_of(lambda: nc.attach(wrapped(group), spec, min_values=1, **levels))

    return [
        attached(inner=INNER),
        attached(nodes=3),
        attached(nodes=0),
        attached(nodes="two"),
        attached(nodes=[[0, 1], [2]]),
        attached(nodes=[[0, 1, 2], [3]]),
        attached("int4/128", nodes=2, inner=INNER),
        attached(nodes=2, inner="int9"),
        attached(nodes=2, algorithm="two_shot"),
    ]


def test_what_does_not_fit_is_refused_and_why(pool: Pool) -> None:
    expected = [
        "ValueError: attach: inner=int8/64+ef is the wire inside of nodes; give nodes=",
        "ValueError: attach: nodes=3 nodes of equal size cannot be made of 4 ranks; give a divisor of 4",
        "ValueError: attach: nodes=0 nodes of equal size cannot be made of 4 ranks",
        "ValueError: attach: nodes='two'; give the number of nodes, or a list",
        "nodes=[[0, 1], [2]] must name each of the ranks 0 to 3 once",
        "differ in size; 'hierarchical' needs equally many ranks a node",
        "inner=int8/64+ef with int4/128 between nodes: error feedback inside a node needs it between nodes, too",
        "codec spec 'int9': ",
        "are for 'hierarchical'; 'two_shot' knows none",
    ]
    for messages in pool.run(4, refused):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_a_simulated_training_takes_the_same_words() -> None:
    x = torch.randn(64, 24)
    y = x[:, :5].argmax(dim=1)
    data = mock.Mock(x_train=x, y_train=y, x_test=x, y_test=y)
    options = {"steps": 2, "batch": 16, "min_values": 1}
    by_size = train(mlp(), data, workers=4, spec=SPEC, nodes=2, inner=INNER, **options)
    by_list = train(mlp(), data, workers=4, spec=SPEC, nodes=NODES, inner=INNER, **options)
    world = nc.simulate.World(4, "hierarchical", nodes=NODES, inner=INNER)
    by_world = train(mlp(), data, workers=world, spec=SPEC, **options)
    other = train(mlp(), data, workers=4, spec=SPEC, nodes=NODES, **options)
    runs = by_size, by_list, by_world, other
    first, *same, last = (torch.cat([p.flatten() for p in run.model.parameters()]) for run in runs)
    assert all(torch.equal(first, one) for one in same)
    assert not torch.equal(first, last)
    for wrong, message in [
        ({"inner": INNER}, "train: inner=int8/64+ef is the wire inside of nodes"),
        ({"nodes": 3}, "train: nodes=3 nodes of equal size cannot be made of 4 ranks"),
        ({"nodes": "auto"}, "train: nodes='auto'; give the number of nodes"),
        ({"nodes": 2, "workers": world}, "give them to the World alone"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            train(mlp(), data, **{"workers": 4, **wrong}, spec=SPEC, **options)
