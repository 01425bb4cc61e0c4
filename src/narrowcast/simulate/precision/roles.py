"""What a tensor is to a product: a weight or an activation.

A weight is a parameter, or what a lowered module's forward computes from parameters alone: `w.t().contiguous()`,
`w.detach()`, `torch.cat([a, b])`, `w * 0.5`. Whole numbers, booleans and constants made on the way (`torch.eye(4) + w`)
change nothing. All else is an activation: inputs, buffers, results of lowered operations, and what mixes them with
weights. So a product written with `@` has the roles that it has as F.linear.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.simulate.precision.formats import ACTIVATION, WEIGHT

MARK = "_narrowcast_role"
"""The attribute of a tensor that says what it is, which compilers trace and copies keep; without it: an activation."""
CONSTANT = "constant"
"""Computed from no tensor at all."""

_NEW = (Tensor.new_empty, Tensor.new_empty_strided, Tensor.new_full, Tensor.new_ones, Tensor.new_zeros)
FRESH = frozenset([*_NEW, *(f for name, f in vars(torch).items() if name.endswith("_like"))])
"""They take a shape and a type from a tensor, and no value."""
VALUES_OF_THE_FIRST = frozenset([Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as])


def _own_role(x: Tensor) -> str | None:
    return WEIGHT if isinstance(x, nn.Parameter) else getattr(x, MARK, None)


def _known_role(x: Tensor) -> str:
    """A weight, a constant or an activation; a view that nobody saw being made is what its base is."""
    role = _own_role(x)
    if role is None and x._base is not None:
        role = _own_role(x._base)
    return role or ACTIVATION


def role_of(x: Tensor) -> str:
    return WEIGHT if _known_role(x) == WEIGHT else ACTIVATION


def mark(x: Tensor, role: str) -> None:
    """Say what a tensor is, where that is not known: a compiler marks no part of a chunked tensor."""
    if not isinstance(x, nn.Parameter) and _known_role(x) != role:
        setattr(x, MARK, role)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if not isinstance(values, tuple | list):
        return []
    return [x for one in values for x in _tensors(one)]


def _role_of_result(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if func in FRESH:
        return CONSTANT
    operands = _tensors(args[:1] if func in VALUES_OF_THE_FIRST else (args, list(kwargs.values())))
    # an index picks values and is none, unless there is nothing else
    numbers = [x for x in operands if x.is_floating_point() or x.is_complex()] or operands
    roles = {_known_role(x) for x in numbers} - {CONSTANT}
    if not roles:
        return CONSTANT
    return WEIGHT if roles == {WEIGHT} else ACTIVATION


def follow(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Mark what `func` gave, or changed in place."""
    results = _tensors(args[:1] if result is None else result)
    if results:
        with torch._C.DisableTorchFunction():
            role = _role_of_result(func, args, kwargs)
            for x in results:
                mark(x, role)
