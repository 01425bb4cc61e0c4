"""A rank of `check_nccl.py`: `nccl_features.py training` trains as people do, `nccl_features.py levels` on two levels,
`nccl_features.py activations` times what pipelines, experts and tensor parallelism send. Over Gloo without a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from nccl_rank import DEVICE, VALUES, Check, begin, is_equal_everywhere, say
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel.expert import Routes, all_to_all
from narrowcast.parallel.pipeline import Boundary
from narrowcast.parallel.wires import Wires
from narrowcast.selftest import Given, same, values
from narrowcast.simulate import World

STEPS, WIDTH, BATCH = 4, 512, 64
SPEC = "int8/256"
ROUNDS = 9
SIZES_MB = (4, 16, 64) if DEVICE.type == "cuda" else (1,)
"""Of the values in bf16."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))


def train(spec: str | None, how: str) -> tuple[Tensor, float]:
    """All parameters after a few steps, and how many times fewer bytes the gradients took."""
    inner = network().to(DEVICE)
    model = DDP(inner, static_graph=how == "static_graph", gradient_as_bucket_view=True)
    handle = None if spec is None else nc.attach(model, spec)
    run = torch.compile(model) if how == "compile" else model
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0) if how == "scaler" else None
    kind = torch.bfloat16 if how == "autocast" or DEVICE.type == "cpu" else torch.float16
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    source = torch.Generator().manual_seed(dist.get_rank())
    parts = 2 if how == "accumulation" else 1
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=how != "static_graph")
        for part in range(parts):
            x = torch.randn(BATCH, WIDTH, generator=source).to(DEVICE)
            with (
                model.no_sync() if part + 1 < parts else nullcontext(),
                torch.autocast(DEVICE.type, kind) if how in ("autocast", "scaler") else nullcontext(),
            ):
                loss = run(x).float().square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    ratio = 1.0 if handle is None else handle.stats()["ratio"]
    if handle is not None:
        handle.detach()
    return torch.cat([p.detach().flatten() for p in inner.parameters()]), ratio


def training(rank: int, world: int) -> Iterator[Check]:
    """The parameters are equal on all ranks, near those of plain DDP, and not those: something was rounded."""
    for how in ("plain loop", "compile", "static_graph", "autocast", "scaler", "accumulation"):
        exact, _ = train(None, how)
        found, ratio = train(SPEC, how)
        start = torch.cat([p.detach().flatten() for p in network().parameters()]).to(DEVICE)
        apart = (found - exact).norm() / (exact - start).norm()
        good = is_equal_everywhere(found) and 0 < apart.item() < 0.02 and ratio > 3
        yield f"{how}: {apart.item():.4f} of the way apart from plain DDP, {ratio:.2f} times fewer bytes", good


def levels(rank: int, world: int) -> Iterator[Check]:
    """Two hosts of two ranks: 8 bits inside a host, 4 with feedback between; against the simulator, with feedback."""
    nodes, outer, inner = [[0, 1], [2, 3]], "int4/128+ef", "int8/256"
    model = DDP(Given(VALUES).to(DEVICE))
    handle = nc.attach(model, outer, nodes=nodes, inner=inner)
    simulated, good = World(world, "hierarchical", outer, nodes=nodes, inner=inner), True
    for step in range(3):
        model.zero_grad()
        model(values(rank, step, VALUES + 999).to(DEVICE)).backward()
        inputs = torch.stack([values(peer, step, VALUES + 999) for peer in range(world)])
        wanted = simulated.all_reduce(inputs[:, :VALUES].contiguous(), "avg", step=step)[0]
        good = good and same(model.module.large.grad, wanted) and is_equal_everywhere(model.module.large.grad)
    handle.detach()
    yield f"two levels: {inner} inside, {outer} between", good
    yield from level_times(nodes)


def level_times(nodes: list[list[int]]) -> Iterator[Check]:
    """An all-reduce of 100 MB on two levels beside the backend's bf16 sum and the same wire on one level, in turn."""
    x = torch.randn(26_214_400 if DEVICE.type == "cuda" else 100_000, device=DEVICE)
    total, half = x.clone(), x.bfloat16()
    between = partial(nc.all_reduce, total, "int4/128", nodes=nodes)
    calls = {
        "bf16 sum": partial(dist.all_reduce, half),
        "int4/128, one level": partial(nc.all_reduce, total, "int4/128"),
        "int4/128 between, int8/256 inside": partial(between, inner="int8/256"),
        "int4/128 between, as-is inside": between,
    }
    for call in calls.values():
        timed(call)
    rounds = [{name: timed(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in calls}
    for name, ms in medians.items():
        # over Gloo the codec's time counts, and nobody asks
        good = ms <= medians["bf16 sum"] or DEVICE.type == "cpu"
        yield f"2 x 2 ranks, {name}: {ms:.2f} ms, {medians['bf16 sum'] / ms:.2f}x", good


def timed(call: Callable[[], object]) -> float:
    """Milliseconds that the slowest rank takes."""
    dist.barrier()
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    took = torch.tensor([1e3 * (time.perf_counter() - began)], device=DEVICE)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def activations(rank: int, world: int) -> Iterator[Check]:
    """Each way beside the backend's own in bf16, in turn; median of the rounds."""
    for megabytes in SIZES_MB:
        rows = megabytes * 2**19 // 1024
        x = torch.randn(rows, 1024, device=DEVICE).bfloat16()
        for name, plain, ours in ways(x, rank, world):
            for call in (plain, ours, plain, ours):
                timed(call)
            pairs = [(timed(plain), timed(ours)) for _ in range(ROUNDS)]
            theirs, own = (statistics.median(column) for column in zip(*pairs, strict=True))
            # over Gloo the codec's time counts, and nobody asks
            good = own <= theirs or DEVICE.type == "cpu"
            yield f"{name}, {megabytes} MB: bf16 {theirs:.2f} ms, {SPEC} {own:.2f} ms, {theirs / own:.2f}x", good


def uneven_counts(rows: int, rank: int, world: int) -> list[int]:
    """Of rows to each rank: some a half more than others."""
    share = rows // (2 * world)
    return [share + share * ((rank + peer) % 3) // 2 for peer in range(world)]


Way = tuple[str, Callable[[], object], Callable[[], object]]


def ways(x: Tensor, rank: int, world: int) -> Iterator[Way]:
    """What travels, the backend's own call, and ours."""
    y, flat = torch.empty_like(x), x.flatten()
    yield "tensor parallel, all_reduce", lambda: dist.all_reduce(x.clone()), lambda: nc.all_reduce(flat.clone(), SPEC)
    wires = Wires(SPEC)
    for how, leaving in (("even", [len(x) // world] * world), ("uneven", uneven_counts(len(x), rank, world))):
        routes = Routes.exchange(leaving, device=DEVICE)
        there = torch.empty(sum(routes.arriving), x.shape[1], device=DEVICE, dtype=x.dtype)
        mine = x[: sum(leaving)]

        def plain(routes: Routes = routes, there: Tensor = there, mine: Tensor = mine) -> None:
            dist.all_to_all_single(there, mine, list(routes.arriving), list(routes.leaving))

        yield f"experts, {how} rows", plain, partial(all_to_all, mine, wires, routes)

        def with_counts(leaving: list[int] = leaving, mine: Tensor = mine) -> None:
            """As a layer of experts does, whose counts are known on the device and needed on the host."""
            counts = torch.tensor(leaving, device=DEVICE)
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts)
            rows = arriving.tolist()
            dist.all_to_all_single(mine.new_empty(sum(rows), mine.shape[1]), mine, rows, leaving)

        yield f"experts, {how} rows and their counts", with_counts, partial(all_to_all, mine, wires, leaving)
    boundary = Boundary(x.shape, SPEC, number=x.numel(), dtype=x.dtype)
    envelope = torch.empty(boundary.words, device=DEVICE)

    def passed_on(leaving: Tensor | None, arriving: Tensor) -> None:
        """From each even rank to the next."""
        if rank % 2 == 0 and rank + 1 < world and leaving is not None:
            dist.send(leaving, rank + 1)
        elif rank % 2:
            dist.recv(arriving, rank - 1)

    def sealed() -> None:
        passed_on(boundary.seal(x) if rank % 2 == 0 else None, envelope)
        if rank % 2:
            boundary.open(envelope)

    yield "pipeline", lambda: passed_on(x, y), sealed

    def message() -> None:
        if rank % 2 == 0 and rank + 1 < world:
            nc.send(flat, SPEC, rank + 1)
        elif rank % 2:
            nc.recv(y.view(-1), SPEC, rank - 1)

    yield "send and recv", lambda: passed_on(x, y), message


if __name__ == "__main__":
    rank, world = begin(120)
    for what, good in {"training": training, "levels": levels, "activations": activations}[sys.argv[1]](rank, world):
        if rank == 0 or not good:
            say(check=what, good=good, rank=rank)
    dist.destroy_process_group()
