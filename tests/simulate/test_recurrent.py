"""LSTM, GRU and RNN in a lowered model: torch's results in float32, a plain cell's bits in narrow formats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from narrowcast import simulate

INPUTS, WIDTH, BATCH, STEPS = 3, 5, 4, 6
NARROW = {"weights": "e4m3", "activations": "e5m2", "gradients": "e5m2", "accumulate": "bf16"}
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "no bias": {"bias": False},
    "two layers, batch first": {"num_layers": 2, "batch_first": True},
    "both directions": {"bidirectional": True, "num_layers": 2},
    "dropout": {"num_layers": 3, "dropout": 0.5},
}


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(kind: str, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return LAYERS[kind](INPUTS, WIDTH, **options)


def packed(seed: int = 1) -> PackedSequence:
    sequences = [random(length, INPUTS, seed=seed + i) for i, length in enumerate((6, 2, 4, 4))]
    return pack_sequence(sequences, enforce_sorted=False)


def tensors(result: Any) -> list[Tensor]:
    """Output and last states."""
    output, state = result
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *(state if isinstance(state, tuple) else [state])]


def everything(model: nn.RNNBase, x: Any, seed: int = 3) -> list[Tensor]:
    """Results and gradients, of a loss that looks at all of them."""
    data = x.data if isinstance(x, PackedSequence) else x
    data = data.clone().requires_grad_()
    x = x._replace(data=data) if isinstance(x, PackedSequence) else data
    torch.manual_seed(seed)
    found = tensors(model(x))
    sum((t * random(*t.shape, seed=9)).sum() for t in found).backward()
    return [*found, data.grad, *(p.grad for p in model.parameters())]


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_in_float32_it_is_torchs_own(kind: str, options: dict[str, Any], is_packed: bool) -> None:
    model = layer(kind, **options)
    x = packed() if is_packed else random(BATCH, STEPS, INPUTS)
    want = everything(model, x)
    model = layer(kind, **options)
    lowered = simulate.lower(model, accumulate="fp32+sequential")
    got = everything(model, x)
    assert "lowered" in lowered.explain()[0].seen[-1]
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=2e-5, rtol=1e-5)


def test_an_lstm_with_a_projection_is_torchs_own() -> None:
    options = {"proj_size": 2, "num_layers": 2, "bidirectional": True}
    want = everything(layer("lstm", **options), random(STEPS, BATCH, INPUTS))
    model = layer("lstm", **options)
    simulate.lower(model, accumulate="fp32+sequential")
    for a, b in zip(everything(model, random(STEPS, BATCH, INPUTS)), want, strict=True):
        assert torch.allclose(a, b, atol=2e-5, rtol=1e-5)


def stored(x: Tensor) -> Tensor:
    return simulate.cast(x, NARROW["activations"], gradient="quantised", backward_fmt=NARROW["gradients"])


def product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = simulate.linear(x, weight, bias, NARROW["accumulate"])
    return simulate.cast(out, "fp32", gradient="quantised", backward_fmt=NARROW["gradients"])


def plain_step(kind: str, inputs: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A step as textbooks have it."""
    if kind == "lstm":
        i, f, g, o = (inputs + hidden).chunk(4, 1)
        c = stored(f.sigmoid() * c + i.sigmoid() * g.tanh())
        return stored(o.sigmoid() * c.tanh()), c
    if kind == "gru":
        (r, z, n), (rh, zh, nh) = inputs.chunk(3, 1), hidden.chunk(3, 1)
        new = (n + (r + rh).sigmoid() * nh).tanh()
        return stored((z + zh).sigmoid() * (h - new) + new), c
    return stored((inputs + hidden).tanh() if kind == "tanh" else (inputs + hidden).relu()), c


class Plain(nn.Module):
    """The definition: one layer, one direction, step by step."""

    def __init__(self, kind: str, given: nn.RNNBase) -> None:
        super().__init__()
        self.kind, self.weights = kind, nn.ParameterList(copy.deepcopy(list(given.parameters())))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        low = [
            simulate.cast(w, NARROW["weights"], gradient="quantised", backward_fmt=NARROW["gradients"])
            for w in self.weights
        ]
        products = product(simulate.cast(x.flatten(0, 1), NARROW["activations"]), low[0], low[2]).split(x.shape[1])
        h = c = x.new_zeros(x.shape[1], WIDTH)
        outputs = []
        for inputs in products:
            h, c = plain_step(self.kind, inputs, product(h, low[1], low[3]), h, c)
            outputs.append(h)
        return torch.stack(outputs), (h[None], c[None]) if self.kind == "lstm" else h[None]


@pytest.mark.parametrize("kind", LAYERS)
def test_it_has_the_bits_of_a_plain_cell(kind: str) -> None:
    """Forward and backward; large inputs, so that formats overflow and gates saturate in places."""
    model = layer(kind)
    x = random(STEPS, BATCH, INPUTS) * torch.logspace(-6, 3, STEPS)[:, None, None]
    want = everything(Plain(kind, model), x)
    assert all(t.isfinite().all() for t in want[:1])
    simulate.lower(model, **NARROW)
    got = everything(model, x)
    assert same(got, want)
    assert not same(got, everything(layer(kind), x))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_cell_is_one_step_of_its_layer(kind: str) -> None:
    model = layer(kind)
    cells = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
    cell = cells[kind](INPUTS, WIDTH) if kind in cells else nn.RNNCell(INPUTS, WIDTH, nonlinearity=kind)
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in model.state_dict().items()})
    x = random(1, BATCH, INPUTS)
    for each in (model, cell):
        simulate.lower(each, **NARROW)
    state = cell(x[0])
    state = state if isinstance(state, tuple) else (state,)
    assert same([t[0] for t in tensors(model(x))[1:]], list(state))


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}], ids=["one", "stacked"])
@pytest.mark.parametrize("kind", LAYERS)
def test_each_packed_sequence_is_as_if_alone(kind: str, options: dict[str, Any]) -> None:
    model = layer(kind, **options)
    simulate.lower(model, **NARROW)
    output, state = model(packed())
    padded, lengths = nn.utils.rnn.pad_packed_sequence(output)
    states = state if isinstance(state, tuple) else (state,)
    for i, length in enumerate(lengths.tolist()):
        alone = tensors(model(random(length, INPUTS, seed=1 + i)[:, None]))
        assert same([padded[:length, i], *(s[:, i] for s in states)], [t[:, 0] for t in alone])


@pytest.mark.parametrize("kind", LAYERS)
def test_the_way_back_is_the_way_forth_of_the_mirrored_sequence(kind: str) -> None:
    both, one = layer(kind, bidirectional=True), layer(kind)
    one.load_state_dict({n.removesuffix("_reverse"): p for n, p in both.state_dict().items() if n.endswith("_reverse")})
    for model in (both, one):
        simulate.lower(model, **NARROW)
    x = random(STEPS, BATCH, INPUTS)
    assert torch.equal(both(x)[0][:, :, WIDTH:], one(x.flip(0))[0].flip(0))


@pytest.mark.parametrize("kind", LAYERS)
def test_an_empty_batch_gives_an_empty_result(kind: str) -> None:
    x, model = torch.zeros(STEPS, 0, INPUTS), layer(kind)
    expected = tensors(model(x))
    simulate.lower(model, **NARROW)
    assert [y.shape for y in tensors(model(x))] == [y.shape for y in expected]


def test_layers_are_stacked() -> None:
    deep, first = layer("lstm", num_layers=2), layer("lstm")
    second = nn.LSTM(WIDTH, WIDTH)
    for number, model in enumerate((first, second)):
        names = {n for n in deep.state_dict() if n.endswith(str(number))}
        model.load_state_dict({n[:-1] + "0": deep.state_dict()[n] for n in names})
    for model in (deep, first, second):
        simulate.lower(model, **NARROW)
    x = random(STEPS, BATCH, INPUTS)
    assert torch.equal(deep(x)[0], second(first(x)[0])[0])


def test_noise_is_drawn_anew_at_each_step_of_a_sequence_and_can_be_had_again() -> None:
    model = layer("gru")
    lowered = simulate.lower(model, activations="e4m3+sr", seed=5)
    x = random(1, BATCH, INPUTS).expand(STEPS, -1, -1)
    first = model(x)[0]
    lowered.set_step(0)
    assert torch.equal(model(x)[0], first)
    assert not torch.equal(model(x)[0], first)


def test_results_may_be_changed_in_place_and_restored() -> None:
    for kind in LAYERS:
        model = layer(kind)
        before = model(random(STEPS, BATCH, INPUTS))[0]
        lowered = simulate.lower(model, gradients="bf16")
        output, _ = model(random(STEPS, BATCH, INPUTS).requires_grad_())
        output.add_(1).sum().backward()
        lowered.restore()
        assert torch.equal(model(random(STEPS, BATCH, INPUTS))[0], before)


def test_a_sequence_without_steps_is_refused() -> None:
    model = layer("gru")
    simulate.lower(model, weights="bf16")
    with pytest.raises(ValueError, match="one step at least"):
        model(torch.zeros(0, BATCH, INPUTS))
