"""The benches of collectives, DDP and FSDP2 with two real ranks on processors: turns, rows, and what is compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.pool import Crew

import narrowcast as nc
from narrowcast.bench import auto, collectives, ddp, fsdp, training
from narrowcast.bench.collectives import FLOAT, HALF
from narrowcast.bench.ranks import Ranks
from narrowcast.measure import Timing

ROUNDS = 3
TINY = training.Task(
    "a tiny transformer",
    partial(training.Transformer, 128, 2, 8, 2, 64, True),
    lambda rank: (torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(rank)),),
    partial(torch.optim.AdamW, lr=1e-2, fused=True),
    bf16=True,
)


def outcomes(function: Any, *args: Any) -> list[Any]:
    with Crew(2, function, *args, timeout=40) as crew:
        found = [crew.outcome(rank) for rank in range(2)]
    assert all(outcome is not None and not outcome.error for outcome in found), found
    return [outcome.value for outcome in found if outcome is not None]


def sums(group: dist.ProcessGroup, specs: list[str]) -> tuple[list[Any], list[Any]]:
    order: list[int] = []
    real = collectives.until_all_done

    def noted(call: Any, clock: Any, count: int) -> float:
        order.append(id(call))
        return real(call, clock, count)

    collectives.until_all_done = noted
    rows = list(collectives.measure(specs, [5000], [1, 10], ROUNDS, gpu=False))
    turns = [order[at : at + 2 + 2 * len(specs)] for at in range(0, len(order), 2 + 2 * len(specs))]
    return rows, turns


def test_sums_take_turns_and_each_row_has_its_limit_in_the_same_run() -> None:
    specs = ["int8/256", "int4/128+ef", "e5m2+aps", "bf16"]
    rows, turns = outcomes(sums, specs)[0]
    assert [row["wire"] for row in rows] == 3 * [FLOAT, HALF, *specs]
    assert [row["values"] for row in rows] == 6 * [5000] + 6 * [1] + 6 * [10]
    # every candidate once a round, in one order: the first round warms up
    assert len(turns) == 3 * (1 + ROUNDS)
    for size in range(3):
        mine = turns[size * (1 + ROUNDS) : (size + 1) * (1 + ROUNDS)]
        assert all(turn == mine[0] for turn in mine)
        assert len(set(mine[0])) == 2 + 2 * len(specs)
    for row in rows:
        assert len(row["rounds_ms"]) == ROUNDS
        assert min(row["ms"], row["host_ms"], row["over_fp32"], row["over_bf16"]) > 0
        assert bool(row.get("small")) == (row["values"] < 5000)
        if row["wire"] in specs:
            assert row["share_of_limit"] == pytest.approx(row["limit_ms"] / row["ms"])
            assert {"error", "encode_ms", "decode_ms", "peak_mib", "bytes_allow"} <= set(row)
    errors = {row["wire"]: row["error"] for row in rows[:6] if "error" in row}
    assert 0 < errors["bf16"] < errors["int8/256"] < errors["int4/128+ef"] < 0.5


def test_ratios_are_those_of_medians() -> None:
    took = {FLOAT: Timing((4.0, 8.0, 9.0)), HALF: Timing((4.0,)), "x": Timing((2.0,)), "limit x": Timing((1.5,))}
    row = collectives.compared("x", took)
    assert (row["ms"], row["over_fp32"], row["over_bf16"]) == (2000.0, 4.0, 2.0)
    assert (row["limit_ms"], row["share_of_limit"], row["beyond_ms"]) == (1500.0, 0.75, -6000.0)
    own = collectives.compared(HALF, took)
    assert (own["over_fp32"], own["over_bf16"], "limit_ms" in own) == (2.0, 1.0, False)


@pytest.mark.parametrize("values", [1, 1000, 4096])
@pytest.mark.parametrize("spec", ["int8/256", "int4/128", "bf16", "e5m2+aps", "int4/128+ef"])
def test_the_limit_moves_the_bytes_of_the_wire_once_there_and_once_back(
    spec: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[str, int, int]] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    for name in ("all_to_all_single", "all_gather_into_tensor"):
        note = partial(lambda name, to, source: moved.append((name, to.numel(), source.numel())), name)
        monkeypatch.setattr(dist, name, note)
    codec = nc.codec(spec)
    collectives.moved_bytes(codec, values, torch.device("cpu"))()
    part = -(-values // (4 * max(1, codec.block))) * max(1, codec.block)
    mine = codec.nbytes(part)
    assert 4 * part >= values
    assert moved == [("all_to_all_single", 4 * mine, 4 * mine), ("all_gather_into_tensor", 4 * mine, mine)]


def test_promises_are_those_of_processors_at_100_megabytes() -> None:
    row = {"wire": "int8/256", "values": 25_000_000, "over_fp32": 3.4}
    assert collectives.judged(Ranks(4, "1gbit"), row) == {"target": 3.3, "met": True}
    assert collectives.judged(Ranks(2, "1gbit"), row)["met"] is False
    for at, other in ((Ranks(4, "1gbit", gpu=True), row), (Ranks(4, "1gbit"), {**row, "values": 250_000})):
        assert collectives.judged(at, other) == {"target": None, "met": None}


def steps_noted(order: list[tuple[int, bool]]) -> None:
    real = training.WireTrainer.step

    def noted(self: training.WireTrainer, communicate: bool = True) -> None:
        order.append((id(self), communicate))
        real(self, communicate)

    training.WireTrainer.step = noted  # type: ignore[method-assign]


def ddp_rows(group: dist.ProcessGroup, wires: list[str]) -> tuple[list[Any], list[Any], list[int]]:
    order: list[tuple[int, bool]] = []
    trainers: list[training.WireTrainer] = []
    steps_noted(order)
    ddp.TASKS["tiny"] = TINY
    make = ddp.make_trainer
    ddp.make_trainer = lambda *args: trainers.append(make(*args)) or trainers[-1]
    rows = list(ddp.measure(wires, "tiny", ROUNDS, gpu=False))
    weights = [next(trainer.model.parameters()).data_ptr() for trainer in trainers]
    return rows, order, weights


def test_ddp_wires_take_turns_with_compute_alone_and_share_their_weights() -> None:
    wires = ["plain", "fp16-hook", "powersgd-1", "int8/256", "int4/128+ef"]
    rows, order, weights = outcomes(ddp_rows, wires)[0]
    assert [row["wire"] for row in rows] == wires
    assert len(set(weights)) == 1
    first, timed = order[: training.WARM_UP * len(wires)], order[training.WARM_UP * len(wires) :]
    assert [trainer for trainer, _ in first] == [t for t, _ in first[:: training.WARM_UP] for _ in range(3)]
    turn = [*first[:: training.WARM_UP], (first[0][0], False)]
    assert timed == ROUNDS * turn, "each wire once a round, then compute alone on the plain model"
    for row in rows:
        assert {"plain", "fp16-hook", "powersgd-1"} == set(row["over"])
        assert row["over"]["plain"] == pytest.approx(rows[0]["step"] / row["step"])
        assert row["exposed"] == pytest.approx(row["step"] - row["compute"])
        assert row["fastest"] <= row["step"] <= row["slowest"]
    errors = {row["wire"]: row["error"] for row in rows}
    assert errors["plain"] == 0.0
    assert 0 < errors["fp16-hook"] < errors["int8/256"] < errors["int4/128+ef"] < 1
    # the weights moved in timed steps alone: before them all wires saw the same
    assert rows[0]["loss"] != rows[-1]["loss"]


def fsdp_rows(group: dist.ProcessGroup, wires: list[str]) -> tuple[list[Any], list[Any]]:
    order: list[tuple[int, bool]] = []
    steps_noted(order)
    fsdp.TASKS["tiny"] = TINY
    return list(fsdp.measure(wires, "tiny", ROUNDS, gpu=False)), order


def test_fsdp_wires_take_turns() -> None:
    wires = ["plain", fsdp.BOTH, "gradients=int4/128+ef,parameters=e4m3fn/128"]
    rows, order = outcomes(fsdp_rows, wires)[0]
    assert [row["wire"] for row in rows] == wires
    first, timed = order[: training.WARM_UP * len(wires)], order[training.WARM_UP * len(wires) :]
    assert timed == ROUNDS * first[:: training.WARM_UP]
    for row in rows:
        assert {"step", "fastest", "slowest", "parameters", "link_bytes", "payload_bytes", "loss"} <= set(row)
        assert row["parameters"] == sum(p.numel() for p in TINY.build().parameters())
    assert rows[0]["payload_bytes"] is None
    assert rows[2]["payload_bytes"] < rows[1]["payload_bytes"]


def test_gpt2_is_the_one_of_124_million_parameters() -> None:
    with torch.device("meta"):
        model = training.GPT2.build()
    assert sum(p.numel() for p in model.parameters()) == 124_475_904
    (tokens,) = training.GPT2.batch(1)
    assert tokens.shape == (8, 1025)
    assert not torch.equal(tokens, training.GPT2.batch(0)[0])


def test_the_autopilot_is_judged_round_by_round() -> None:
    """A machine that gets slower does so for all: medians over all rounds would compare other rounds with others."""
    drift = [1.0, 1.1, 1.3, 1.6, 2.0]
    own = {"plain": 1.0, "plain again": 1.01, "half": 0.7, "int8/256": 0.5, "int4/128": 0.4, "auto": 0.51}
    rows = [
        {"wire": wire, "step": s, "seconds": [s * d for d in drift], "allowed": wire != "int4/128"}
        for wire, s in own.items()
    ]
    rows[-1]["seconds"][2] *= 9  # one round in which it timed sums
    verdict = auto.judged(rows)
    assert (verdict["best"], verdict["counted"]) == ("int8/256", True)
    numbers = [verdict[key] for key in ("noise", "behind_best", "behind_plain_or_half")]
    assert numbers == pytest.approx([0.01, 0.02, 0.51 / 0.7 - 1])
