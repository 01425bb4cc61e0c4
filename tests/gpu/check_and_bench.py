"""By hand on a machine with a GPU: first every codec's bits against the CPU reference, then speed.

    PYTHONPATH=src python tests/gpu/check_and_bench.py --json result.json [--commit ID] [--quick]

A codec whose check failed gets no speed. Ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu.check_cuda import check_all_reduce, free_port, values
from kernels.triton import products
from laws.inputs import hard_values, near_ties, normal, with_specials
from laws.wires import hard_wires
from torch import Tensor

import narrowcast as nc
from narrowcast.bench import cuda as bench
from narrowcast.codecs import Codec, all_specs
from narrowcast.formats import all_formats
from narrowcast.kernels import (
    CastPlan,
    Feedback,
    Finish,
    Noise,
    Plan,
    TransformPlan,
    low_rank,
    native,
    ops,
    reference,
    triton_loader,
)

N = 20_011
WORKERS = 14
MORE = ("int8/8192", "sign/8192", "qsgd4/8192+l2", "int6/48", "int5/64", "int7/64+sr", "dynamic8/256+sr", "uint8/5008",
        "int8/16+spike4", "int8/4096+spike2", "int6/48+spike3", "int4/512+spike4", "mxfp4+spike5")  # fmt: skip
LARGE = 2**31 + 4099


def bits(x: Tensor) -> Tensor:
    """Patterns, with one for all NaN."""
    if x.dtype is torch.uint8:
        return x
    pattern = x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    return torch.where(x.isnan(), -1, pattern)


class Found:
    """What differs."""

    def __init__(self, who: str) -> None:
        self.who, self.faults, self.stage = who, [], ""

    def same(self, got: Tensor, wanted: Tensor, what: str) -> None:
        got, wanted = bits(got.cpu()), bits(wanted.cpu())
        if not torch.equal(got, wanted):
            where = (got != wanted).nonzero().flatten()
            at = int(where[0])
            self.faults.append(f"{self.who} {what}: {len(where)} differ, first at {at}: {got[at]} not {wanted[at]}")


oracle = reference.kernels


def like_wire(plan: Plan | CastPlan, n: int) -> Tensor:
    return torch.full((plan.layout(n).nbytes,), 0xA5, dtype=torch.uint8)


def check_encode(found: Found, plan: Plan | CastPlan, x: Tensor, what: str, noise: Noise) -> Tensor:
    found.stage = f"encode {what}"
    wanted = like_wire(plan, x.numel())
    oracle(plan).encode(plan, x, wanted, noise)
    got, there = like_wire(plan, x.numel()).cuda(), x.cuda()
    if "unaligned" in what:
        got, there = torch.empty(len(got) + 1, dtype=torch.uint8, device="cuda")[1:], shifted(there)
    ops.encode(plan, there, got, noise)
    got = got.clone()
    if isinstance(plan, CastPlan):
        # a NaN has no one pattern in a plain cast
        found.same(got.view(plan.dtype), wanted.view(plan.dtype), what)
    else:
        found.same(got, wanted, what)
    return wanted


def shifted(x: Tensor) -> Tensor:
    """The same values one element further on."""
    room = torch.empty(len(x) + 1, dtype=x.dtype, device=x.device)
    room[1:] = x
    return room[1:]


def check_decode(found: Found, plan: Plan | CastPlan, wire: Tensor, n: int, dtype: torch.dtype, add: bool) -> None:
    found.stage = f"decode {dtype} {add}"
    wanted = normal(n, 4).to(dtype)
    got = wanted.cuda()
    oracle(plan).decode(plan, wire, n, wanted, add)
    ops.decode(plan, wire.cuda(), n, got, add)
    found.same(got, wanted, f"decode to {dtype}{' adding' if add else ''}")


def check_owed(found: Found, plan: Plan | CastPlan, x: Tensor, unit: float) -> None:
    found.stage = f"encode owed {unit}"
    n = x.numel()
    wanted, owed = like_wire(plan, n), 0.01 * normal(n, 9)
    got, kept = wanted.cuda(), owed.cuda()
    oracle(plan).encode(plan, x, wanted, Noise(7, 8, 128), None, Feedback(owed, unit))
    ops.encode(plan, x.cuda(), got, Noise(7, 8, 128), None, Feedback(kept, unit))
    if not isinstance(plan, CastPlan):
        found.same(got, wanted, f"wire with residual, unit {unit}")
    found.same(kept, owed, f"residual, unit {unit}")


def check_reduce(found: Found, plan: Plan | CastPlan, n: int, world: int, dtype: torch.dtype, divide: float) -> None:
    found.stage = "reduce"
    block = 0 if isinstance(plan, CastPlan) else plan.block
    rows = ops.aligned_rows(world, plan.layout(n).nbytes)
    for rank, row in enumerate(rows):
        oracle(plan).encode(plan, hard_values(block, n) if rank == 1 else normal(n, rank), row, Noise(rank))
    wanted, owed, out = like_wire(plan, n), 0.01 * normal(n, 9), torch.empty(n, dtype=dtype)
    got, kept, there = wanted.cuda(), owed.cuda(), out.cuda()
    on_gpu = ops.aligned_rows(world, rows.shape[1], "cuda")
    on_gpu.copy_(rows)
    finish = Finish(divide, 0.3 if divide != 1 else 1.0)
    oracle(plan).reduce(plan, rows, n, wanted, Noise(1, 2, 0), None, Feedback(owed), finish, out)
    ops.reduce(plan, on_gpu, n, got, Noise(1, 2), None, Feedback(kept), finish, there)
    found.same(got, wanted, "reduce")
    found.same(kept, owed, "residual of reduce")
    found.same(there, out, "decoded by reduce")


def check_wires(found: Found, plan: Plan) -> None:
    """Sums of wires that no encoder makes, with nothing owed and nothing to divide by."""
    n = 16384 // max(plan.block, 1) * max(plan.block, 1) or plan.block
    for what, rows in hard_wires(plan, n, 8):
        found.stage = f"reduce, {what}"
        wanted = like_wire(plan, n)
        got, on_gpu = wanted.cuda(), ops.aligned_rows(8, rows.shape[1], "cuda")
        on_gpu.copy_(rows)
        oracle(plan).reduce(plan, rows, n, wanted)
        ops.reduce(plan, on_gpu, n, got)
        found.same(got, wanted, found.stage)


def check_plan(found: Found, plan: Plan | CastPlan) -> None:
    block = 0 if isinstance(plan, CastPlan) else plan.block
    x = hard_values(block, N)
    wire = check_encode(found, plan, x, "hard values", Noise(5, 6, 48))
    check_encode(found, plan, with_specials(x, 900), "NaN and Inf", Noise(5, 6, 0))
    check_encode(found, plan, normal(N, 3), "normal values", Noise(2**63, 2**40, 2**33))
    check_encode(found, plan, normal(16384, 3), "a whole number of tiles", Noise(1, 2, 0))
    small = (normal(4099, 7) * torch.exp(2 * normal(4099, 8))).bfloat16()
    check_encode(found, plan, small, "bfloat16", Noise(3, 0, 0))
    check_encode(found, plan, normal(4099, 5).half(), "unaligned float16", Noise(3, 0, 0))
    check_encode(found, plan, normal(1), "one value", Noise(3, 0, 0))
    check_encode(found, plan, near_ties(8195), "near ties", Noise(1, 2, 0))
    codes = wire[: plan.code_bytes(N)]
    if not isinstance(plan, CastPlan):
        codes.copy_(torch.randint(0, 256, codes.shape, generator=torch.Generator().manual_seed(4)))
    check_decode(found, plan, wire, N, torch.float32, False)
    if isinstance(plan, TransformPlan):
        broken = wire.clone()
        places = broken[plan.layout(N).side :][::97]
        places.copy_(torch.randint(0, 256, places.shape, generator=torch.Generator().manual_seed(5)))
        check_decode(found, plan, broken, N, torch.float32, False)
        check_decode(found, plan, broken, N, torch.float32, True)
    check_decode(found, plan, wire, N, torch.float32, True)
    check_decode(found, plan, wire, N, torch.bfloat16, False)
    check_owed(found, plan, with_specials(x, 900), 1.0)
    check_owed(found, plan, normal(N, 12), 1024.0)
    check_reduce(found, plan, N, 3, torch.float32, 3.0)
    if isinstance(plan, Plan):
        check_wires(found, plan)


def check_codec(spec: str) -> tuple[str, list[str], float]:
    """In a process of its own."""
    torch.set_num_threads(1)
    found, start = Found(spec), time.perf_counter()
    try:
        check_plan(found, nc.codec(spec).plan_for(torch.float32))
    except Exception as error:  # noqa: BLE001  one codec's fault is a row of the table
        found.faults.append(f"{found.stage}: {type(error).__name__} {str(error)[:300]}")
    return spec, found.faults[:4], time.perf_counter() - start


def check_formats(names: list[str]) -> tuple[str, list[str], float]:
    """round_to."""
    torch.set_num_threads(1)
    found, start = Found("round_to"), time.perf_counter()
    x = with_specials(hard_values(64, N), 900)
    for name in names:
        fmt = nc.format(name)
        for rounding in ("nearest", "stochastic"):
            for overflow in fmt.overflows if rounding == "nearest" else fmt.overflows[:1]:
                wanted = torch.empty_like(x)
                reference.round_to(x, fmt, rounding, overflow, "ieee", 7, wanted)
                got = nc.round_to(x.cuda(), fmt, rounding=rounding, overflow=overflow, seed=7)
                found.same(got, wanted, f"{name} {rounding} {overflow}")
    return f"round_to {len(names)} formats", found.faults[:4], time.perf_counter() - start


def check_large() -> list[str]:
    """More than 2**31 values: the end of the tensor has the bytes that the CPU gives it."""
    found = Found("large")
    x = torch.randn(LARGE, device="cuda", dtype=torch.bfloat16)
    tail = 4099 + 4096
    for spec in ("int8/256", "int4/128+sr", "mxfp4", "dtree8"):
        codec = nc.codec(spec)
        first = LARGE - tail
        wire = codec.encode(x, seed=3)
        back = codec.decode(wire, LARGE, dtype=torch.bfloat16)[first:].cpu()
        part = codec.encode(x[first:].cpu(), seed=3, offset=first) if codec.block else None
        if part is not None:
            found.same(back, codec.decode(part, tail, dtype=torch.bfloat16), spec)
        else:
            scale = wire[-4:].cpu().view(torch.float32)
            part = codec.encode(x[first:].cpu(), scale=scale)
            found.same(back, codec.decode(part, tail, dtype=torch.bfloat16), spec)
        del wire
    return found.faults


def check_graphs() -> list[str]:
    """Captured once, replayed on other values; nothing may wait for the host."""
    found = Found("graph")
    for spec in ("int8/256", "int4/128+sr", "dtree8", "nvfp4+sr", "e5m2+aps", "onebit/64", "bf16", "int2/4096+top64",
                 "int4/128+rot", "int4/128+spike2"):  # fmt: skip
        codec = nc.codec(spec)
        x, out = normal(N, 1).cuda(), torch.empty(N, device="cuda")
        wire, owed = codec.encode(x), torch.zeros(N, device="cuda")
        codec.decode(wire, N, out=out)
        codec.encode(x, residual=owed, out=wire)
        owed.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            codec.encode(x, residual=owed, out=wire)
            codec.decode(wire, N, out=out)
        other = normal(N, 2)
        owed.zero_()
        x.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        here, left = torch.empty(wire.numel(), dtype=torch.uint8), torch.zeros(N)
        codec.encode(other, residual=left, out=here)
        found.same(wire, here, f"{spec} wire")
        found.same(out, codec.decode(here, N), f"{spec} values")
        found.same(owed, left, f"{spec} residual")
        check_never_waits(found, codec, x, out)
    return found.faults


def check_never_waits(found: Found, codec: Codec, x: Tensor, out: Tensor) -> None:
    """After a first call, which compiles and brings tables over."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        wire = codec.encode(x)
        codec.decode(wire, N, out=out, accumulate=True)
        codec.decode(wire, N, out=out)
        codec.encode(x, residual=torch.empty_like(x), out=wire)
    except RuntimeError as error:
        found.faults.append(f"{codec} waits for the host: {error}")
    torch.cuda.set_sync_debug_mode("default")


def check_low_rank() -> list[str]:
    """Products beside the reference; the same bits from run to run."""
    found = Found("low rank")
    products.check("cuda")
    x, q = normal(3000 * 700, 1).view(3000, 700).cuda(), normal(4 * 700, 2).view(4, 700).cuda()
    p = low_rank.left(x, None, q)
    for _ in range(5):
        found.same(low_rank.left(x, None, q).flatten(), p.flatten(), "left, once more")
        found.same(low_rank.right(x, None, p).flatten(), low_rank.right(x, None, p).flatten(), "right, once more")
    return found.faults


def check_compile() -> list[str]:
    """torch.compile in one graph, and torch's own check of the ops."""
    found = Found("compile")
    for spec in ("int8/256", "int4/128+sr", "nvfp4"):
        codec, x = nc.codec(spec), normal(N, 1).cuda()

        def through(x: Tensor, codec: Codec = codec) -> Tensor:
            return codec.decode(codec.encode(x * 2, seed=3), N) + 1

        found.same(torch.compile(through, fullgraph=True)(x), through(x.cpu()), spec)
    wire = nc.codec("int8/256").encode(x)
    torch.library.opcheck(torch.ops.narrowcast.encode.default, (x, "int8/256", 1, 2, 0, None))
    torch.library.opcheck(torch.ops.narrowcast.decode.default, (wire, "int8/256", N, torch.float32))
    torch.library.opcheck(torch.ops.narrowcast.decode_add.default, (wire, "int8/256", x.clone()))
    torch.library.opcheck(torch.ops.narrowcast.reduce.default, (wire.expand(3, -1).contiguous(), "int8/256", N, 1.0, 1.0, 0, 0, 0, None))  # fmt: skip  # noqa: E501
    torch.library.opcheck(torch.ops.narrowcast.round_to.default, (x, "e4m3fn", "stochastic", None, "ieee", 7))
    rounded = torch.compile(lambda x: nc.round_to(2 * x, "e4m3fn"), fullgraph=True)
    found.same(rounded(x), nc.round_to(2 * x.cpu(), "e4m3fn"), "round_to")
    return found.faults


# ---- ranks -----------------------------------------------------------------------------------------------------------

RANK_SPECS = ("bf16", "int8/256", "int4/128+sr", "e5m2", "nvfp4", "onebit/64", "dynamic8/256")


def rank_main(rank: int, world: int, port: int, faults: Any) -> None:
    """Each rank encodes on the GPU and sends to the next, which decodes on the CPU; then the reverse."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(2)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    found, before = Found(f"rank {rank}"), (rank - 1) % world
    for spec in RANK_SPECS:
        codec, theirs = nc.codec(spec), values(before, "cpu")
        n = theirs.numel()
        for here, there in (("cuda", "cpu"), ("cpu", "cuda")):
            wire = codec.encode(values(rank, here), seed=1, stream=rank).cpu()
            arrived = torch.empty_like(wire)
            sends = dist.isend(wire, (rank + 1) % world)
            dist.recv(arrived, before)
            sends.wait()
            found.same(arrived, codec.encode(theirs, seed=1, stream=before), f"{spec} {here} to {there}: bytes")
            got = codec.decode(arrived.to(there), n)
            found.same(got, codec.decode(arrived, n), f"{spec} {here} to {there}: values")
    check_all_reduce(rank)
    faults.extend(found.faults)
    dist.barrier()
    dist.destroy_process_group()


def check_ranks(world: int = 4) -> list[str]:
    with multiprocessing.get_context("spawn").Manager() as manager:
        faults = manager.list()
        mp.spawn(rank_main, (world, free_port(), faults), nprocs=world)
        return list(faults)


# ---- the same maths in torch -----------------------------------------------------------------------------------------


def torch_encode(block: int, levels: float, pack: bool) -> Callable[[Tensor, Tensor], None]:
    """int8/256 and int4/128 as one would write them with torch: same codes, but for its division."""

    def run(x: Tensor, wire: Tensor) -> None:
        x_NB = x.view(-1, block)
        scale_N = x_NB.abs().amax(dim=1) / levels
        inverse_N = torch.where(scale_N > 0, 1.0 / scale_N, 0.0)
        code = (x_NB * inverse_N[:, None]).round().clamp(-levels, levels).to(torch.int8).view(-1)
        if pack:
            code = (code[::2] & 15) | (code[1::2] << 4)
        wire[: code.numel()].copy_(code.view(torch.uint8))
        wire[code.numel() :].view(torch.float32).copy_(scale_N)

    return run


def torch_e4m3(x: Tensor, wire: Tensor) -> None:
    x_NB = x.view(-1, 256)
    scale_N = x_NB.abs().amax(dim=1) / 448.0
    inverse_N = torch.where(scale_N > 0, 1.0 / scale_N, 0.0)
    code = (x_NB * inverse_N[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(-1)
    wire[: x.numel()].copy_(code.view(torch.uint8))
    wire[x.numel() :].view(torch.float32).copy_(scale_N)


PEERS = {
    "int8/256": torch_encode(256, 127.0, False),
    "int4/128": torch_encode(128, 7.0, True),
    "e4m3fn/256": torch_e4m3,
}


def against_torch(n: int) -> list[dict[str, Any]]:
    rows, x = [], bench.data(n, torch.device("cuda"))
    for spec, eager in PEERS.items():
        codec = nc.codec(spec)
        ours, theirs = (torch.empty(codec.nbytes(n), dtype=torch.uint8, device="cuda") for _ in range(2))
        compiled = torch.compile(eager)
        codec.encode(x, out=ours)
        compiled(x, theirs)
        equal = float((ours == theirs).float().mean())
        calls = {
            "ours": lambda c=codec, w=ours: c.encode(x, out=w),
            "eager": lambda f=eager, w=theirs: f(x, w),
            "compiled": lambda f=compiled, w=theirs: f(x, w),
        }
        timings = bench.interleaved(calls, 7, 10, x.device, first_calls=2)
        took = {name: timing.median for name, timing in timings.items()}
        row = {"codec": spec, "values": n, **{f"{k}_us": 1e6 * v for k, v in took.items()}, "equal_bytes": equal}
        row |= {"over_eager": took["eager"] / took["ours"], "over_compiled": took["compiled"] / took["ours"]}
        rows.append(row)
    return rows


# ---- all of it -------------------------------------------------------------------------------------------------------


def all_checks(specs: list[str]) -> dict[str, list[str]]:
    """Faults by codec; and those of everything else under its own name."""
    faults: dict[str, list[str]] = {}
    names = [fmt.name for fmt in all_formats() if triton_loader.why_not_round(fmt, "nearest", "ieee") is None]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        jobs = [pool.submit(check_codec, spec) for spec in specs]
        jobs += [pool.submit(check_formats, names[i::6]) for i in range(6)]
        for number, job in enumerate(jobs):
            if job.exception() is not None:
                faults[f"job {number}"] = [str(job.exception())[:300]]
                continue
            who, found, _ = job.result()
            faults[who] = found + faults.get(who, [])
    return faults


def guarded(check: Callable[[], list[str]]) -> list[str]:
    try:
        return check()
    except Exception:  # noqa: BLE001  the same
        return [traceback.format_exc()[-1500:]]


def show(faults: dict[str, list[str]]) -> int:
    bad = {who: found for who, found in faults.items() if found}
    for who, found in list(bad.items())[:40]:
        print(f"DIFFERS {who}: {'; '.join(found[:2])[:400]}", flush=True)
    print(f"checks: {len(faults) - len(bad)} of {len(faults)} equal", flush=True)
    return len(bad)


def show_rows(rows: list[bench.CudaRow]) -> None:
    print(f"{'codec':16} {'encode':>7} {'decode':>7} {'reduce':>7}  missed")
    for row in rows:
        shares = " ".join(f"{v:7.1%}" if v is not None else "   -   " for v in (row.encode, row.decode, row.reduce))
        print(f"{row.codec:16} {shares}  {'; '.join(row.missed)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="gpu.json")
    parser.add_argument("--commit", default="")
    parser.add_argument("--no-checks", action="store_true", help="time only what `failure` lets through")
    parser.add_argument("--values", type=int, default=bench.VALUES)
    parser.add_argument("--specs", nargs="*", default=list(bench.TARGETS))
    parser.add_argument("--check", nargs="*", help="codecs whose bits are checked; without it all, and all else")
    parser.add_argument("--quick", action="store_true", help="no ranks, no large tensors, no peers")
    options = parser.parse_args()
    start = time.perf_counter()
    bench.require()
    results = bench.CudaResults(bench.describe_machine() | {"commit": options.commit})
    print(results.machine, "cpu:", native.isa() if native.available() else native.load()[1], flush=True)
    faults: dict[str, list[str]] = {}
    if not options.no_checks:
        faults = all_checks(options.check or [*all_specs(), *MORE])
        print(f"codecs after {time.perf_counter() - start:.0f} s", flush=True)
        faults["CUDA graphs, no host waits"] = guarded(check_graphs)
        faults["low rank"] = guarded(check_low_rank)
        if not options.check:
            faults["torch.compile, opcheck"] = guarded(check_compile)
        if not options.quick and not options.check:
            faults["more than 2**31 values"] = guarded(check_large)
            faults["four ranks"] = guarded(check_ranks)
        torch.cuda.empty_cache()
    bad = show(faults)
    print(f"checks after {time.perf_counter() - start:.0f} s", flush=True)
    good = [spec for spec in options.specs if not faults.get(spec)]
    results.rows = list(bench.run(good, options.values))
    results.rows += [bench.CudaRow(s, options.values, 0.0, failed="differs") for s in options.specs if s not in good]
    print(f"copy {results.rows[0].copy_gbs:.0f} GB/s")
    show_rows(results.rows)
    results.buckets = list(bench.run_buckets(good))
    for b in results.buckets:
        print(f"25 MB {b.codec:16} copy {b.copy_us:5.1f} us encode {b.encode_us:5.1f} us = {b.factor:.2f} x, "
              f"{b.launches} launches, call {b.call_us:.0f} us", flush=True)  # fmt: skip
    peers = [] if options.quick or options.check else against_torch(options.values)
    for row in peers:
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    report = results.as_dict() | {"checks": faults, "peers": peers, "seconds": time.perf_counter() - start}
    Path(options.json).write_text(json.dumps(report, indent=1))
    print(f"done after {time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
