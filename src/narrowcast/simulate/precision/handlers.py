"""What each torch function becomes in a lowered module.

Operands are cast, the gradient that comes back is cast, products and sums go through the accumulator. Softmax, the
statistics of norms and all that is elementwise stay float32. Arguments have torch's names, since callers may use them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.simulate.precision import autograd, gemm, recurrent
from narrowcast.simulate.precision.formats import ACTIVATION, OUTPUT, ROUNDED_OUTPUT, WEIGHT, LoweredCall, Site, role_of

Handler = Callable[..., Any]


def _operands(
    call: LoweredCall, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if bias is None:
        x, weight = call.cast_together((x, ACTIVATION), (weight, WEIGHT))
        return x, weight, None
    bias, x, weight = call.cast_together((bias, WEIGHT), (x, ACTIVATION), (weight, WEIGHT))
    return x, weight, bias


def _summed(compute: Callable[..., Tensor]) -> Handler:
    """linear and convolutions: the three operands are cast, and the gradient that comes back."""

    def handler(
        site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        call = site.new_call()
        return call.cast(compute(*_operands(call, input, weight, bias), call.sums, *args, **kwargs), OUTPUT)

    return handler


linear, _plain_conv2d = _summed(gemm.affine), _summed(gemm.convolution2d)


def conv2d(site: Site, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    operands = [input, weight] if bias is None else [input, weight, bias]
    fits = site.precision.sums.is_torch and autograd.suits(*operands)
    run = gemm.torch_convolution(input, *args, **kwargs) if fits else None
    if run is None:
        return _plain_conv2d(site, input, weight, bias, *args, **kwargs)
    call = site.new_call()
    # in the order of the plain form, so that noise is the same
    bias_castings = [] if bias is None else [call.casting(WEIGHT)]
    castings = [call.casting(ACTIVATION), call.casting(WEIGHT), *bias_castings]
    _ = call.sums
    return autograd.apply_operation(run, operands, castings, call.casting(OUTPUT), site.origin.step)


def matmul(site: Site, input: Tensor, other: Tensor) -> Tensor:
    return _product(site, (input, role_of(input)), (other, role_of(other)))


def _product(site: Site, left: tuple[Tensor, str], right: tuple[Tensor, str]) -> Tensor:
    call = site.new_call()
    site.operands.add(f"{left[1]} @ {right[1]}")
    a, b = call.cast_together(left, right)
    return call.cast(gemm.product(a, b, call.sums), OUTPUT)


def added_matmul(site: Site, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """addmm and baddbmm: the product is lowered; scaling and adding are float32. With beta=0 input is not looked at."""
    product = alpha * matmul(site, mat1, mat2)
    return product if beta == 0 else beta * input + product


def _rename_arguments(handler: Handler, **names: str) -> Handler:
    """The same for a function that gives arguments other names."""

    def handle(site: Site, *args: Any, **kwargs: Any) -> Any:
        return handler(site, *args, **{names.get(name, name): value for name, value in kwargs.items()})

    return handle


def _in_place(handler: Handler) -> Handler:
    def handle(site: Site, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(handler(site, input, *args, **kwargs))

    return handle


def _masking(where: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An additive mask: minus infinity there, zero elsewhere."""
    return torch.zeros(where.shape, dtype=dtype, device=where.device).masked_fill(where, -math.inf)


def _softmax_or_zeros(scores: Tensor, dim: int) -> Tensor:
    """Softmax, and zeros where every score is masked."""
    masked = (scores == -math.inf).all(dim, keepdim=True)
    return torch.softmax(scores.masked_fill(masked, 0.0), dim).masked_fill(masked, 0.0)


def _attention(
    site: Site, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, softmax: Callable[[Tensor, int], Tensor] = _softmax_or_zeros,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """F.scaled_dot_product_attention and the weights that it mixed by: products are lowered, the softmax is float32.

    softmax: where there is a mask.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: got attn_mask and is_causal=True; give one of them")
    roles = role_of(query), role_of(key), role_of(value)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _product(site, (query * factor, roles[0]), (key.mT, roles[1]))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _masking(~attn_mask)
    probabilities = torch.softmax(scores, -1) if attn_mask is None else softmax(scores + attn_mask, -1)
    dropped = torch.dropout(probabilities, dropout_p, dropout_p > 0)
    return _product(site, (dropped, ACTIVATION), (value, roles[2])), dropped


def _pad_positions(x: Tensor, extra: Tensor | None, zero: bool) -> Tensor:
    """Keys or values (L x B x E) with the learnt and the zero position after them."""
    parts = [x]
    if extra is not None:
        parts.append(extra.expand(1, x.shape[1], x.shape[2]))
    if zero:
        parts.append(x.new_zeros(1, *x.shape[1:]))
    return torch.cat(parts)


def _mask(arguments: dict[str, Any], batch: int, heads: int, dtype: torch.dtype, length: int) -> Tensor | None:
    """One additive mask that broadcasts to batch x heads x target x source."""
    masks = arguments["attn_mask"], arguments["key_padding_mask"]
    mask, padding = (m if m is None or m.is_floating_point() else _masking(m, dtype) for m in masks)
    if mask is not None:
        mask = mask.view(batch, heads, *mask.shape[1:]) if mask.dim() == 3 else mask[None, None]
        mask = functional.pad(mask, (0, length - mask.shape[-1]))
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        padding = functional.pad(padding, (0, length - padding.shape[-1]))[:, None, None, :]
    if mask is None or padding is None:
        return mask if padding is None else padding
    return mask + padding


MULTIHEAD = {
    name: None if parameter.default is parameter.empty else parameter.default
    for name, parameter in list(inspect.signature(functional.multi_head_attention_forward).parameters.items())[3:]
}
"""Its arguments after query, key and value, with torch's defaults."""


def multihead_attention(
    site: Site, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """F.multi_head_attention_forward: its projections and both products are lowered, nothing else changes."""
    arguments = MULTIHEAD | dict(zip(MULTIHEAD, args, strict=False)) | kwargs
    if arguments["static_k"] is not None or arguments["static_v"] is not None:
        raise NotImplementedError("lower: multi_head_attention_forward with static_k or static_v is not lowered")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    out, weights = _attend(site, (query, key, value), arguments)
    if weights is not None and arguments["average_attn_weights"]:
        weights = weights.mean(1)
    if not batched:
        out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _attend(
    site: Site, inputs: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    length, batch, width = inputs[0].shape
    heads = arguments["num_heads"]
    weights = [arguments[f"{name}_proj_weight"] for name in "qkv"]
    if not arguments["use_separate_proj_weight"]:
        weights = list(arguments["in_proj_weight"].chunk(3))
    bias = arguments["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    q, k, v = (linear(site, x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
    zero = arguments["add_zero_attn"]
    k, v = _pad_positions(k, arguments["bias_k"], zero), _pad_positions(v, arguments["bias_v"], zero)
    mask = _mask(arguments, batch, heads, q.dtype, k.shape[0])
    causal = arguments["is_causal"] and mask is None
    # L x B x E to B x heads x L x (E / heads)
    q, k, v = (x.reshape(x.shape[0], batch, heads, -1).permute(1, 2, 0, 3) for x in (q, k, v))
    drop = arguments["dropout_p"] if arguments["training"] else 0.0
    # torch mixes by a softmax that is NaN where all is masked if somebody wants to see the weights, else by zeros
    softmax = torch.softmax if arguments["need_weights"] else _softmax_or_zeros
    mixed, mixed_by = _attention(site, q, k, v, mask, drop, causal, softmax=softmax)
    joined = mixed.permute(2, 0, 1, 3).reshape(length, batch, width)
    out = linear(site, joined, arguments["out_proj_weight"], arguments["out_proj_bias"])
    return out, mixed_by if arguments["need_weights"] else None


def _embedding(look_up: Callable[..., Tensor]) -> Handler:
    """The rows that are looked up are cast, and the gradient of each."""

    def handler(site: Site, *args: Any, **kwargs: Any) -> Tensor:
        return site.new_call().cast(look_up(*args, **kwargs), WEIGHT)

    return handler


def _norm(normalise: Callable[..., Tensor], weight_at: int) -> Handler:
    """Norms: input, weight, bias and output are cast; the statistics are float32."""

    def handler(site: Site, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = site.new_call()
        arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs
        at = [i for i in (weight_at, weight_at + 1, "weight", "bias") if isinstance(arguments.get(i), Tensor)]
        *weights, x = call.cast_together(*((arguments[i], WEIGHT) for i in at), (input, ACTIVATION))
        arguments.update(zip(at, weights, strict=True))
        positional = [arguments.pop(i) for i in range(len(args))]
        return call.cast(normalise(x, *positional, **arguments), ROUNDED_OUTPUT)

    return handler


_plain_batch_norm = _norm(functional.batch_norm, 2)


def batch_norm(
    site: Site, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    # what torch refuses is left to the plain form, where torch says why
    values = input.numel() // input.shape[1] if input.dim() > 1 and input.shape[1] else 0
    if weight is None or bias is None or values < 2 or eps <= 0 or not autograd.suits(input, weight, bias):
        arguments = running_mean, running_var, weight, bias, training, momentum, eps
        return _plain_batch_norm(site, input, *arguments)
    call = site.new_call()
    run = autograd.BatchNorm(running_mean, running_var, training, momentum, eps)
    castings = [call.casting(WEIGHT), call.casting(WEIGHT), call.casting(ACTIVATION)]
    after = call.casting(ROUNDED_OUTPUT)
    return autograd.apply_operation(run, [input, weight, bias], [castings[2], *castings[:2]], after, site.origin.step)


_mm = _rename_arguments(matmul, mat2="other")
_addmm, _baddbmm = added_matmul, _rename_arguments(added_matmul, batch1="mat1", batch2="mat2")

HANDLERS: dict[Callable[..., Any], Handler] = {
    functional.linear: linear,
    torch.conv1d: _summed(gemm.convolution1d),
    torch.conv2d: conv2d,
    **dict.fromkeys((torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__), matmul),
    **dict.fromkeys((torch.mm, torch.bmm, Tensor.mm, Tensor.bmm), _mm),
    Tensor.__rmatmul__: lambda site, other, input: matmul(site, input, other),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    Tensor.addmm_: _in_place(_addmm),
    Tensor.baddbmm_: _in_place(_baddbmm),
    functional.scaled_dot_product_attention: lambda *args, **kwargs: _attention(*args, **kwargs)[0],
    functional.multi_head_attention_forward: multihead_attention,
    functional.embedding: _embedding(functional.embedding),
    torch.embedding: _embedding(torch.embedding),
    # where the weight stands among the arguments after the input; the bias follows it
    functional.batch_norm: batch_norm,
    functional.layer_norm: _norm(functional.layer_norm, 1),
    functional.group_norm: _norm(functional.group_norm, 1),
    functional.instance_norm: _norm(functional.instance_norm, 2),
    functional.rms_norm: _norm(functional.rms_norm, 1),
    torch.batch_norm: _norm(torch.batch_norm, 0),
    torch.layer_norm: _norm(torch.layer_norm, 1),
    torch.group_norm: _norm(torch.group_norm, 1),
    torch.instance_norm: _norm(torch.instance_norm, 0),
    torch.rms_norm: _norm(torch.rms_norm, 1),
    **recurrent.HANDLERS,
}


def _refused(home: Any, names: str, advice: str = "") -> dict[Callable[..., Any], str]:
    """Those of the names that this version of torch has."""
    return {getattr(home, name): advice for name in names.split() if hasattr(home, name)}


AS_MATMUL, AS_FUNCTION = "write it as matmul", "write it with torch.nn.functional"

REFUSED: dict[Callable[..., Any], str] = {
    **_refused(torch, "einsum tensordot inner dot vdot mv addmv addbmm chain_matmul matrix_power", AS_MATMUL),
    **_refused(Tensor, "inner dot vdot mv addmv addmv_ addbmm addbmm_ matrix_power", AS_MATMUL),
    **_refused(torch.linalg, "vecdot multi_dot matrix_power", AS_MATMUL),
    **_refused(torch, "smm sspaddmm hspmm cov corrcoef", AS_MATMUL),
    **_refused(Tensor, "smm sspaddmm cov corrcoef", AS_MATMUL),
    **_refused(torch.sparse, "mm addmm sampled_addmm", AS_MATMUL),
    **_refused(torch, "_int_mm _addmm_activation", AS_MATMUL),
    **_refused(torch, "_grouped_mm _foreach_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2"),
    **_refused(torch, "matrix_exp cdist bilinear embedding_bag"),
    **_refused(Tensor, "matrix_exp"),
    **_refused(torch.linalg, "matrix_exp"),
    **_refused(functional, "bilinear embedding_bag linear_cross_entropy"),
    **_refused(torch, "conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"),
    **_refused(torch, "convolution native_batch_norm native_layer_norm native_group_norm", AS_FUNCTION),
}
"""Functions that multiply matrices and are not lowered, with what to do instead."""
