"""Run by test_matmul_triton.py under TRITON_INTERPRET=1: the Triton kernel on CPU tensors against the reference."""

from __future__ import annotations

import math
import sys
import warnings

import torch

from narrowcast.kernels.matmul.accumulator import How, accumulator, how_to_compute
from narrowcast.kernels.ops import round_to
from narrowcast.kernels.reference import matmul as reference
from narrowcast.kernels.triton import matmul as kernel

SEED = 2**63 + 7


def check(spec: str, fmt: str | None, special: bool) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(shape, generator=g) * torch.exp(2 * torch.randn(shape, generator=g))
        for shape in ((2, 3, 5), (2, 5, 4))
    )
    a[0, 1, 2] = 0.0
    if fmt is not None:
        a, b = (round_to(x, fmt, overflow="saturate") for x in (a, b))
    if special:
        a[0, 0, 0], b[1, 3, 3] = math.inf, math.nan
    rule = accumulator(spec)
    want = reference.matmul(a, b, rule, SEED, torch.empty(2, 3, 4))
    how = how_to_compute(a, b, rule)
    for way in {how, How(False, True)} if not special else {how}:
        got = kernel.matmul(a, b, rule, SEED, torch.full((2, 3, 4), 9.0), way)
        same = (want.view(torch.int32) == got.view(torch.int32)) | (want.isnan() & got.isnan())
        assert bool(same.all()), f"{spec} {fmt} {way}: {want} is not {got}"


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy tells of every Inf - Inf
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        check(argument, None, True)
        check(argument, "e4m3fn", False)
        print(argument, "ok", flush=True)
