"""Codec speed on a GPU: bytes read and written per second, as a share of a device-to-device copy in the same run.

Every figure is the median over rounds in which all candidates take their turn, timed with events. Small tensors are
timed as replays of a CUDA graph over several buffers, so that neither the launch nor the cache is what is measured.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

import torch
from torch import Tensor

from narrowcast.bench.check import failure
from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.kernels import ops, triton_loader
from narrowcast.measure import DeviceClock, Timing, interleaved

VALUES = 256 << 20
BUCKET_BYTES = 25_000_000
WORLD = 8
ROUNDS = 9
BUFFERS = 8
"""Sets of buffers of a bucket, together larger than any cache."""
MAX_LAUNCHES = 2
WARM_UP_CALLS = 2
HOST_ROUNDS, HOST_CALLS = 5, 200
BUCKET_FACTOR = 2.0
"""A bucket may take so many times what its bytes need at the copy's rate."""


@dataclass(frozen=True)
class CudaTarget:
    """Promised shares of the copy."""

    encode: float
    decode: float
    reduce: float = 0.0


TARGETS = {
    **dict.fromkeys(("int8/256", "e4m3fn/256", "e5m2/256", "mxfp8"), CudaTarget(0.92, 0.90, 0.70)),
    **dict.fromkeys(("int4/128", "mxfp4", "nvfp4"), CudaTarget(0.85, 0.85, 0.65)),
    **dict.fromkeys(("int8/256+sr", "int4/128+sr+ef"), CudaTarget(0.80, 0.85, 0.65)),
    **dict.fromkeys(("dynamic8/256", "posit8.1/256"), CudaTarget(0.60, 0.85, 0.50)),
    **dict.fromkeys(("dtree8", "e5m2", "e5m2+aps"), CudaTarget(0.40, 0.85, 0.32)),
    **dict.fromkeys(("int3/64", "int6/64", "onebit/64"), CudaTarget(0.60, 0.70, 0.50)),
    **dict.fromkeys(("int2/4096+top64", "bf16/4096+top64"), CudaTarget(0.35, 0.60)),
    "int4/128+rot": CudaTarget(0.80, 0.80),
    "int4/128+spike2": CudaTarget(0.70, 0.75),
}
"""On one H200, 256 Mi float32."""


@dataclass(frozen=True)
class CudaRow:
    """One codec: shares of the copy; None where its check failed."""

    codec: str
    values: int
    copy_gbs: float
    encode: float | None = None
    decode: float | None = None
    reduce: float | None = None
    encode_us: float | None = None
    decode_us: float | None = None
    reduce_us: float | None = None
    spread: float | None = None
    """Largest less smallest time over the median, of encode."""
    target: CudaTarget | None = None
    failed: str | None = None

    @property
    def missed(self) -> list[str]:
        if self.failed or self.target is None:
            return [self.failed] if self.failed else []
        pairs = {name: (getattr(self, name), getattr(self.target, name)) for name in ("encode", "decode", "reduce")}
        return [
            f"{name} {got:.0%} < {want:.0%}" for name, (got, want) in pairs.items() if got is not None and got < want
        ]


@dataclass(frozen=True)
class BucketRow:
    """Encoding a gradient bucket of 25 MB."""

    codec: str
    copy_us: float
    encode_us: float
    factor: float
    """Time over what its bytes need at the copy's rate."""
    launches: int
    call_us: float
    """Of the host, to start one."""


@dataclass
class CudaResults:
    """Every row, and what they were measured on."""

    machine: dict[str, str] = field(default_factory=dict)
    rows: list[CudaRow] = field(default_factory=list)
    buckets: list[BucketRow] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        rows = [asdict(row) | {"missed": row.missed} for row in self.rows]
        return {"machine": self.machine, "rows": rows, "buckets": [asdict(b) for b in self.buckets]}


def require() -> None:
    if not torch.cuda.is_available():
        raise ValueError("bench --device cuda: torch sees no CUDA device here; run it on a machine with a GPU")


def describe_machine() -> dict[str, str]:
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "kernels": triton_loader.load()[1],
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def graph_of(call: Callable[[int], object], buffers: int) -> torch.cuda.CUDAGraph:
    """One graph that makes the call on each set of buffers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(buffers):
            call(number)
    return graph


def count_launches(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call starts."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiled.events() or [])


def _bytes_moved(codec: Codec, n: int) -> tuple[int, int, int]:
    """Bytes that encode, decode and reduce must read and write."""
    wire, residual = codec.nbytes(n), 8 * n if codec.feedback else 0
    return 4 * n + wire + residual, 4 * n + wire, (WORLD + 1) * wire + residual


def measure(spec: str, x: Tensor, copy_to: Tensor, rounds: int = ROUNDS, calls: int = 5) -> CudaRow:
    """Encode, decode and reduce beside a copy; error feedback where the codec has it."""
    codec, n = codec_named(spec), x.numel()
    why = failure(codec, x.device)
    wire, out = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=x.device), copy_to
    residual = torch.zeros(n, device=x.device) if codec.feedback else None
    # ranks differ by what is rolled: the same distribution, other values
    wires = ops.aligned_rows(WORLD, wire.numel(), x.device)
    candidates: dict[str, Callable[[], object]] = {"copy": lambda: copy_to.copy_(x)}
    if why is None:
        codec.encode(x, out=wire)
        wires.copy_(wire.expand(WORLD, -1))
        candidates["encode"] = lambda: codec.encode(x, residual=residual, out=wire)
        candidates["decode"] = lambda: codec.decode(wire, n, out=out)
        candidates["reduce"] = lambda: codec.reduce(wires, n, residual=residual, out=wire)
    took = interleaved(candidates, rounds, calls, x.device, first_calls=WARM_UP_CALLS)
    copy = 8 * n / took["copy"].median
    if why is not None:
        return CudaRow(spec, n, copy / 1e9, failed=why)
    median = {name: timing.median for name, timing in took.items()}
    moved = dict(zip(("encode", "decode", "reduce"), _bytes_moved(codec, n), strict=True))
    encode, decode, reduce = (moved[name] / median[name] / copy for name in moved)
    times = [1e6 * median[name] for name in moved]
    spread = (max(took["encode"].seconds) - min(took["encode"].seconds)) / median["encode"]
    row = CudaRow(spec, n, copy / 1e9, encode, decode, reduce, times[0], times[1], times[2], spread)
    return replace(row, target=TARGETS.get(spec))


def measure_bucket(spec: str, device: torch.device, rounds: int = ROUNDS) -> BucketRow:
    """A bucket of 25 MB, by replaying a graph over several of them."""
    codec, n = codec_named(spec), BUCKET_BYTES // 4
    xs = [torch.randn(n, device=device) for _ in range(BUFFERS)]
    to = [torch.empty_like(x) for x in xs]
    wires = [torch.empty(codec.nbytes(n), dtype=torch.uint8, device=device) for _ in xs]
    residuals = [torch.zeros(n, device=device) if codec.feedback else None for _ in xs]
    graphs = {
        "copy": graph_of(lambda i: to[i].copy_(xs[i]), BUFFERS),
        "encode": graph_of(lambda i: codec.encode(xs[i], residual=residuals[i], out=wires[i]), BUFFERS),
    }
    replays = {name: graph.replay for name, graph in graphs.items()}
    took = interleaved(replays, rounds, 10, device, first_calls=WARM_UP_CALLS)
    copy, encode = (took[name].median / BUFFERS for name in ("copy", "encode"))
    needed = _bytes_moved(codec, n)[0] / (8 * n / copy)
    small, small_wire = xs[0][:1024], torch.empty(codec.nbytes(1024), dtype=torch.uint8, device=device)
    call = _host_seconds(lambda: codec.encode(small, out=small_wire))
    launches = count_launches(lambda: codec.encode(xs[0], residual=residuals[0], out=wires[0]))
    return BucketRow(spec, 1e6 * copy, 1e6 * encode, encode / needed, launches, 1e6 * call)


def _host_seconds(call: Callable[[], object]) -> float:
    """What the host needs to start a call: the device may still be at work."""
    seconds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        seconds.append(DeviceClock().timed(call, HOST_CALLS))
    torch.cuda.synchronize()
    return Timing(tuple(seconds)).median


def data(n: int, device: torch.device) -> Tensor:
    return torch.randn(n, device=device, generator=torch.Generator(device).manual_seed(0))


def run(specs: list[str], values: int = VALUES, rounds: int = ROUNDS) -> Iterator[CudaRow]:
    """A row for each codec."""
    device = torch.device("cuda")
    x = data(values, device)
    copy_to = torch.empty_like(x)
    for spec in specs:
        yield measure(spec, x, copy_to, rounds)


def run_buckets(specs: list[str]) -> Iterator[BucketRow]:
    device = torch.device("cuda")
    for spec in specs:
        yield measure_bucket(spec, device)
