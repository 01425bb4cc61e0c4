"""What a Triton kernel is compiled for: a plan as plain numbers, and the tables that it reads on the device.

A `Recipe` is one compile-time argument. Its name is a digest of all its fields: Triton keys its caches by the name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from narrowcast.formats import Coding, FloatFormat, Format, Kind, Specials, UniformFormat
from narrowcast.kernels import search_table
from narrowcast.kernels.plan import NVFP4_BLOCK_SCALE, CastPlan, Method, Plan, Rule, Store, TransformPlan, inner_of
from narrowcast.kernels.reference import rotation
from narrowcast.kernels.reference.blocks import power_of_two_above

FLOAT, UNIFORM, TABLE = 0, 1, 2
SCALED, AFFINE, MEANS, SIGN, NVFP4, CAST = 0, 1, 2, 3, 4, 5
FP32, BF16, E8M0, CONSTANT = 0, 1, 2, 3
DIVIDE, FLOOR, RCEIL, APS = 0, 1, 2, 3

KINDS = {Kind.FLOAT: FLOAT, Kind.UNIFORM: UNIFORM, Kind.TABLE: TABLE}
METHODS = {Method.SCALED: SCALED, Method.AFFINE: AFFINE, Method.MEANS: MEANS, Method.SIGN: SIGN, Method.NVFP4: NVFP4}
STORES = {Store.FP32: FP32, Store.BF16: BF16, Store.E8M0: E8M0}
RULES = {Rule.DIVIDE: DIVIDE, Rule.FLOOR: FLOOR, Rule.RCEIL: RCEIL, Rule.APS: APS}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

SIGN_FREE = 0x7FFFFFFF


class Named:
    """Compile-time arguments differ by a digest of their fields, computed once."""

    @cached_property
    def name(self) -> str:
        text = repr([(field.name, getattr(self, field.name)) for field in fields(self)])  # type: ignore[arg-type]
        return f"{type(self).__name__}_{hashlib.sha256(text.encode()).hexdigest()[:20]}"

    def __repr__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name


@dataclass(frozen=True, repr=False, eq=False)
class Codes(Named):
    """How a scaled value becomes a code and back."""

    kind: int
    bits: int
    sign_bit: int
    signed_zero: bool
    max_code: int
    min_code: int
    nan_code: int
    inf_code: int
    neg_inf_code: int
    neg_zero_code: int
    low: float
    """The least and the largest level."""
    high: float
    max_bits: int
    """The pattern of the largest level."""
    sign_magnitude: bool
    unsigned: bool
    man: int
    bias: int
    exp_bits: int
    ieee: bool
    """Inf and NaN at the top of the codes."""
    top_is_nan: bool
    """The all-ones magnitude is NaN."""
    neg_zero_is_nan: bool
    packed: bool
    """A look-up and one compare give the code."""
    steps: int
    """How often a search halves what the prefix table leaves."""
    n_grid: int
    search_at: int
    """Where parts of the table lie, in words of 32 bits: the search table, starts, grid, codes, inverse gaps."""
    starts_at: int
    grid_at: int
    codes_at: int
    gaps_at: int
    short: bool
    """Every level is a bfloat16."""
    by_addition: bool
    """Adding a power of two may round to nearest without leaving float32."""
    fp8: int = 0
    """Conversions that the hardware has and that give the same bits. 1: e4m3fn. 2: e5m2, for decoding alone."""


@dataclass(frozen=True, repr=False, eq=False)
class Recipe(Named):
    """A plan, as numbers."""

    codes: Codes
    block_codes: Codes
    """Those of nvfp4's block scales."""
    method: int
    bits: int
    block: int
    """Values that share a scale; 0: all of them."""
    store: int
    rule: int
    l2: bool
    stochastic: bool
    cpd: bool
    target: float
    max_scale: float
    scale: float
    """The constant scale, and its inverse, both as float32."""
    inverse: float
    low_exponent: int
    high_exponent: int
    top_exponent: int
    tree_width: int
    """What a block is filled up to in sums."""
    cast: int
    """The type of the wire, for plain casts."""
    rotated: bool = False
    signs_at: int = 0
    """Where in the table the signs of a block lie, with the power of two by which a whole block is made smaller."""
    careful_from: int = 0
    """The pattern of a scale with which sums over a block may overflow."""
    spikes: int = 0
    """Values of each block that travel apart."""


@dataclass(frozen=True, repr=False, eq=False)
class CodecJob(Named):
    """What one launch does with a recipe: the shape of a tile, and what goes in and out."""

    mode: int
    """IN_TILE: rows are blocks. WIDE: a block is larger than a tile. FREE: no scale on the wire."""
    rows: int
    cols: int
    step: int
    """Values from one row to the next; the other places of a row are empty."""
    levels: int
    """log2 of what a tree sums."""
    group: int
    """Codes that fill whole bytes."""
    group_bytes: int
    exact: bool
    """Every tile is full."""
    aligned: bool
    """Scales lie at multiples of their size."""
    words: bool = False
    """Codes of full tiles are read and written 32 bits at a time."""
    each: int = 0
    """Codes in a word where full tiles of wires are summed word by word; 0: they are not."""
    groups: int = 1
    """Words that lie together: 4 of 24 bits in three of 32."""
    by_lanes: bool = False
    """The levels of codes lie in the threads of a warp, which look them up in each other."""
    halves: bool = False
    """Codes are 4-bit floats, and full tiles of wires are summed by way of float16."""
    few: bool = False
    """So few wires that each has instructions of its own."""
    gated: bool = False
    """All wires of a tile are asked for before the first is waited for: few only."""
    packed: bool = False
    """Codes of full tiles leave as words; those of a row that is not finite become zero there."""
    raw: bool = False
    """Integers are packed as the sum with ROUNDER leaves them."""
    cut: bool = True
    """A scaled value may lie beyond the largest level."""
    signs: bool = False
    """Codes are signs, and leave as words."""
    no_minus: bool = False
    """No sum of wires is -0: the first addend is not, and nothing but two of them adds up to one."""
    across: int = 1
    """Parts of a row, of which a thread has the same places."""
    loop: bool = False
    """A program does several tiles."""
    world: int = 0
    """Wires to sum; 0: the input is a tensor."""
    x_dtype: int = 0
    out: bool = False
    out_dtype: int = 0
    accumulate: bool = False
    residual: int = 0
    """1: add the residual and keep what is lost. 2: keep alone, since the first pass added."""
    unit: int = 0
    """Of residuals. 0: one. 1: a power of two. 2: any other."""
    divide: bool = False
    multiply: bool = False
    shared_noise: bool = False
    """Tiles begin where groups of random bits do, so eight values share a call of the generator."""
    given_scale: bool = False
    """The scale comes from the caller."""
    many: bool = False
    """Many wires from or to parts of one tensor that lie side by side: the grid has a row for each."""
    parts: int = 1
    """Places for what the first pass left of a block: a power of two."""
    columns: int = 1
    column_levels: int = 0


@dataclass(frozen=True, repr=False, eq=False)
class RoundJob(Named):
    """What one launch of round_to does."""

    cols: int
    dtype: int
    exact: bool
    stochastic: bool
    overflow: int
    steps_per_unit: float


@dataclass(frozen=True)
class Tables:
    """Words of 32 bits that a kernel reads; moved to a device once."""

    words: Tensor

    def on(self, device: torch.device) -> Tensor:
        known: dict[torch.device, Tensor] = self.__dict__.setdefault("_on", {})
        if device not in known:
            # two threads may both be first: one copy stays, so that none is freed while a kernel reads it
            known.setdefault(device, self.words.to(device))
        return known[device]


def _words(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.int32)


def _needs_search(fmt: Format, by_value: bool) -> bool:
    if fmt.kind is Kind.TABLE:
        return True
    steps = fmt.steps_per_unit if isinstance(fmt, UniformFormat) else 1
    return by_value and steps & (steps - 1) != 0


def describe_codes(
    fmt: Format, levels: Tensor, by_value: bool = False, stochastic: bool = False
) -> tuple[Codes, Tables]:
    """`by_value`: for round_to, which needs the value and not the code."""
    table = search_table.build(fmt) if _needs_search(fmt, by_value) else None
    packed = table is not None and table.packed is not None and not by_value and not stochastic
    parts = [_words(levels.float())]
    steps = 0
    if table is not None:
        parts += _search_parts(fmt, table, packed)
        steps = _halvings(table)
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    ends += [0] * (7 - len(ends))
    counted = fmt.levels if table is None else levels
    usable = counted[fmt.grid_codes]
    nan, inf = fmt.nan_code, fmt.inf_code
    floating = fmt if isinstance(fmt, FloatFormat) else None
    specials = floating.specials if floating else None
    coding = fmt.coding if isinstance(fmt, UniformFormat) else None
    high = float(usable.max())
    codes = Codes(
        kind=TABLE if table is not None else KINDS[fmt.kind],
        bits=fmt.bits,
        sign_bit=1 << (fmt.bits - 1),
        signed_zero=fmt.negative_zero_code is not None,
        max_code=int(fmt.grid_codes[-1]),
        min_code=int(fmt.grid_codes[0]),
        nan_code=_first(nan, inf),
        inf_code=_first(inf, nan),
        neg_inf_code=inf + 2 ** (fmt.bits - 1) if inf is not None else _first(nan),
        neg_zero_code=_first(fmt.negative_zero_code),
        low=float(usable.min()),
        high=high,
        max_bits=pattern(high),
        sign_magnitude=coding is Coding.SIGN_MAGNITUDE,
        unsigned=coding is Coding.UNSIGNED,
        man=floating.man_bits if floating else 0,
        bias=floating.bias if floating else 0,
        exp_bits=floating.exp_bits if floating else 0,
        ieee=specials is Specials.IEEE,
        top_is_nan=specials is Specials.FN,
        neg_zero_is_nan=specials is Specials.FNUZ,
        packed=packed,
        steps=steps,
        n_grid=len(fmt.grid),
        search_at=ends[1],
        starts_at=ends[2],
        grid_at=ends[3],
        codes_at=ends[4],
        gaps_at=ends[5],
        short=not bool((_words(levels.float()) & 0xFFFF).any()),
        by_addition=floating is not None and _rounds_by_addition(floating),
        fp8=0 if by_value else _fp8(fmt),
    )
    return codes, Tables(torch.cat(parts))


def _rounds_by_addition(fmt: FloatFormat) -> bool:
    dropped = 23 - fmt.man_bits
    return fmt.man_bits > 0 and fmt.bits <= 8 and (pattern(fmt.max) >> 23) + 1 + dropped < 255


FP8 = {"e4m3fn": 1, "e5m2": 2}
FP8_CAPABILITY = (8, 9)


def _fp8(fmt: Format) -> int:
    """Which 8-bit conversion every device here has for a format."""
    if fmt.name not in FP8 or not torch.cuda.is_available():
        return 0
    capabilities = [torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())]
    return FP8[fmt.name] if min(capabilities) >= FP8_CAPABILITY else 0


def _halvings(table: search_table.SearchTable) -> int:
    """How many compares settle an index within a bin of finite numbers."""
    prefix = table.prefix.int()
    spread = (prefix[1:] - prefix[:-1]).abs()
    finite = torch.arange(len(spread)) % search_table.SIGN_BIN < search_table.INF_BIN
    return int(spread[finite].max()).bit_length()


def _search_parts(fmt: Format, table: search_table.SearchTable, packed: bool) -> list[Tensor]:
    search = table.packed.to(torch.int64).to(torch.int32) if packed and table.packed is not None else table.prefix.int()
    count = len(fmt.grid)
    # an even number of words each, so that the doubles at the end are aligned
    even = count + count % 2
    pad = torch.nn.functional.pad
    starts = pad(fmt.starts.float(), (0, even - len(fmt.starts)))
    grid = pad(fmt.grid.float(), (0, even - count))
    codes = pad(fmt.grid_codes.int(), (0, even - count))
    gaps = 1.0 / (fmt.grid[1:] - fmt.grid[:-1])
    search = pad(search, (0, len(search) % 2))
    return [_words(search), _words(starts), _words(grid), _words(codes), _words(gaps)]


def _first(*codes: int | None) -> int:
    return next((code for code in codes if code is not None), -1)


def pattern(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _scale(plan: Plan) -> tuple[float, float]:
    if plan.constant is None:
        return 1.0, 1.0
    return plan.unit_scale, float(1.0 / torch.tensor(plan.unit_scale, dtype=torch.float32))


@cache
def block_codes() -> Codes:
    return describe_codes(NVFP4_BLOCK_SCALE, NVFP4_BLOCK_SCALE.values)[0]


def describe(plan: Plan | CastPlan | TransformPlan) -> tuple[Recipe, Tables]:
    """The recipe of a plan, derived once and kept on it."""
    kept: tuple[Recipe, Tables] | None = plan.__dict__.get("_triton")
    if kept is None:
        if isinstance(plan, TransformPlan):
            kept = _describe_spikes(plan) if plan.transform.name == "spike" else _describe_rotated(plan)
        else:
            kept = _describe_cast(plan) if isinstance(plan, CastPlan) else _describe(plan)
        plan.__dict__["_triton"] = kept
    return kept


def _describe_rotated(plan: TransformPlan) -> tuple[Recipe, Tables]:
    inner = inner_of(plan)
    recipe, tables = _describe(inner)
    factors = rotation.signs(inner.block) / inner.block
    careful = pattern(2.0**126 / inner.block / max(inner.largest_level, 1.0))
    # an even number of words each, so that the doubles before stay aligned and so do these
    signs_at = len(tables.words) + len(tables.words) % 2
    words = torch.cat([torch.nn.functional.pad(tables.words, (0, signs_at - len(tables.words))), _words(factors)])
    return replace(recipe, rotated=True, signs_at=signs_at, careful_from=careful), Tables(words)


def _describe_spikes(plan: TransformPlan) -> tuple[Recipe, Tables]:
    recipe, tables = _describe(inner_of(plan))
    return replace(recipe, spikes=plan.transform.written(plan.block)[0]), tables


def _describe(plan: Plan) -> tuple[Recipe, Tables]:
    codes, tables = describe_codes(plan.format, plan.format.levels, stochastic=plan.stochastic)
    scale, inverse = _scale(plan)
    low, high = plan.exponents
    recipe = Recipe(
        codes=codes,
        block_codes=block_codes(),
        method=METHODS[plan.method],
        bits=plan.bits,
        block=plan.block,
        store=CONSTANT if plan.constant is not None else STORES[plan.store],
        rule=RULES[plan.rule],
        l2=plan.l2,
        stochastic=plan.stochastic,
        cpd=plan.cpd,
        target=_float32(plan.target),
        max_scale=plan.max_scale,
        scale=scale,
        inverse=inverse,
        low_exponent=low,
        high_exponent=high,
        top_exponent=plan.top_exponent,
        tree_width=power_of_two_above(plan.block),
        cast=0,
    )
    return recipe, tables


def _describe_cast(plan: CastPlan) -> tuple[Recipe, Tables]:
    codes, tables = describe_codes(NVFP4_BLOCK_SCALE, NVFP4_BLOCK_SCALE.values)
    recipe = Recipe(
        codes=codes,
        block_codes=block_codes(),
        method=CAST,
        bits=plan.bits,
        block=0,
        store=CONSTANT,
        rule=DIVIDE,
        l2=False,
        stochastic=False,
        cpd=False,
        target=1.0,
        max_scale=1.0,
        scale=1.0,
        inverse=1.0,
        low_exponent=0,
        high_exponent=0,
        top_exponent=0,
        tree_width=1,
        cast=DTYPES[plan.dtype],
    )
    return recipe, tables
