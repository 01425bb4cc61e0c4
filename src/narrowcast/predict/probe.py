"""Measures a cluster: links by message size and collective, codecs idle and busy, and what overlap costs.

Runs on every rank of a process group. Each timing is the slowest rank's, exchanged at once, so that all ranks hold the
same numbers to the last bit.

A rank, as the lab or torchrun starts it:
python -m narrowcast.predict.probe gloo|nccl SECONDS NAME WIRE... [model=TARGET [input=SHAPE]]
Rank 0 prints {"cluster": the file's text} as lines of JSON: what is known after each part, the last one complete.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.measure import (
    DeviceClock,
    LoadWatch,
    MatrixSum,
    first_decides,
    from_barrier,
    mean,
    rank_device,
    run_rank,
    slowest,
    tell_progress,
)
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import loop
from narrowcast.predict.cluster import MOST_BUSY, Cluster, CodecSpeed, CollectiveTimings, Device, Level, Overlap, Points
from narrowcast.predict.probed_calls import Background, Call, backend_sum, gather, swap, two_shot

WIRES = ("fp32", "bf16", "int8/256", "int4/128", "int4/128+ef")
SIZES = (*tuple(1 << power for power in range(12, 26, 2)), 24 << 20)
"""Bytes of the tensors: 4 KiB to 16 MiB in steps of four, and about a bucket of DDP."""
WIRE_SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 24)
TWO_SIZES = (SIZES[0], *WIRE_SIZES)
"""For two nodes of several: few, since all of them are what is asked about."""
LEAST_LATENCY = 0.1
"""Of what the smallest call takes by its steps: two timings that are nearly equal do not say that there is none."""
LARGEST_ON_GPU = 96 << 20
"""Models of GPUs have embeddings, each a bucket of DDP that is larger than its cap."""
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
BACKGROUND, GPU_BACKGROUND = 1 << 18, 1 << 22
"""Values of the sums that run beside compute and codecs. On a GPU as many as a bucket has: a small one's time is its
launches, which wait for the host and for products under way, a bucket's is the link's."""
WORK, GPU_WORK = 384, 4096
"""Side of the matrices whose products stand for compute. A GPU's must keep it busy for longer than launching takes."""
WORK_ROUNDS, GPU_WORK_ROUNDS = 5 * ROUNDS, 100
"""How often; beside sums for longer than several of them take."""


Jobs = Sequence[tuple[str, str, Call, Sequence[int]]]
"""Collectives to time: the kind, the wire, the call and the sizes."""


def _quickest(table: CollectiveTimings) -> float:
    """Of the smallest size."""
    return min(table.points[0][1:])


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

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

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
        larger = (LARGEST_ON_GPU,) if self.is_gpu else ()
        sizes, wire_sizes = (*SIZES, *larger), (*WIRE_SIZES, *larger)
        jobs = [("all_reduce", "fp32", backend_sum, sizes), ("two_shot", "fp32", two_shot("fp32"), sizes)]
        jobs += [("all_gather", "fp32", gather, FEW_SIZES), ("send", "fp32", swap, FEW_SIZES)]
        # a call by low rank is two sums of few values, which the others tell the time of
        whole = [wire for wire in self.wires if wire != "fp32" and not codec_named(wire).rank]
        jobs += [("two_shot", wire, two_shot(wire), wire_sizes) for wire in whole]
        tables = tuple(self._tables(name, jobs, group, ranks, member, until))
        last = tables[0].points[-1]
        gbit = 2 * (ranks - 1) / ranks * last[0] * 8 / min(last[1:]) / 1e9
        latency = _quickest(tables[0]) / (2 * (ranks - 1))
        return Level(name, most, gbit, 1e6 * latency, tables=tables, timed_gbit=gbit)

    def between_two(self, level: Level, group: dist.ProcessGroup | None, member: bool, until: float) -> Level:
        """A level with tables of two of its members, too, and with the latency that each further member adds: a call
        by itself costs something that is no latency."""
        jobs = [("all_reduce", "fp32", backend_sum, TWO_SIZES), ("two_shot", "fp32", two_shot("fp32"), TWO_SIZES)]
        pair = tuple(self._tables("two nodes", jobs, group, 2, member, until))
        whole = level.tables[0]
        further = (_quickest(whole) - _quickest(pair[0])) / (2 * (whole.ranks - 2))
        latency = min(level.latency_us, max(LEAST_LATENCY * level.latency_us, 1e6 * further))
        return replace(level, latency_us=latency, tables=(*level.tables, *pair))

    def _tables(
        self, name: str, jobs: Jobs, group: dist.ProcessGroup | None, ranks: int, member: bool, until: float
    ) -> Iterator[CollectiveTimings]:
        for kind, wire, run, sizes in jobs:
            self.tell(f"{name}: {kind}" if wire == "fp32" else f"{name}: {kind} of {wire}")
            yield CollectiveTimings(kind, ranks, self.table(run, sizes, group, member, until), wire)

    def table(
        self, run: Call, sizes: Sequence[int], group: dist.ProcessGroup | None, member: bool, until: float
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
        # on a GPU the two threads would wait for each other's turn in the interpreter, which those of training do not
        both = (0.0, 0.0) if self.is_gpu else self.beside(two_shot(wire))
        return CodecSpeed(wire, encode, decode, max(1.0, slowest([slower])[0]), *both)

    def beside(self, run: Call) -> tuple[float, float]:
        """How many times slower compute is beside collectives that run on and on, and these beside compute."""
        values, rounds = (GPU_BACKGROUND, GPU_WORK_ROUNDS) if self.is_gpu else (BACKGROUND, WORK_ROUNDS)
        x = torch.linspace(-1, 1, values, dtype=torch.float32, device=self.device)
        together = self.mean_seconds(self._work, rounds)
        quiet = self.mean_seconds(lambda: run(x, None), 3 * ROUNDS)
        with self.background(run, values) as moved:
            busy = self.mean_seconds(self._work, rounds)
        slow = mean([moved.seconds_each])[0]
        return max(1.0, busy / together), max(1.0, slow / quiet)

    def background(self, run: Call | None = None, values: int = 0) -> Background:
        if not self._side:
            self._side = [dist.new_group()]
        return Background(self.device, self._side[0], run or backend_sum, values or BACKGROUND)

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
        return Overlap(*self.beside(backend_sum), together=max(1.0, together / alone))

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
        # GPUs train in 16 bits, mostly
        side, dtype = (GPU_WORK, torch.bfloat16) if self.is_gpu else (WORK, torch.float32)
        if not self._weights:
            self._weights = [torch.ones(n, n, dtype=dtype, device=self.device) for n in (side, 4 * side)]
        x = self._weights[0]
        for _ in range(4):
            x = x @ self._weights[0] * 1e-3
        torch.ones(16, 4 * side, dtype=dtype, device=self.device) @ self._weights[1]

    def work_seconds(self) -> float:
        """Of the same work at the begin and at the end: a machine that does something else in between shows."""
        return statistics.median(self.mean_seconds(self._work, ROUNDS) for _ in range(ROUNDS))

    def copy_speed(self) -> float:
        """GB/s read and written by a large copy."""
        x = torch.ones(1 << 22, dtype=torch.float32, device=self.device)
        y = torch.empty_like(x)
        return 8 * x.numel() / self.mean_seconds(lambda: y.copy_(x)) / 1e9


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
    *_, whole = probe_in_parts(wires, seconds, name, tell, model, shape)
    return whole


def probe_in_parts(
    wires: Sequence[str],
    seconds: float,
    name: str,
    tell: Callable[[str], None] = lambda text: None,
    model: str = "",
    shape: str = "",
) -> Iterator[Cluster]:
    """The cluster as far as it is measured: its links, its device and what overlap costs, then codec by codec; last
    what else the machine did meanwhile, and steps of the model.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise ValueError("probe: needs a process group of two ranks or more; start it with torchrun or in the lab")
    # a wrong name fails here, not after all has been measured
    trained = loop.prepare(model, shape) if model else None
    prober = Prober(seconds, tell, wires, local_device())
    if prober.is_gpu:
        torch.cuda.set_device(prober.device)
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size()
    local, nodes = (local, world // local) if local > 1 and world % local == 0 else (1, world)
    watch, before = LoadWatch(), prober.work_seconds()
    made = Cluster(name, tuple(_levels(prober, local, nodes)), measured=True)
    processor = f"cpu: {platform.machine()}, {os.cpu_count()} cores"
    device = torch.cuda.get_device_name(prober.device) if prober.is_gpu else processor
    backend = "nccl" if prober.is_gpu else dist.get_backend()
    today = time.strftime("%Y-%m-%d", time.gmtime())
    source = f"narrowcast probe on {local} x {nodes} ranks, {backend}, torch {torch.__version__}, {today}"
    made = replace(made, device=Device(device, memory_gbyte=prober.copy_speed()), source=source)
    yield _agreed(made)
    made = replace(made, overlap=prober.overlap())
    yield _agreed(made)
    for wire in wires:
        made = replace(made, codecs=(*made.codecs, prober.codec(wire)))
        yield _agreed(made)
    drift = abs(math.log(prober.work_seconds() / before))
    made = replace(made, busy=min(MOST_BUSY, watch.together()), drift=drift)
    yield _agreed(made)
    if trained:
        tell(f"steps of {model}")
        module, batch = trained
        yield _agreed(loop.measure(made, module.to(prober.device), batch.to(prober.device), model))


def _levels(prober: Prober, local: int, nodes: int) -> Iterator[Level]:
    if local > 1:
        own = [dist.new_group([node * local + i for i in range(local)]) for node in range(nodes)]
        yield prober.link("inside a node", own[dist.get_rank() // local], local, local, True, 0.25)
    if nodes > 1:
        firsts = [node * local for node in range(nodes)]
        every, rank = dist.new_group(firsts), dist.get_rank()
        level = prober.link("between nodes", every, nodes, 0, rank in firsts, 0.7)
        if nodes > 2:
            level = prober.between_two(level, dist.new_group(firsts[:2]), rank in firsts[:2], 0.8)
        yield level


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
    made = probe_in_parts(wires, float(seconds), name, tell_progress, more.get("model", ""), more.get("input", ""))
    run_rank(lambda: ({"cluster": cluster_file.dump(part)} for part in made), backend == "nccl")


if __name__ == "__main__":
    main()
