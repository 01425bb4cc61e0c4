"""nn.MultiheadAttention in a lowered module: its projections and both products go through the handlers.

Nothing else changes: the same projections, masks, dropout and shapes as
torch.nn.functional.multi_head_attention_forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from narrowcast.simulate.precision import handlers
from narrowcast.simulate.precision.formats import Site


def _projections(site: Site, inputs: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> list[Tensor]:
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else list(bias.chunk(3))
    return [handlers.linear(site, x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _padded(x: Tensor, extra: Tensor | None, zero: bool) -> Tensor:
    """Keys or values (L x B x E) with the learnt and the zero position after them."""
    parts = [x]
    if extra is not None:
        parts.append(extra.expand(1, x.shape[1], x.shape[2]))
    if zero:
        parts.append(x.new_zeros(1, *x.shape[1:]))
    return torch.cat(parts)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _mask(given: dict[str, Any], batch: int, heads: int, dtype: torch.dtype, length: int) -> Tensor | None:
    """One additive mask that broadcasts to batch x heads x target x source."""
    mask, padding = _additive(given["attn_mask"], dtype), _additive(given["key_padding_mask"], dtype)
    if mask is not None:
        mask = mask.view(batch, heads, *mask.shape[1:]) if mask.dim() == 3 else mask[None, None]
        mask = functional.pad(mask, (0, length - mask.shape[-1]))
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        padding = functional.pad(padding, (0, length - padding.shape[-1]))[:, None, None, :]
    if mask is None or padding is None:
        return mask if padding is None else padding
    return mask + padding


def _heads(x: Tensor, batch: int, heads: int) -> Tensor:
    """L x B x E to B x heads x L x (E / heads)."""
    return x.reshape(x.shape[0], batch, heads, -1).permute(1, 2, 0, 3)


NAMES = (
    *("embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn"),
    *("dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask"),
    *("use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k", "static_v"),
    *("average_attn_weights", "is_causal"),
)
ON = ("training", "need_weights", "average_attn_weights")
DEFAULTS: dict[str, Any] = dict.fromkeys(NAMES) | dict.fromkeys(ON, True)


def forward(site: Site, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """What F.multi_head_attention_forward computes."""
    given = DEFAULTS | dict(zip(NAMES, args, strict=False)) | kwargs
    if given["static_k"] is not None or given["static_v"] is not None:
        raise NotImplementedError("lower: multi_head_attention_forward with static_k or static_v is not lowered")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
    out, weights = _attend(site, (query, key, value), given)
    if weights is not None and given["average_attn_weights"]:
        weights = weights.mean(1)
    if not batched:
        out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
    return out, weights


def _attend(site: Site, inputs: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    length, batch, width = inputs[0].shape
    heads = given["num_heads"]
    q, k, v = _projections(site, inputs, given)
    k, v = _padded(k, given["bias_k"], given["add_zero_attn"]), _padded(v, given["bias_v"], given["add_zero_attn"])
    mask = _mask(given, batch, heads, q.dtype, k.shape[0])
    causal = given["is_causal"] and mask is None
    q, k, v = (_heads(x, batch, heads) for x in (q, k, v))
    drop = given["dropout_p"] if given["training"] else 0.0
    # torch mixes by a softmax that is NaN where all is masked if somebody wants to see the weights, else by zeros
    softmax = torch.softmax if given["need_weights"] else handlers._softmax_or_zeros
    mixed, weights = handlers._attention(site, q, k, v, softmax, mask, drop, causal)
    joined = mixed.permute(2, 0, 1, 3).reshape(length, batch, width)
    out = handlers.linear(site, joined, given["out_proj_weight"], given["out_proj_bias"])
    return out, weights if given["need_weights"] else None


handlers.HANDLERS[functional.multi_head_attention_forward] = forward
