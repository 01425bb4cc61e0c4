"""Measures a cluster: links by message size and collective, codecs idle and busy, and what overlap costs.

Runs on every rank of a process group. Each timing is the slowest rank's, exchanged at once, so that all ranks hold the
same numbers to the last bit.

A rank, as the lab or torchrun starts it:
python -m narrowcast.predict.probe gloo|nccl SECONDS NAME WIRE... [model=TARGET [input=SHAPE]]
Rank 0 prints the file after a line with MARK.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.measure import (
    DeviceClock,
    LoadWatch,
    MatrixSum,
    WireSum,
    first_decides,
    from_barrier,
    mean,
    process_group,
    rank_device,
    slowest,
)
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import loop
from narrowcast.predict.cluster import MOST_BUSY, Cluster, CodecSpeed, CollectiveTimings, Device, Level, Overlap, Points

MARK = "# narrowcast cluster"
WIRES = ("fp32", "bf16", "int8/256", "int4/128", "int4/128+ef")
SIZES = (*tuple(1 << power for power in range(12, 26, 2)), 24 << 20)
"""Bytes of the tensors: 4 KiB to 16 MiB in steps of four, and about a bucket of DDP."""
WIRE_SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)
FEW_SIZES, ENOUGH = WIRE_SIZES[:3], 3
"""For what gradients hardly use; and how many sizes are timed even when time is up."""
CODEC_VALUES = (1 << 14, 1 << 18, 1 << 21)
MATRICES = 16
"""Of small ones, timed together: their vectors are made orthonormal one by one, which takes a hundred kernels."""
ROUNDS, FEW_ROUNDS = 7, 3
LONG = 1.0
"""After a collective that takes so many seconds the next size is left out."""
STRETCH, MOST_CALLS = 0.02, 2
"""Quick calls are timed in twos, as `attach` makes them: for a bucket's large tensors, and for its small ones."""
BACKGROUND = 1 << 18
"""Values of the sums that run beside compute and codecs."""
WORK = 384
"""Side of the matrices whose products stand for compute."""


@dataclass
class Prober:
    """The measurements of one rank; every method is collective."""

    seconds: float = 60.0
    """About how long all of it may take."""
    tell: Callable[[str], None] = lambda text: None
    wires: Sequence[str] = WIRES
    device: torch.device = torch.device("cpu")
    """Where the tensors lie that travel and are encoded."""
    _began: float = field(default_factory=time.monotonic)
    _weights: list[Tensor] = field(default_factory=list)
    _side: list[dist.ProcessGroup] = field(default_factory=list)
    """One for all sums that run beside something: NCCL takes its time to connect."""

    @property
    def clock(self) -> DeviceClock:
        return DeviceClock(self.device)

    def mean_seconds(self, call: Callable[[], object], rounds: int = 5 * ROUNDS) -> float:
        """Seconds a call over a stretch that is long beside a processor's time slices; the mean over the ranks."""
        self.clock.timed(call)
        return mean([self.clock.timed(call, rounds)])[0]

    def has_time_left(self, share: float) -> bool:
        """Whether less than this share of the time is spent; rank 0's clock decides."""
        return first_decides(time.monotonic() - self._began < share * self.seconds)

    def link(
        self, name: str, group: dist.ProcessGroup | None, ranks: int, most: int, member: bool, until: float
    ) -> Level:
        """Latency, bandwidth and tables of the links between the members of a group; others only wait."""
        jobs = [("all_reduce", "fp32", _plain, SIZES), ("two_shot", "fp32", _two_shot("fp32"), SIZES)]
        jobs += [("all_gather", "fp32", _gather, FEW_SIZES), ("send", "fp32", _swap, FEW_SIZES)]
        # a call by low rank is two sums of few values, which the others tell the time of
        whole = [wire for wire in self.wires if wire != "fp32" and not codec_named(wire).rank]
        jobs += [("two_shot", wire, _two_shot(wire), WIRE_SIZES) for wire in whole]
        tables = []
        for kind, wire, run, sizes in jobs:
            self.tell(f"{name}: {kind}" if wire == "fp32" else f"{name}: {kind} of {wire}")
            points = self.table(run, sizes, group, member, until)
            tables.append(CollectiveTimings(kind, ranks, points, wire))
        last = tables[0].points[-1]
        best = min(last[1:])
        latency = min(tables[0].points[0][1:]) / (2 * (ranks - 1))
        gbit = 2 * (ranks - 1) / ranks * last[0] * 8 / best / 1e9
        return Level(name, most, gbit, 1e6 * latency, tables=tuple(tables), timed_gbit=gbit)

    def table(
        self, run: _Run, sizes: Sequence[int], group: dist.ProcessGroup | None, member: bool, until: float
    ) -> Points:
        rows: list[tuple[float, ...]] = []
        for size in sizes:
            x = torch.linspace(-1, 1, size // 4, dtype=torch.float32, device=self.device)
            call = functools.partial(run, x, group)
            once = functools.partial(self._round, call, group, member)
            once(1)
            first = once(1)
            few = first > LONG / ROUNDS
            # ranks leave a barrier up to milliseconds apart, which counts half so
            calls = max(1, min(MOST_CALLS, int(STRETCH / max(first, 1e-6))))
            times = [once(calls) for _ in range(FEW_ROUNDS - 1 if few else ROUNDS * calls)]
            rows.append((float(size), *([first] if few else []), *times))
            if first > LONG or (len(rows) >= ENOUGH and not self.has_time_left(until)):
                break
        return tuple(rows)

    def _round(self, call: Callable[[], object], group: dist.ProcessGroup | None, member: bool, calls: int) -> float:
        """The slowest member's seconds a call; who is no member only waits."""
        return slowest([from_barrier(call, self.clock, group, calls) if member else 0.0])[0]

    def codec(self, wire: str) -> CodecSpeed:
        """Speeds with all ranks at work at once, idle and beside a collective that runs on and on."""
        self.tell(f"codec {wire}")
        encode, decode = (tuple(self.codec_row(wire, n, way) for n in CODEC_VALUES) for way in ("encode", "decode"))
        with self.background():
            busy = self.codec_row(wire, CODEC_VALUES[1], "encode")
        slower = statistics.fmean(busy[1:]) / statistics.fmean(encode[1][1:])
        both = self.beside(_two_shot(wire))
        return CodecSpeed(wire, encode, decode, max(1.0, slowest([slower])[0]), *both)

    def beside(self, run: _Run) -> tuple[float, float]:
        """How many times slower compute is beside collectives that run on and on, and these beside compute."""
        x = torch.linspace(-1, 1, BACKGROUND, dtype=torch.float32, device=self.device)
        together = self.mean_seconds(self._work)
        quiet = self.mean_seconds(lambda: run(x, None), 3 * ROUNDS)
        with self.background(run) as moved:
            busy = self.mean_seconds(self._work)
        slow = mean([moved.seconds_each])[0]
        return max(1.0, busy / together), max(1.0, slow / quiet)

    def background(self, run: _Run | None = None) -> _background:
        if not self._side:
            self._side = [dist.new_group()]
        return _background(self.device, self._side[0], run or _plain)

    def codec_row(self, wire: str, values: int, way: str) -> tuple[float, ...]:
        codec, x = codec_named(wire), torch.randn(values, dtype=torch.float32, device=self.device)
        calls = max(1, (1 << 18) // values)
        if codec.rank:
            add = MatrixSum(x, codec)
            add.products()()
            few = min(calls, MATRICES)
            return (float(values), *mean([self._matrix_seconds(add, way, few) for _ in range(ROUNDS)]))
        bytes_ = codec.encode(x)

        def work() -> None:
            for _ in range(calls):
                codec.encode(x, out=bytes_) if way == "encode" else codec.decode(bytes_, values, out=x)

        self.clock.timed(work)
        times = [self.clock.timed(work) / calls for _ in range(ROUNDS)]
        return (float(values), *mean(times))

    def _matrix_seconds(self, add: MatrixSum, way: str, calls: int) -> float:
        """By low rank: encoding is the products, decoding what is made of the factors."""
        begun: list[Callable[[], None]] = []
        took = self.clock.timed(lambda: begun.append(add.products()), calls)
        if way == "encode":
            return took
        return self.clock.timed(lambda: [finish() for finish in begun]) / calls

    def overlap(self) -> Overlap:
        """Compute alone, with all ranks at once, and beside collectives; collectives beside compute."""
        self.tell("compute beside communication")
        alone, together = self._one_at_a_time(), self.mean_seconds(self._work)
        return Overlap(*self.beside(_plain), together=max(1.0, together / alone))

    def _one_at_a_time(self) -> float:
        mine = 0.0
        for rank in range(min(2, dist.get_world_size())):
            dist.barrier()
            if rank == dist.get_rank():
                self.clock.timed(self._work)
                mine = self.clock.timed(self._work, 5 * ROUNDS)
        dist.barrier()
        return slowest([mine])[0]

    def _work(self) -> None:
        """Products that fit the cache, and one with a matrix that does not: training has both."""
        if not self._weights:
            self._weights = [torch.ones(n, n, dtype=torch.float32, device=self.device) for n in (WORK, 4 * WORK)]
        x = self._weights[0]
        for _ in range(4):
            x = x @ self._weights[0] * 1e-3
        torch.ones(16, 4 * WORK, dtype=torch.float32, device=self.device) @ self._weights[1]

    def work_seconds(self) -> float:
        """Of the same work at the begin and at the end: a machine that does something else in between shows."""
        return statistics.median(self.mean_seconds(self._work, ROUNDS) for _ in range(ROUNDS))

    def copy_speed(self) -> float:
        """GB/s read and written by a large copy."""
        x = torch.ones(1 << 22, dtype=torch.float32, device=self.device)
        y = torch.empty_like(x)
        return 8 * x.numel() / self.mean_seconds(lambda: y.copy_(x)) / 1e9


_Run = Callable[[Tensor, "dist.ProcessGroup | None"], object]


def _plain(x: Tensor, group: dist.ProcessGroup | None) -> object:
    return dist.all_reduce(x, group=group)


def _gather(x: Tensor, group: dist.ProcessGroup | None) -> object:
    """Everybody's part of x, by all."""
    world = dist.get_world_size(group)
    # Gloo wants equal parts, and worlds need not be powers of two
    parts = [*x[: len(x) // world * world].view(world, -1)]
    return dist.all_gather(parts, parts[dist.get_rank(group)].clone(), group=group)


def _swap(x: Tensor, group: dist.ProcessGroup | None) -> object:
    """Neighbours exchange x; of an odd number of ranks the last one waits."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    peer = rank ^ 1
    if peer >= world:
        return None
    other = peer if group is None else dist.get_global_rank(group, peer)
    # together: NCCL sends nothing before the peer's receive is asked for, and both ask for their own first
    both = [dist.P2POp(dist.isend, x, other, group), dist.P2POp(dist.irecv, torch.empty_like(x), other, group)]
    return [message.wait() for message in dist.batch_isend_irecv(both)]


def _two_shot(wire: str) -> _Run:
    codec = codec_named(wire)
    if codec.rank:
        return _matrix_sums(codec)
    # as `attach` does where small tensors of a bucket travel apart: a list, which is gathered and written back
    parts = 1 if codec.lossless else 2

    def run(x: Tensor, group: dist.ProcessGroup | None) -> None:
        WireSum(x, codec, parts=parts, op=dist.ReduceOp.AVG, algorithm="two_shot", group=group)()

    return run


def _matrix_sums(codec: Codec) -> _Run:
    made: dict[object, MatrixSum] = {}

    def run(x: Tensor, group: dist.ProcessGroup | None) -> None:
        if group not in made:
            made[group] = MatrixSum(x, codec, op=dist.ReduceOp.AVG, algorithm="two_shot", group=group)
        made[group]()

    return run


class _background:
    """Inside the block a thread sums tensors with the other ranks, one after the other; on a stream of its own."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup, run: _Run) -> None:
        self.seconds_each, self._device, self._group, self._call = 0.0, device, group, run
        self._stop = torch.zeros(1)

    def __enter__(self) -> _background:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        if self._device.type == "cpu":
            self._sum(lambda: None)
            return
        # both are each thread's own
        torch.cuda.set_device(self._device)
        own = torch.cuda.Stream(self._device)
        with torch.cuda.stream(own):
            self._sum(own.synchronize)

    def _sum(self, wait: Callable[[], object]) -> None:
        x, stop = torch.linspace(-1, 1, BACKGROUND, dtype=torch.float32, device=self._device), torch.zeros(1)
        count, began = 0, time.perf_counter()
        while True:
            self._call(x, self._group)
            count += 1
            if count % 4 == 0:
                wait()
                stop.copy_(self._stop)
                dist.all_reduce(stop, group=self._group)
                if stop.item() >= dist.get_world_size():
                    break
        self.seconds_each = (time.perf_counter() - began) / count

    def __exit__(self, *error: object) -> None:
        self._stop.fill_(1.0)
        self._thread.join()


def local_device() -> torch.device:
    """This rank's accelerator where its group speaks NCCL, the processor otherwise."""
    return rank_device(torch.cuda.is_available() and "nccl" in dist.get_backend_config())


def probe(
    wires: Sequence[str] = WIRES,
    seconds: float = 60.0,
    name: str = "cluster",
    tell: Callable[[str], None] = lambda text: None,
    model: str = "",
    shape: str = "",
) -> Cluster:
    """Measure the cluster of the default process group. Collective; all ranks return the same.

    model: whose DDP steps calibrate the timeline; shape: of its inputs.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ValueError("probe: needs a process group of two ranks or more; start it with torchrun or in the lab")
    prober = Prober(seconds, tell, wires, local_device())
    is_cuda = prober.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(prober.device)
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size()
    local, nodes = (local, world // local) if local > 1 and world % local == 0 else (1, world)
    watch, before = LoadWatch(), prober.work_seconds()
    levels = list(_levels(prober, local, nodes))
    codecs = tuple(prober.codec(wire) for wire in wires)
    overlap, speed = prober.overlap(), prober.copy_speed()
    processor = f"cpu: {platform.machine()}, {os.cpu_count()} cores"
    backend = "nccl" if is_cuda else dist.get_backend()
    device = Device(torch.cuda.get_device_name(prober.device) if is_cuda else processor, memory_gbyte=speed)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    source = f"narrowcast probe on {local} x {nodes} ranks, {backend}, torch {torch.__version__}, {today}"
    drift = abs(math.log(prober.work_seconds() / before))
    busy = min(MOST_BUSY, watch.together())
    made = Cluster(name, tuple(levels), device, overlap, codecs, True, source, busy=busy, drift=drift)
    if model:
        tell(f"steps of {model}")
        made = loop.measure_named(made, model, shape, prober.device)
    return _agreed(made)


def _levels(prober: Prober, local: int, nodes: int) -> Iterator[Level]:
    if local > 1:
        own = [dist.new_group([node * local + i for i in range(local)]) for node in range(nodes)]
        yield prober.link("inside a node", own[dist.get_rank() // local], local, local, True, 0.25)
    if nodes > 1:
        first = dist.new_group([node * local for node in range(nodes)])
        member = dist.get_rank() % local == 0
        yield prober.link("between nodes", first, nodes, 0, member, 0.75)


def _agreed(made: Cluster) -> Cluster:
    """Rank 0's numbers for all: the few that are not reduced (the name of a processor) may differ.

    They travel as the text of a cluster file, which is read strictly: what comes from another process is never
    unpickled.
    """
    mine = torch.tensor(list(cluster_file.dump(made).encode()), dtype=torch.uint8)
    size = torch.tensor([len(mine)])
    dist.broadcast(size, 0)
    text = mine if dist.get_rank() == 0 else mine.new_empty(int(size))
    dist.broadcast(text, 0)
    return cluster_file.parse(bytes(text.tolist()).decode(), "the cluster that rank 0 has measured")


def main() -> None:
    backend, seconds, name, *words = sys.argv[1:]
    wires = [word for word in words if not word.startswith(("model=", "input="))]
    more = dict(word.split("=", 1) for word in words if word not in wires)
    with process_group(backend == "nccl"):
        made = probe(wires, float(seconds), name, model=more.get("model", ""), shape=more.get("input", ""))
        if dist.get_rank() == 0:
            sys.stdout.write(f"{MARK}\n{cluster_file.dump(made)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
