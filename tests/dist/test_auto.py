"""The autopilot with real ranks: all decide alike, a run can be repeated, and nothing owed is lost."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.links import FAST, SLOW, made_up
from dist.models import bits, error_of, gradients, loss, mlp, rank_order_mean, same, wrapped
from dist.pool import Pool
from dist.shards import mesh_of, sharded
from torch import nn

import narrowcast as nc
from narrowcast import data, simulate
from narrowcast.parallel import seeds
from narrowcast.parallel.autopilot import Decided, Replay, lines
from narrowcast.parallel.autopilot.ddp import DDPRoad
from narrowcast.parallel.autopilot.link import DescribedLink
from narrowcast.parallel.autopilot.pilot import BEAT
from narrowcast.simulate.settings import MicroBatches

STEPS = 45


def changing(step: int) -> DescribedLink:
    return SLOW if step < 20 else FAST


def trained(model: nn.Module, rank: int, steps: int = STEPS, handle: nc.parallel.Handle | None = None) -> bytes:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        found = loss(model, rank, step)
        found.backward()
        optimizer.step()
        if handle is not None:
            handle.observe(found.item())
    return bits(model.module)


def run(group: dist.ProcessGroup, dry_run: bool) -> dict[str, Any]:
    model, rank = wrapped(group), dist.get_rank(group)
    with made_up(changing):
        handle = nc.attach(model, nc.auto(dry_run=dry_run), min_values=1)
        first = handle.explain()
        end = trained(model, rank, handle=handle)
        handle.check_ranks()
        found = {"first": first, "last": handle.explain(), "history": handle.history(), "bits": end}
        found |= {
            "stats": handle.stats(),
            "owed": {name: float(r.abs().sum()) for name, r in handle.state_dict().items()},
        }
        handle.detach()
    found["again"] = nc.attach(model, "int8/256").detach() is None
    return found


def test_ranks_decide_alike_say_why_and_send_what_is_owed(pool: Pool) -> None:
    found = pool.run(3, run, False)
    one = found[0]
    assert all((other["history"], other["bits"]) == (one["history"], one["bits"]) for other in found)
    assert "auto: watching, gradients travel as they are" in one["first"]
    assert "all 6 tensors: the policy says so" in one["first"], "and not that somebody asked for it"
    assert [entry["road"] for entry in one["history"]][:2] == ["wires", "wires"]
    assert one["history"][0]["step"] == BEAT
    assert "the link has changed" in one["history"][-1]["reason"]
    assert one["stats"]["steps"] == STEPS
    assert one["stats"]["decisions"] == len(one["history"])
    assert 0 < one["stats"]["compressed_share"] < 1
    last = one["history"][-1]["wires"]
    left = [owed for name, owed in one["owed"].items() if not nc.codec(last.get(name, "as-is")).feedback]
    assert len(left) >= 2
    assert set(left) == {0.0}, "what has a wire without residuals has none left"


def test_a_dry_run_is_the_training_without_it(pool: Pool) -> None:
    # of three ranks: there DDP's own mean is not what a division gives
    plain = pool.run(3, untouched)
    for one in pool.run(3, run, True):
        assert one["bits"] == plain[0]
        assert one["history"][0]["road"] == "wires"
        assert one["stats"]["compressed_share"] == 0


def untouched(group: dist.ProcessGroup) -> bytes:
    return trained(wrapped(group), dist.get_rank(group))


def repeated(group: dist.ProcessGroup) -> tuple[bytes, bytes, int]:
    """A run, and the same from its history."""
    model, rank = wrapped(group), dist.get_rank(group)
    with made_up(changing):
        handle = nc.attach(
            model, nc.auto(candidates=["int8/64", "int4/64+sr+ef", "bf16+rank1+ef"], min_bits=0), min_values=1
        )
        first = trained(model, rank, handle=handle)
        history = handle.history()
        handle.detach()
    folder = tempfile.mkdtemp()
    path = Path(folder) / "run.jsonl"
    path.write_text(lines(history))
    model = wrapped(group)
    # the second model of a run has noise of its own: what is repeated is a run by itself
    seeds._COUNTS.clear()
    handle = nc.attach(model, nc.replay(path), min_values=1)
    second = trained(model, rank, handle=handle)
    assert handle.history() == history
    assert "decisions are repeated" in handle.explain()
    handle.detach()
    path.unlink()
    os.rmdir(folder)
    return first, second, len(history)


def test_a_replayed_run_has_the_same_bits(pool: Pool) -> None:
    found = pool.run(2, repeated)
    for first, second, decisions in found:
        assert first == second == found[0][0]
        assert decisions >= 2


POLICIES: dict[str, tuple[Any, Any]] = {
    "a dry run": (nc.auto, lambda: nc.auto(dry_run=True)),
    "another bound": (nc.auto, lambda: nc.auto(error=1e-6)),
    "a spec": (lambda: "auto", lambda: "int8/64"),
    "a history": (nc.auto, lambda: Replay([Decided(2, "half")])),
    "another history": (lambda: Replay([Decided(2)]), lambda: Replay([Decided(2, "half")])),
}
"""Of rank 0 and of all others: where one leaves a step to the backend, and others do not, ranks would wait."""


def parted(group: dist.ProcessGroup, kind: str, where: str) -> str:
    policy = POLICIES[kind][min(1, dist.get_rank(group))]()
    if where == "local":
        module = mlp()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return error_of(lambda: nc.LocalSGD(module, optimizer, every=2, spec=policy, group=group))
    model = wrapped(group) if where == "ddp" else sharded(mesh_of(group))
    return error_of(lambda: nc.attach(model, policy, min_values=1))


@pytest.mark.parametrize("where", ["ddp", "fsdp", "local"])
def test_ranks_with_other_policies_hear_of_it_at_once(pool: Pool, where: str) -> None:
    for kind in POLICIES:
        for error in pool.run(2, parted, kind, where):
            assert error.startswith("DisagreementError: ranks disagree about this call"), (kind, error)
            assert "policy=" in error, kind


def strangers(group: dist.ProcessGroup) -> list[str]:
    other = Replay([Decided(2, "wires", {"nobody": "int8/64"})])
    ring = Replay([Decided(2, "wires", {"0.weight": "int8/64"})])
    errors = [
        error_of(lambda: nc.attach(wrapped(group), other)),
        error_of(lambda: nc.attach(sharded(mesh_of(group)), other)),
    ]
    errors.append(error_of(lambda: nc.attach(sharded(mesh_of(group)), Replay([Decided(2, "half")]))))
    errors.append(error_of(lambda: nc.attach(wrapped(group), ring, algorithm="native")))
    return errors


def test_a_history_that_does_not_fit_is_refused_before_the_first_step(pool: Pool) -> None:
    for ddp, fsdp, half_of_fsdp, algorithm in pool.run(2, strangers):
        assert "'nobody', and this model no such parameter" in ddp
        assert "'nobody', and this model no such parameter" in fsdp
        assert "16 bits, which FSDP2 has not" in half_of_fsdp
        assert "attach with int8/64 for 0.weight" in algorithm


def followed(group: dist.ProcessGroup, path: str, batch: int, steps: int) -> tuple[bytes, int]:
    """A training on ranks by the history of a simulated one, with its batches."""
    rank, model = dist.get_rank(group), wrapped(group, small(), bucket_cap_mb=25)
    handle = nc.attach(model, nc.replay(path), min_values=100)
    source = MicroBatches(data.load("digits").normalised(), torch.device("cpu"), batch, 2, 0, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = source.of(step, rank)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    handle.detach()
    return bits(model.module), handle.seed


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))


def test_ranks_that_follow_a_simulated_run_have_its_bits(pool: Pool, tmp_path: Path) -> None:
    """Law 9 through a change of wire, on two ranks: of more the backend's own sum adds in an order of its own."""
    path, batch, steps = tmp_path / "run.jsonl", 128, 12
    path.write_text(lines([Decided(0).as_dict()]))
    seed = pool.run(2, followed, str(path), batch, 1)[0][1]
    pilot = nc.auto(candidates=["int4/64+sr+ef"])
    options = {"min_values": 100, "batch": batch, "lr": 0.1, "steps": steps}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = simulate.train(
            small(),
            data.load("digits").normalised(),
            workers=simulate.World(2, "auto", seed=seed),
            spec=pilot,
            link=DescribedLink(0.001, compute=0.001),
            **options,
        )
    finally:
        torch.set_num_threads(threads)
    assert [(entry["step"], entry["road"]) for entry in pilot.history()] == [(BEAT, "wires")]
    path.write_text(lines(pilot.history()))
    assert pool.run(2, followed, str(path), batch, steps)[0][0] == bits(run.model)


def half(group: dist.ProcessGroup) -> bool:
    """The backend's 16 bits: the mean of what was rounded to them."""
    model = wrapped(group)
    handle = nc.attach(model, nc.replay(_half_file()), min_values=1)
    expected = rank_order_mean(model.module, 2, 0)
    loss(model, dist.get_rank(group), 0).backward()
    near = all(
        torch.allclose(a, b, rtol=0.02, atol=1e-3) for a, b in zip(gradients(model.module), expected, strict=True)
    )
    exact = same(gradients(model.module), expected)
    handle.detach()
    return near and not exact and handle.stats()["ratio"] == 2


def _half_file() -> Path:
    path = Path(tempfile.mkdtemp()) / "half.jsonl"
    path.write_text(lines([Decided(0, "half").as_dict()]))
    return path


def test_the_backends_16_bits_are_a_road(pool: Pool) -> None:
    assert pool.run(2, half) == [True, True]


def timed(group: dist.ProcessGroup) -> dict[str, Any]:
    """With real times: whatever they are, all ranks have the same."""
    model = wrapped(group)
    handle = nc.attach(model, nc.auto(candidates=["int8/64", "bf16+rank1+ef"], min_bits=0), min_values=1)
    trained(model, dist.get_rank(group), 2 * BEAT + 2)
    pilot, stats = handle._pilot, handle.stats()
    fits = {name: (fit.latency, fit.per_value) for name, fit in pilot.known.fits.items()}
    found = {"fits": fits, "layout": pilot.known.layout, "errors": pilot.known.errors, "history": handle.history()}
    handle.detach()
    return {**found, "watched": stats["watch_seconds"] > 0}


def test_ranks_measure_the_same_link_and_gradients(pool: Pool) -> None:
    one, two = pool.run(2, timed)
    assert one == two
    assert list(one["fits"]) == ["plain", "half", "as-is", "bf16", "int8/64", "bf16+rank1+ef"]
    assert all(latency > 0 or value > 0 for latency, value in one["fits"].values())
    assert one["watched"]
    names = sorted(name for name, _ in mlp().named_parameters())
    assert sorted(one["errors"]) == sorted(name for bucket in one["layout"].buckets for name in bucket) == names


@pytest.mark.parametrize("kind", ["mapping", "schedule"])
def test_inside_another_policy_it_says_what_to_do(pool: Pool, kind: str) -> None:
    for error in pool.run(2, nested, kind):
        assert "give it to attach as it is" in error


def nested(group: dist.ProcessGroup, kind: str) -> str:
    model = wrapped(group)
    policy = {"*": nc.auto()} if kind == "mapping" else nc.schedule({0: nc.auto()})
    try:
        nc.attach(model, policy)
    except ValueError as error:
        return str(error)
    return ""


def test_a_road_without_its_state_says_so() -> None:
    road = DDPRoad.__new__(DDPRoad)
    road._state = lambda: None  # type: ignore[assignment,method-assign]
    with pytest.raises(RuntimeError, match="internal"):
        road._owner()
