"""By hand on a machine with a GPU: how large tiles should be, and how many warps a program should have.

    PYTHONPATH=src python tests/gpu/tune.py [SPEC ...]

Prints the share of a copy for each op, codec and choice. The best go into OVERRIDES of kernels/triton/launch.py.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

import narrowcast as nc
from narrowcast.bench import cuda as bench
from narrowcast.kernels import ops
from narrowcast.kernels.triton import launch

SPECS = ("int8/256", "e4m3fn/256", "e5m2", "int4/128", "mxfp4", "int8/256+sr", "dynamic8/256", "dtree8", "int3/64")
SPECS += ("onebit/64", "nvfp4")
CHOICES = [(1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16)]
OPS = ("encode", "decode", "reduce")
SMALL, LARGE = 1 << 22, 1 << 27


def choose(tile: int, warps: int) -> None:
    """Everywhere."""
    for op in OPS:
        launch.OVERRIDES[op, ""] = launch.Tuning(tile, warps)
    for key in [key for key in launch.OVERRIDES if key[1]]:
        del launch.OVERRIDES[key]
    launch._prepare.cache_clear()
    launch._prepare_decode.cache_clear()


def calls(spec: str, x: torch.Tensor, out: torch.Tensor) -> dict:
    codec, n = nc.codec(spec), x.numel()
    wire = codec.encode(x)
    rows = ops.aligned_rows(bench.WORLD, len(wire), x.device)
    rows.copy_(wire.expand(bench.WORLD, -1))
    return {
        "encode": lambda: codec.encode(x, out=wire),
        "decode": lambda: codec.decode(wire, n, out=out),
        "reduce": lambda: codec.reduce(rows, n, out=wire),
    }


def compile_all(spec: str, tile: int, warps: int) -> None:
    """Into Triton's cache."""
    choose(tile, warps)
    x = torch.randn(SMALL, device="cuda")
    for call in calls(spec, x, torch.empty_like(x)).values():
        call()
    torch.cuda.synchronize()


def main() -> None:
    specs = sys.argv[1:] or SPECS
    jobs = list(itertools.product(specs, CHOICES))
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_all, spec, *choice) for spec, choice in jobs]:
            done.result()
    x = torch.randn(LARGE, device="cuda")
    out = torch.empty_like(x)
    copy = statistics.median(bench.interleaved({"copy": lambda: out.copy_(x)}, 9, 5)["copy"])
    for spec in specs:
        found: dict[str, list[str]] = {op: [] for op in OPS}
        for choice in CHOICES:
            choose(*choice)
            took = bench.interleaved(calls(spec, x, out), 5, 3)
            for op, moved in zip(OPS, bench._moved(nc.codec(spec), LARGE), strict=True):
                share = moved / statistics.median(took[op]) / (8 * LARGE / copy)
                found[op].append(f"{choice[0]}/{choice[1]} {share:5.1%}")
        for op in OPS:
            print(f"{spec:14} {op:7}", "  ".join(found[op]), flush=True)


if __name__ == "__main__":
    main()
