"""The FSDP2 benches: what they compare, and that a study goes on where it was stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowcast_research.bench import fsdp_curves, fsdp_curves_worker

from narrowcast.bench import fsdp, training
from narrowcast.bench.ranks import Ranks
from narrowcast.bench.training import Transformer, text_batch
from narrowcast.data import help_text


def test_a_wire_is_what_attach_gets() -> None:
    assert fsdp.attach_arguments("plain") == {}
    assert fsdp.attach_arguments("gradients=int8/256") == {"gradients": "int8/256"}
    assert fsdp.attach_arguments("parameters=e4m3fn/128") == {"gradients": "as-is", "parameters": "e4m3fn/128"}
    both = fsdp.attach_arguments("gradients=int4/128+ef,parameters=e4m3fn/128")
    assert both == {"gradients": "int4/128+ef", "parameters": "e4m3fn/128"}
    with pytest.raises(ValueError, match="'weights' is neither"):
        fsdp.attach_arguments("weights=int8/256")


def test_a_wrong_spec_is_refused_before_a_lab_is_built() -> None:
    with pytest.raises(ValueError, match="int8/255"):
        next(fsdp.run(Ranks(4, "1gbit"), ["plain", "gradients=int8/255"]))


def test_the_models_have_the_promised_sizes() -> None:
    large = training.TEXT.build()
    small = Transformer(fsdp_curves_worker.WIDTH, fsdp_curves_worker.LAYERS, fsdp_curves_worker.LENGTH)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (large, small)]
    assert sizes == [pytest.approx(10e6, rel=0.05), pytest.approx(3e6, rel=0.1)]


def test_the_loss_looks_at_no_later_byte() -> None:
    torch.manual_seed(0)
    model, x = Transformer(16, 2, 8), text_batch(help_text(), 0, 1, 8)
    hidden = model.embed(x[:, :-1]) + model.place(torch.arange(8))
    changed = hidden.clone()
    changed[0, -1] += 1.0
    a, b = model.blocks[0](hidden), model.blocks[0](changed)
    assert torch.allclose(a[0, :-1], b[0, :-1])
    assert not torch.allclose(a[0, -1], b[0, -1])


def test_rows_are_compared_with_plain() -> None:
    plain = {"wire": "plain", "link_bytes": 100.0, "step": 4.0}
    row = {"wire": fsdp.BOTH, "link_bytes": 25.0, "step": 1.0}
    slow = Ranks(4, "200mbit")
    kept = {"fewer_bytes": 4.0, "speedup": 4.0, "target": (3.5, 2.5), "met": True}
    assert fsdp.comparison(row, plain, slow) == kept
    assert fsdp.comparison({**row, "step": 2.0}, plain, slow)["met"] is False
    assert fsdp.comparison(row, plain, Ranks(2, "200mbit"))["met"] is None
    assert fsdp.comparison(row, plain, Ranks(4, "200mbit", gpu=True))["met"] is None
    assert fsdp.comparison({**row, "link_bytes": 0.0}, plain, slow)["fewer_bytes"] is None


def test_the_interval_of_paired_differences() -> None:
    mean, half = fsdp_curves.interval([0.01, 0.03, 0.02])
    assert mean == pytest.approx(0.02)
    # Student's t for 2 degrees of freedom times 0.01 / sqrt(3)
    assert half == pytest.approx(4.303 * 0.01 / math.sqrt(3))
    assert math.isnan(fsdp_curves.interval([0.5])[1])
    assert math.isnan(fsdp_curves.interval([])[0])


def one(wire: str, seed: int, last: float) -> dict[str, Any]:
    return {"wire": wire, "seed": seed, "held_out": {"250": last + 1, "500": last}}


def test_every_seed_is_a_pair() -> None:
    runs = [one("plain", 0, 2.0), one("x", 0, 2.1), one("plain", 1, 3.0), one("x", 1, 3.2)]
    plain, x = fsdp_curves.compared(runs)
    assert (plain["difference"], plain["largest_gap"]) == (0.0, 0.0)
    assert x["difference"] == pytest.approx(0.15)
    assert x["largest_gap"] == pytest.approx(0.2)
    assert x["seeds"] == 2


def test_a_study_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int, str]] = []

    def loopback(steps: int, seed: int, wire: str) -> dict[str, Any]:
        started.append((steps, seed, wire))
        if len(started) == 3:
            raise KeyboardInterrupt
        return one(wire, seed, float(seed))

    monkeypatch.setattr(fsdp_curves, "loopback", loopback)
    wires = ["plain", "gradients=int8/256,parameters=e4m3fn/128"]
    with pytest.raises(KeyboardInterrupt):
        list(fsdp_curves.run(tmp_path, wires, 5, 2))
    found = list(fsdp_curves.run(tmp_path, wires, 5, 2))
    assert [(run["wire"], run["seed"]) for run in found] == [(wire, seed) for seed in (0, 1) for wire in wires]
    # two before the stop, the one that was stopped, and the two that were missing
    assert started == [
        (5, s, w) for s, w in [(0, wires[0]), (0, wires[1]), (1, wires[0]), (1, wires[0]), (1, wires[1])]
    ]
    assert all(json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
