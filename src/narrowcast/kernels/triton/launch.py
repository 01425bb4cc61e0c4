"""What the ops call: grids, scratch memory, launches. Nothing here waits for a device."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from narrowcast.formats import Format, Kind, UniformFormat
from narrowcast.kernels.arithmetic import NO_FINISH, Feedback, Finish, encode_each
from narrowcast.kernels.noise import NO_NOISE, Noise, as_signed
from narrowcast.kernels.plan import CastPlan, Plan, TransformPlan
from narrowcast.kernels.triton import decode as decoding
from narrowcast.kernels.triton import encode as encoding
from narrowcast.kernels.triton import rounding as rounding_kernels
from narrowcast.kernels.triton import shapes
from narrowcast.kernels.triton.constants import constants
from narrowcast.kernels.triton.recipe import (
    AFFINE,
    DTYPES,
    MEANS,
    NVFP4,
    SIGN,
    CodecJob,
    Recipe,
    RoundJob,
    Tables,
    describe,
    describe_codes,
)
from narrowcast.kernels.triton.shapes import SUMS, Tuning
from narrowcast.kernels.triton.start import COMPILING, FAST, Start, current_device

VERSION = f"triton {triton.__version__}"
MAX_PARTS = 1024
"""A first pass leaves at most this much for each block."""
COLUMNS = 1024
"""Sums that the first levels of a large tree leave."""
COLUMN_GROUP = 16
OVERFLOWS = {"saturate": 0, "inf": 1, "nan": 2, "cpd": 3}


AnyKernelPlan = Plan | CastPlan | TransformPlan
"""Of transforms those that are a step of the inner plan's kernels: see `transforms.is_step`."""

MAX_KEPT = 1024
"""Calls of one plan that are remembered."""


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
    rows: int = 0
    """Wires from parts of one tensor; 0: one, of all of it."""


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
        job = replace(job, no_minus=bare and job.few and job.signs and recipe.method == MEANS and not recipe.rotated)
    job = replace(job, **shapes.packs(recipe, job))
    across = shapes.across(recipe, shape, tuning.warps)
    if not variant.world:
        job = replace(job, **across)
    two_passes = shapes.takes_two_passes(recipe)
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
    last = replace(
        job, loop=tiles > 1, out=has_out, out_dtype=max(variant.out_dtype, 0), shared_noise=shared,
        many=variant.rows > 0,
    )  # fmt: skip
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


def unit_kind(unit: float, decay: float) -> int:
    if unit == decay == 1.0:
        return 0
    # then multiplying by the inverse is the same as dividing
    return 1 if math.frexp(unit)[0] == 0.5 and 2.0**-126 <= unit <= 2.0**126 else 2


Memory = tuple[Any, ...]
"""x, wire, residual, out, scale: tensors, or their addresses"""
Words = tuple[int, int, int]
"""seed, stream and offset, signed"""
Factors = tuple[float, float, float, float]
"""divide, multiply, what a residual is multiplied by, and its unit: by how much to multiply, or (kind 2) to divide"""
NO_WORDS: Words = (0, 0, 0)


class EncodeCall:
    """The launches of one encode or reduce: all but memory, noise and factors."""

    def __init__(
        self, plan: AnyKernelPlan, n: int, stride: int, pitch: int, variant: Variant, device: torch.device
    ) -> None:
        recipe, tables = describe(plan)
        self.prepared = prepared = _prepare(recipe, n, variant)
        self.table, self.device = tables.on(device), device
        self.table_at = self.table.data_ptr()
        inner = _planes(plan)
        layout, tail, tuning = inner.layout(n), _tail(plan, n), prepared.tuning
        scales_end = layout.scales + inner.n_scales(n) * inner.store.value
        self.first_numbers = (
            n, stride, layout.scales, tail, prepared.first_tiles, prepared.blocks, prepared.count,
        )  # fmt: skip
        last = prepared.last
        self.numbers = (
            n, stride if last.world or last.many else 0, pitch, layout.scales, tail,
            inner.code_bytes(n), scales_end, prepared.tiles, prepared.chunks, prepared.blocks, prepared.count,
        )  # fmt: skip
        self.first = self.sums = None
        if prepared.first is not None:
            programs = prepared.blocks * prepared.count
            self.first = Start(encoding.parts_kernel, programs, recipe, prepared.first, tuning)
        if prepared.sums is not None:
            programs = prepared.blocks * prepared.sums.columns // COLUMN_GROUP
            self.sums = Start(encoding.sums_kernel, programs, recipe, prepared.sums, SUMS)
        self.last = Start(encoding.encode_kernel, prepared.programs, recipe, last, tuning, variant.rows)
        self.ready = False
        """Whether addresses will do: all was compiled."""

    def run(self, memory: Memory, words: Words, factors: Factors, device: int) -> None:
        """Start all of it; `memory` as tensors until it is ready."""
        x, wire, residual, out, scale = memory
        parts = sums = wire
        table = self.table_at if self.ready else self.table
        if self.first is not None:
            x, parts = self._first_pass(x, wire, residual, table, factors, device)
            if self.sums is not None:
                sums = self._sum_columns(x, residual, parts, factors[2], device)
        self.last.begin(device, x, wire, residual, out, table, parts, sums, scale, *self.numbers, *words, *factors)
        if not self.ready:
            self.ready = all(one is None or one.compiled is not None for one in (self.first, self.sums, self.last))

    def _first_pass(
        self, x: Any, wire: Any, residual: Any, table: Any, factors: Factors, device: int
    ) -> tuple[Any, Tensor]:
        """What the second pass reads, and what scales follow from. A sum of wires is kept: nothing is decoded twice."""
        assert self.first is not None
        parts = torch.empty(self.prepared.part_words, dtype=torch.int32, device=self.device)
        total = None
        if self.prepared.first is not None and self.prepared.first.world:
            total = torch.empty(self.numbers[0], dtype=torch.float32, device=self.device)
        into = wire if total is None else total
        self.first.begin(device, x, residual, into, table, parts, *self.first_numbers, *factors)
        return (x if total is None else total), parts

    def _sum_columns(self, x: Any, residual: Any, parts: Tensor, weight: float, device: int) -> Tensor:
        """The first levels of the trees of blocks larger than a tile."""
        assert self.sums is not None
        prepared = self.prepared
        sums = torch.empty(prepared.sum_words, dtype=torch.int32, device=self.device)
        numbers = self.numbers[0], prepared.blocks, prepared.count
        self.sums.begin(device, x, residual, parts, sums, *numbers, weight)
        return sums


def _planes(plan: AnyKernelPlan) -> Plan | CastPlan:
    """The plan whose planes are the wire, or its begin."""
    return plan.inner if isinstance(plan, TransformPlan) else plan


def _tail(plan: AnyKernelPlan, n: int) -> int:
    """Where in the wire of n values the tensor's scale lies or the side plane begins."""
    if isinstance(plan, TransformPlan) and plan.transform.side_bytes(n):
        return plan.layout(n).side
    return _planes(plan).layout(n).tensor_scale


def _derives_noise(plan: AnyKernelPlan, offset: int, pitch: int) -> bool:
    """Whether rows have streams of their own: they do not begin with a block."""
    if not isinstance(plan, TransformPlan) or plan.transform.keeps_places:
        return False
    return plan.stochastic and (offset % plan.block or pitch % plan.block) != 0


def _kept_of(plan: AnyKernelPlan) -> dict[object, Any]:
    """What was prepared for a plan, by all that it depends on."""
    kept: dict[object, Any] | None = plan.__dict__.get("_triton_calls")
    if kept is None or len(kept) > MAX_KEPT:
        kept = plan.__dict__["_triton_calls"] = {}
    return kept


def forget(plan: AnyKernelPlan) -> None:
    """For whoever changes what calls are prepared from."""
    plan.__dict__.pop("_triton_calls", None)


def encode(
    plan: AnyKernelPlan,
    x: Tensor,
    wire: Tensor,
    noise: Noise = NO_NOISE,
    scale: Tensor | None = None,
    feedback: Feedback | None = None,
) -> None:
    """See `kernels.ops.encode`."""
    if isinstance(plan, TransformPlan):
        noise = plan.inner_noise(noise)
    _run(plan, x, x.numel(), 0, 0, 0, wire, noise, scale, feedback, NO_FINISH, None)


def encode_rows(
    plan: AnyKernelPlan,
    x: Tensor,
    per: int,
    wires: Tensor,
    noise: Noise = NO_NOISE,
    feedback: Feedback | None = None,
    pitch: int = 0,
) -> None:
    """See `kernels.ops.encode_rows`."""
    rows = wires.shape[0]
    if rows == 1 or shapes.takes_two_passes(describe(plan)[0]) or _derives_noise(plan, noise.offset, pitch or per):
        encode_each(encode, plan, x, per, wires, noise, feedback, pitch)
    else:
        stride = wires.stride()[0]
        _run(plan, x, per, 0, stride, rows, wires, noise, None, feedback, NO_FINISH, None, pitch or per)


def reduce(
    plan: AnyKernelPlan,
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
    if isinstance(plan, TransformPlan):
        noise = plan.inner_noise(noise)
    _run(plan, wires, n, wires.shape[0], wires.stride()[0], 0, wire, noise, scale, feedback, finish, out)


def _run(
    plan: AnyKernelPlan,
    x: Tensor,
    n: int,
    world: int,
    stride: int,
    rows: int,
    wire: Tensor,
    noise: Noise,
    scale: Tensor | None,
    feedback: Feedback | None,
    finish: Finish,
    out: Tensor | None,
    pitch: int = 0,
) -> None:
    """Values x, or the sum of `world` wires, into a wire; or `rows` times n values into a wire each. Where there are
    several wires, they begin `stride` bytes apart, and rows `pitch` values.
    """
    if n == 0:
        return
    device = wire.get_device()
    if device >= 0 and device != current_device():
        with torch.cuda.device(device):  # where launches go
            _run(plan, x, n, world, stride, rows, wire, noise, scale, feedback, finish, out, pitch)
        return
    (seed, stream, offset), (divide, multiply) = noise, finish
    residual, unit, decay = (None, 1.0, 1.0) if feedback is None else feedback
    kind = 0 if residual is None else unit_kind(unit, decay)
    # what is not there is never read or written: any address will do
    x_at, wire_at = x.data_ptr(), wire.data_ptr()
    residual_at = wire_at if residual is None else residual.data_ptr()
    out_at = wire_at if out is None else out.data_ptr()
    scale_at = wire_at if scale is None else scale.data_ptr()
    memory: Memory = x_at, wire_at, residual_at, out_at, scale_at
    # Whatever Triton looks at in an argument must be the same in all calls of one key. Addresses: their alignment.
    # Numbers: they follow from these, and noise always has 64 bits. Memory of our own begins as torch's does.
    key = (
        n, world, stride, rows, pitch, x.dtype, None if out is None else out.dtype,
        None if residual is None else kind, divide == 1.0, multiply == 1.0, scale is None, offset & 127,
        device,
        tuple([at & 15 for at in memory]) if (x_at | wire_at | residual_at | out_at | scale_at) & 15 else 0,
    )  # fmt: skip
    kept = _kept_of(plan)
    call = kept.get(key)
    if call is None:
        aligned = (wire_at | stride) % 4 == 0 and (world == 0 or x_at % 4 == 0)
        # where random bits begin, in every row
        first = (offset | pitch) % 128
        variant = Variant(
            aligned, world, 0 if world else DTYPES[x.dtype], -1 if out is None else DTYPES[out.dtype],
            residual is not None, kind, divide != 1.0, multiply != 1.0, scale is not None, first,
            rows,
        )  # fmt: skip
        call = kept[key] = EncodeCall(plan, n, stride, pitch, variant, wire.device)
    if not call.ready:
        memory = x, wire, *(wire if one is None else one for one in (residual, out, scale))
    words = NO_WORDS if noise is NO_NOISE else (as_signed(seed), as_signed(stream), offset)
    # floats always: Triton would compile for an integer
    call.run(
        memory,
        words,
        (float(divide), float(multiply), float(unit * decay), float(unit) if kind == 2 else 1.0 / unit),
        device,
    )


@dataclass(frozen=True)
class Reading:
    """What one decode or sum of wires differs in from another, beside the recipe and n."""

    aligned: bool
    dtype: int = 0
    accumulate: bool = False
    world: int = 0
    divide: bool = False
    multiply: bool = False
    rows: int = 0


class DecodeCall:
    """The launch of one decode: all but memory and factors."""

    def __init__(
        self, plan: AnyKernelPlan, n: int, stride: int, pitch: int, reading: Reading, device: torch.device
    ) -> None:
        recipe, tables = describe(plan)
        job, tuning = _prepare_decode(recipe, n, reading)
        programs, chunks = -(-n // (job.rows * job.step)), 1
        if job.mode == shapes.WIDE:
            size = min(recipe.block, n) if recipe.block else n
            chunks = -(-size // job.cols)
            programs = -(-n // size) * chunks
        self.table, layout = tables.on(device), _planes(plan).layout(n)
        self.table_at = self.table.data_ptr()
        self.numbers = n, stride, pitch, layout.scales, _tail(plan, n), chunks
        self.start = Start(decoding.decode_kernel, programs, recipe, job, tuning, reading.rows)


def _prepare_decode(recipe: Recipe, n: int, reading: Reading) -> tuple[CodecJob, Tuning]:
    tuning = shapes.tuning_of(recipe, "reduce" if reading.world else "decode")
    shape = shapes.shape_of(recipe, n, reading.aligned, tuning.tile)
    job = replace(
        shape, out_dtype=reading.dtype, accumulate=reading.accumulate, words=shape.words and reading.world > 0,
        world=reading.world, divide=reading.divide, multiply=reading.multiply, many=reading.rows > 0,
    )  # fmt: skip
    if reading.world:
        job = replace(job, **shapes.of_sum(recipe, shape, tuning.warps, reading.world))
    return job, tuning


def decode(plan: AnyKernelPlan, wire: Tensor, n: int, out: Tensor, accumulate: bool = False) -> None:
    """See `kernels.ops.decode`."""
    _read(plan, wire, n, 0, 0, 0, out, accumulate, NO_FINISH)


def decode_rows(plan: AnyKernelPlan, wires: Tensor, per: int, out: Tensor, pitch: int = 0) -> None:
    """See `kernels.ops.decode_rows`."""
    _read(plan, wires, per, 0, wires.stride()[0], wires.shape[0], out, False, NO_FINISH, pitch or per)


def sum_wires(plan: AnyKernelPlan, wires: Tensor, n: int, out: Tensor, finish: Finish = NO_FINISH) -> None:
    """See `kernels.ops.sum_wires`."""
    _read(plan, wires, n, wires.shape[0], wires.stride()[0], 0, out, False, finish)


def _read(
    plan: AnyKernelPlan,
    wires: Tensor,
    n: int,
    world: int,
    stride: int,
    rows: int,
    out: Tensor,
    accumulate: bool,
    finish: Finish,
    pitch: int = 0,
) -> None:
    """A wire to values; the sum of `world` wires; or `rows` wires to n values each, `pitch` apart."""
    if n == 0:
        return
    device = out.get_device()
    if device >= 0 and device != current_device():
        with torch.cuda.device(device):
            _read(plan, wires, n, world, stride, rows, out, accumulate, finish, pitch)
        return
    wires_at, out_at, (divide, multiply) = wires.data_ptr(), out.data_ptr(), finish
    # as in `_run`
    key = (
        n, world, stride, rows, pitch, out.dtype, accumulate, divide == 1.0, multiply == 1.0, wires_at & 15,
        out_at & 15, device,
    )  # fmt: skip
    kept = _kept_of(plan)
    call = kept.get(key)
    if call is None:
        aligned = (wires_at | stride) % 4 == 0
        reading = Reading(aligned, DTYPES[out.dtype], accumulate, world, divide != 1.0, multiply != 1.0, rows)
        call = kept[key] = DecodeCall(plan, n, stride, pitch, reading, out.device)
    factors = float(divide), float(multiply)
    if call.start.compiled is None:
        call.start.begin(device, wires, out, call.table, *call.numbers, *factors)
    else:
        call.start.begin(device, wires_at, out_at, call.table_at, *call.numbers, *factors)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device: make it the tensor's own."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


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
    with on_device_of(out), COMPILING:
        kernel = rounding_kernels.round_kernel[(programs,)]
        compiled = kernel(*args, *launch.constant, **shapes.ROUND.options())
    if FAST:
        launch.compiled[key] = compiled
    return out
