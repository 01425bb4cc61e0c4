"""By hand on a machine with a GPU: simulated workers on CUDA tensors hold the bits of the CPU, and nothing waits."""

from __future__ import annotations

import sys

import torch

from narrowcast.collectives.algorithms import record
from narrowcast.simulate import World

ALGORITHMS = [n for n, one in record.ALGORITHMS.items() if one.order not in (record.Order.EXACT, record.Order.BACKEND)]
SPECS = ("e5m2+aps", "int4/128+sr+ef", "int8/256", "dtree8", "mxfp4", "as-is")
NO_WAIT = ("e5m2+aps", "int8/256", "int4/128+sr", "as-is")


def world(algorithm: str, spec: str) -> World:
    plain = spec if record.ALGORITHMS[algorithm].residual_shots else spec.removesuffix("+ef")
    return World(8, algorithm, plain, groups=4 if algorithm == "hierarchical" else None, seed=3)


def same_bits(algorithm: str, spec: str) -> bool:
    here, there = world(algorithm, spec), world(algorithm, spec)
    for step in range(3):
        x = torch.randn(8, 100_003, generator=torch.Generator().manual_seed(step)) * 1e-3
        cuts = [30_000, 1, 70_002]
        expected = here.all_reduce(x, "avg", step=step, segments=cuts)[0]
        got = there.all_reduce(x.cuda(), "avg", step=step, segments=cuts)[0]
        if not torch.equal(got.cpu().view(torch.int32), expected.view(torch.int32)):
            return False
    return True


def waits(algorithm: str, spec: str) -> str:
    """What made the host wait for the device; empty where nothing did."""
    x, simulated = torch.randn(8, 100_003, device="cuda"), world(algorithm, spec)
    simulated.all_reduce(x, "avg", step=0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        simulated.all_reduce(x, "avg", step=1)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def main() -> int:
    faults = [f"{a} {s}: other bits" for a in ALGORITHMS for s in SPECS if not same_bits(a, s)]
    faults += [f"{a} {s}: {why}" for a in ALGORITHMS for s in NO_WAIT if (why := waits(a, s))]
    print("\n".join(faults) or f"{len(ALGORITHMS) * len(SPECS)} exchanges hold the CPU's bits; none waits")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
