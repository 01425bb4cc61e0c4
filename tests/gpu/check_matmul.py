"""By hand on a machine with a GPU: matrix products on CUDA give the bits of the CPU, and how fast they are.

    PYTHONPATH=src python tests/gpu/check_matmul.py [--size 2048]

Bits are compared first; a speed is printed only after that. TFLOP/s count a product and a sum as two.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from narrowcast_research.bench.matmul import operands, run_model
from torch import Tensor

from narrowcast.kernels.matmul import explain, matmul
from narrowcast.kernels.matmul.accumulator import accumulator, how_to_compute
from narrowcast.kernels.ops import round_to

FORMATS = ("bf16", "fp16", "e5m2", "e4m3", "e4m3fn", "e3m0", "e6m9", "e2m1fn", "e4m3fnuz", "fixed8.8", "fixed4.4")
METHODS = ("", "+kahan", "+fma", "+fma+kahan", "+pairwise", "+sr", "+sr+kahan", "+mogami")
MIXED = (
    "e5m2+mul=fp16",
    "bf16+mul=fp32",
    "fp16/3",
    "fp16/4+outer=fp32",
    "e4m3/5+kahan",
    "fp32+sequential",
    "fp32+kahan",
)
SHAPES = ((1, 1, 1, 1), (1, 7, 13, 5), (2, 65, 31, 129), (3, 1, 257, 1), (1, 130, 64, 66), (1, 3, 0, 4))
SPEEDS = {"bf16": 1.0, "fp16": 1.0, "e4m3fn": 1.0, "bf16+kahan": 0.4, "fp16+kahan": 0.4, "bf16+fma": None,
          "bf16+mul=fp32": None, "fp32+sequential": None, "bf16+sr": None}  # fmt: skip
"""Accumulator -> TFLOP/s that are promised on an H200."""


def hard(*shape: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(3 * torch.randn(shape, generator=g))
    x[torch.rand(shape, generator=g) < 0.1] = 0.0
    return x


def check(spec: str) -> int:
    """How many products were compared; a difference ends the program."""
    count = 0
    for batch, m, k, n in SHAPES:
        for name in (None, "e4m3fn", "special"):
            a, b = hard(batch, m, k, seed=1), hard(batch, k, n, seed=2)
            if name == "e4m3fn":
                a, b = (round_to(x, name, overflow="saturate") for x in (a, b))
            elif name == "special" and k:
                a[0, 0, 0], b[-1, -1, -1] = float("inf"), float("nan")
            want = matmul(a, b, spec, seed=2**63 + 11)
            got = matmul(a.cuda(), b.cuda(), spec, seed=2**63 + 11).cpu()
            same = (want.view(torch.int32) == got.view(torch.int32)) | (want.isnan() & got.isnan())
            assert bool(same.all()), f"{spec} {(batch, m, k, n)} {name}: {int((~same).sum())} of {same.numel()} differ"
            count += 1
    return count


def alone() -> None:
    """Each process has a core of its own."""
    torch.set_num_threads(1)


def seconds(spec: str, a: Tensor, b: Tensor, rounds: int = 5) -> float:
    matmul(a, b, spec, seed=1)
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        matmul(a, b, spec, seed=1)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrices that are timed")
    parser.add_argument("--model", action="store_true", help="time a lowered ResNet-18 too")
    parser.add_argument("--processes", type=int, default=1, help="share the checks: nearly all of their time compiles")
    size = (arguments := parser.parse_args()).size
    print(
        "torch", torch.__version__, "GPU:", torch.cuda.get_device_name(0), "CPU runs:", explain("bf16").implementation
    )
    specs = [f"{name}{method}" for name in FORMATS for method in METHODS] + list(MIXED)
    with ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn"), alone) as pool:
        count = sum(pool.map(check, specs))
    print(f"{count} products of {len(specs)} accumulators: the bits of the CPU", flush=True)
    for spec, target in SPEEDS.items():
        a, b = (x.cuda() for x in operands(spec, size))
        speed = 2e-12 * size**3 / seconds(spec, a, b)
        single = how_to_compute(a[None], b[None], accumulator(spec)).single
        kept = "" if target is None else f", promised {target}: {'kept' if speed >= target else 'NOT kept'}"
        print(f"{spec}: {speed:.2f} TFLOP/s at {size} in {'float32' if single else 'float64'}{kept}", flush=True)
    if arguments.model:
        print("lowered ResNet-18:", run_model(512, device="cuda").as_dict())


if __name__ == "__main__":
    main()
