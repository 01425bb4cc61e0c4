"""A new implementation is one file and one line: this class is that file, its entry in IMPLEMENTATIONS that line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from each import each
from laws.inputs import normal
from laws.laws import LAWS, exempt
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import all_specs
from narrowcast.formats import Format
from narrowcast.kernels import CastPlan, Noise, Plan, dispatch, ops, reference
from narrowcast.kernels.arithmetic import Unfused

SPEC = "int8/64"


class Counted:
    """int8 in blocks of 64, by way of the reference; counts its encodings."""

    DEVICE = "cpu"

    def __init__(self) -> None:
        self.calls = 0

    def name(self) -> str:
        return "counted"

    def why_not(self, plan: Plan | CastPlan | None) -> str | None:
        return None if plan == nc.codec(SPEC).plan_for(torch.float32) else f"only {SPEC} is counted"

    def why_not_round(self, fmt: Format, rounding: str, rules: str) -> str | None:
        return "nothing is rounded here"

    def kernels(self, plan: Plan | CastPlan) -> Unfused:
        return Unfused(self._encode, reference.decode)

    def _encode(self, plan: Plan, x: Tensor, wire: Tensor, noise: Noise, scale: Tensor | None) -> None:
        self.calls += 1
        reference.encode(plan, x, wire, noise, scale)

    def rounding(self) -> Callable[..., Tensor]:
        raise AssertionError("asked for in spite of its reason")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    one = Counted()
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [one, *dispatch.IMPLEMENTATIONS])
    monkeypatch.setattr(dispatch, "kernels_for", dispatch.choose_kernels)
    return one


def test_it_runs_what_it_can_and_explain_names_it(counted: Counted) -> None:
    x = normal(200)
    nc.codec(SPEC).encode(x)
    nc.codec("int8/128").encode(x)
    assert counted.calls == 1
    on_cpu = {c.op: c for c in nc.codec(SPEC).explain() if c.device == "cpu"}
    assert (on_cpu["encode"].implementation, on_cpu["encode"].why) == ("counted", "")
    assert on_cpu["round_to"].implementation != "counted"
    assert f"only {SPEC} is counted" in nc.codec("int8/128").explain()[0].why


def test_feedback_reduction_and_all_laws_follow(counted: Counted) -> None:
    codec = nc.codec(SPEC)
    for law in LAWS:
        if not exempt(codec, law):
            LAWS[law](codec)
    before, residual = counted.calls, torch.zeros(200)
    codec.reduce([codec.encode(normal(200), residual=residual)], 200)
    assert counted.calls == before + 2
    assert residual.any()


def test_what_runs_a_plan_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    choose = dispatch.choose_kernels
    monkeypatch.setattr(dispatch, "choose_kernels", lambda plan, device: asked.append(device) or choose(plan, device))
    plan, x = Plan(nc.format("int8"), block=64), normal(64)
    for _ in range(3):
        ops.encode(plan, x, torch.empty(plan.layout(64).nbytes, dtype=torch.uint8))
    assert asked == ["cpu"]


@each("spec", all_specs())
def test_explain_names_what_runs(spec: str) -> None:
    """The names come from the same choice as the kernels."""
    plan = nc.codec(spec).plan_for(torch.float32)
    kernels = dispatch.kernels_for(plan, "cpu")
    (first, *_) = nc.codec(spec).explain()
    assert (kernels is reference.kernels(plan)) == (first.implementation == "reference")
    assert bool(first.why) == (first.implementation == "reference")
