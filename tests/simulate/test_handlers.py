"""Whatever multiplies matrices in a lowered module is lowered or refused, however it is called."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import get_testing_overrides

from narrowcast import simulate
from narrowcast.simulate.precision.lowering import HANDLERS, REFUSED

Function = Callable[[Tensor, Tensor], Tensor]


class Calls(nn.Module):
    """A module that makes one call, of an input and a parameter."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def rows(seed: int = 1) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


LOWERED: dict[str, tuple[Function, Function]] = {
    "F.linear by name": (lambda x, w: functional.linear(input=x, weight=w), functional.linear),
    "F.linear, weight by name": (
        lambda x, w: functional.linear(x, weight=w, bias=w[0]),
        lambda x, w: functional.linear(x, w, w[0]),
    ),
    "F.conv1d by name": (
        lambda x, w: functional.conv1d(input=x[:, None], weight=w[:, None], padding=1),
        lambda x, w: functional.conv1d(x[:, None], w[:, None], None, 1, 1),
    ),
    "F.conv2d by name": (
        lambda x, w: functional.conv2d(input=x[None, None], weight=w[None, None, :2]),
        lambda x, w: functional.conv2d(x[None, None], w[None, None, :2]),
    ),
    "matmul by name": (lambda x, w: torch.matmul(input=x, other=w), torch.matmul),
    "matmul into": (lambda x, w: torch.matmul(x, w.detach(), out=torch.empty(3, 4)), torch.matmul),
    "matmul into nothing": (lambda x, w: torch.matmul(x, w.detach(), out=torch.empty(0)), torch.matmul),
    "mm by name": (lambda x, w: torch.mm(x, mat2=w), torch.mm),
    "Tensor.mm by name": (lambda x, w: x.mm(mat2=w), torch.mm),
    "bmm by name": (lambda x, w: torch.bmm(x[None], mat2=w[None]), torch.mm),
    "linalg.matmul": (torch.linalg.matmul, torch.matmul),
    "addmm by name": (lambda x, w: torch.addmm(input=x, mat1=x, mat2=w), lambda x, w: torch.addmm(x, x, w)),
    "addmm without input": (lambda x, w: torch.addmm(x * torch.nan, x, w, beta=0), torch.mm),
    "addmm in place": (lambda x, w: x.clone().addmm_(x, w, alpha=2), lambda x, w: torch.addmm(x, x, w, alpha=2)),
    "baddbmm by name": (
        lambda x, w: torch.baddbmm(x[None], batch1=x[None], batch2=w[None]),
        lambda x, w: torch.addmm(x, x, w),
    ),
    "baddbmm in place": (
        lambda x, w: x[None].clone().baddbmm_(x[None], w[None]),
        lambda x, w: torch.addmm(x, x, w),
    ),
    "torch.layer_norm": (
        lambda x, w: torch.layer_norm(x, (4,), w[0], w[1]),
        lambda x, w: functional.layer_norm(x, (4,), w[0], w[1]),
    ),
    "F.layer_norm by name": (
        lambda x, w: functional.layer_norm(input=x, normalized_shape=(4,), weight=w[0], bias=w[1]),
        lambda x, w: functional.layer_norm(x, (4,), w[0], w[1]),
    ),
    "torch.rms_norm": (
        lambda x, w: torch.rms_norm(input=x, normalized_shape=(4,), weight=w[0]),
        lambda x, w: functional.rms_norm(x, (4,), w[0]),
    ),
    "torch.group_norm": (
        lambda x, w: torch.group_norm(x, 2, w[0], w[1]),
        lambda x, w: functional.group_norm(x, 2, w[0], w[1]),
    ),
    "torch.batch_norm": (
        lambda x, w: torch.batch_norm(x, w[0], w[1], None, None, True, 0.1, 1e-5, False),
        lambda x, w: functional.batch_norm(
            input=x, running_mean=None, running_var=None, weight=w[0], bias=w[1], training=True
        ),
    ),
    "torch.embedding": (
        lambda x, w: torch.embedding(w, torch.tensor([1, 2])),
        lambda x, w: functional.embedding(input=torch.tensor([1, 2]), weight=w),
    ),
}
FORMATS = {"weights": "e4m3", "activations": "e4m3", "gradients": "e5m2", "accumulate": "bf16"}


@pytest.mark.parametrize("name", LOWERED)
def test_one_call_is_lowered_as_the_other(name: str) -> None:
    """The first form in a lowered module gives what the second gives there, and not what it gives in float32."""
    models = [Calls(function) for function in LOWERED[name]]
    plain = models[0](rows())
    found = []
    for model in models:
        lowered = simulate.lower(model, **FORMATS)
        out = model(rows())
        assert lowered.explain()[0].seen
        if out.requires_grad:
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found.append((out.detach().reshape(plain.shape), model.weight.grad))
    (got, gradient), (want, wanted) = found
    assert torch.equal(got, want)
    assert not torch.equal(got, plain)
    assert gradient is None or torch.equal(gradient, wanted)


@pytest.mark.parametrize("size", [(3, 4), (0,)])
def test_a_result_goes_into_out(size: tuple[int, ...]) -> None:
    out = torch.empty(size)
    model = Calls(lambda x, w: torch.mm(x, w.detach(), out=out))
    simulate.lower(model, **FORMATS)
    assert model(rows()) is out
    plain = Calls(lambda x, w: torch.mm(x, w.detach()))
    simulate.lower(plain, **FORMATS)
    assert torch.equal(out, plain(rows()))


NOT_LOWERED: dict[str, Function] = {
    "inner": torch.inner,
    "Tensor.inner": lambda x, w: x.inner(w),
    "Tensor.vdot": lambda x, w: x[0].vdot(w[0]),
    "Tensor.addmv": lambda x, w: x[0].addmv(w, x[0]),
    "Tensor.addmv_": lambda x, w: x[0].clone().addmv_(w, x[0]),
    "Tensor.addbmm": lambda x, w: x.addbmm(x[None], w[None]),
    "linalg.vecdot": lambda x, w: torch.linalg.vecdot(x, w[:3]),
    "linalg.multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, w]),
    "matrix_power": lambda x, w: torch.matrix_power(w, 3),
    "conv_tbc": lambda x, w: torch.conv_tbc(x[:, None], w[None], w[0]),
    "convolution": lambda x, w: torch.convolution(x[:, None], w[:, None], None, [1], [0], [1], False, [0], 1),
    "grouped_mm": lambda x, w: functional.grouped_mm(*(t.bfloat16().repeat(4, 4)[None] for t in (w, w))),
    "_int_mm": lambda x, w: torch._int_mm(w.repeat(8, 8).to(torch.int8), w.repeat(8, 8).to(torch.int8)),
    "sampled_addmm": lambda x, w: torch.sparse.sampled_addmm(torch.eye(4).to_sparse_csr(), w, w).to_dense(),
    "sparse.mm": lambda x, w: torch.sparse.mm(x.to_sparse(), w),
    "native_layer_norm": lambda x, w: torch.native_layer_norm(x, (4,), w[0], w[1], 1e-5)[0],
}


@pytest.mark.parametrize("name", NOT_LOWERED)
def test_what_is_not_lowered_is_refused_or_listed(name: str) -> None:
    model = Calls(NOT_LOWERED[name])
    want = model(rows())
    lowered = simulate.lower(model, weights="e4m3")
    with pytest.raises(NotImplementedError, match=r"the model calls .*, which is not lowered; .*unsupported='float32'"):
        model(rows())
    lowered.restore()
    lowered = simulate.lower(model, weights="e4m3", unsupported="float32")
    assert torch.equal(model(rows()), want)
    assert "NOT lowered: runs in float32" in lowered.explain()[0].seen[0]


PRODUCTS = re.compile(
    r"(linalg_)?((vec|v|multi_|tensor)?dot|\w*mat(mul|rix_power|rix_exp)|einsum|inner|cov|corrcoef|cdist)|_?\w*(mm|mv)_?"
    r"|(conv\w*|bilinear|linear\w*|(lstm|gru|rnn_tanh|rnn_relu)(_cell)?|embedding(_bag)?)|(native_)?\w*_norm"
    r"|scaled_dot_product_attention|multi_head_attention_forward"
)
OTHERS = re.compile(
    r"(linalg|\w*matrix|\w*vector|nuclear|frobenius|weight|native|local_response)_norm|_\w+"
    r"|(miopen|cudnn|mkldnn|quantized|fbgemm)\w*"
)
"""Norms of vectors and matrices, what torch keeps to itself, and what belongs to other devices and types."""


def test_every_function_of_torch_that_sounds_like_a_product_or_a_norm_is_known() -> None:
    sounds = [f for f in get_testing_overrides() if PRODUCTS.fullmatch(f.__name__) and not OTHERS.fullmatch(f.__name__)]
    assert len(sounds) > 80
    assert [f.__name__ for f in sounds if f not in HANDLERS and f not in REFUSED] == []


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("formats", [{"accumulate": "fp32+sequential"}, {"gradients": "bf16"}], ids=str)
def test_a_row_that_may_look_nowhere_is_zero(kind: str, formats: dict[str, str]) -> None:
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    given = mask if kind == "bool" else torch.zeros(5, 5).masked_fill(~mask, -torch.inf)

    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x + 1, x * 2, attn_mask=given)

    found = []
    for lower in (False, True):
        attend, x = Attend(), torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if lower:
            simulate.lower(attend, **formats)
        out = attend(x)
        out.square().sum().backward()
        found.append((out, x.grad))
    (want, wanted), (got, gradient) = found
    assert torch.equal(got[:, 0], torch.zeros(2, 8))
    assert torch.allclose(got, want, atol=1e-5)
    assert torch.allclose(gradient, wanted, atol=0.1)


def test_attention_takes_a_mask_or_is_causal() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(3, 3), is_causal=True)

    attend = Attend()
    simulate.lower(attend, activations="bf16")
    with pytest.raises(ValueError, match="give one of them"):
        attend(torch.randn(1, 3, 4))


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_with_dropout_and_padding_is_torchs(need_weights: bool) -> None:
    """The weights are those that were used, dropout included; where all is masked it is NaN or zero as in torch."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [True] * 5])
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        plain = attention(x, x, x, need_weights=need_weights)
        padded = attention(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        found.append([y for y in (*plain, *padded) if y is not None])
        if len(found) == 1:
            simulate.lower(attention, accumulate="fp32+sequential")
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, atol=1e-5, equal_nan=True)
    assert not need_weights or bool((found[0][1] == 0).any())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_cannot_be_seen_into_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"the model \(\w+\) is compiled by TorchScript"):
        simulate.lower(torch.jit.script(nn.Linear(2, 2)), weights="bf16")
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"0 \(LazyLinear\) does not know its shapes yet; call the model once"):
        simulate.lower(lazy, weights="bf16")
    lazy(rows())
    assert simulate.lower(lazy, weights="bf16")(rows()).shape == (3, 4)
