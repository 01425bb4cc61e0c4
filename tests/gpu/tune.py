"""By hand on a machine with a GPU: how large tiles should be, how many warps a program should have, and what each way
of summing narrow codes brings.

    PYTHONPATH=src python tests/gpu/tune.py [--check] [SPEC ...]

Prints the share of a copy for each op, codec and choice, best first; a choice whose bits are not the CPU's has none.
The best go into OVERRIDES of kernels/triton/shapes.py. --check: only compares bits, of what is shipped.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.bench import cuda as bench
from narrowcast.bench.cuda import TARGETS
from narrowcast.codecs import Codec, compiled
from narrowcast.kernels import ops
from narrowcast.kernels.triton import launch, shapes

SPECS = ("int4/128", "mxfp4", "nvfp4", "int4/128+sr+ef", "int3/64", "int6/64", "onebit/64", "posit8.1/256")
SPECS += ("dynamic8/256", "int8/256", "e5m2/256")
OPS = ("encode", "reduce")
TILES = ((2048, 2), (2048, 4), (4096, 4), (8192, 4), (8192, 8), (2048, 2, 96), (4096, 2, 96), (4096, 4, 96))
"""Values, warps, and the most registers of a thread: with 96 of them a processor has room for 20 warps."""
SMALL, LARGE = 1 << 16, 1 << 28
"""Both end in a full tile, so that one kernel serves them."""
COMPILE_SECONDS = 100.0
"""What is not compiled and checked by then is left out."""
SHIPPED = dict(shapes.OVERRIDES)
WAYS = ("BY_WORDS", "BY_LANES", "BY_HALVES", "GATED")
"""What shapes.py can leave out."""


@dataclass(frozen=True)
class Choice:
    """Tiles and warps, or what is shipped; and what is left out."""

    tiles: tuple[int, ...] | None = None
    without: str = ""

    def __str__(self) -> str:
        size = "shipped" if self.tiles is None else "/".join(map(str, self.tiles))
        return size + (f" without {self.without}" if self.without else "")

    def take(self) -> None:
        shapes.OVERRIDES.clear()
        if self.tiles is None:
            shapes.OVERRIDES.update(SHIPPED)
        else:
            shapes.OVERRIDES.update({(op, ""): shapes.Tuning(*self.tiles) for op in (*OPS, "decode")})
        for way in WAYS:
            setattr(shapes, way, way != self.without)
        for codec in compiled.KNOWN.values():
            launch.forget(codec.plan_for(torch.float32))


CHOICES = [Choice(), *(Choice(without=way) for way in WAYS), *map(Choice, TILES)]


def choices(spec: str) -> list[Choice]:
    """Those that differ for a codec."""
    recipe = launch.describe(nc.codec(spec).plan_for(torch.float32))[0]
    tuning = shapes.tuning_of(recipe, "reduce")
    ways = shapes.of_sum(recipe, shapes.shape_of(recipe, SMALL, True, tuning.tile), tuning.warps, bench.WORLD)
    differ = {"BY_WORDS": "each" in ways, "BY_LANES": ways.get("by_lanes", False)}
    differ |= {"BY_HALVES": ways.get("halves", False), "GATED": ways["gated"]}
    return [c for c in CHOICES if differ.get(c.without, True)]


@dataclass
class Case:
    """A codec's calls on n values of a device."""

    codec: Codec
    n: int
    device: str

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        # the same everywhere, and on a GPU not made by the CPU where there are many
        few = [torch.randn(min(self.n, SMALL), generator=generator).to(self.device) for _ in range(bench.WORLD)]
        self.xs = [x.repeat(-(-self.n // len(x)))[: self.n] for x in few[:1]] if self.n > SMALL else few
        self.owed = torch.zeros(self.n, device=self.device) if self.codec.feedback else None
        wires = [self.codec.encode(x, seed=rank) for rank, x in enumerate(self.xs)]
        self.rows = ops.aligned_rows(bench.WORLD, len(wires[0]), self.device)
        for rank, row in enumerate(self.rows):
            row.copy_(wires[rank % len(wires)])
        self.wire = torch.empty_like(wires[0])

    def calls(self) -> dict[str, Callable[[], Tensor]]:
        return {
            "encode": lambda: self.codec.encode(self.xs[0], residual=self.owed, out=self.wire),
            "reduce": lambda: self.codec.reduce(self.rows, self.n, residual=self.owed, out=self.wire),
        }

    def results(self) -> list[Tensor]:
        """Of both, one after another, and what is owed in the end."""
        found = [call().cpu().clone() for call in self.calls().values()]
        found += [self.owed.cpu()] if self.owed is not None else []
        # any bytes are a wire: scales that no encoder makes
        some = torch.randint(0, 256, self.rows.shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
        return [*found, self.codec.reduce(self.rows.copy_(some), self.n).cpu()]


def check(spec: str, choice: Choice) -> bool:
    """Whether the bits are the CPU's; compiles into Triton's cache."""
    torch.set_num_threads(1)
    choice.take()
    codec = nc.codec(spec)
    there, here = (Case(codec, SMALL, device).results() for device in ("cuda", "cpu"))
    return all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def checked(specs: Sequence[str], wanted: Sequence[Choice]) -> dict[tuple[str, Choice], str]:
    """By codec and choice: empty where the bits are right, else what is wrong. The choices in turn, so that each codec
    has its first ones where time runs out.
    """
    found: dict[tuple[str, Choice], str] = {}
    pool = ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn"))
    jobs = {pool.submit(check, spec, c): (spec, c) for c in wanted for spec in specs if c in choices(spec)}
    try:
        for job in as_completed(jobs, COMPILE_SECONDS):
            error = job.exception()
            found[jobs[job]] = str(error) if error is not None else "" if job.result() else "other bits than the CPU's"
            print(*jobs[job], found[jobs[job]][:400] or "right", flush=True)
    except TimeoutError:
        print(f"{len(jobs) - len(found)} choices were not ready in time", flush=True)
        for worker in list(pool._processes.values()):
            worker.terminate()
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def main() -> None:
    start, only_check = time.perf_counter(), "--check" in sys.argv
    specs = [given for given in sys.argv[1:] if not given.startswith("--")] or list(SPECS)
    verdicts = checked(specs, CHOICES[:1] if only_check else CHOICES)
    print(f"{len(verdicts)} choices compiled and checked after {time.perf_counter() - start:.0f} s", flush=True)
    if only_check:
        sys.exit(any(verdicts.values()) or len(verdicts) < len(specs))
    x = torch.randn(LARGE, device="cuda")
    copied = torch.empty_like(x)
    for spec in specs:
        shares: dict[str, list[tuple[float, str]]] = {op: [] for op in OPS}
        encode, _, reduce = bench._bytes_moved(nc.codec(spec), LARGE)
        case = Case(nc.codec(spec), LARGE, "cuda")
        for choice in [choice for choice in choices(spec) if verdicts.get((spec, choice)) == ""]:
            choice.take()
            took = bench.interleaved({"copy": lambda: copied.copy_(x), **case.calls()}, 11, 5, x.device, first_calls=2)
            seconds = {name: timing.median for name, timing in took.items()}
            for op, moved in (("encode", encode), ("reduce", reduce)):
                share = moved / seconds[op] / (8 * LARGE / seconds["copy"])
                shares[op].append((share, f"{choice} {share:.1%}"))
        for op in OPS:
            target = getattr(TARGETS[spec], op) if spec in TARGETS else 0.0
            listed = "; ".join(text for _, text in sorted(shares[op], reverse=True))
            print(f"{spec:14} {op:6} target {target:.0%}: {listed}", flush=True)
    print(f"done after {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
