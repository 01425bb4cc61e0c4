"""By hand on a machine with a GPU: launches that were prepared give the bits of the reference, and what the host takes.

    PYTHONPATH=src python tests/gpu/check_host.py [--processes 14] [SPEC ...]

Each call is made several times, with other memory and other seeds: Triton starts the first, and what it compiled the
others. Then the host's microseconds for one call. Under 90 s on an H200; nearly all of it compiles. Ends with 1 where
anything differs or a call takes more than 25 us.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import multiprocessing
import pstats
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
from gpu import host_cases as cases
from gpu.host_cases import WORLD, Found

import narrowcast as nc
from narrowcast.codecs import Codec
from narrowcast.kernels import Feedback, Finish, Noise, ops
from narrowcast.kernels.triton import start

TIMED = ("int8/256", "int4/128", "int2/64", "e4m3fn/256", "bf16", "onebit/64", "int8", "int4/128+sr+ef")
SPECS = (*TIMED, "nvfp4+sr", "qsgd4/8192+l2")
TIMED_SIZES = (1 << 16, 1 << 24)
MOST_US = 25.0
ROUNDS, CALLS = 7, 100


def call_each(found: Found, codec: Codec) -> None:
    """All that is timed, once: what it compiles lies on the disk then, and the clock need not wait for it."""
    for n in TIMED_SIZES:
        for name, call in calls_of(codec, n).items():
            call()
            found.true(True, name)


CHECKS: dict[Callable[[Found, Codec], None], tuple[str, ...]] = {
    cases.check_sum: SPECS,
    cases.check_reduce: SPECS,
    call_each: TIMED,
    cases.check_encode: SPECS,
    cases.check_rows: SPECS,
    cases.check_decode: SPECS,
    cases.check_large: ("int8/256", "int4/128+sr+ef"),
    cases.check_surroundings: ("int8/256", "int4/128"),
    cases.check_refusals: ("int8/256", "int8", "bf16"),
}
"""What compiles longest comes first."""


def check(name: str, spec: str) -> Found:
    found, began = Found(f"{spec}:"), time.perf_counter()
    try:
        {one.__name__: one for one in CHECKS}[name](found, nc.codec(spec))
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001  whatever it is, the other checks go on
        found.faults.append(f"{spec}: {name} ends with\n{traceback.format_exc()[-1500:]}")
    found.who = f"{spec} {name} {time.perf_counter() - began:.0f} s"
    return found


def alone() -> None:
    torch.set_num_threads(1)
    torch.cuda.init()


def check_all(specs: list[str], processes: int) -> list[str]:
    began, faults, compared, slowest = time.perf_counter(), list[str](), 0, list[str]()
    whole = Found("this script:")
    cases.check_the_checks(whole)
    faults += whole.faults
    jobs = [
        (one.__name__, spec)
        for one, those in CHECKS.items()
        for spec in (specs if specs and those in (SPECS, TIMED) else those)
    ]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), alone) as pool:
        for done in as_completed([pool.submit(check, *job) for job in jobs]):
            found = done.result()
            faults, compared, slowest = faults + found.faults, compared + found.compared, [*slowest, found.who]
    slowest.sort(key=lambda who: -float(who.split()[-2]))
    print(
        f"{compared} comparisons in {time.perf_counter() - began:.0f} s; slowest: {', '.join(slowest[:4])}", flush=True
    )
    return faults


def calls_of(codec: Codec, n: int) -> dict[str, Callable[[], object]]:
    x, out = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
    wire, rows = codec.encode(x), ops.aligned_rows(WORLD, codec.nbytes(n), "cuda")
    rows.copy_(wire.expand(WORLD, -1))
    parts = ops.aligned_rows(WORLD, codec.nbytes(n // WORLD), "cuda")
    finish, noise, plan = Finish(float(WORLD)), Noise(2**63 + 5, 3), codec.plan_for(torch.float32)
    feedback = Feedback(torch.zeros(n, device="cuda")) if codec.feedback else None
    return {
        "encode": lambda: (
            codec.encode_with(x, noise, None, feedback, wire) if codec.feedback else codec.encode(x, out=wire)
        ),
        "decode": lambda: codec.decode(wire, n, out=out),
        "reduce": lambda: codec.reduce(rows, n, out=wire, decoded=out),
        "sum": lambda: ops.sum_wires(plan, rows, n, out, finish),
        "encode_rows": lambda: ops.encode_rows(plan, x, n // WORLD, parts, noise, feedback),
        "decode_rows": lambda: ops.decode_rows(plan, parts, n // WORLD, out),
    }


def microseconds(call: Callable[[], object]) -> float:
    """Of the host for one call; the device is idle when the first of them comes."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    torch.cuda.synchronize()
    return min(times)


def show_profile(call: Callable[[], object], what: str) -> None:
    profile = cProfile.Profile()
    profile.runcall(lambda: [call() for _ in range(1000)])
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(12)
    lines = [line for line in text.getvalue().splitlines() if "/" in line or "{" in line]
    print(f"  where 1000 calls of {what} spend their time:", *lines[:14], sep="\n    ", flush=True)


def time_all(specs: list[str]) -> list[str]:
    faults, x = list[str](), torch.zeros(1024, device="cuda")
    print(f"host us of one call, {WORLD} wires; for comparison x.add_(1): {microseconds(lambda: x.add_(1)):.1f}")
    for n in TIMED_SIZES:
        print(f"{n:>10} values " + "".join(f"{name:>13}" for name in calls_of(nc.codec("bf16"), 64)), flush=True)
        for spec in specs:
            calls = calls_of(nc.codec(spec), n)
            for call in calls.values():
                call()
            found = {name: microseconds(call) for name, call in calls.items()}
            print(f"{spec:>17} " + "".join(f"{us:>13.1f}" for us in found.values()), flush=True)
            slow = [name for name, us in found.items() if us > MOST_US and nc.codec(spec).block]
            faults += [f"{spec} {name}: {found[name]:.1f} us for {n} values, more than {MOST_US}" for name in slow]
            for name in slow[:1]:
                show_profile(calls[name], f"{spec} {name}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", help="codecs; all that are listed here where none is named")
    parser.add_argument("--processes", type=int, default=14, help="share the checks: nearly all of their time compiles")
    arguments, began = parser.parse_args(), time.perf_counter()
    print("torch", torch.__version__, "triton", triton.__version__, "launches are prepared:", start.FAST, flush=True)
    print("GPU:", torch.cuda.get_device_name(0), flush=True)
    faults = check_all(arguments.specs, arguments.processes)
    print("\n".join(faults[:40]) or "the bits of the reference", flush=True)
    faults += time_all(arguments.specs or list(TIMED))
    print(f"{len(faults)} faults, {time.perf_counter() - began:.0f} s")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
