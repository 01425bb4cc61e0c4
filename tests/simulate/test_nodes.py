"""One node for an operation and its casts: whatever is asked of the graph, the answer is that of the plain form."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from each import each
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast import simulate
from narrowcast.simulate.precision import autograd

FORMATS = {"weights": "e4m3", "activations": "e4m3", "gradients": "e5m2"}
NOISY = {"weights": "e4m3+sr", "activations": "e5m2+sr", "gradients": "e5m2+sr", "seed": 3}
SCALED = {"weights": "int8/64", "activations": "bf16"}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Conv2d(6, 8, 3, padding=1, bias=False),
    "conv with bias, stride, dilation, groups": lambda: nn.Conv2d(6, 4, 3, 2, 2, 2, 2),
    "norm": lambda: nn.BatchNorm2d(6),
    "norm without history": lambda: nn.BatchNorm2d(6, track_running_stats=False),
}
NOT_ONE_NODE: dict[str, Callable[[], nn.Module]] = {
    "conv, padded by name": lambda: nn.Conv2d(6, 8, 3, padding="same"),
    "norm without weights": lambda: nn.BatchNorm2d(6, affine=False),
}


def pictures(wants_gradient: bool = True) -> Tensor:
    x = torch.randn(5, 6, 9, 7, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(wants_gradient)


def lowered(make: Callable[[], nn.Module], formats: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    layer = make()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) / 3)
    simulate.lower(layer, **formats)
    return layer


def is_one_node(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ == "_NodeBackward"


Ask = Callable[[nn.Module], list[Tensor]]


def same_in_both_forms(
    make: Callable[[], nn.Module], formats: dict[str, object], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """What `ask` gets from the node and from the plain form, every bit and every buffer."""
    layer = lowered(make, formats)
    got = ask(layer) + list(layer.buffers())
    with monkeypatch.context() as patch:
        patch.setattr(autograd, "suits", lambda *_: False)
        plain = lowered(make, formats)
        want = ask(plain) + list(plain.buffers())
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    return got


def weighted(y: Tensor) -> Tensor:
    """A loss whose gradient is another number everywhere."""
    return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()


def gradients(layer: nn.Module) -> list[Tensor]:
    x = pictures()
    out = layer(x)
    weighted(out).backward()
    return [out, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("formats", [FORMATS, NOISY, SCALED, {"gradients": "e5m2"}], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients(
    name: str, training: bool, formats: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    same_in_both_forms(LAYERS[name], formats, lambda layer: gradients(layer.train(training)), monkeypatch)
    assert is_one_node(lowered(LAYERS[name], formats)(pictures()))


@pytest.mark.parametrize("name", NOT_ONE_NODE)
def test_what_is_not_one_node_takes_the_plain_form(name: str) -> None:
    out = lowered(NOT_ONE_NODE[name], FORMATS)(pictures())
    assert not is_one_node(out)
    out.sum().backward()


def test_accumulators_of_ours_are_never_skipped() -> None:
    layer = lowered(LAYERS["conv"], FORMATS | {"accumulate": "bf16"})
    assert not is_one_node(layer(pictures()))
    backward_only = lowered(LAYERS["conv"], FORMATS | {"accumulate_backward": "bf16"})
    assert not is_one_node(backward_only(pictures()))


@pytest.mark.parametrize("formats", [FORMATS, {"weights": "e4m3", "activations": "e5m2"}], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives(name: str, formats: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty on gradients; where gradients are cast, the graph ends there, in both forms."""

    def ask(layer: nn.Module) -> list[Tensor]:
        x = pictures()
        wanted = [x, *layer.parameters()]
        first = torch.autograd.grad(weighted(layer(x).square()), wanted, create_graph=True)
        penalty = sum((weighted(g.square()) for g in first), torch.zeros(()))
        second = torch.autograd.grad(penalty, wanted, allow_unused=True)
        return [*first, *second]

    got = same_in_both_forms(LAYERS[name], formats, ask, monkeypatch)
    assert any(g is not None and bool(g.any()) for g in got[len(got) // 2 :])


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
@pytest.mark.parametrize("name", LAYERS)
def test_who_wants_no_gradient_gets_none(name: str, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(layer: nn.Module) -> list[Tensor]:
        if frozen != "input" and getattr(layer, frozen) is not None:
            getattr(layer, frozen).requires_grad_(False)
        x = pictures(frozen != "input")
        weighted(layer(x)).backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    got = same_in_both_forms(LAYERS[name], FORMATS, ask, monkeypatch)
    assert frozen != "input" or got[0] is None


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_that_is_kept_is_used_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(layer: nn.Module) -> list[Tensor]:
        x = pictures()
        loss = weighted(layer(x))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    same_in_both_forms(LAYERS[name], FORMATS, ask, monkeypatch)


@pytest.mark.parametrize("name", LAYERS)
def test_hooks_see_what_they_saw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a result, of a module, and gradients with respect to a result: not yet cast."""

    def ask(layer: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        layer.register_full_backward_hook(lambda _, inputs, outputs: seen.extend([*inputs, *outputs]))
        x = pictures()
        out = layer(x)
        out.register_hook(seen.append)
        out.retain_grad()
        weighted(out).backward()
        again = layer(x)
        return [*seen, out.grad, *torch.autograd.grad(weighted(again), again)]

    got = same_in_both_forms(LAYERS[name], FORMATS, ask, monkeypatch)
    assert not torch.equal(got[0], nc.round_to(got[0], "e5m2"))


@pytest.mark.parametrize("name", LAYERS)
def test_without_a_graph_there_is_no_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(layer: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            out = layer(pictures())
        with torch.inference_mode():
            inferred = layer(pictures(False)).clone()
        assert out.grad_fn is None
        return [out, inferred]

    same_in_both_forms(LAYERS[name], FORMATS, ask, monkeypatch)


@pytest.mark.parametrize("name", LAYERS)
def test_autocast_checkpoints_and_layouts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(layer: nn.Module) -> list[Tensor]:
        x, y, z = pictures(), pictures(), pictures(False).to(memory_format=torch.channels_last).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            mixed = layer(x)
        weighted(mixed.float()).backward()
        weighted(checkpoint(layer, y, use_reentrant=False)).backward()
        weighted(layer(z)).backward()
        return [mixed, x.grad, y.grad, z.grad, *(p.grad for p in layer.parameters())]

    same_in_both_forms(LAYERS[name], FORMATS, ask, monkeypatch)


def test_a_layer_used_twice_before_it_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(layer: nn.Module) -> list[Tensor]:
        x = pictures()
        weighted(layer(x) + layer(2 * x)).backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    for make in LAYERS.values():
        same_in_both_forms(make, NOISY, ask, monkeypatch)


ROWS = pictures(False).flatten(2)
EVERY_LAYER: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    **{name: (make, pictures(False)) for name, make in {**LAYERS, **NOT_ONE_NODE}.items()},
    "one picture": (LAYERS["conv"], pictures(False)[0]),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3), ROWS),
    "linear": (lambda: nn.Linear(63, 4), ROWS[0]),
    "linear on a batch": (lambda: nn.Linear(63, 4), ROWS),
    "linear on a vector": (lambda: nn.Linear(63, 4), ROWS[0, 0]),
    "layer norm": (lambda: nn.LayerNorm(63), ROWS),
    "group norm": (lambda: nn.GroupNorm(2, 6), ROWS),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), pictures(False)),
    "rms norm": (lambda: nn.RMSNorm(63), ROWS),
    "embedding": (lambda: nn.Embedding(5, 4), torch.tensor([[1, 3], [3, 0]])),
    "attention": (lambda: nn.TransformerEncoderLayer(63, 3, 8, batch_first=True, dropout=0.0), ROWS),
    "quantizer": (lambda: nn.Sequential(nn.Linear(63, 4), simulate.Quantizer(None, "e5m2")), ROWS),
}
INPLACE = [{"gradients": "e5m2"}, {"accumulate": "bf16"}, FORMATS | {"accumulate": "bf16"}, {"activations": "int8/64"}]


@each("formats", [*INPLACE, FORMATS])
@pytest.mark.parametrize("name", EVERY_LAYER)
def test_a_result_may_be_changed_in_place(name: str, formats: dict[str, object]) -> None:
    make, given = EVERY_LAYER[name]
    found = []
    for inplace in (True, False):
        layer, x = lowered(make, formats), given.clone().requires_grad_(given.is_floating_point())
        result = layer(x)
        assert "gradients" not in formats or not result._is_view()
        out = functional.relu(result, inplace=inplace)
        weighted(out).backward()
        assert torch.equal(x, given)
        found.append([out, x.grad, *(p.grad for p in layer.parameters())])
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_caster_that_has_not_begun_leaves_nothing_that_cannot_be_changed_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(inplace=True))
    simulate.lower(model, activations=simulate.LayerScale("posit8.1", warmup=5))
    model(torch.ones(2, 4)).sum().backward()


def test_a_quantizer_of_gradients_leaves_its_input_as_it_is() -> None:
    x = pictures()
    before = x.detach().clone()
    functional.relu(simulate.Quantizer(None, "e5m2")(x), inplace=True).sum().backward()
    assert torch.equal(x, before)
    assert torch.equal(x.grad, (before > 0).float())


def test_what_torch_refuses_is_refused_by_torch() -> None:
    layer = lowered(LAYERS["norm"], FORMATS)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.randn(1, 6, 1, 1, requires_grad=True))
    with pytest.raises(RuntimeError, match="channels"):
        lowered(LAYERS["conv"], FORMATS)(torch.randn(2, 5, 8, 8, requires_grad=True))


def test_training_with_overrides_and_a_master_format(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
        return nn.Sequential(*layers)

    def train() -> list[Tensor]:
        model = make()
        low = simulate.lower(model, **FORMATS, master="bf16", overrides={"3": "as-is", "4": {"gradients": "bf16"}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        low.keep_master(optimizer)
        for step in range(3):
            low.set_step(step)
            optimizer.zero_grad()
            weighted(model(pictures(False))).backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers(), copy.deepcopy(model)(pictures(False))]

    got = train()
    monkeypatch.setattr(autograd, "suits", lambda *_: False)
    assert all(torch.equal(a, b) for a, b in zip(got, train(), strict=True))
