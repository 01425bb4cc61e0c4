"""What low-rank wires compute: products of a matrix with few vectors, and vectors made orthonormal.

A factor holds its vectors as rows: r x n on the left, r x m on the right of a matrix of n rows and m columns. On the
CPU every sum has a stated order, which the native library and the reference keep, so the bits depend neither on the
number of threads nor on the machine. Other devices have an order of their own: Triton's kernels, or torch's products.

What is finite stays finite: vectors are of length one at most, and a product with them is taken 2^16 times too small
and then cut to the largest number. A NaN or Inf anywhere in a matrix makes what follows from it NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowcast.kernels import native, triton_loader
from narrowcast.kernels.arithmetic import LARGEST, Feedback, keeps_subnormals, saturate
from narrowcast.kernels.native import low_rank as native_low_rank
from narrowcast.kernels.noise import Noise
from narrowcast.kernels.plan import TINY
from narrowcast.kernels.reference import low_rank as reference
from narrowcast.kernels.reference.rounding import random_bits

SMALLER = 2.0**-16
"""More than the square root of any length, by which a sum of products can exceed the largest of them."""
DRAWN = 2.0**16
"""How many different numbers the generator gives."""
DEPENDENT = 2.0**-12
"""A vector of which so little is left, once those before it were taken out, is one of them and rounding noise."""


def explain() -> tuple[str, str]:
    """What runs the products on the CPU, and why nothing faster does."""
    why = native_low_rank.why_not()
    return ("reference", why) if why is not None else (native.name(), "")


def _is_native(x_nm: Tensor) -> bool:
    return x_nm.is_cpu and native_low_rank.why_not() is None


def _triton(x_nm: Tensor, rank: int) -> Any:
    """The module that runs the products on this device, or None."""
    if not x_nm.is_cuda or not triton_loader.available():
        return None
    kernels = triton_loader.low_rank()
    return kernels if kernels.fits(x_nm, rank) else None


def _floats(x_nm: Tensor) -> Tensor:
    """As the native library takes a matrix."""
    return x_nm.float().contiguous()


def left(x_nm: Tensor, feedback: Feedback | None, right_rm: Tensor) -> Tensor:
    """The products of the rows of `x + residual * unit` with each vector of `right`: r x n, float32."""
    if (kernels := _triton(x_nm, len(right_rm))) is not None:
        return kernels.left(x_nm, feedback, right_rm.contiguous())
    smaller_rm = right_rm * SMALLER
    if _is_native(x_nm):
        return _larger(native_low_rank.left(_floats(x_nm), feedback, smaller_rm))
    if x_nm.is_cpu:
        return _larger(reference.left(x_nm, feedback, smaller_rm))
    return _larger(smaller_rm @ reference.with_residual(x_nm, feedback).T)


def right(x_nm: Tensor, feedback: Feedback | None, left_rn: Tensor) -> Tensor:
    """The products of the columns of `x + residual * unit` with each vector of `left`: r x m, float32."""
    if (kernels := _triton(x_nm, len(left_rn))) is not None:
        return kernels.right(x_nm, feedback, left_rn.contiguous())
    smaller_rn = left_rn * SMALLER
    if _is_native(x_nm):
        return _larger(native_low_rank.right(_floats(x_nm), feedback, smaller_rn))
    if x_nm.is_cpu:
        return _larger(reference.right(x_nm, feedback, smaller_rn))
    return _larger(smaller_rn @ reference.with_residual(x_nm, feedback))


def finish(x_nm: Tensor, feedback: Feedback | None, left_rn: Tensor, right_rm: Tensor, share: float = 1.0) -> None:
    """Write the matrix of two factors into `x`; the residual becomes what there was of both, less `share` of that.

    Where that is not finite the residual stays as it was.
    """
    if _is_native(x_nm) and x_nm.dtype == torch.float32 and x_nm.is_contiguous():
        native_low_rank.finish(x_nm, feedback, left_rn, right_rm, share)
        return
    if x_nm.dtype == torch.float32 and (kernels := _triton(x_nm, len(left_rn))) is not None:
        kernels.finish(x_nm, feedback, left_rn.contiguous(), right_rm.contiguous(), share)
        return
    total_nm = _product(x_nm, left_rn, right_rm)
    expected = None if feedback is None else reference.with_residual(x_nm, feedback)
    x_nm.copy_(saturate(total_nm, x_nm.dtype))
    if feedback is not None and expected is not None:
        sent = x_nm.float()
        feedback.keep(expected, sent if share == 1.0 else sent * share)


def _product(like_nm: Tensor, left_rn: Tensor, right_rm: Tensor) -> Tensor:
    """The matrix of two factors, in float32."""
    if _is_native(like_nm):
        total_nm = torch.empty(like_nm.shape, dtype=torch.float32)
        native_low_rank.finish(total_nm, None, left_rn, right_rm, 1.0)
        return total_nm
    return reference.product(left_rn, right_rm) if like_nm.is_cpu else left_rn.T @ right_rm


@keeps_subnormals
def _larger(product: Tensor) -> Tensor:
    """Undo `SMALLER`; what is finite stays finite."""
    return torch.where(product.isinf(), product, (product / SMALLER).clamp(-LARGEST, LARGEST))


def within_reach(factor: Tensor) -> Tensor:
    """A factor cut so that no product with vectors of length one at most overflows."""
    limit = LARGEST / (2 * len(factor))
    return factor.clamp(-limit, limit)


def orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """The vectors of each factor, of length one and at right angles: modified Gram-Schmidt in float32.

    Each vector is first divided by its largest magnitude; one whose largest is below 2^-100 is zero. Then, in their
    order, each is divided by its length and taken out of those after it. One of which less than 2^-12 of its length is
    left becomes zero. Sums of products are halving trees, except on a GPU.
    """
    done: dict[int, Tensor] = {}
    if factors and all(_triton(factor, len(factor)) is not None for factor in factors):
        return _by_rank(factors)
    for members in _by_size(factors):
        size = 1 << max(factors[number].shape[1] - 1 for number in members).bit_length()
        first = factors[members[0]]
        stack_KrN = torch.zeros(len(members), len(first), size, dtype=torch.float32, device=first.device)
        for place, number in enumerate(members):
            stack_KrN[place, :, : factors[number].shape[1]] = factors[number]
        _gram_schmidt_(stack_KrN)
        done |= {n: stack_KrN[place, :, : factors[n].shape[1]] for place, n in enumerate(members)}
    return [done[number] for number in range(len(factors))]


def _by_rank(factors: Sequence[Tensor]) -> list[Tensor]:
    """On a GPU: one launch for all factors of as many vectors."""
    done: dict[int, Tensor] = {}
    for rank in {len(factor) for factor in factors}:
        numbers = [number for number, factor in enumerate(factors) if len(factor) == rank]
        made = triton_loader.low_rank().orthonormal([factors[number] for number in numbers], TINY, DEPENDENT)
        done |= dict(zip(numbers, made, strict=True))
    return [done[number] for number in range(len(factors))]


def _by_size(factors: Sequence[Tensor]) -> list[list[int]]:
    """Those that fit into one power of two go together: zeros change no sum, and there are fewer calls."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, factor in enumerate(factors):
        groups.setdefault((len(factor), (factor.shape[1] - 1).bit_length()), []).append(number)
    return list(groups.values())


@keeps_subnormals
def _gram_schmidt_(vectors_KrN: Tensor) -> None:
    top = vectors_KrN.abs().amax(dim=-1, keepdim=True)
    counts = top >= TINY
    vectors_KrN.div_(torch.where(counts, top, 1.0)).mul_(counts)
    first = _sum(vectors_KrN.square()).sqrt()
    for k in range(vectors_KrN.shape[1]):
        v = vectors_KrN[:, k]
        length = _sum(v.square()).sqrt()
        v.mul_(torch.where(length > DEPENDENT * first[:, k], 1.0 / length, 0.0)[:, None])
        rest = vectors_KrN[:, k + 1 :]
        if rest.shape[1]:
            rest.sub_(_sum(rest * v[:, None])[..., None] * v[:, None])


def _sum(x: Tensor) -> Tensor:
    """Over the last dimension, a power of two."""
    if not x.is_cpu:
        return x.sum(dim=-1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def random_factor(rank: int, length: int, noise: Noise, device: torch.device) -> Tensor:
    """Numbers between -1 and 1 from the counter-based generator: the same wherever they are drawn."""
    bits = random_bits(rank * length, noise.seed, noise.stream, device=device).view(rank, length)
    return (2.0 * bits.float() + 1.0 - DRAWN) / DRAWN
