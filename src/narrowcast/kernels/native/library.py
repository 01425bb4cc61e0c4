"""The library of csrc/: loaded with ctypes at first use, and what its C functions take.

No Python or torch headers, and the GIL is released.
"""

from __future__ import annotations

import ctypes
import math
import sys
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.formats import Coding, FloatFormat, Format, Kind, UniformFormat
from narrowcast.kernels import search_table
from narrowcast.kernels.plan import NVFP4_BLOCK_SCALE, Method, Plan, Rule, Store, TransformPlan, inner_of
from narrowcast.kernels.reference import rotation

ABI = 6
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
METHODS = {Method.SCALED: 0, Method.AFFINE: 1, Method.MEANS: 2, Method.SIGN: 3, Method.NVFP4: 4}
KINDS = {Kind.FLOAT: 0, Kind.UNIFORM: 1, Kind.TABLE: 2}
STORES = {Store.FP32: 0, Store.BF16: 1, Store.E8M0: 2}
STORE_NONE = 3
SIGN_BIT = -(1 << 31)
RULES = {Rule.DIVIDE: 0, Rule.FLOOR: 1, Rule.RCEIL: 2, Rule.APS: 3}
CODINGS = {Coding.TWOS_COMPLEMENT: 0, Coding.SIGN_MAGNITUDE: 1, Coding.UNSIGNED: 2}

_FORMAT_FIELDS: list[tuple[str, Any]] = [
    *((name, c_int32) for name in ("kind", "bits", "nan_code", "inf_code", "neg_inf_code", "neg_zero_code")),
    *((name, c_int32) for name in ("max_code", "min_code")),
    *((name, c_float) for name in ("max_level", "min_level")),
    *((name, c_int32) for name in ("exp_bits", "man_bits", "bias", "coding", "low", "high", "fraction_bits")),
    *((name, POINTER(c_float)) for name in ("levels", "starts", "grid")),
    ("inverse_gap", POINTER(c_double)),
    ("grid_codes", POINTER(c_uint16)),
    ("n_grid", c_int32),
    ("prefix", POINTER(c_uint16)),
    ("packed", POINTER(c_uint32)),
]


class NativeFormat(Structure):
    """`nc_format` of csrc/narrowcast.h."""

    _fields_ = _FORMAT_FIELDS
    _keep: list[Tensor]
    """The tables that it points to. They live as long as the description, which may outlive its place on a format:
    where two threads describe one at once, the later description takes the place of one that C is reading."""


_PLAN_FIELDS: list[tuple[str, Any]] = [
    ("format", NativeFormat),
    *((name, c_int32) for name in ("method", "store", "rule", "l2", "stochastic", "target_exponent")),
    ("block", c_int64),
    *((name, c_float) for name in ("target", "max_scale", "constant")),
    ("block_scale_levels", POINTER(c_float)),
    ("signs", POINTER(c_uint32)),
]


class NativePlan(Structure):
    """`nc_plan` of csrc/narrowcast.h."""

    _fields_ = _PLAN_FIELDS
    _keep: list[Tensor]
    """As in `NativeFormat`."""


def library_name() -> str:
    return "libnarrowcast_cpu.dylib" if sys.platform == "darwin" else "libnarrowcast_cpu.so"


def _candidates() -> list[Path]:
    # an editable install keeps sources and the built library in two folders; what was built in place is fresher
    package = sys.modules["narrowcast.kernels"]
    return [Path(folder) / library_name() for folder in reversed(list(package.__path__))]


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The library and where it lies, or None and why not."""
    for path in _candidates():
        if not path.exists():
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            return None, f"{path.name} does not load: {error}"
        if library.nc_abi() != ABI:
            return None, f"{path.name} is of another version (ABI {library.nc_abi()}, not {ABI}); run `make native`"
        _declare(library)
        return library, str(path)
    return None, f"{library_name()} was not built; run `make native` or reinstall with a C++ compiler present"


def _declare(library: ctypes.CDLL) -> None:
    planes = [c_void_p, c_void_p, c_void_p]
    noise = [c_uint64, c_uint64, c_uint64]
    library.nc_encode.argtypes = [c_void_p, c_void_p, c_int32, c_int64, *planes, c_void_p, *noise, c_int32]
    library.nc_decode.argtypes = [c_void_p, *planes, c_int64, c_void_p, c_int32, c_int32, c_int32]
    feedback: list[Any] = [c_void_p, c_float, c_float]
    library.nc_encode_owed.argtypes = [c_void_p, c_void_p, c_int32, c_int64, *feedback, *planes[:2], *noise, c_int32]
    library.nc_reduce.argtypes = [
        c_void_p, c_void_p, c_int32, c_int64, c_int64, *feedback, c_float, c_float, *planes[:2], c_void_p, c_int32,
        *noise, c_int32,
    ]  # fmt: skip
    library.nc_encode_transform.argtypes = [
        c_void_p, c_void_p, c_int32, c_int64, *feedback, *planes, *noise, c_int32,
    ]  # fmt: skip
    library.nc_decode_transform.argtypes = [c_void_p, *planes, c_int64, c_void_p, c_int32, c_int32, c_int32]
    library.nc_reduce_transform.argtypes = [
        c_void_p, c_void_p, c_int32, c_int64, c_int64, c_int64, *feedback, c_float, c_float, *planes, c_void_p, c_int32,
        *noise, c_int32,
    ]  # fmt: skip
    library.nc_round.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int32, c_int32, c_uint64, c_int32]
    library.nc_cast.argtypes = [c_void_p, c_int32, c_int64, c_void_p, c_int32, c_int32, c_int32]
    library.nc_isa.restype = c_char_p
    library.nc_set_isa.argtypes = [c_char_p]


def available() -> bool:
    return load()[0] is not None


def isa() -> str:
    """The instruction set that runs: avx512, avx2 or baseline."""
    return str(require().nc_isa().decode())


def set_isa(name: str) -> None:
    """Run a lesser instruction set (tests and benchmarks)."""
    if require().nc_set_isa(name.encode()) != 0:
        raise ValueError(f"instruction set {name!r}: not in this build or not on this machine; it runs {isa()!r}")


def require() -> ctypes.CDLL:
    """The library; RuntimeError where there is none."""
    library, why = load()
    if library is None:
        raise RuntimeError(f"native kernels: {why}")
    return library


def _pointer(tensor: Tensor, ctype: type[c_float | c_double | c_uint16 | c_uint32], keep: list[Tensor]) -> object:
    keep.append(tensor)
    return ctypes.cast(tensor.data_ptr(), POINTER(ctype))


def _code(code: int | None) -> int:
    return -1 if code is None else code


def _fill_specials(native: NativeFormat, fmt: Format) -> None:
    nan, inf = fmt.nan_code, fmt.inf_code
    native.nan_code = _code(nan if nan is not None else inf)
    native.inf_code = _code(inf if inf is not None else nan)
    native.neg_inf_code = _code(inf + 2 ** (fmt.bits - 1) if inf is not None else nan)
    native.neg_zero_code = _code(fmt.negative_zero_code)
    native.max_code, native.min_code = int(fmt.grid_codes[-1]), int(fmt.grid_codes[0])


def _fill_table(native: NativeFormat, fmt: Format, keep: list[Tensor]) -> None:
    table = search_table.build(fmt)
    native.starts = _pointer(fmt.starts.contiguous(), c_float, keep)
    native.grid = _pointer(fmt.grid.float(), c_float, keep)
    native.inverse_gap = _pointer(1.0 / (fmt.grid[1:] - fmt.grid[:-1]), c_double, keep)
    native.grid_codes = _pointer(fmt.grid_codes.to(torch.uint16), c_uint16, keep)
    native.n_grid = len(fmt.grid)
    native.prefix = _pointer(table.prefix, c_uint16, keep)
    if table.packed is not None:
        native.packed = _pointer(table.packed, c_uint32, keep)


def _counts_in_powers_of_two(fmt: UniformFormat) -> bool:
    return fmt.steps_per_unit & (fmt.steps_per_unit - 1) == 0


def describe_format(fmt: Format, keep: list[Tensor], levels: Tensor) -> NativeFormat:
    """Describe `fmt`; tables that the description points to are appended to `keep`."""
    native = NativeFormat(kind=KINDS[fmt.kind], bits=fmt.bits)
    _fill_specials(native, fmt)
    usable = levels[fmt.grid_codes]
    native.max_level, native.min_level = float(usable.max()), float(usable.min())
    native.levels = _pointer(levels.float(), c_float, keep)
    if isinstance(fmt, FloatFormat):
        native.exp_bits, native.man_bits, native.bias = fmt.exp_bits, fmt.man_bits, fmt.bias
    elif isinstance(fmt, UniformFormat):
        native.coding, native.low, native.high = CODINGS[fmt.coding], fmt.low, fmt.high
        native.fraction_bits = fmt.steps_per_unit.bit_length() - 1 if _counts_in_powers_of_two(fmt) else -1
    if fmt.kind is Kind.TABLE or native.fraction_bits < 0:
        _fill_table(native, fmt, keep)
    return native


def describe_plan(whole: Plan | TransformPlan) -> NativePlan:
    """The description of a plan, written once and kept on it."""
    known: NativePlan | None = whole.__dict__.get("_native")
    if known is not None:
        return known
    keep: list[Tensor] = []
    plan = inner_of(whole)
    native = NativePlan(format=describe_format(plan.format, keep, plan.format.levels))
    native.method, native.rule = METHODS[plan.method], RULES[plan.rule]
    native.store = STORE_NONE if plan.constant is not None else STORES[plan.store]
    native.l2, native.stochastic, native.block = plan.l2, plan.stochastic, plan.block
    native.target, native.max_scale, native.target_exponent = plan.target, plan.max_scale, plan.top_exponent
    native.constant = plan.unit_scale if plan.constant is not None else math.nan
    native.block_scale_levels = _pointer(NVFP4_BLOCK_SCALE.values.float(), c_float, keep)
    if isinstance(whole, TransformPlan):
        native.signs = _pointer(rotation.signs(plan.block).view(torch.int32) & SIGN_BIT, c_uint32, keep)
    native._keep = keep
    whole.__dict__["_native"] = native
    return native


def describe_rounding(fmt: Format) -> NativeFormat:
    """The description of a format as `round_to` takes it, written once and kept on it."""
    known: NativeFormat | None = fmt.__dict__.get("_native_round")
    if known is not None:
        return known
    keep: list[Tensor] = []
    native = describe_format(fmt, keep, fmt.values)
    if native.fraction_bits < 0:
        native.kind = KINDS[Kind.TABLE]
    native._keep = keep
    fmt.__dict__["_native_round"] = native
    return native


def check_status(status: int, function: str, what: object) -> None:
    """A call that the library refused has written nothing, so the result would be what lay in that memory."""
    if status != 0:
        raise RuntimeError(f"internal: {function} refused {what} with {status}; this is a fault of narrowcast")
