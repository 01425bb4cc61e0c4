"""A weight is a weight however a model writes its product, in training, in evaluation and in a compiled graph."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

import narrowcast as nc
from narrowcast import simulate

SIZE = 6
FORMAT = "e2m1fn"
Way = Callable[[Tensor], Tensor]


def _written(w: Tensor) -> Tensor:
    copied = torch.empty_like(w)
    copied[:] = w
    return copied


MOVES: dict[str, Way] = {
    "itself": lambda w: w,
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "adjoint": lambda w: w.adjoint(),
    "t, contiguous": lambda w: w.t().contiguous(),
    "T, contiguous": lambda w: w.T.contiguous(),
    "detach": lambda w: w.detach(),
    "detach, t": lambda w: w.detach().t(),
    "clone": lambda w: w.clone(),
    "clone, t, clone": lambda w: w.clone().t().clone(),
    "transpose": lambda w: torch.transpose(w, 0, 1),
    "permute": lambda w: w.permute(1, 0).contiguous(),
    "view": lambda w: w.view(-1).view(SIZE, SIZE),
    "reshape of a copy": lambda w: w.t().reshape(-1).reshape(SIZE, SIZE),
    "flatten": lambda w: w.flatten().view(SIZE, SIZE),
    "expand": lambda w: w[:1].expand(SIZE, SIZE),
    "expand_as": lambda w: w[0].expand_as(w),
    "index": lambda w: w[torch.arange(SIZE - 1, -1, -1)],
    "ellipsis": lambda w: w[None, ..., :][0],
    "index_select": lambda w: w.index_select(0, torch.tensor([2] * SIZE)),
    "gather": lambda w: w.gather(0, torch.zeros(SIZE, SIZE, dtype=torch.int64)),
    "narrow": lambda w: w.narrow(0, 0, SIZE),
    "chunk": lambda w: w.chunk(3, 1)[1].repeat(1, 3),
    "split": lambda w: torch.cat(w.split(2)[::-1]),
    "cat": lambda w: torch.cat([w[:2], w[2:]]),
    "cat of its own and of constants": lambda w: torch.cat([w[:2], torch.ones(SIZE - 2, SIZE)]),
    "stack": lambda w: torch.stack(list(w.unbind())),
    "rows in a loop": lambda w: torch.stack([row.clone() for row in w]),
    "roll and flip": lambda w: w.roll(1, 0).flip(1),
    "tril": lambda w: w.tril(),
    "to the same type": lambda w: w.to(torch.float32),
    "to another type and back": lambda w: w.to(torch.float64).float(),
    "to what the input is": lambda w: w.to(torch.ones(1)),
    "type_as": lambda w: w.type_as(torch.ones(1)),
    "memory format": lambda w: w[None, None].contiguous(memory_format=torch.channels_last)[0, 0],
    "masked": lambda w: torch.where(w > 0, w, torch.zeros_like(w)),
    "written into a new tensor": _written,
    "masked_fill": lambda w: w.masked_fill(w < 0, 0.5),
}
ARITHMETIC: dict[str, Way] = {
    "scaled": lambda w: w * 0.5,
    "normed": lambda w: w / w.norm(dim=1, keepdim=True),
    "of two": lambda w: w + 0.25 * w.t(),
    "pruned": lambda w: w * (w.abs() > 0.3).float(),
    "triangle": lambda w: w * torch.tril(torch.ones(SIZE, SIZE)),
    "identity added": lambda w: torch.eye(SIZE) + w,
    "straight-through": lambda w: w + (w.sign() - w).detach(),
}
HIDDEN: dict[str, Way] = {
    "data": lambda w: w.data,
    "data, t": lambda w: w.data.t(),
    "T of a copy": lambda w: w.clone().T,
    "pad": lambda w: functional.pad(w[:, :-2], (1, 1)),
}
"""A compiler takes properties, and a few functions, past every mode."""
WAYS = MOVES | ARITHMETIC | HIDDEN


class Uses(nn.Module):
    """Multiplies by one parameter in many ways; `plain` gives the operands to F.linear."""

    def __init__(self, names: list[str], plain: bool = False) -> None:
        super().__init__()
        self.names, self.plain = names, plain
        self.w = nn.Parameter(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> list[Tensor]:
        if self.plain:
            return [functional.linear(x, WAYS[name](self.w).t()) for name in self.names]
        return [x @ WAYS[name](self.w) for name in self.names]


def rows() -> Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))


def by_hand(w: Tensor, names: list[str]) -> list[Tensor]:
    with torch.no_grad():
        return [rows() @ nc.round_to(WAYS[name](w).detach(), FORMAT) for name in names]


def _compiled(backend: str) -> Callable[[nn.Module], nn.Module]:
    def compiled(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(model, backend=backend, fullgraph=True)

    return compiled


def _functional(model: nn.Module) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: torch.func.functional_call(model, {"w": model.w.detach().clone()}, x)


MODES = {
    "training": (contextlib.nullcontext, lambda model: model),
    "no_grad": (torch.no_grad, lambda model: model),
    "inference_mode": (torch.inference_mode, lambda model: model),
    "frozen": (contextlib.nullcontext, lambda model: model.requires_grad_(False)),
    "deepcopy": (contextlib.nullcontext, copy.deepcopy),
    "pickle": (contextlib.nullcontext, lambda model: pickle.loads(pickle.dumps(model))),
    "functional_call": (contextlib.nullcontext, _functional),
    "compile": (contextlib.nullcontext, _compiled("aot_eager")),
    "compile, inference_mode": (torch.inference_mode, _compiled("eager")),
    "compile a copy, no_grad": (torch.no_grad, lambda model: _compiled("eager")(copy.deepcopy(model))),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_is_cast_in_every_mode_however_it_is_used(mode: str) -> None:
    names = [name for name in WAYS if "compile" not in mode or name not in HIDDEN]
    model = Uses(names)
    simulate.lower(model, weights=FORMAT)
    context, prepare = MODES[mode]
    prepared = prepare(model)
    with context():
        got = prepared(rows())
    want = by_hand(model.w, names)
    wrong = [name for name, a, b in zip(names, got, want, strict=True) if not torch.allclose(a, b, atol=1e-5)]
    assert wrong == []


def test_gradients_are_those_of_the_layer_written_out() -> None:
    """Cast on the way back as F.linear's; its operand is the other way round, so all that is transposed is equal."""
    for name in WAYS:
        found = []
        for plain in (False, True):
            model, x = Uses([name], plain), rows().requires_grad_()
            simulate.lower(model, weights=FORMAT, activations="e4m3", gradients="e5m2")
            (out,) = model(x)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            found.append((out, x.grad, model.w.grad))
        for a, b in zip(*found, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, atol=1e-6), name


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "the input": lambda x, w, b: x,
    "a buffer": lambda x, w, b: b,
    "a mixture": lambda x, w, b: w + x,
    "a product of weights": lambda x, w, b: functional.linear(w, w),
    "a shape of a weight": lambda x, w, b: w.new_zeros(SIZE, SIZE).copy_(x),
    "zeros, written into": lambda x, w, b: torch.zeros_like(w).index_copy_(0, torch.arange(SIZE), x),
    "a copy, overwritten": lambda x, w, b: w.clone().copy_(x),
    "the type of a weight": lambda x, w, b: x.to(w),
    "rows that were set": lambda x, w, b: _set(w.clone(), x),
}


def _set(into: Tensor, x: Tensor) -> Tensor:
    into[:] = x
    return into


class Other(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.w = name, nn.Parameter(torch.ones(SIZE, SIZE))
        self.register_buffer("b", torch.full((SIZE, SIZE), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ ACTIVATIONS[self.name](x, self.w, self.b)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_is_no_weight_is_an_activation_and_explain_says_so(name: str) -> None:
    lowered = simulate.lower(Other(name), weights=FORMAT)
    x = torch.full((SIZE, SIZE), 0.3)
    with torch.no_grad():
        lowered(x)
    assert lowered.explain()[0].operands == ("activation @ activation",)


def test_explain_says_what_was_taken_for_what() -> None:
    model = Uses(["T", "clone"])
    lowered = simulate.lower(model, weights=FORMAT)
    model(rows())
    row = lowered.explain()[0]
    assert row.operands == ("activation @ weight",)
    assert row.seen == ("matmul: lowered",) or row.seen == ("__matmul__: lowered",)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_compiler_hides_is_told_by_explain(name: str) -> None:
    """It may be shown one day; until then it is not cast, and the row says so."""
    torch._dynamo.reset()
    model = Uses([name])
    lowered = simulate.lower(model, weights=FORMAT)
    with torch.no_grad():
        (got,) = torch.compile(model, backend="eager", fullgraph=True)(rows())
    is_cast = torch.allclose(got, by_hand(model.w, [name])[0], atol=1e-5)
    assert lowered.explain()[0].operands == (f"activation @ {'weight' if is_cast else 'activation'}",)


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class Tied(nn.Module):
    """Words and their scores by one table; a weight that is computed by a parametrization; queries that are learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, SIZE)
        self.inner = nn.Linear(SIZE, SIZE, bias=False)
        parametrize.register_parametrization(self.inner, "weight", Doubled())
        self.queries = nn.Parameter(torch.randn(2, SIZE))

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.words(words)
        attended = functional.scaled_dot_product_attention(self.queries.expand(1, 2, SIZE), x[None], x[None])
        return x @ self.words.weight.t(), x @ self.inner.weight, attended


@pytest.mark.parametrize("functional_call", [False, True])
def test_tied_parametrized_and_learnt_operands_are_weights(functional_call: bool) -> None:
    torch.manual_seed(0)
    model, words = Tied(), torch.tensor([0, 3])
    table, inner = (nc.round_to(w.detach(), FORMAT) for w in (model.words.weight, model.inner.weight))
    queries = nc.round_to(model.queries.detach() / SIZE**0.5, FORMAT)
    simulate.lower(model, weights=FORMAT)
    given = {name: p.detach().clone() for name, p in model.named_parameters()}
    scores, product, attended = torch.func.functional_call(model, given, words) if functional_call else model(words)
    assert torch.allclose(scores, table[words] @ table.t(), atol=1e-5)
    assert torch.allclose(product, table[words] @ inner, atol=1e-5)
    assert torch.allclose(attended[0], torch.softmax(queries @ table[words].t(), -1) @ table[words], atol=1e-5)


def test_weights_that_are_left_alone_are_left_alone() -> None:
    """Marks do not leak: a module "as-is" and a restored model compute what they always did."""
    model = Uses(list(WAYS))
    want = model(rows())
    lowered = simulate.lower(model, weights=FORMAT)
    model(rows())
    lowered.restore()
    assert all(torch.equal(a, b) for a, b in zip(model(rows()), want, strict=True))
    assert not any(hasattr(p, "_narrowcast_role") for p in model.parameters())
    simulate.lower(model, weights=FORMAT, overrides={"": "as-is"})
    assert all(torch.equal(a, b) for a, b in zip(model(rows()), want, strict=True))
