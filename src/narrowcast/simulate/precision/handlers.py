"""What each torch function becomes in a lowered module.

Operands are cast, the gradient that comes back is cast, products and sums go through the accumulator. Softmax, the
statistics of norms and all that is elementwise stay float32. Arguments have torch's names, since callers may use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.simulate.precision import autograd, conv, gemm
from narrowcast.simulate.precision.formats import ACTIVATION, OUTPUT, ROUNDED_OUTPUT, WEIGHT, Call, Site
from narrowcast.simulate.precision.roles import role_of

Handler = Callable[..., Any]


def _operands(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if bias is None:
        x, weight = call.cast_together((x, ACTIVATION), (weight, WEIGHT))
        return x, weight, None
    bias, x, weight = call.cast_together((bias, WEIGHT), (x, ACTIVATION), (weight, WEIGHT))
    return x, weight, bias


def linear(site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    call = site.new_call()
    return call.cast(gemm.affine(*_operands(call, input, weight, bias), call.sums), OUTPUT)


def _conv(convolve: Callable[..., Tensor]) -> Handler:
    def handler(
        site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        call = site.new_call()
        return call.cast(convolve(*_operands(call, input, weight, bias), call.sums, *args, **kwargs), OUTPUT)

    return handler


_plain_conv2d = _conv(conv.convolution2d)


def conv2d(site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    given = [input, weight] if bias is None else [input, weight, bias]
    fits = site.precision.sums.is_torch and autograd.suits(*given)
    run = conv.torch_convolution(input, *args, **kwargs) if fits else None
    if run is None:
        return _plain_conv2d(site, input, weight, bias, *args, **kwargs)
    call = site.new_call()
    # in the order of the plain form, so that noise is the same
    bias_castings = [] if bias is None else [call.casting(WEIGHT)]
    castings = [call.casting(ACTIVATION), call.casting(WEIGHT), *bias_castings]
    _ = call.sums
    return autograd.apply_operation(run, given, castings, call.casting(OUTPUT), site.clock.step)


def matmul(site: Site, input: Tensor, other: Tensor) -> Tensor:
    return _product(site, (input, role_of(input)), (other, role_of(other)))


def _product(site: Site, left: tuple[Tensor, str], right: tuple[Tensor, str]) -> Tensor:
    call = site.new_call()
    site.operands.add(f"{left[1]} @ {right[1]}")
    a, b = call.cast_together(left, right)
    return call.cast(gemm.product(a, b, call.sums), OUTPUT)


def matmul_reversed(site: Site, other: Tensor, input: Tensor) -> Tensor:
    return matmul(site, input, other)


def added_matmul(site: Site, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """addmm and baddbmm: the product is lowered; scaling and adding are float32. With beta=0 input is not looked at."""
    product = alpha * matmul(site, mat1, mat2)
    return product if beta == 0 else beta * input + product


def _renamed(handler: Handler, **names: str) -> Handler:
    """The same for a function that gives arguments other names."""

    def renamed(site: Site, *args: Any, **kwargs: Any) -> Any:
        return handler(site, *args, **{names.get(name, name): value for name, value in kwargs.items()})

    return renamed


def _in_place(handler: Handler) -> Handler:
    def changing(site: Site, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(handler(site, input, *args, **kwargs))

    return changing


def _attention_mask(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    if is_causal and mask is not None:
        raise ValueError("scaled_dot_product_attention: got attn_mask and is_causal=True; give one of them")
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        return torch.zeros(allowed.shape, device=query.device).masked_fill(~allowed, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=query.device).masked_fill(~mask, -math.inf)
    return mask


def attention(
    site: Site,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention: both products are lowered, the softmax is float32."""
    given = attn_mask, dropout_p, is_causal, scale, enable_gqa
    return _attention(site, query, key, value, _softmax_or_zeros, *given)[0]


def _softmax_or_zeros(scores: Tensor, dim: int) -> Tensor:
    """Softmax, and zeros where every score is masked."""
    masked = (scores == -math.inf).all(dim, keepdim=True)
    return torch.softmax(scores.masked_fill(masked, 0.0), dim).masked_fill(masked, 0.0)


def _attention(
    site: Site, query: Tensor, key: Tensor, value: Tensor, softmax: Callable[[Tensor, int], Tensor],
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What comes out, and the weights that it was mixed by; `softmax` where there is a mask."""
    roles = role_of(query), role_of(key), role_of(value)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _product(site, (query * factor, roles[0]), (key.mT, roles[1]))
    mask = _attention_mask(query, key, attn_mask, is_causal)
    probabilities = torch.softmax(scores, -1) if mask is None else softmax(scores + mask, -1)
    dropped = torch.dropout(probabilities, dropout_p, dropout_p > 0)
    return _product(site, (dropped, ACTIVATION), (value, roles[2])), dropped


def _embedding(look_up: Callable[..., Tensor]) -> Handler:
    """The rows that are looked up are cast, and the gradient of each."""

    def handler(site: Site, *args: Any, **kwargs: Any) -> Tensor:
        return site.new_call().cast(look_up(*args, **kwargs), WEIGHT)

    return handler


def _norm(normalise: Callable[..., Tensor], weight_at: int) -> Handler:
    """Norms: input, weight, bias and output are cast; the statistics are float32."""

    def handler(site: Site, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = site.new_call()
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        at = [i for i in (weight_at, weight_at + 1, "weight", "bias") if isinstance(given.get(i), Tensor)]
        *weights, x = call.cast_together(*((given[i], WEIGHT) for i in at), (input, ACTIVATION))
        given.update(zip(at, weights, strict=True))
        positional = [given.pop(i) for i in range(len(args))]
        return call.cast(normalise(x, *positional, **given), ROUNDED_OUTPUT)

    return handler


_plain_batch_norm = _norm(functional.batch_norm, 2)


def batch_norm(
    site: Site, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    # what torch refuses is left to the plain form, where torch says why
    values = input.numel() // input.shape[1] if input.dim() > 1 and input.shape[1] else 0
    if weight is None or bias is None or values < 2 or eps <= 0 or not autograd.suits(input, weight, bias):
        given = running_mean, running_var, weight, bias, training, momentum, eps
        return _plain_batch_norm(site, input, *given)
    call = site.new_call()
    run = autograd.BatchNorm(running_mean, running_var, training, momentum, eps)
    castings = [call.casting(WEIGHT), call.casting(WEIGHT), call.casting(ACTIVATION)]
    after = call.casting(ROUNDED_OUTPUT)
    return autograd.apply_operation(run, [input, weight, bias], [castings[2], *castings[:2]], after, site.clock.step)


def _rms_norm(
    site: Site, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    call = site.new_call()
    *weights, x = call.cast_together(*((w, WEIGHT) for w in (weight,) if w is not None), (input, ACTIVATION))
    return call.cast(functional.rms_norm(x, normalized_shape, weights[0] if weights else None, eps), ROUNDED_OUTPUT)


_mm = _renamed(matmul, mat2="other")
_addmm, _baddbmm = added_matmul, _renamed(added_matmul, batch1="mat1", batch2="mat2")

HANDLERS: dict[Callable[..., Any], Handler] = {
    functional.linear: linear,
    torch.conv1d: _conv(conv.convolution1d),
    torch.conv2d: conv2d,
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
    **dict.fromkeys((torch.mm, torch.bmm, Tensor.mm, Tensor.bmm), _mm),
    Tensor.__rmatmul__: matmul_reversed,
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    Tensor.addmm_: _in_place(_addmm),
    Tensor.baddbmm_: _in_place(_baddbmm),
    functional.scaled_dot_product_attention: attention,
    functional.embedding: _embedding(functional.embedding),
    torch.embedding: _embedding(torch.embedding),
    # where the weight stands among the arguments after the input; the bias follows it
    functional.batch_norm: batch_norm,
    functional.layer_norm: _norm(functional.layer_norm, 1),
    functional.group_norm: _norm(functional.group_norm, 1),
    functional.instance_norm: _norm(functional.instance_norm, 2),
    functional.rms_norm: _rms_norm,
    torch.batch_norm: _norm(torch.batch_norm, 0),
    torch.layer_norm: _norm(torch.layer_norm, 1),
    torch.group_norm: _norm(torch.group_norm, 1),
    torch.instance_norm: _norm(torch.instance_norm, 0),
    torch.rms_norm: _rms_norm,
}


def _each(home: Any, names: str, advice: str = "") -> dict[Callable[..., Any], str]:
    """Those of the names that this version of torch has."""
    return {getattr(home, name): advice for name in names.split() if hasattr(home, name)}


AS_MATMUL, AS_LINEAR, AS_FUNCTION = "write it as matmul", "write it with F.linear", "write it with torch.nn.functional"

REFUSED: dict[Callable[..., Any], str] = {
    **_each(torch, "einsum tensordot inner dot vdot mv addmv addbmm chain_matmul matrix_power", AS_MATMUL),
    **_each(Tensor, "inner dot vdot mv addmv addmv_ addbmm addbmm_ matrix_power", AS_MATMUL),
    **_each(torch.linalg, "vecdot multi_dot matrix_power", AS_MATMUL),
    **_each(torch, "smm sspaddmm hspmm cov corrcoef", AS_MATMUL),
    **_each(Tensor, "smm sspaddmm cov corrcoef", AS_MATMUL),
    **_each(torch.sparse, "mm addmm sampled_addmm", AS_MATMUL),
    **_each(torch, "_int_mm _addmm_activation", AS_MATMUL),
    **_each(torch, "_grouped_mm _foreach_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2"),
    **_each(torch, "matrix_exp cdist bilinear embedding_bag"),
    **_each(Tensor, "matrix_exp"),
    **_each(torch.linalg, "matrix_exp"),
    **_each(functional, "bilinear embedding_bag linear_cross_entropy"),
    **_each(torch, "conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"),
    **_each(torch, "convolution native_batch_norm native_layer_norm native_group_norm", AS_FUNCTION),
    **_each(torch, "lstm gru rnn_tanh rnn_relu", "write the cell with F.linear"),
    **_each(torch, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", AS_LINEAR),
}
"""Functions that multiply matrices and are not lowered, with what to do instead."""
