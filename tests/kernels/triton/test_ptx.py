"""Compiled for a GPU that need not be there, no kernel holds an instruction that rounds otherwise than the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
import narrowcast as nc
from narrowcast.kernels import Feedback, Finish, ops
from narrowcast.kernels.triton import launch, start

start.FAST = False
CUDABackend.make_cubin = lambda *args, **options: b""  # machine code is not looked at
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32", torch.int16: "*i16"}
seen = []
now = ""
JITFunction.run = lambda self, *args, **options: seen.append((now, self, args, options))

def compiled(kernel, args, options):
    signature, constants = {}, {}
    for name, value, parameter in zip(kernel.arg_names, args, kernel.params):
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = parameter.annotation_type or "i32"
        else:
            signature[name], constants[name] = "constexpr", value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    chosen = {k: options[k] for k in ("num_warps", "enable_fp_fusion")}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=chosen).asm["ptx"]

n = 5000
for spec in sys.argv[1:]:
    codec = nc.codec(spec)
    x, wire = torch.empty(n), torch.empty(codec.nbytes(n), dtype=torch.uint8)
    now = "encode:" + spec
    launch.encode(codec.plan, x, wire, feedback=Feedback(torch.empty(n), 3.0))
    now = "decode:" + spec
    launch.decode(codec.plan, wire, n, x, True)
    now = "reduce:" + spec
    launch.reduce(codec.plan, ops.aligned_rows(2, codec.nbytes(n)), n, wire, finish=Finish(3.0))
    now = "sum:" + spec
    launch.sum_wires(codec.plan, ops.aligned_rows(2, codec.nbytes(n)), n, x, Finish(3.0))
    now, rows = "rows:" + spec, ops.aligned_rows(2, codec.nbytes(2560))
    launch.encode_rows(codec.plan, torch.empty(5120), 2560, rows)
    launch.decode_rows(codec.plan, rows, 2560, torch.empty(5120))
for what, kernel, args, options in seen:
    names = re.findall(r"^\\s+(?:@!?%p\\d+ )?([a-z]\\S*)", compiled(kernel, args, options), re.M)
    print(what, *sorted(set(names)))
"""

EXACT = {"reduce:mxfp4": ["fma.rn.f32"], "sum:mxfp4": ["fma.rn.f32"]}
"""Products by powers of two are exact: to fuse one with a sum changes nothing."""
SPECS = ("int8/256+sr", "qsgd4/512+l2", "nvfp4")
"""Noise, norms and two scales: between them most kinds of arithmetic."""
OTHERS = ("mxfp4", "e4m3fn/256", "uint8/512", "onebit/64", "int3/64", "int4/128+rot")
SPIKES = ("int4/128+spike2",)


@pytest.mark.timeout(300)  # triton compiles all of it
@pytest.mark.parametrize(
    "specs",
    [SPECS, *(pytest.param(more, marks=pytest.mark.slow) for more in (OTHERS, SPIKES))],
    ids=["few", "others", "spikes"],
)
def test_nothing_is_fused_approximated_or_flushed(specs: tuple[str, ...], tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *specs],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) >= 6 * len(specs)
    for line in lines:
        what, *instructions = line.split()
        wrong = [name for name in instructions if re.search(r"fma|approx|div\.full|\.ftz", name)]
        assert wrong == EXACT.get(what, []), what
    if specs == SPECS:  # what is looked for can be seen
        assert any("mul.rn.f32" in line and "add.rn.f32" in line for line in lines)
        assert any("div.rn.f32" in line for line in lines)
        assert any("sqrt.rn.f32" in line for line in lines)
