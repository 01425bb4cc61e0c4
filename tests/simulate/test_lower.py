"""Lowering: the same model with its code, names and checkpoints, and every product and cast as asked for."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast import simulate
from narrowcast.kernels.matmul import matmul
from narrowcast.simulate.precision import autograd


class Everything(nn.Module):
    """Layers, functions and attention in one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 16)
        self.ln = nn.LayerNorm(16)
        self.mix = nn.Parameter(torch.randn(16, 16) / 4)
        self.words = nn.Embedding(5, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = functional.relu(self.bn(self.conv(x))).mean((2, 3))
        x = self.ln(self.fc(x)) @ self.mix
        both = torch.stack([x, self.words(words)], 1)
        both = functional.scaled_dot_product_attention(both, both, both)
        return self.head(self.layer(both).mean(1))


@pytest.fixture
def model() -> Everything:
    torch.manual_seed(0)
    return Everything()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 8, 8, generator=g), torch.arange(6) % 5


def run(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(*batch)
    out.square().sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_nothing_asked_for_changes_nothing_and_restore_undoes_all(
    model: Everything, batch: tuple[Tensor, Tensor]
) -> None:
    out, grads = run(model, batch)
    classes = [type(m) for m in model.modules()]
    lowered = simulate.lower(model, weights="fp32")
    again, grads_again = run(model, batch)
    assert torch.equal(out, again)
    assert same(grads, grads_again)
    assert lowered.restore() is model
    lowered = simulate.lower(model, weights="e4m3")
    assert not torch.equal(run(model, batch)[0], out)
    lowered.restore()
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(run(model, batch)[0], out)


@pytest.mark.parametrize("training", [True, False])
def test_every_product_goes_through_the_accumulator(
    model: Everything, batch: tuple[Tensor, Tensor], training: bool
) -> None:
    """In float32 but in another order: all close, attention and its fast paths included, and not one the same."""
    model.train(training)
    out, grads = run(model, batch)
    lowered = simulate.lower(model, accumulate="fp32+pairwise")
    again, grads_again = run(model, batch)
    assert torch.allclose(out, again, atol=1e-5)
    assert all(torch.allclose(grads[n], grads_again[n], atol=1e-4, rtol=1e-3) for n in grads)
    rows = {row.module: row for row in lowered.explain()}
    assert "matmul: lowered" in rows[""].seen
    assert "scaled_dot_product_attention: lowered" in rows[""].seen
    assert rows["layer.self_attn"].seen == ("multi_head_attention_forward: lowered",)
    assert all("lowered" in " ".join(rows[n].seen) for n in ("conv", "bn", "fc", "ln", "words", "head"))


def test_a_linear_layer_by_hand() -> None:
    """y = R(A(x) @ W(w)), gradients cast on the way in and out."""
    torch.manual_seed(0)
    layer, x = nn.Linear(20, 7, bias=False), torch.randn(5, 20, requires_grad=True)
    simulate.lower(layer, weights="e4m3", activations="bf16", gradients="e5m2", accumulate="fp16+kahan")
    out = layer(x)
    x_low, w_low = nc.round_to(x, "bf16"), nc.round_to(layer.weight, "e4m3")
    assert torch.equal(out, matmul(x_low, w_low.t(), "fp16+kahan"))
    grad = torch.randn(5, 7)
    out.backward(grad)
    grad_low = nc.round_to(grad, "e5m2")
    assert torch.equal(x.grad, matmul(grad_low, w_low, "fp16+kahan"))
    assert torch.equal(layer.weight.grad, nc.round_to(matmul(x_low.t(), grad_low, "fp16+kahan").t(), "e5m2"))


class Recorded(TorchDispatchMode):
    """Which gradients convolutions were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[list[bool]] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is torch.ops.aten.convolution_backward.default:
            self.wanted.append(list(args[-1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("plain", [False, True])
def test_no_gradient_is_computed_for_pictures(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of the first layer wants none, though the weight that is cast beside it does; in both forms."""
    if plain:
        monkeypatch.setattr(autograd, "suits", lambda *_: False)
    layer = nn.Conv2d(3, 4, 3)
    simulate.lower(layer, weights="e4m3", activations="e4m3", gradients="e5m2")
    with Recorded() as seen:
        layer(torch.randn(2, 3, 8, 8)).sum().backward()
        layer(torch.randn(2, 3, 8, 8, requires_grad=True)).sum().backward()
    assert seen.wanted == [[False, True, True], [True, True, True]]


@pytest.mark.parametrize("formats", [{}, {"weights": "e4m3+sr", "activations": "e4m3+sr", "seed": 3}])
def test_a_lowered_model_compiles_in_one_graph(formats: dict[str, object]) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    model, batch = nn.Sequential(*layers), (torch.randn(4, 3, 8, 8),)
    roles = {"weights": "e4m3", "activations": "e4m3", "gradients": "e5m2"} | formats
    lowered = simulate.lower(model, **roles)
    out, grads = run(model, batch)
    lowered.set_step(0)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    again = compiled(*batch)
    again.square().sum().backward()
    assert torch.equal(again, out)
    assert same(grads, {name: p.grad for name, p in model.named_parameters()})


def test_norms_and_embeddings_by_hand() -> None:
    norm, words = nn.LayerNorm(8), nn.Embedding(4, 8)
    x, indices = torch.randn(3, 8), torch.tensor([0, 3, 3])
    weight = words.weight.detach().clone()
    simulate.lower(norm, activations="e4m3", weights="e5m2")
    simulate.lower(words, weights="e4m3", gradients="e5m2")
    want = functional.layer_norm(nc.round_to(x, "e4m3"), (8,), norm.weight, norm.bias, norm.eps)
    assert torch.equal(norm(x), nc.round_to(want, "e4m3"))
    out = words(indices)
    assert torch.equal(out, nc.round_to(weight, "e4m3")[indices])
    grad = torch.randn(3, 8)
    out.backward(grad)
    low = nc.round_to(grad, "e5m2")
    assert torch.equal(words.weight.grad[3], low[1] + low[2])


def test_convolutions_keep_their_padding_modes() -> None:
    for mode in ("zeros", "reflect", "circular"):
        layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode)
        x = torch.randint(-3, 4, (1, 2, 5, 5)).float()
        with torch.no_grad():
            layer.weight.copy_(layer.weight.mul(8).round())
            layer.bias.zero_()
        want = layer(x)
        simulate.lower(layer, accumulate="fp32+sequential")
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("kind", ["mask", "padding", "causal", "zero", "separate", "unbatched"])
def test_multihead_attention_computes_what_torch_does(kind: str) -> None:
    torch.manual_seed(0)
    options = {
        "add_zero_attn": kind == "zero",
        "add_bias_kv": kind == "zero",
        "kdim": 6 if kind == "separate" else None,
    }
    attention = nn.MultiheadAttention(8, 2, vdim=6 if kind == "separate" else None, batch_first=True, **options)
    shape = (5,) if kind == "unbatched" else (3, 5)
    q = torch.randn(*shape, 8)
    k = torch.randn(*shape, 6) if kind == "separate" else q
    masks: dict[str, object] = {}
    if kind == "mask":
        masks["attn_mask"] = torch.randn(6, 5, 5)
    if kind == "padding":
        masks["key_padding_mask"] = torch.tensor([[False] * 4 + [True]] * 3)
    if kind == "causal":
        masks |= {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5), "is_causal": True}
    want, weights = attention(q, k, k, **masks)
    simulate.lower(attention, accumulate="fp32+sequential")
    got, got_weights = attention(q, k, k, **masks)
    assert torch.allclose(got, want, atol=1e-6)
    assert torch.allclose(got_weights, weights, atol=1e-6)
    assert attention(q, k, k, need_weights=False, **masks)[1] is None


def test_attention_with_grouped_heads_and_masks() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, **options: object) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, k, **options)

    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    attend = Attend()
    cases = ({"is_causal": True}, {"attn_mask": torch.rand(5, 5) > 0.3}, {"scale": 0.2}, {})
    wants = [attend(q, k, enable_gqa=True, **case) for case in cases]
    simulate.lower(attend, accumulate="fp32+sequential")
    for case, want in zip(cases, wants, strict=True):
        assert torch.allclose(attend(q, k, enable_gqa=True, **case), want, atol=1e-6, equal_nan=True)


def test_checkpoints_copies_and_pickles(model: Everything, batch: tuple[Tensor, Tensor]) -> None:
    keys = list(model.state_dict())
    simulate.lower(model, weights="e4m3", accumulate="bf16", overrides={"head": "as-is"})
    assert list(model.state_dict()) == keys
    assert isinstance(model.fc, nn.Linear)
    model.eval()
    want = model(*batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*batch), want)


def test_overrides_and_what_is_left_alone(model: Everything) -> None:
    lowered = simulate.lower(
        model,
        weights="e4m3",
        overrides={"head": "as-is", "layer.*": {"weights": "bf16"}, "l*": {"activations": "bf16"}},
    )
    rows = {row.module: row.precision for row in lowered.explain()}
    assert rows["head"] == "as-is"
    assert rows["layer.linear1"].startswith("weights bf16")
    assert rows["ln"].startswith("weights e4m3, activations bf16")
    x = torch.randn(2, 16)
    assert torch.equal(model.head(x), functional.linear(x, model.head.weight, model.head.bias))


def test_a_module_left_alone_inside_a_lowered_one_is_left_alone() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    outer, x = Outer(), torch.randn(2, 4)
    want = outer(x)
    simulate.lower(outer, weights="e2m1fn", overrides={"inner": "as-is"})
    assert torch.equal(outer(x), want)


class WithEinsum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ij,kj->ik", x, x)


def test_what_cannot_be_lowered_raises_or_is_listed() -> None:
    with pytest.raises(NotImplementedError, match="Bilinear"):
        simulate.lower(nn.Sequential(nn.Bilinear(3, 4, 2)), weights="bf16")
    lowered = simulate.lower(WithEinsum(), weights="bf16")
    with pytest.raises(NotImplementedError, match="calls einsum, which is not lowered; write it as matmul"):
        lowered(torch.ones(2, 2))
    model = nn.Sequential(nn.Bilinear(3, 4, 2), WithEinsum())
    lowered = simulate.lower(model, weights="bf16", unsupported="float32")
    assert "NOT lowered" in {row.module: row.runs for row in lowered.explain()}["0"]
    model[1](torch.ones(2, 2))
    assert lowered.explain()[2].seen == ("einsum: NOT lowered: runs in float32",)


def test_noise_follows_from_seed_step_and_call(model: Everything, batch: tuple[Tensor, Tensor]) -> None:
    lowered = simulate.lower(model.eval(), activations="e4m3+sr", accumulate="bf16+sr", seed=3)
    first, second = model(*batch), model(*batch)
    assert not torch.equal(first, second)
    lowered.set_step(0)
    assert torch.equal(model(*batch), first)
    state = lowered.state_dict()
    assert torch.equal(model(*batch), second)
    lowered.load_state_dict(state)
    assert torch.equal(model(*batch), second)
    lowered.set_step(1)
    assert not torch.equal(model(*batch), first)


def test_modules_with_the_same_numbers_draw_their_own_noise() -> None:
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
    model[1].load_state_dict(model[0].state_dict())
    simulate.lower(model, weights="e4m3+sr", seed=3)
    x = torch.eye(64)
    assert not torch.equal(model[0](x), model[1](x))


def test_a_master_format_is_kept_by_the_optimizer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    lowered = simulate.lower(layer, master="e4m3", weights="e5m2")
    assert torch.equal(layer.weight, nc.round_to(layer.weight, "e4m3"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    lowered.keep_master(optimizer)
    layer(torch.randn(3, 8)).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, nc.round_to(layer.weight, "e4m3"))


def test_noise_of_the_master_format_is_by_parameter_and_step() -> None:
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
    start = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    for layer in layers:
        layer.weight.data = start.clone()
    lowered = simulate.lower(layers, master="e4m3+sr", seed=3)
    assert not torch.equal(*(layer.weight for layer in layers))
    found = []
    for step in (0, 1, 0):
        for layer in layers:
            layer.weight.data = start.clone()
        lowered.set_step(step)
        lowered.round_master()
        found.append(layers[0].weight.detach().clone())
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_posits_under_a_layers_scale_with_warm_up(model: Everything, batch: tuple[Tensor, Tensor]) -> None:
    out = run(model.eval(), batch)[0]
    posit = simulate.LayerScale(nc.format("posit8.1"), warmup=2)
    lowered = simulate.lower(model, weights=posit, activations=posit)
    # attention is no longer fused, so that sums have another order
    assert torch.allclose(model(*batch), out, atol=1e-5)
    lowered.set_step(2)
    assert not torch.allclose(model(*batch), out, atol=1e-5)


@pytest.mark.parametrize(
    "options, word",
    [
        ({"weights": "e4m3+sr"}, "needs seed="),
        ({"overrides": {"nothing.*": "as-is"}}, "matches no module"),
        ({"overrides": {"*": {"weight": "bf16"}}}, "unknown role 'weight'"),
        ({"unsupported": "ignore"}, "take 'raise' or 'float32'"),
        ({"accumulate": "bf17"}, "unknown format"),
    ],
)
def test_wrong_arguments_are_told(options: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        simulate.lower(nn.Linear(2, 2), **options)


def test_accumulators_want_float32_models() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).bfloat16()
    with pytest.raises(ValueError, match=r"0\.weight is torch\.bfloat16; .*call model\.float\(\) first"):
        simulate.lower(model, accumulate="bf16")
    simulate.lower(model, weights="e4m3", gradients="e5m2")
    out = model(torch.ones(1, 2, dtype=torch.bfloat16))
    out.sum().backward()
    assert out.dtype == model[0].weight.grad.dtype == torch.bfloat16


def test_a_lowered_model_is_not_lowered_twice() -> None:
    layer = nn.Linear(2, 2)
    simulate.lower(layer, weights="bf16")
    with pytest.raises(ValueError, match="lowered already"):
        simulate.lower(layer, weights="bf16")
