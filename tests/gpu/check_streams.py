"""By hand on a machine with a GPU: collectives of CUDA tensors wait for the right streams, and never for the host.

    PYTHONPATH=src python tests/gpu/check_streams.py [--few]

Ranks are threads on one GPU; values arrive late, and so does every message (late_ranks.py). All algorithms, codecs and
ways of the wires must give the CPU's bits; with any one wait left out they must not. Then NCCL, with one rank: it takes
no more on one GPU.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from gpu import late_cases as cases
from gpu import late_ranks
from gpu.late_ranks import Job, run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.collectives import api
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.streams import DeviceStream, Way
from narrowcast.collectives.transports.torch import TorchTransport
from narrowcast.parallel import auto

CPU = torch.device("cpu")
N = 200_003
"""So many that the chunks of a shard hold full tiles, and one that is not."""
WORLDS = (2, 4)
VERY_LATE = 200_000_000
"""About a tenth of a second: far more than the host needs for a call."""
WAYS = (Way.ROUNDS, Way.STAGED)
FORGETFUL: dict[str, tuple[type[DeviceStream], tuple[Way, ...]]] = {
    "the side stream waits for the caller's": (late_ranks.NoFollow, WAYS),
    "the caller's stream waits for the side stream": (late_ranks.NoJoin, WAYS),
    "the host waits for a copy before it sends it": (late_ranks.NoSynchronize, (Way.STAGED,)),
}
Checks = list[tuple[str, bool]]


def gpu() -> torch.device:
    torch.cuda.set_device(0)
    torch.set_num_threads(2)
    cases.small_chunks()
    return torch.device("cuda", 0)


def same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for one, other in zip(found, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )


def compare(name: str, world: int, job: Callable[[torch.device], Job]) -> Checks:
    """Both ways on the GPU against the CPU."""
    device = gpu()
    wanted = run(world, CPU, Way.PLAIN, job(CPU))
    return [(f"{name}, {world} ranks, {way.name}", same(run(world, device, way, job(device)), wanted)) for way in WAYS]


def check_spec(spec: str) -> Checks:
    found: Checks = []
    for number, algorithm in enumerate(cases.ALGORITHMS):
        for world in WORLDS:
            for n in (N, 100) if "--few" not in sys.argv else (N,):
                name, seed = f"{spec} by {algorithm}, {n} values", 20 * number + world
                found += compare(
                    name, world, lambda device, a=algorithm, n=n, s=seed: cases.all_reduces(spec, a, n, device, s)
                )
    return found


def check_others(spec: str) -> Checks:
    return compare(f"{spec}: parts of all-reduces, FSDP2's calls", 3, lambda device: cases.others(spec, 5001, device))


def check_backend_sums() -> Checks:
    found: Checks = []
    for algorithm, spec in cases.BY_BACKEND:
        found += compare(f"{spec} by {algorithm}", 4, lambda d, a=algorithm, s=spec: cases.all_reduces(s, a, N, d))
    return found


def check_forgotten_waits() -> Checks:
    """Each wait left out, one at a time: the result must be wrong, or these tests would prove nothing."""
    device, seeds = gpu(), itertools.count(500)
    late_ranks.CYCLES = VERY_LATE

    def right(way: Way, kind: type[DeviceStream] = DeviceStream, careful: bool = True) -> bool:
        # other values each time: memory may still hold what is right for the last ones
        seed = next(seeds)
        here, there = (cases.all_reduces("int8/256", "one_shot", N, where, seed) for where in (CPU, device))
        return same(run(2, device, way, there, kind, careful), run(2, CPU, Way.PLAIN, here))

    found = [(f"control: with all waits, {way.name}", right(way)) for way in WAYS]
    for name, (kind, ways) in FORGETFUL.items():
        found += [(f"noticed when not: {name}, {way.name}", not right(way, kind)) for way in ways]
    found.append(("noticed when not: the side stream waits for a round", not right(Way.ROUNDS, careful=False)))
    return found


def check_let_go() -> Checks:
    """Tensors that the caller lets go of while the side stream still needs them."""
    device, found = gpu(), list[tuple[str, bool]]()
    late_ranks.CYCLES = VERY_LATE
    wanted = run(2, CPU, Way.PLAIN, cases.let_go(N, CPU))
    for way in WAYS:
        found.append((f"tensors let go of, {way.name}", same(run(2, device, way, cases.let_go(N, device)), wanted)))
    lost = run(2, device, Way.ROUNDS, cases.let_go(N, device), late_ranks.NoKeep)
    found.append(("noticed when not: memory stays until the side stream is done", not same(lost, wanted)))
    return found


def check_no_host_waits() -> Checks:
    """Where the transport carries the device's memory, torch itself finds no call that waits for the device."""
    device, meeting = gpu(), threading.Barrier(2, timeout=60)

    def quiet(spec: str) -> Job:
        def job(rank: int, channel: Channel) -> str:
            x = torch.randn(N, device=device)
            for last in (False, True):
                meeting.wait()
                torch.cuda.synchronize()
                if last and rank == 0:
                    torch.cuda.set_sync_debug_mode("error")
                meeting.wait()
                try:
                    api.all_reduce(x, spec, step=1, algorithm="two_shot", channel=channel)
                except RuntimeError as error:
                    return f"{error!s} {error.__cause__!s}".splitlines()[0][:200]
                finally:
                    meeting.wait()
                    torch.cuda.set_sync_debug_mode("default")
            return ""

        return job

    found: Checks = []
    for spec in ("int8/256", "int4/128+sr", "e5m2+aps", "dtree8", "as-is"):
        waits = "".join(run(2, device, Way.ROUNDS, quiet(spec)))
        found.append((f"{spec}: nothing waits for the host {waits}", not waits))
    return found


def check_nccl() -> Checks:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29561")
    device = gpu()
    dist.init_process_group("nccl", rank=0, world_size=1, timeout=timedelta(seconds=60))
    found: Checks = []
    for check in (nccl_swap, nccl_ddp, nccl_auto, nccl_fsdp):
        found += guarded(check, device)[0]
    dist.destroy_process_group()
    return found


def nccl_swap(device: torch.device) -> Checks:
    """A rank may send to itself: the one round that NCCL does here."""
    transport = TorchTransport()
    sent = [cases.values(n, n).to(device).view(torch.uint8) for n in (1000, 7)]
    got, total = [torch.zeros_like(wire) for wire in sent], torch.arange(9, device=device, dtype=torch.int32)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(late_ranks.CYCLES)
        late = [wire.clone() for wire in sent]
        transport.swap([(wire, 0) for wire in late], [(wire, 0) for wire in got]).wait()
        arrived = [wire.clone() for wire in got]
        transport.max_(total)
    side.synchronize()
    right = all(torch.equal(a, b) for a, b in zip(arrived, sent, strict=True))
    checks = [("NCCL carries CUDA tensors", transport.carries(device)), ("NCCL: a round with itself", right)]
    checks.append(("NCCL: max", torch.equal(total.cpu(), torch.arange(9, dtype=torch.int32))))
    transport.close()
    return checks


def model_of(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)).to(device)


def trained(model: torch.nn.Module, device: torch.device, steps: int = 3) -> Tensor:
    """A few steps; all parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = cases.values(8 * 512, step % 3).view(8, 512).to(device)  # the next ones hold what no training survives
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def nccl_ddp(device: torch.device) -> Checks:
    plain = trained(DistributedDataParallel(model_of(device)), device)
    model = DistributedDataParallel(model_of(device))
    handle = nc.attach(model, "int8/256", min_values=0)
    found = trained(model, device)
    handle.detach()
    return [("NCCL, one rank: DDP attached trains as DDP", torch.equal(plain, found))]


def nccl_auto(device: torch.device) -> Checks:
    """The group has no backend for CPU tensors: what "auto" times must lie on the GPU, and by the GPU's clock."""
    steps = auto.WARM_UP + auto.WATCHED + 3
    plain = trained(DistributedDataParallel(model_of(device)), device, steps)
    model = DistributedDataParallel(model_of(device))
    handle = nc.attach(model, "auto", min_values=0)
    found = trained(model, device, steps)
    clock, channel = auto.DeviceClock(device), Channel(TorchTransport())
    late = auto._timed(lambda x: torch.cuda._sleep(VERY_LATE), 16, 1, clock)
    rates = auto.seconds_a_value(channel, dist.group.WORLD, clock)  # type: ignore[arg-type]
    channel.close()
    why = handle.explain().partition("\n")[0]
    handle.detach()
    return [
        (
            f"NCCL, one rank: {why}; it trains as DDP",
            "watching" not in why and bool(plain.isfinite().all()) and torch.equal(plain, found),
        ),
        (f"auto: the GPU's time counts, not the launch's: {float(late[0]):.3f} s", float(late[0]) > 0.03),
        ("auto: every wire has a time", all(bool((rate > 0).all()) for rate in rates.values())),
    ]


def nccl_fsdp(device: torch.device) -> Checks:
    mesh = init_device_mesh("cuda", (1,))
    plain, model = model_of(device), model_of(device)
    for one in (plain, model):
        for part in (one[0], one[2], one):  # type: ignore[index]
            fully_shard(part, mesh=mesh)
    handle = nc.attach(model, gradients="int8/256", parameters="e4m3fn/128")
    expected, found = trained(plain, device), trained(model, device)
    handle.detach()
    return [("NCCL, one rank: FSDP2 attached trains", bool(found.isfinite().all()) and found.shape == expected.shape)]


def guarded(check: Callable[..., Checks], *given: Any) -> tuple[Checks, float]:
    start = time.perf_counter()
    try:
        return check(*given), time.perf_counter() - start
    except Exception:  # noqa: BLE001  a check that fails must not hide the others
        return [(f"{check.__name__} {given}: {traceback.format_exc()[-1500:]}", False)], time.perf_counter() - start


def main() -> int:
    print(torch.cuda.get_device_name(0), "torch", torch.__version__, flush=True)
    specs = cases.SPECS if "--few" not in sys.argv else ("int4/128+sr+ef", "mxfp4")
    tasks: list[tuple[Callable[..., Checks], tuple[str, ...]]] = [(check_nccl, ())]
    tasks += [(check_spec, (spec,)) for spec in specs] + [(check_others, (spec,)) for spec in specs]
    tasks += [(check_backend_sums, ()), (check_no_host_waits, ())]
    bad = total = 0
    # by themselves: what is late must be late for these alone
    for alone in (check_forgotten_waits, check_let_go):
        found, seconds = guarded(alone)
        bad, total = bad + show(alone, (), found, seconds), total + len(found)
        for name, right in found:
            print("   ", "ok" if right else "WRONG", name, flush=True)
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(guarded, check, *given) for check, given in tasks]
        for (check, given), job in zip(tasks, jobs, strict=True):
            bad, total = bad + show(check, given, *job.result()), total + len(job.result()[0])
    print(f"streams: {total - bad} of {total} right", flush=True)
    return bad


def show(check: Callable[..., Checks], given: tuple[str, ...], found: Checks, seconds: float) -> int:
    wrong = [name for name, right in found if not right]
    print(f"{check.__name__} {' '.join(given)}: {len(found) - len(wrong)} of {len(found)}, {seconds:.0f} s", flush=True)
    for name in wrong:
        print("  WRONG", name, flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main() > 0)
