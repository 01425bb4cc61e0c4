"""What the ops call: grids, scratch memory, launches. Nothing here waits for a device."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from narrowcast.formats import Format, Kind, UniformFormat
from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish
from narrowcast.kernels.noise import NO_NOISE, Noise, as_signed
from narrowcast.kernels.plan import CastPlan, Plan, WireLayout
from narrowcast.kernels.triton import decode as decoding
from narrowcast.kernels.triton import encode as encoding
from narrowcast.kernels.triton import rounding as rounding_kernels
from narrowcast.kernels.triton import shapes
from narrowcast.kernels.triton.constants import INTERPRETED, constants
from narrowcast.kernels.triton.recipe import (
    AFFINE,
    DTYPES,
    MEANS,
    NVFP4,
    SIGN,
    CodecJob,
    Named,
    Recipe,
    RoundJob,
    Tables,
    describe,
    describe_codes,
)
from narrowcast.kernels.triton.shapes import SUMS, Tuning

VERSION = f"triton {triton.__version__}"
MAX_PARTS = 1024
"""A first pass leaves at most this much for each block."""
COLUMNS = 1024
"""Sums that the first levels of a large tree leave."""
COLUMN_GROUP = 16
OVERFLOWS = {"saturate": 0, "inf": 1, "nan": 2, "cpd": 3}


def _is_aligned(*tensors: Tensor | None) -> bool:
    return all(t.data_ptr() % 4 == 0 and (t.dim() < 2 or t.stride(0) % 4 == 0) for t in tensors if t is not None)


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device: make it the tensor's own."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


FAST = not INTERPRETED and triton.__version__.startswith("3.6.")
"""Versions on which a compiled kernel was seen to start when called by itself."""
_COMPILED: dict[tuple[object, ...], Any] = {}
_COMPILING = threading.Lock()
"""Channels have threads of their own."""


def _launch(kernel: Any, programs: int, args: tuple[Any, ...], recipe: Named, job: Named, tuning: Tuning) -> None:
    """Start `kernel`. Triton looks at every argument anew; what it compiled is kept for arguments of the same kinds."""
    constant = constants(recipe), constants(job)
    if not FAST:
        kernel[(programs,)](*args, *constant, **tuning.options())
        return
    key = (kernel, recipe.name, job.name, tuning, *map(_kind, args))
    compiled = _COMPILED.get(key)
    if compiled is None:
        with _COMPILING:
            _COMPILED[key] = kernel[(programs,)](*args, *constant, **tuning.options())
        return
    compiled[(programs, 1, 1)](*args, *constant)


def _kind(arg: Any) -> object:
    """What Triton compiles for: alignment and type of a tensor, width and divisibility of an integer."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0, arg.device.index
    if isinstance(arg, int):
        return -(2**31) <= arg < 2**31, arg % 16 == 0, arg == 1
    return float


@dataclass(frozen=True)
class Variant:
    """What one prepared launch differs in from another, beside the recipe and n."""

    aligned: bool
    world: int = 0
    x_dtype: int = 0
    out_dtype: int = -1
    residual: bool = False
    unit: int = 0
    divide: bool = False
    multiply: bool = False
    given_scale: bool = False
    offset: int = 0
    """Modulo 128."""


@dataclass(frozen=True)
class Prepared:
    """The launches of one encode or reduce, all but their tensors."""

    first: CodecJob | None
    """The job of the first pass, where there is one."""
    sums: CodecJob | None
    last: CodecJob
    tuning: Tuning
    blocks: int
    count: int
    """Parts of each block."""
    first_tiles: int
    programs: int
    tiles: int
    chunks: int
    part_words: int
    sum_words: int


@lru_cache(maxsize=8192)
def _prepare(recipe: Recipe, n: int, variant: Variant) -> Prepared:
    tuning = shapes.tuning_of(recipe, "reduce" if variant.world else "encode")
    shape = shapes.shape_of(recipe, n, variant.aligned, tuning.tile)
    job = replace(
        shape, world=variant.world, x_dtype=variant.x_dtype, residual=int(variant.residual), unit=variant.unit,
        divide=variant.divide, multiply=variant.multiply, given_scale=variant.given_scale,
    )  # fmt: skip
    if variant.world:
        job = replace(job, **shapes.of_sum(recipe, shape, tuning.warps, variant.world))
        # nothing but what wires say goes into the sum
        bare = not (variant.residual or variant.divide or variant.multiply)
        job = replace(job, no_minus=bare and job.few and job.signs and recipe.method == MEANS)
    job = replace(job, **shapes.packs(recipe, job))
    across = shapes.across(recipe, shape, tuning.warps)
    if not variant.world:
        job = replace(job, **across)
    two_passes = shape.mode == shapes.WIDE or recipe.method == NVFP4
    has_sums = shape.mode == shapes.WIDE and (recipe.l2 or recipe.method in (MEANS, SIGN))
    size = min(recipe.block, n) if shape.mode == shapes.WIDE and recipe.block else n
    blocks, in_block = -(-n // size), -(-size // tuning.tile)
    first_tiles = -(-in_block // MAX_PARTS)
    count = -(-in_block // first_tiles)
    first = replace(job, out=bool(variant.world)) if two_passes else None
    if two_passes:
        job = replace(job, parts=shapes.pow2(count))
        if variant.world:  # the first pass leaves the sum, residual added
            job = replace(
                job, world=0, x_dtype=0, divide=False, multiply=False, residual=2 * variant.residual, **across
            )
    columns = min(COLUMNS, recipe.tree_width) if has_sums else 1
    heights = recipe.tree_width // columns
    sums = None
    if has_sums:
        job = replace(job, columns=columns, column_levels=columns.bit_length() - 1)
        sums = replace(job, rows=heights, cols=COLUMN_GROUP, levels=heights.bit_length() - 1)
        sums = replace(sums, residual=int(job.residual == 1))
    programs, tiles, chunks = _grid(recipe, shape, n, blocks, in_block)
    shared = recipe.stochastic and shapes.shares_noise(recipe, shape, variant.offset)
    has_out = variant.out_dtype >= 0
    last = replace(job, loop=tiles > 1, out=has_out, out_dtype=max(variant.out_dtype, 0), shared_noise=shared)
    kinds = 3 if recipe.method == AFFINE else 1
    part_words = kinds * blocks * count if two_passes else 0
    return Prepared(
        first, sums, last, tuning, blocks, count, first_tiles, programs, tiles, chunks,
        part_words, 3 * blocks * columns if has_sums else 0,
    )  # fmt: skip


def _grid(recipe: Recipe, job: CodecJob, n: int, blocks: int, in_block: int) -> tuple[int, int, int]:
    """Programs, tiles for each, and programs for each large block."""
    if job.mode == shapes.WIDE:
        tiles = _tiles_for_each(in_block * blocks)
        chunks = -(-in_block // tiles)
        return blocks * chunks, tiles, chunks
    all_tiles = -(-n // (job.rows * job.step))
    tiles = _tiles_for_each(all_tiles) if recipe.method == NVFP4 else 1
    return -(-all_tiles // tiles), tiles, 1


def _tiles_for_each(tiles: int) -> int:
    """Enough for each program that reading what the first pass left costs little, few enough to fill a device."""
    return max(1, min(8, tiles // 2048))


def _unit_kind(feedback: Feedback | None) -> int:
    unit = 1.0 if feedback is None else feedback.unit
    if unit == 1.0:
        return 0
    # then multiplying by the inverse is the same as dividing
    return 1 if math.frexp(unit)[0] == 0.5 and 2.0**-126 <= unit <= 2.0**126 else 2


def encode(
    plan: Plan | CastPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
) -> None:
    """See `kernels.ops.encode`."""
    variant = Variant(
        wire.data_ptr() % 4 == 0, 0, DTYPES[x.dtype], -1, feedback is not None, _unit_kind(feedback),
        False, False, scale is not None, noise.offset % 128,
    )  # fmt: skip
    _run(plan, x, x.numel(), wire, variant, noise, scale, feedback, NO_FINISH, None)


def reduce(
    plan: Plan | CastPlan,
    wires: Tensor,
    n: int,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
    finish: Finish = NO_FINISH,
    out: Tensor | None = None,
) -> None:
    """See `kernels.ops.reduce`."""
    variant = Variant(
        _is_aligned(wire, wires), wires.shape[0], 0, DTYPES[out.dtype] if out is not None else -1,
        feedback is not None, _unit_kind(feedback), finish.divide != 1.0, finish.multiply != 1.0, scale is not None,
        noise.offset % 128,
    )  # fmt: skip
    _run(plan, wires, n, wire, variant, noise, scale, feedback, finish, out)


Factors = tuple[float, float, float, float]
"""divide, multiply, unit and its inverse"""


def _run(
    plan: Plan | CastPlan,
    x: Tensor,
    n: int,
    wire: Tensor,
    variant: Variant,
    noise: Noise,
    scale: Tensor | None,
    feedback: Feedback | None,
    finish: Finish,
    out: Tensor | None,
) -> None:
    if n == 0:
        return
    recipe, tables = describe(plan)
    prepared = _prepare(recipe, n, variant)
    layout = plan.layout(n)
    table = tables.on(wire.device)
    # what is not there is never read or written: any address will do
    residual, unit = (wire, 1.0) if feedback is None else feedback
    factors = *finish, unit, 1.0 / unit
    with _on(wire):
        parts = sums = wire
        if prepared.first is not None:
            x, parts = _first_pass(recipe, prepared, x, n, wire, residual, table, layout, factors)
            if prepared.sums is not None:
                sums = _sum_columns(recipe, prepared, x, n, residual, parts, unit)
        stride = x.stride(0) if prepared.last.world else 0
        scales_end = layout.scales + plan.n_scales(n) * plan.store.value
        args = (
            x, wire, residual, wire if out is None else out, table, parts, sums, wire if scale is None else scale, n,
            stride, layout.scales, layout.tensor_scale, plan.code_bytes(n), scales_end, prepared.tiles,
            prepared.chunks, prepared.blocks, prepared.count, as_signed(noise.seed), as_signed(noise.stream),
            noise.offset, *factors,
        )  # fmt: skip
        _launch(encoding.encode_kernel, prepared.programs, args, recipe, prepared.last, prepared.tuning)


def _first_pass(
    recipe: Recipe,
    prepared: Prepared,
    x: Tensor,
    n: int,
    wire: Tensor,
    residual: Tensor,
    table: Tensor,
    layout: WireLayout,
    factors: Factors,
) -> tuple[Tensor, Tensor]:
    """What the second pass reads, and what scales follow from. A sum of wires is kept: nothing is decoded twice."""
    assert prepared.first is not None
    parts = torch.empty(prepared.part_words, dtype=torch.int32, device=wire.device)
    total = torch.empty(n, dtype=torch.float32, device=wire.device) if prepared.first.world else None
    args = (
        x, residual, wire if total is None else total, table, parts, n,
        x.stride(0) if prepared.first.world else 0, layout.scales, layout.tensor_scale, prepared.first_tiles,
        prepared.blocks, prepared.count, *factors,
    )  # fmt: skip
    _launch(encoding.parts_kernel, prepared.blocks * prepared.count, args, recipe, prepared.first, prepared.tuning)
    return (x if total is None else total), parts


def _sum_columns(
    recipe: Recipe,
    prepared: Prepared,
    x: Tensor,
    n: int,
    residual: Tensor,
    parts: Tensor,
    unit: float,
) -> Tensor:
    """The first levels of the trees of blocks larger than a tile."""
    assert prepared.sums is not None
    sums = torch.empty(prepared.sum_words, dtype=torch.int32, device=x.device)
    programs = prepared.blocks * prepared.sums.columns // COLUMN_GROUP
    args = (x, residual, parts, sums, n, prepared.blocks, prepared.count, unit)
    _launch(encoding.sums_kernel, programs, args, recipe, prepared.sums, SUMS)
    return sums


@lru_cache(maxsize=8192)
def _prepare_decode(
    recipe: Recipe, n: int, aligned: bool, dtype: int, accumulate: bool
) -> tuple[CodecJob, int, int, Tuning]:
    """The job, programs, programs for each large block, tuning."""
    tuning = shapes.tuning_of(recipe, "decode")
    job = replace(shapes.shape_of(recipe, n, aligned, tuning.tile), out_dtype=dtype, accumulate=accumulate, words=False)
    if job.mode != shapes.WIDE:
        return job, -(-n // (job.rows * job.step)), 1, tuning
    size = min(recipe.block, n) if recipe.block else n
    chunks = -(-size // job.cols)
    return job, -(-n // size) * chunks, chunks, tuning


def decode(plan: Plan | CastPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    if n == 0:
        return
    recipe, tables = describe(plan)
    aligned = wire.data_ptr() % 4 == 0
    job, programs, chunks, tuning = _prepare_decode(recipe, n, aligned, DTYPES[out.dtype], accumulate)
    layout = plan.layout(n)
    with _on(out):
        args = (wire, out, tables.on(out.device), n, layout.scales, layout.tensor_scale, chunks)
        _launch(decoding.decode_kernel, programs, args, recipe, job, tuning)


@dataclass(frozen=True)
class RoundLaunch:
    """One way to round: all that does not depend on the tensors, and what Triton compiled for their kinds."""

    tables: Tables
    constant: tuple[Any, Any]
    compiled: dict[object, Any]


def _prepare_round(fmt: Format, dtype: torch.dtype, whole: bool, stochastic: bool, overflow: str) -> RoundLaunch:
    """Kept with the format: a simulated training casts hundreds of times a step, and the host must keep up."""
    known: dict[object, RoundLaunch] = fmt.__dict__.setdefault("_triton_round", {})
    key = dtype, whole, stochastic, overflow
    launch = known.get(key)
    if launch is None:
        codes, tables = describe_codes(fmt, fmt.values, by_value=True)
        steps = float(fmt.steps_per_unit) if isinstance(fmt, UniformFormat) and fmt.kind is Kind.UNIFORM else 1.0
        job = RoundJob(shapes.ROUND.tile, DTYPES[dtype], whole, stochastic, OVERFLOWS[overflow], steps)
        launch = known[key] = RoundLaunch(tables, (constants(codes), constants(job)), {})
    return launch


def round_to(x: Tensor, fmt: Format, rounding: str, overflow: str, rules: str, seed: int, out: Tensor) -> Tensor:
    """See `kernels.ops.round_to`."""
    n = x.numel()
    if n == 0:
        return out
    # CPD's rules decide what becomes of an overflow, too
    lost = overflow if rules == "ieee" else rules
    launch = _prepare_round(fmt, x.dtype, n % shapes.ROUND.tile == 0, rounding == "stochastic", lost)
    device, seed = x.device, as_signed(seed)
    args = x, out, launch.tables.on(device), n, seed
    # the kernel specialises on neither n nor the seed: of both only the width counts
    key = x.data_ptr() % 16, out.data_ptr() % 16, n < 2**31, -(2**31) <= seed < 2**31, device.index
    programs = -(-n // shapes.ROUND.tile)
    compiled = launch.compiled.get(key) if FAST and device.index == torch.cuda.current_device() else None
    if compiled is not None:
        compiled[(programs, 1, 1)](*args, *launch.constant)
        return out
    with _on(out), _COMPILING:
        kernel = rounding_kernels.round_kernel[(programs,)]
        compiled = kernel(*args, *launch.constant, **shapes.ROUND.options())
    if FAST:
        launch.compiled[key] = compiled
    return out
