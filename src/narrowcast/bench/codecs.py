"""Codec speed: bytes read and written per second, as a share of `copy_` in the same run."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

import torch
from torch import Tensor

from narrowcast.bench.check import failure
from narrowcast.codecs import codec as codec_named
from narrowcast.formats import format as format_named
from narrowcast.kernels import KernelChoice, native, round_to
from narrowcast.measure import ROUNDS, Timing, cpu_name, interleaved, torch_threads

MIB = 1 << 20
SIZES = {"64MiB": 64 * MIB, "1GiB": 1024 * MIB, "25MB": 25_000_000}
CALL_BYTES = 4096
"""A tensor so small that only the call costs anything."""

AVX2_SHARE = 0.6
"""What the AVX2 kernels have to reach of the targets."""


@dataclass(frozen=True)
class CodecTarget:
    """The share of the copy that we promise, on AVX-512 and one thread."""

    encode: float
    decode: float


TARGETS = {
    "int8/256": CodecTarget(0.80, 0.80),
    **dict.fromkeys(("int8", "e5m2", "linear8"), CodecTarget(0.40, 0.75)),
    **dict.fromkeys(("e4m3fn/256", "e5m2/256", "e3m4/256", "e4m3fnuz/256", "e2m5/256"), CodecTarget(0.70, 0.70)),
    **dict.fromkeys(("int4/128", "mxfp4", "e2m1fn/32", "mxfp8"), CodecTarget(0.50, 0.60)),
    **dict.fromkeys(("dtree8", "dynamic8/256", "posit8.1/256"), CodecTarget(0.20, 0.60)),
    **dict.fromkeys(("int8/256+sr", "qsgd4/512"), CodecTarget(0.30, 0.60)),
    **dict.fromkeys(("onebit/64", "int3/64"), CodecTarget(0.25, 0.40)),
    "int4/128+rot": CodecTarget(0.33, 0.38),
}
ROUND_TARGETS = dict.fromkeys(("e4m3fn", "e5m2", "e3m4", "bf16", "fp16", "e6m9"), 0.70)


@dataclass(frozen=True)
class CodecRow:
    """One codec (or round_to a format) at one size."""

    what: str
    size: str
    values: int
    threads: int
    encode: float | None
    """Share of the copy's bytes per second; None where the check failed."""
    decode: float | None
    encode_us: float | None
    decode_us: float | None
    copy_us: float
    spread: float
    """Interquartile range of the encode (or only) time over its median."""
    copy_gbs: float
    target_encode: float | None = None
    target_decode: float | None = None
    failed: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where there is none for this row."""
        if self.failed:
            return False
        pairs = [(self.encode, self.target_encode), (self.decode, self.target_decode)]
        judged = [got >= want for got, want in pairs if got is not None and want is not None]
        return all(judged) if judged else None


def describe_machine() -> dict[str, str]:
    return {
        "cpu": cpu_name(),
        "isa": native.isa() if native.available() else "reference only",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@dataclass
class CodecResults:
    """Every row, and what they were measured on."""

    machine: dict[str, str] = field(default_factory=describe_machine)
    rows: list[CodecRow] = field(default_factory=list)
    calls: list[CallCost] = field(default_factory=list)
    peers: list[dict[str, object]] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        rows = [asdict(row) | {"met": row.met} for row in self.rows]
        return {"machine": self.machine, "rows": rows, "calls": [asdict(c) for c in self.calls], "peers": self.peers}


@dataclass(frozen=True)
class CallCost:
    """What one call costs on a tensor of 4 KiB, in microseconds."""

    what: str
    encode_us: float
    decode_us: float


def _share_of_copy(nbytes: int, spent: Timing, copy: Timing, copied: int) -> float:
    return (nbytes / spent.median) / (copied / copy.median)


def _copy_of(x: Tensor) -> Callable[[], object]:
    target = torch.empty_like(x)
    return lambda: target.copy_(x)


def _isa_factor() -> float:
    return AVX2_SHARE if native.available() and native.isa() == "avx2" else 1.0


def measure_codec(spec: str, x: Tensor, size: str, threads: int = 1, rounds: int = ROUNDS) -> CodecRow:
    """Encode and decode `x` beside a copy of it."""
    codec, n = codec_named(spec), x.numel()
    why = failure(codec)
    wire, out = torch.empty(codec.nbytes(n), dtype=torch.uint8), torch.empty(n)
    candidates: dict[str, Callable[[], object]] = {"copy": _copy_of(x)}
    if why is None:
        candidates["encode"] = lambda: codec.encode(x, out=wire)
        candidates["decode"] = lambda: codec.decode(wire, n, out=out)
    with torch_threads(threads):
        took = interleaved(candidates, rounds)
    copied, moved = 8 * n, 4 * n + wire.numel()
    return _row(spec, size, n, threads, took, copied, moved, why)


def _row(
    what: str, size: str, n: int, threads: int, took: dict[str, Timing], copied: int, moved: int, why: str | None
) -> CodecRow:
    copy, encode, decode = took["copy"], took.get("encode"), took.get("decode")
    target, factor = TARGETS.get(what), _isa_factor()
    judged = target is not None and threads == 1 and size in ("64MiB", "1GiB")
    return CodecRow(
        what,
        size,
        n,
        threads,
        encode=_share_of_copy(moved, encode, copy, copied) if encode else None,
        decode=_share_of_copy(moved, decode, copy, copied) if decode else None,
        encode_us=1e6 * encode.median if encode else None,
        decode_us=1e6 * decode.median if decode else None,
        copy_us=1e6 * copy.median,
        spread=(encode.high - encode.low) / encode.median if encode else 0.0,
        copy_gbs=copied / copy.median / 1e9,
        target_encode=target.encode * factor if judged and target else None,
        target_decode=target.decode * factor if judged and target else None,
        failed=why,
    )


def measure_round(name: str, x: Tensor, size: str, threads: int = 1, rounds: int = ROUNDS) -> CodecRow:
    """`round_to` beside a copy; both read and write four bytes a value."""
    fmt, out = format_named(name), torch.empty_like(x)
    with torch_threads(threads):
        took = interleaved({"copy": _copy_of(x), "round": lambda: round_to(x, fmt, out=out)}, rounds)
    copy, spent, n = took["copy"], took["round"], x.numel()
    target = ROUND_TARGETS[name] * _isa_factor() if threads == 1 else None
    return CodecRow(
        f"round_to {name}",
        size,
        n,
        threads,
        encode=_share_of_copy(8 * n, spent, copy, 8 * n),
        decode=None,
        encode_us=1e6 * spent.median,
        decode_us=None,
        copy_us=1e6 * copy.median,
        spread=(spent.high - spent.low) / spent.median,
        copy_gbs=8 * n / copy.median / 1e9,
        target_encode=target,
    )


def call_cost(spec: str) -> CallCost:
    """What calling costs: a 4 KiB tensor, buffers given, one thread."""
    codec, x = codec_named(spec), torch.randn(CALL_BYTES // 4)
    wire, out = codec.encode(x), torch.empty_like(x)
    with torch_threads(1):
        took = interleaved(
            {"encode": lambda: codec.encode(x, out=wire), "decode": lambda: codec.decode(wire, x.numel(), out=out)},
            calls=1000,
        )
    return CallCost(spec, 1e6 * took["encode"].median, 1e6 * took["decode"].median)


def data(nbytes: int) -> Tensor:
    """Normal values, the same for every candidate."""
    return torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0))


def run(specs: Iterable[str], sizes: Iterable[str], threads: Iterable[int], rounds: int = ROUNDS) -> Iterator[CodecRow]:
    """Measure every codec and round_to at every size and thread count, a row at a time."""
    chosen, counts = list(specs), list(threads)
    for size in sizes:
        x = data(SIZES[size])
        for count in counts:
            yield from (measure_codec(spec, x, size, count, rounds) for spec in chosen)
            if chosen == list(TARGETS):
                yield from (measure_round(name, x, size, count, rounds) for name in ROUND_TARGETS)


def implementation(spec: str) -> str:
    """What runs a codec here: "native (avx512)", "reference" or "torch"."""
    choices: list[KernelChoice] = codec_named(spec).explain()
    return choices[0].implementation
