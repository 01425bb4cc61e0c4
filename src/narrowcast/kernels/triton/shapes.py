"""The shape of tiles: how many values and warps a program has, and which ways through a kernel they allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from narrowcast.kernels.triton.constants import INTERPRETED
from narrowcast.kernels.triton.recipe import (
    AFFINE,
    CONSTANT,
    DIVIDE,
    E8M0,
    FLOAT,
    FP32,
    MEANS,
    NVFP4,
    SCALED,
    SIGN,
    TABLE,
    UNIFORM,
    CodecJob,
    Codes,
    Recipe,
)

IN_TILE, WIDE, FREE = 0, 1, 2
MAX_IN_TILE = 4096
"""The largest block that one tile holds."""
GROUPS = {1: (8, 1), 2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 6: (4, 3), 7: (8, 7)}
"""Width of a code -> codes in a group, and the bytes that they fill."""


@dataclass(frozen=True)
class Tuning:
    """Values in a tile, warps of a program, the most registers of a thread. They change the speed and no bit."""

    tile: int
    warps: int
    registers: int = 0
    """0: as many as the compiler wants."""

    def options(self) -> dict[str, Any]:
        """As Triton takes them."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "enable_fp_fusion": False, **limit}


DEFAULT = Tuning(2048, 4)
ROUND = Tuning(2048, 4)
SUMS = Tuning(0, 8)

OVERRIDES: dict[tuple[str, str], Tuning] = {
    ("encode", "narrow"): Tuning(4096, 4),
    ("encode", "eight in a word"): Tuning(4096, 4),
    ("encode", "halves"): Tuning(4096, 4),
    ("encode", "noise"): Tuning(4096, 4),
    ("encode", "narrow noise"): Tuning(4096, 4),
    ("encode", "table"): Tuning(1024, 4),
    ("encode", "signs"): Tuning(4096, 4),
    ("encode", "rotated"): Tuning(4096, 4),
    ("encode", "spikes"): Tuning(4096, 4, 96),
    ("decode", ""): Tuning(1024, 4),
    ("decode", "rotated"): Tuning(1024, 2),
    ("decode", "spikes"): Tuning(1024, 2),
    ("decode", "tensor table"): Tuning(8192, 16),
    ("reduce", "narrow"): Tuning(4096, 4),
    ("reduce", "eight in a word"): Tuning(8192, 4),
    ("reduce", "noise"): Tuning(4096, 4),
    ("reduce", "table"): Tuning(4096, 4),
    ("reduce", "signs"): Tuning(8192, 4, 96),
    ("reduce", "halves"): Tuning(4096, 4, 96),
    ("reduce", "nvfp4"): Tuning(4096, 4),
    ("reduce", "tensor"): Tuning(4096, 8),
    ("reduce", "tensor table"): Tuning(8192, 16),
}
"""(op, kind of work) -> what is faster there; measured on an H200 by tests/gpu/tune.py."""


def tuning_of(recipe: Recipe, op: str) -> Tuning:
    """The tiles of an op."""
    return OVERRIDES.get((op, work_of(recipe))) or OVERRIDES.get((op, "")) or DEFAULT


def work_of(recipe: Recipe) -> str:
    """What a tile costs beside its bytes."""
    if recipe.rotated:
        return "rotated"
    if recipe.spikes:
        return "spikes"
    table = recipe.codes.kind == TABLE and recipe.method == SCALED
    if mode_of(recipe) == WIDE:
        return "tensor table" if table else "tensor"
    if table:
        return "table"
    if recipe.stochastic:
        return "narrow noise" if recipe.bits < 8 else "noise"
    if recipe.method == NVFP4:
        return "nvfp4"
    if recipe.method in (MEANS, SIGN):
        return "signs"
    if recipe.bits >= 8 or recipe.method != SCALED:
        return "wide"
    if by_halves(recipe):
        return "halves"
    return "eight in a word" if recipe.bits in (3, 4) else "narrow"


def in_place(codes: Codes) -> bool:
    """Whether a code becomes a float where it lies in its word."""
    return codes.kind == UNIFORM and not codes.sign_magnitude


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def mode_of(recipe: Recipe) -> int:
    if recipe.store == CONSTANT:
        return FREE
    if recipe.method == NVFP4 or 0 < recipe.block <= MAX_IN_TILE:
        return IN_TILE
    return WIDE


def takes_two_passes(recipe: Recipe) -> bool:
    """Whether a scale follows from more than one tile."""
    return mode_of(recipe) == WIDE or recipe.method == NVFP4


@lru_cache(maxsize=4096)
def shape_of(recipe: Recipe, n: int, aligned: bool, tile: int) -> CodecJob:
    """The tiles of n values."""
    mode = mode_of(recipe)
    cols = pow2(recipe.block) if mode == IN_TILE else tile
    step = recipe.block if mode == IN_TILE else tile
    rows = max(1, tile // cols) if mode == IN_TILE else 1
    group, group_bytes = GROUPS.get(recipe.bits, (1, 1))
    block = recipe.block if mode == WIDE and recipe.block else n
    exact = cols == step and block % (rows * step) == 0 and n % block == 0
    levels = cols.bit_length() - 1
    starts = recipe.block if mode == WIDE else 0
    words = aligned and cols == step and recipe.bits in (2, 4) and starts % 32 == 0
    return CodecJob(mode, rows, cols, step, levels, group, group_bytes, exact, aligned, words)


WORDS = {1: (32, 2), 3: (8, 4), 4: (8, 1), 6: (4, 4), 8: (4, 1)}
"""Width of a code -> codes in a word, and words that lie together, where sums of wires are taken word by word."""
FEW = 16
"""Up to so many wires of a tile are asked for at once."""
BY_WORDS, BY_LANES, BY_HALVES, GATED = True, True, True, True
"""Turned off by tests/gpu/tune.py alone, which finds out what each brings."""


def of_sum(recipe: Recipe, job: CodecJob, warps: int, world: int) -> dict[str, Any]:
    """How full tiles of `world` wires are summed."""
    # of rotated wires each would be mixed by instructions of its own
    few = world <= FEW and not recipe.rotated
    words = by_words(recipe, job, warps, few) if suits_words(recipe, job, warps) else {}
    gated = GATED and not INTERPRETED and few and (recipe.bits < 8 or bool(words))
    return {"few": few, "gated": gated, **words}


def suits_words(recipe: Recipe, job: CodecJob, warps: int) -> bool:
    """Whether full tiles begin and end with words, codes that lie together share a scale, and each thread has some."""
    each, groups = WORDS.get(recipe.bits, (0, 1))
    starts = recipe.block if job.mode == WIDE else 0
    size = job.rows * job.cols
    whole = job.aligned and job.cols == job.step and starts % 32 == 0 and size % 128 == 0
    together = each > 0 and size >= each * groups * 32 * warps and job.cols % (each * groups) == 0
    bytes_too = recipe.bits < 8 or (recipe.method == SCALED and in_place(recipe.codes))
    return BY_WORDS and whole and together and bytes_too and recipe.method != AFFINE


def by_words(recipe: Recipe, job: CodecJob, warps: int, few: bool) -> dict[str, Any]:
    """How many codes a word has, and what is done with it."""
    each, groups = WORDS[recipe.bits]
    halves = BY_HALVES and few and by_halves(recipe) and suits_halves(job, warps)
    if recipe.method == NVFP4 and not halves:  # too many scales
        return {}
    looks_up = recipe.method in (SCALED, NVFP4) and not in_place(recipe.codes)
    by_lanes = BY_LANES and not INTERPRETED and looks_up and recipe.bits <= 4
    return {"each": each, "groups": groups, "by_lanes": by_lanes, "halves": halves, "signs": recipe.bits == 1}


def by_halves(recipe: Recipe) -> bool:
    """Whether codes are floats of 4 bits without special ones, and scales bytes: see fp4_sum.py."""
    codes = recipe.codes
    plain = codes.kind == FLOAT and recipe.bits == 4 and not (codes.ieee or codes.top_is_nan or codes.neg_zero_is_nan)
    return plain and (recipe.method == NVFP4 or (recipe.method == SCALED and recipe.store == E8M0))


def suits_halves(job: CodecJob, warps: int) -> bool:
    """Whether each thread has four words, which share a scale or have two."""
    return job.rows * job.cols >= 32 * 32 * warps and (job.cols % 32 == 0 or job.cols == 16)


def across(recipe: Recipe, job: CodecJob, warps: int) -> dict[str, Any]:
    """A thread has values of all parts of a row, so that sums of halves, or much work for each row, stay in it."""
    signs = recipe.bits == 1 and recipe.method in (MEANS, SIGN)
    part = max(4, 4 * 32 * warps // job.rows)
    # random bits come in the order of the values
    much = recipe.method == NVFP4 or recipe.rotated or recipe.spikes > 0
    worth_it = signs or (much and not recipe.stochastic)
    if not worth_it or job.mode != IN_TILE or job.cols != job.step or part >= job.cols:
        return {}
    return {"across": job.cols // part, "signs": signs and job.aligned and part <= 32 <= job.cols}


def packs(recipe: Recipe, job: CodecJob) -> dict[str, bool]:
    """Whether full tiles of codes leave as words, and how much of their rounding is left to the words."""
    scaled = recipe.method in (SCALED, NVFP4) and recipe.store != CONSTANT and not recipe.cpd
    # a thread must have the codes of three words
    together = job.groups == 4 and job.each * recipe.bits == 24
    if not scaled or recipe.codes.kind == TABLE or not (job.words or together):
        return {}
    codes = recipe.codes
    raw = in_place(codes) and not (recipe.stochastic or codes.unsigned)
    exact = recipe.rule == DIVIDE and recipe.store == FP32 and not (recipe.l2 or job.given_scale)
    return {"packed": True, "raw": raw, "cut": not exact or recipe.target != codes.high or codes.low > -codes.high}


def shares_noise(recipe: Recipe, job: CodecJob, offset: int) -> bool:
    starts = recipe.block if job.mode == WIDE else 0
    return job.cols == job.step and (job.rows * job.cols) % 128 == 0 and (offset | starts) % 128 == 0
