"""The laws of design.md as functions of a codec: each raises AssertionError with the smallest case that it met."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TypeGuard
from unittest import mock

import pytest
import torch
from laws.implementations import use
from laws.inputs import (
    FLOAT32_MAX,
    HUGE,
    SIZES,
    Planes,
    hard_blocks,
    hard_values,
    log_uniform,
    normal,
    planes,
    scales_of,
    spread,
    unpacked,
)
from torch import Tensor

from narrowcast.codecs import Codec, ErrorFeedback, Law
from narrowcast.codecs.planned import PlanCodec
from narrowcast.codecs.transformed import Transformed
from narrowcast.formats.posits import PositFormat
from narrowcast.kernels import reference
from narrowcast.kernels.plan import TINY, Method, Plan, Rule, Store

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def there_and_back(codec: Codec, x: Tensor, seed: int = 0, offset: int = 0) -> Tensor:
    return codec.decode(codec.encode(x, seed=seed, offset=offset), x.numel())


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def cases(codec: Codec) -> Iterator[Tensor]:
    """Tensors of whole and broken blocks; for a codec with one scale for the tensor, each block on its own."""
    if codec.block > 1:
        yield hard_blocks(codec.block, random=4096 * 16 // codec.block)
        yield hard_values(codec.block, 3 * codec.block + 7)
        return
    whole = hard_blocks(48, random=24)
    yield from whole.split(48)
    yield whole[48 * 14 :]


AFFINE_WITNESSES = (
    *((1.3766125440597534, 32.464054107666016), (-111.59964752197266, 141.4512481689453)),
    *((-24.320497512817383, 39.2206916809082), (-11.604897499084473, 19.995769500732422)),
    *((-152.12550354003906, 357.92059326171875), (-1.3571540117263794, 2.6404402256011963)),
    *((-30.301034927368164, 33.49455261230469),),
)
"""Smallest and largest value of blocks (of uint2 to uint8) in which minimum + code * step misses the largest value."""


def affine_witnesses(codec: Codec) -> Iterator[Tensor]:
    size = codec.block if codec.block > 1 else 64
    for low, high in AFFINE_WITNESSES:
        x = torch.linspace(low, high, size)
        x[0], x[-1] = low, high
        yield x


def any_mantissa(codec: Codec) -> Iterator[Tensor]:
    """Many blocks whose largest magnitude has every kind of mantissa, of either sign."""
    block = codec.block if codec.block > 1 else 16
    count = 16 * 4096 // block if codec.block > 1 else 64
    scale = log_uniform(count, -20, 20, seed=11)
    x_NB = normal(count * block, seed=12).view(count, block) * scale[:, None]
    yield from [x_NB.flatten()] if codec.block else x_NB.unbind()
    # far from zero, where an affine code has to subtract
    far_NB = x_NB + 1000 * scale[:, None] * log_uniform(count, -6, 6, seed=13)[:, None]
    yield from [far_NB.flatten()] if codec.block else far_NB.unbind()


def exact_levels(codec: Codec) -> Iterator[Tensor]:
    """Blocks of levels times a scale, under each magnitude at which a rule for scales might change its mind."""
    if not isinstance(codec, PlanCodec):
        return
    plan = codec.plan
    level = plan.format.levels[plan.format.grid_codes].float()
    size = codec.block if codec.block > 1 else 64
    peaks = [p for p in (plan.target, plan.target / 2, *2.0 ** (plan.top_exponent + torch.arange(-1, 2))) if p > 0]
    shifts = torch.tensor([1.0, 1 - 2.0**-24, 1 + 2.0**-23, 1.1, 0.99])
    for number, (peak, shift) in enumerate(itertools.product(peaks, shifts)):
        top = torch.as_tensor(peak).float() * shift
        inside = level[level.abs() <= top] if bool((level.abs() <= top).any()) else level[:1] * 0
        x = inside[(torch.arange(size) * 7 + number) % len(inside)]
        x[number % size] = top * (1 - 2 * (number % 2))
        yield x * 2.0 ** (number % 5)
        yield -x


def size_is_known_beforehand(codec: Codec) -> None:
    for n in SIZES:
        for dtype in DTYPES:
            wire = codec.encode(torch.ones(n, dtype=dtype))
            assert wire.dtype is torch.uint8
            assert wire.numel() == codec.nbytes(n, dtype), f"{codec}: {n} values of {dtype}"
    assert codec.nbytes(0) == 0
    n = 2**26
    assert abs(8 * codec.nbytes(n) - codec.bits_per_value * n) <= 64, "bits_per_value is the size of a large wire"


def joined(parts: list[Planes]) -> Planes:
    return Planes(*(torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales", "tail")))


def blocks_are_independent(codec: Codec) -> None:
    """The planes of a part are slices of the planes of the whole, the random bits of a part included."""
    block = codec.block or 64
    step = block if codec.stochastic or block > 1 else 16
    x = hard_values(block if block > 1 else 16, 5 * step + 5)
    n = len(x)
    whole = planes(codec, codec.encode(x, seed=3, stream=9), n)
    for cuts in ([2 * step], [step, 4 * step], [5 * step]):
        edges = [0, *cuts, n]
        parts = [(start, x[start:end]) for start, end in itertools.pairwise(edges)]
        wires = [codec.encode(part, seed=3, stream=9, offset=start) for start, part in parts]
        found = joined([planes(codec, wire, len(part)) for wire, (_, part) in zip(wires, parts, strict=True)])
        assert torch.equal(found.codes, whole.codes), f"{codec}: codes, cut at {cuts}"
        assert torch.equal(found.scales, whole.scales), f"{codec}: scales, cut at {cuts}"
        assert torch.equal(found.tail, whole.tail), f"{codec}: tensor scale, cut at {cuts}"


def nearest_means_nearest(codec: Codec) -> None:
    """Of the scaled value t, by brute force in float64 over all levels of the format."""
    for x in cases(codec):
        check_nearest(codec, x)


def check_nearest(codec: Codec, x: Tensor) -> None:
    if isinstance(codec, Transformed):
        # of what the transform gives, whose wire is the inner codec's
        side = torch.empty(codec.transform.side_bytes(len(x)), dtype=torch.uint8)
        kept = codec.transform.forward(x, side)
        check_nearest(codec.inner, kept)
        wire, inner = codec.encode(x, seed=4), codec.inner.encode(kept, seed=4)
        assert torch.equal(wire[: len(inner)], inner), f"{codec}: the inner wire is another"
    elif isinstance(codec, PlanCodec):
        check_plan(codec, x)
    else:
        check_cast(codec, x)


def check_cast(codec: Codec, x: Tensor) -> None:
    """Whatever comes back is as close as its neighbours in the type that travels would be."""
    y = there_and_back(codec, x)
    if codec.lossless:
        assert torch.equal(y, x)
        return
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(codec).removesuffix("+ef"))
    if dtype is not None:
        limit = torch.finfo(dtype).max
        assert torch.equal(y, x.clamp(-limit, limit).to(dtype).float())


def check_plan(codec: PlanCodec, x: Tensor) -> None:
    plan, n = codec.plan, len(x)
    if plan.method is Method.NVFP4 or plan.cpd:
        return  # see tests/codecs/test_mx.py for an independent version, and tests/formats/test_cpd.py
    found = planes(codec, codec.encode(x, seed=4), n)
    code = unpacked(found.codes, plan.bits, n)
    if plan.method in (Method.MEANS, Method.SIGN):
        assert torch.equal(code, (x >= 0).long())
        return
    t, live = scaled_values(plan, x, found.scales)
    level = plan.format.levels[code]
    assert_nearest(plan, t[live], level[live], f"{codec}")


def scaled_values(plan: Plan, x: Tensor, scale_plane: Tensor) -> tuple[Tensor, Tensor]:
    """t by the arithmetic of design.md, and where the block is not one of zeros."""
    n = len(x)
    if plan.constant is not None:
        return x * (1 / torch.tensor(plan.unit_scale)), torch.ones(n, dtype=torch.bool)
    scales = scales_of(plan, scale_plane)
    if plan.method is Method.AFFINE:
        low, step = (spread(part, plan.block, n) for part in scales.view(-1, 2).unbind(1))
        return (x - low) * (1 / step), step > 0
    if plan.rule is Rule.DIVIDE and not plan.l2:
        assert_scales(plan, x, scales)
    # one exponent byte has no zero: 2**-127 stands for it
    scale = spread(scales, plan.block, n)
    return x * (1 / scale), scale > (2.0**-127 if plan.store is Store.E8M0 else 0)


def assert_scales(plan: Plan, x: Tensor, scales: Tensor) -> None:
    """s = absmax / target, rounded once (and once more to bfloat16), 0 for a block of zeros."""
    block = plan.block or len(x)
    top_N = torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block).abs().amax(dim=1)
    wanted_N = top_N / plan.format.target
    live_N = top_N >= TINY
    if plan.store is Store.BF16:
        wanted_N = wanted_N.bfloat16().float()
        live_N &= wanted_N * plan.format.target >= TINY
    # a scale that would turn the largest level infinite is cut
    usual_N = wanted_N.double() * max(1.0, float(plan.format.levels[plan.format.grid_codes].abs().max())) < 1e38
    assert torch.equal(scales[usual_N], torch.where(live_N, wanted_N, 0.0)[usual_N])


def assert_nearest(plan: Plan, t: Tensor, level: Tensor, what: str) -> None:
    fmt = plan.format
    all_levels = fmt.levels[fmt.grid_codes].unique()
    for some_t, some_level in zip(t.double().split(8192), level.split(8192), strict=True):
        distance = (some_t - some_level).abs()
        if plan.stochastic or isinstance(fmt, PositFormat):
            # one of the two neighbours: which one is compared with gfloat and SoftPosit
            cut = some_t.clamp(all_levels[0], all_levels[-1])
            high = torch.bucketize(cut, all_levels).clamp(max=len(all_levels) - 1)
            low = torch.where(all_levels[high] == cut, high, (high - 1).clamp(min=0))
            good = (some_level == all_levels[low]) | (some_level == all_levels[high])
        else:
            good = distance == (some_t[:, None] - all_levels).abs().amin(dim=1)
        bad = (~good).nonzero().flatten()
        assert len(bad) == 0, f"{what}: t={some_t[bad[0]].item()!r} became {some_level[bad[0]].item()!r}"


def idempotent(codec: Codec) -> None:
    """With stochastic rounding: whatever the noise, so the second time it is the least and the largest there is."""
    extremes = (0, 2**16 - 1) if codec.stochastic else (None,)
    for source, noise in itertools.product((cases, any_mantissa, exact_levels, affine_witnesses), extremes):
        for number, x in enumerate(source(codec)):
            once = there_and_back(codec, x, seed=1 + number)
            with contextlib.nullcontext() if noise is None else with_noise(noise):
                twice = there_and_back(codec, once)
            bad = (~((once == twice) | (once.isnan() & twice.isnan()))).nonzero().flatten()
            assert len(bad) == 0, report(codec, x, once, twice, int(bad[0]))


@contextlib.contextmanager
def with_noise(value: int) -> Iterator[None]:
    """Every random number is `value`; the reference runs, since only there can that be arranged."""

    def random_bits(n: int, *_: object) -> Tensor:
        return torch.full((n,), value)

    with mock.patch.object(reference, "random_bits", random_bits), pytest.MonkeyPatch.context() as patch:
        use("reference", patch)
        yield


def report(codec: Codec, x: Tensor, once: Tensor, twice: Tensor, where: int) -> str:
    block = codec.block or len(x)
    start = where - where % block
    top = x[start : start + block].abs().max().item()
    return (
        f"{codec}: {x[where].item()!r} (largest of its block {top!r}) came back as {once[where].item()!r}, "
        f"and that as {twice[where].item()!r}"
    )


def zero_stays_zero(codec: Codec) -> None:
    sparse = normal(20 * (codec.block or 64) + 3, seed=14)
    sparse[::3] = 0
    for x in (*cases(codec), sparse):
        y = there_and_back(codec, x)
        assert not y[x == 0].any(), f"{codec}: {y[x == 0].abs().max().item()!r} came back for zero"


def a_block_of_zeros_or_subnormals_works(codec: Codec) -> None:
    """No codec is exempt."""
    n = 3 * (codec.block or 64) + 1
    assert not there_and_back(codec, torch.zeros(n)).any()
    for tiny in (1e-39, -1e-39, 2.0**-149, 2.0**-127, 2.0**-101):
        y = there_and_back(codec, torch.full((n,), tiny))
        # with a constant scale the smallest value of the format may be what comes back
        most = float(codec.plan.constant or 0) * codec.plan.format.smallest if has_constant(codec) else 2.0**-100
        assert (y.abs() <= most).all(), f"{codec}: {tiny!r} came back as {y.abs().max().item()!r}"


def has_constant(codec: Codec) -> TypeGuard[PlanCodec]:
    return isinstance(codec, PlanCodec) and codec.plan.constant is not None


N = 4096
PLACES = {"nan": 100, "inf": 1500, "huge": 3000}


def nonfinite_never_turns_finite(codec: Codec) -> None:
    """One NaN or Inf in 4096 values comes back as non-finite, and touches nothing beyond its block."""
    clean = normal(N, seed=21)
    before = there_and_back(codec, clean)
    for value in (math.nan, math.inf, -math.inf):
        for place in (0, 100, N - 1):
            x = clean.clone()
            x[place] = value
            y = there_and_back(codec, x)
            assert not y[place].isfinite(), f"{codec}: {value} came back as {y[place].item()!r}"
            block = codec.block or N
            other = torch.arange(N) // block != place // block
            assert same(y[other], before[other]), f"{codec}: {value} at {place} touched another block"


def finite_never_turns_nonfinite(codec: Codec) -> None:
    for value in (HUGE, -HUGE, FLOAT32_MAX, -FLOAT32_MAX, 1e38, 65536.0):
        one, many = normal(N, seed=22), torch.full((N,), value)
        one[PLACES["huge"]] = value
        for x in (one, many, many * (1 - 2 * (torch.arange(N) % 2))):
            wire = codec.encode(x)
            for dtype in DTYPES if codec.nbytes(N) == codec.nbytes(N, torch.float16) else DTYPES[:1]:
                y = codec.decode(wire, N, dtype=dtype)
                assert y.isfinite().all(), f"{codec}: {value} came back as {y[~y.isfinite()][0].item()} in {dtype}"


def residual_is_never_poisoned(codec: Codec) -> None:
    """No codec is exempt."""
    feedback = ErrorFeedback(codec)
    clean = normal(N, seed=23)
    feedback.encode(clean)
    dirty = clean.clone()
    dirty[PLACES["nan"]], dirty[PLACES["inf"]], dirty[PLACES["huge"]] = math.nan, math.inf, HUGE
    before = feedback.residual
    assert before is not None
    before = before.clone()
    for _ in range(3):
        feedback.encode(dirty)
        assert feedback.residual is not None
        assert feedback.residual.isfinite().all(), f"{codec}: the residual is poisoned"
    lost = [PLACES["nan"], PLACES["inf"]]
    assert feedback.residual is not None
    assert torch.equal(feedback.residual[lost], before[lost]), "where nothing finite came back the residual stays"


def one_of_each_in_4096_values(codec: Codec) -> None:
    """A NaN, an Inf and a 3.4e38 together."""
    x = normal(N, seed=24)
    x[PLACES["nan"]], x[PLACES["inf"]], x[PLACES["huge"]] = math.nan, math.inf, HUGE
    y = there_and_back(codec, x)
    if Law.NONFINITE not in codec.exemptions:
        assert not y[[PLACES["nan"], PLACES["inf"]]].isfinite().any()
    alone = codec.block and len({place // codec.block for place in PLACES.values()}) == 3
    if alone and Law.FINITE not in codec.exemptions:
        assert y[PLACES["huge"]].isfinite()


def torchs_default_type_changes_no_number(codec: Codec) -> None:
    x, n = normal(300, seed=25), 300
    before, found = torch.get_default_dtype(), []
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            residual, decoded = torch.zeros(n, dtype=torch.float32), torch.zeros(n, dtype=torch.float32)
            wires = [codec.encode(x, seed=1), codec.encode(x, seed=2, residual=residual, unit=3.0)]
            total = codec.reduce(wires, n, seed=3, divide=2.0, decoded=decoded)
            found.append([*wires, total, residual, decoded, codec.decode(total, n)])
    finally:
        torch.set_default_dtype(before)
    for others in found[1:]:
        for wanted, got in zip(found[0], others, strict=True):
            assert got.dtype is wanted.dtype
            assert torch.equal(got, wanted), f"{codec}: another default type gives other numbers"


LAWS: dict[str, Callable[[Codec], None]] = {
    "1: size known beforehand": size_is_known_beforehand,
    Law.BLOCKS: blocks_are_independent,
    "3: nearest means nearest": nearest_means_nearest,
    Law.IDEMPOTENT: idempotent,
    Law.ZERO: zero_stays_zero,
    "4: a block of zeros works": a_block_of_zeros_or_subnormals_works,
    Law.NONFINITE: nonfinite_never_turns_finite,
    Law.FINITE: finite_never_turns_nonfinite,
    "5: the residual is never poisoned": residual_is_never_poisoned,
    "5: one of each in 4096 values": one_of_each_in_4096_values,
    "10: torch's default type changes no number": torchs_default_type_changes_no_number,
}


def exempt(codec: Codec, law: str) -> bool:
    return law in codec.exemptions
