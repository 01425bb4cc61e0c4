"""What stands around a model is looked through, and on one process a handle has nothing to do."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from each import each
from torch import nn

import narrowcast as nc
from narrowcast.parallel.policy import TensorInfo, choose
from narrowcast.parallel.stats import TensorRow, small_values
from narrowcast.parallel.wrappers import inner_model

POLICIES = ("as-is", "int8/256", "int4/128+ef", "bf16+rank2+ef", "auto", {"0.*": "int8/256"}, nc.schedule({0: "bf16"}))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 5))


@each("policy", POLICIES)
def test_an_idle_handle_answers_everything(policy: object) -> None:
    model = net()
    handle = nc.attach(model, policy, min_values=1)
    model(torch.randn(3, 24)).sum().backward()
    assert handle.step == 0
    assert handle.stats()["ratio"] == 1
    assert (handle.events(), handle.errors(), handle.history(), handle.state_dict()) == ([], {}, [], {})
    assert [row.name for row in handle.rows()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "one process: nothing travels, and nothing is rounded" in handle.explain()
    handle.observe(1.0)
    handle.check_ranks()
    handle.detach()
    nc.attach(model, policy).detach()


def test_gradients_stay_as_they_are_to_the_bit() -> None:
    x, ours, theirs = torch.randn(3, 24), net(), net()
    nc.attach(ours, "int4/128+ef", min_values=1)
    for model in (ours, theirs):
        model(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_what_a_checkpoint_of_many_brings_is_in_the_next_one() -> None:
    model = net()
    handle = nc.attach(model, "int4/128+ef")
    owed = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    handle.load_state_dict(owed)
    assert all(torch.equal(value, owed[name]) for name, value in handle.state_dict().items())
    assert list(handle.state_dict()) == list(owed)
    with pytest.raises(ValueError, match=r"0\.bias has shape \(40,\), the state for it \(3,\)"):
        handle.load_state_dict({"0.bias": torch.zeros(3)})


def test_it_is_said_aloud_and_mistakes_are_errors(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, "narrowcast"):
        nc.attach(net(), "int8/256")
    assert "one process: nothing travels" in caplog.text
    with pytest.raises(ValueError, match="codec spec 'int8/255'"):
        nc.attach(net(), "int8/255")
    with pytest.raises(ValueError, match="the pattern 'head' matches no parameter"):
        nc.attach(net(), {"head": "int8/256"}, strict=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        TypeError, match=r"in one of 2 processes; call torch\.distributed\.init_process_group, then wrap"
    ):
        nc.attach(net(), "int8/256")


def test_a_handle_does_not_keep_its_model_alive() -> None:
    handle = nc.attach(net(), "int8/256")
    assert handle.stats()["steps"] == 0
    with pytest.raises(RuntimeError, match="its model is gone"):
        handle.rows()


class Around(nn.Module):
    """As Fabric's module or torch.compile's: what it wraps under one name, and as an attribute whatever that has."""

    def __init__(self, inner: nn.Module, name: str = "_forward_module") -> None:
        super().__init__()
        self.add_module(name, inner)

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(next(iter(self.__dict__["_modules"].values()), None), name)


def compiled(model: nn.Module) -> nn.Module:
    """torch.compile itself takes seconds to import; tests/dist has the real one."""
    return Around(model, "_orig_mod")


def regional(model: nn.Module) -> nn.Module:
    """As Accelerate's regional compilation, which keeps the original beside it."""
    other = net()
    other.__dict__["_orig_mod"] = model
    return other


@each("wrap", [compiled, Around, regional, lambda m: Around(compiled(m)), lambda m: compiled(Around(m)), lambda m: m])
def test_the_model_inside_is_found(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    assert inner_model(wrap(model)) is model


def test_an_attribute_that_is_handed_on_is_no_wrapper() -> None:
    model = Around(compiled(net()), "base")  # as a model of peft
    assert inner_model(model) is model


def rows_of(sizes: list[int], min_values: int) -> list[TensorRow]:
    infos = [TensorInfo(f"t{n}", (size,), torch.float32) for n, size in enumerate(sizes)]
    choices = [choose("int8/256", info, 0, min_values) for info in infos]
    return [TensorRow.of(i.name, i.numel, choice, i.dtype) for i, choice in zip(infos, choices, strict=True)]


LORA = [6144] * 48 + [64] * 48


@each(
    "sizes, says",
    [
        (LORA, "100 % of the values stay as they are"),
        ([*LORA, 20_000], "94 % of the values stay as they are"),
        ([*LORA, 400_000], None),  # a head that is trained as well
        ([768 * 768] * 12 + [768] * 50, None),
        ([960, 40, 1320], None),  # a toy
    ],
)
def test_small_tensors_that_hold_most_values_are_named(sizes: list[int], says: str | None) -> None:
    said = small_values(rows_of(sizes, 10_000))
    assert [text.startswith(str(says)) for text in said] == ([True] if says else [])
    for text in said:
        assert text.endswith("min_values=6144 sends most of them")
        assert not small_values(rows_of(sizes, 6144))
