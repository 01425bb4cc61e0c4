"""What each torch function becomes in a lowered module.

Operands are cast, the gradient that comes back is cast, products and sums go through the accumulator. Softmax, the
statistics of norms and all that is elementwise stay float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.simulate import conv, gemm, nodes
from narrowcast.simulate.precision import ACTIVATION, OUTPUT, ROUNDED_OUTPUT, WEIGHT, Call, Site, role_of

Handler = Callable[..., Any]


def _operands(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if bias is None:
        x, weight = call.cast_together((x, ACTIVATION), (weight, WEIGHT))
        return x, weight, None
    bias, x, weight = call.cast_together((bias, WEIGHT), (x, ACTIVATION), (weight, WEIGHT))
    return x, weight, bias


def linear(site: Site, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    call = site.new_call()
    return call.cast(gemm.affine(*_operands(call, x, weight, bias), call.sums), OUTPUT)


def _conv(convolve: Callable[..., Tensor]) -> Handler:
    def handler(site: Site, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        call = site.new_call()
        return call.cast(convolve(*_operands(call, x, weight, bias), call.sums, *args, **kwargs), OUTPUT)

    return handler


_plain_conv2d = _conv(conv.convolution2d)


def conv2d(site: Site, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    given = [x, weight] if bias is None else [x, weight, bias]
    run = conv.torch_convolution(x, *args, **kwargs) if site.precision.sums.is_torch and nodes.suits(*given) else None
    if run is None:
        return _plain_conv2d(site, x, weight, bias, *args, **kwargs)
    call = site.new_call()
    # in the order of the plain form, so that noise is the same
    bias_castings = [] if bias is None else [call.casting(WEIGHT)]
    castings = [call.casting(ACTIVATION), call.casting(WEIGHT), *bias_castings]
    _ = call.sums
    return nodes.apply_operation(run, given, castings, call.casting(OUTPUT), site.clock.step)


def matmul(site: Site, a: Tensor, b: Tensor) -> Tensor:
    call = site.new_call()
    a, b = call.cast_together((a, role_of(a)), (b, role_of(b)))
    return call.cast(gemm.product(a, b, call.sums), OUTPUT)


def matmul_reversed(site: Site, b: Tensor, a: Tensor) -> Tensor:
    return matmul(site, a, b)


def added_matmul(site: Site, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """addmm and baddbmm: the product is lowered; scaling and adding are float32."""
    return beta * x + alpha * matmul(site, a, b)


def _attention_mask(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
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
    return _attention(site, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)[0]


def _attention(
    site: Site, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = matmul(site, query * factor, key.mT)
    mask = _attention_mask(query, key, attn_mask, is_causal)
    probabilities = torch.softmax(scores if mask is None else scores + mask, -1)
    dropped = torch.dropout(probabilities, dropout_p, dropout_p > 0)
    return matmul(site, dropped, value), probabilities


def embedding(site: Site, indices: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The rows that are looked up are cast, and the gradient of each."""
    call = site.new_call()
    return call.cast(functional.embedding(indices, weight, *args, **kwargs), WEIGHT)


def _norm(normalise: Callable[..., Tensor], weight_at: int) -> Handler:
    """Norms: input, weight, bias and output are cast; the statistics are float32."""

    def handler(site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = site.new_call()
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        at = [i for i in (weight_at, weight_at + 1, "weight", "bias") if isinstance(given.get(i), Tensor)]
        *weights, x = call.cast_together(*((given[i], WEIGHT) for i in at), (x, ACTIVATION))
        given.update(zip(at, weights, strict=True))
        positional = [given.pop(i) for i in range(len(args))]
        return call.cast(normalise(x, *positional, **given), ROUNDED_OUTPUT)

    return handler


_plain_batch_norm = _norm(functional.batch_norm, 2)


def batch_norm(
    site: Site, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    # what torch refuses is left to the plain form, where torch says why
    values = x.numel() // x.shape[1] if x.dim() > 1 and x.shape[1] else 0
    if weight is None or bias is None or values < 2 or eps <= 0 or not nodes.suits(x, weight, bias):
        given = running_mean, running_var, weight, bias, training, momentum, eps
        return _plain_batch_norm(site, x, *given)
    call = site.new_call()
    run = nodes.BatchNorm(running_mean, running_var, training, momentum, eps)
    castings = [call.casting(WEIGHT), call.casting(WEIGHT), call.casting(ACTIVATION)]
    after = call.casting(ROUNDED_OUTPUT)
    return nodes.apply_operation(run, [x, weight, bias], [castings[2], *castings[:2]], after, site.clock.step)


def _rms_norm(site: Site, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    call = site.new_call()
    *weights, x = call.cast_together(*((w, WEIGHT) for w in (weight,) if w is not None), (x, ACTIVATION))
    return call.cast(functional.rms_norm(x, shape, weights[0] if weights else None, eps), ROUNDED_OUTPUT)


HANDLERS: dict[Callable[..., Any], Handler] = {
    functional.linear: linear,
    torch.conv1d: _conv(conv.convolution1d),
    torch.conv2d: conv2d,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__), matmul
    ),
    Tensor.__rmatmul__: matmul_reversed,
    **dict.fromkeys((torch.addmm, torch.baddbmm, Tensor.addmm, Tensor.baddbmm), added_matmul),
    functional.scaled_dot_product_attention: attention,
    functional.embedding: embedding,
    # where the weight stands among the arguments after the input; the bias follows it
    functional.batch_norm: batch_norm,
    functional.layer_norm: _norm(functional.layer_norm, 1),
    functional.group_norm: _norm(functional.group_norm, 1),
    functional.instance_norm: _norm(functional.instance_norm, 2),
    functional.rms_norm: _rms_norm,
}

REFUSED: dict[Callable[..., Any], str] = {
    **dict.fromkeys((torch.einsum, torch.tensordot, torch.inner), "write it as matmul"),
    **dict.fromkeys((torch.dot, torch.mv, torch.vdot, Tensor.dot, Tensor.mv), "write it as matmul"),
    **dict.fromkeys((torch.addmv, torch.addbmm, torch.chain_matmul, torch.linalg.multi_dot), "write it as matmul"),
    **dict.fromkeys((torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), ""),
    **dict.fromkeys((functional.bilinear, functional.embedding_bag, torch.cdist), ""),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), "write the cell with F.linear"),
    **dict.fromkeys(
        (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell), "write it with F.linear"
    ),
}
"""Functions that multiply matrices and are not lowered, with what to do instead."""
