"""The autopilot in simulated trainings: it does not lose where few bits for all do, and a run goes on as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast import data
from narrowcast.parallel.autopilot import lines
from narrowcast.simulate import DescribedLink, Run, train

LINK = DescribedLink(0.001, compute=0.001)


class Poisoned(nn.Module):
    """A layer whose gradients have heavy tails: one value in 64 is huge, and nothing depends on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        used = torch.cat([torch.zeros(12, 1), self.layer.weight[:, 1:]], dim=1)
        scores = self.head(torch.relu(nn.functional.linear(x.flatten(1), used, self.layer.bias)))
        huge = 3e3 * self.layer.weight[:, 0].sum()
        return torch.cat([scores[:, :1] + huge - huge.detach(), scores[:, 1:]], dim=1)


def run(spec: object, **options: Any) -> Run:
    digits = data.load("digits").normalised()
    common: dict[str, Any] = {"workers": 2, "min_values": 100, "batch": 128, "lr": 0.1, "steps": 70, "link": LINK}
    return train(options.pop("model", None) or Poisoned(), digits, spec=spec, **{**common, **options})


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))


def test_one_layer_with_heavy_tails_does_not_learn_in_int4_and_does_with_auto() -> None:
    plain, few, auto = (run(spec) for spec in ("as-is", "int4/128", nc.auto(candidates=["int4/128", "int8/128"])))
    right = [one.accuracy or 0.0 for one in (plain, few, auto)]
    assert right[1] < right[0] - 0.05
    assert right[2] > right[0] - 0.02
    wires = {row.name: row.bits_per_value for row in auto.exchange.rows(auto.step)}
    assert wires["layer.weight"] >= 16
    assert wires["head.weight"] < 9


def test_a_loss_is_heard_before_the_decision_of_its_step() -> None:
    """As on ranks, which decide in the next one."""
    begun: list[int] = []

    def loss(scores: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores, wanted) + (1000.0 if begun[-1] == 24 else 0.0)

    done = run("auto", steps=30, model=plain(), loss=loss, before_step=lambda r: begun.append(r.step))
    history = done.exchange.policy.history()
    assert [entry["step"] for entry in history if "the loss jumped" in entry["reason"]] == [26], "25 sends what is owed"


def test_a_run_that_was_cut_goes_on_with_the_same_wires_and_bits(tmp_path: Path) -> None:
    def link(step: int) -> DescribedLink:
        return LINK if step < 20 else DescribedLink(1000.0)

    options: dict[str, Any] = {"link": link, "steps": 40}
    whole = run("auto", **options)
    path = tmp_path / "run.pt"
    run("auto", **options, checkpoint=path, checkpoint_every=7, after_step=lambda r: setattr(r, "stop", r.step == 26))
    rest = run("auto", **options, checkpoint=path)
    assert rest.exchange.policy.history() == whole.exchange.policy.history()
    assert len(whole.exchange.policy.history()) >= 2
    for one, other in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "road, link", [("wires", LINK), ("half", DescribedLink(0.5, compute=1e-4, codec_gbyte=0.05, latency=1e-6))]
)
def test_a_run_repeated_from_its_history_has_the_same_bits(tmp_path: Path, road: str, link: DescribedLink) -> None:
    """Small tensors, too, which a history does not name."""
    first = run(nc.auto(candidates=["int4/64+sr+ef"]), link=link, steps=20, model=plain())
    assert first.exchange.policy.history()[0]["road"] == road
    path = tmp_path / "run.jsonl"
    path.write_text(lines(first.exchange.policy.history()))
    again = run(nc.replay(path), link=None, steps=20, model=plain())
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_another_autopilot_or_link_is_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run("auto", steps=6, checkpoint=path)
    for other in ({"spec": nc.auto(error=0.1)}, {"spec": "auto", "link": DescribedLink(2.0)}):
        with pytest.raises(ValueError, match="is of another run"):
            run(**other, steps=6, checkpoint=path)


def test_auto_needs_a_link() -> None:
    with pytest.raises(ValueError, match="give link="):
        run("auto", link=None)
    with pytest.raises(ValueError, match="must be above 0"):
        DescribedLink(0.0)
