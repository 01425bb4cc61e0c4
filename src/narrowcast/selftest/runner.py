"""The checks, one after another on all ranks; who failed; a short bench; and one verdict."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.bench import collectives as bench
from narrowcast.collectives import Channel, TorchTransport, channel_of
from narrowcast.measure import DeviceClock, until_all_done
from narrowcast.parallel import nodes_by_host
from narrowcast.selftest.checks import QUICK, SECTIONS, Found, Scope, kernels

BUDGET = 40.0
"""Seconds of checks; what does not fit is listed as left out. The bench comes after."""
BENCH_WIRES, BENCH_ROUNDS, BENCH_SECONDS = ("int8/256", "int4/128"), 3, 0.2
PROBE_VALUES, MOST_VALUES = 1 << 18, 1 << 24
WORTH_IT = 0.95
"""Below this share of the backend's better time, few bits are said to pay."""
Say = Callable[[str], None]


@dataclass
class Report:
    """What was found on all ranks."""

    where: str
    ranks: int
    hosts: int = 1
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Of each: its name, the ranks on which it failed, and whether ranks hold different bits."""
    left_out: list[str] = field(default_factory=list)
    """Sections that time has cut off."""
    bench: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""
    """What ended it before its end."""

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [check for check in self.checks if check["failed_ranks"]]

    @property
    def ok(self) -> bool:
        return not self.failed and not self.error

    @property
    def pays(self) -> bool | None:
        """Whether a wire beats the better of the backend's own sums; None where nothing was timed."""
        wires = [row["ms"] for row in self.bench if row["wire"] in BENCH_WIRES]
        own = [row["ms"] for row in self.bench if row["wire"] in (bench.FLOAT, bench.HALF)]
        return min(wires) < WORTH_IT * min(own) if wires and own else None

    def verdict(self) -> str:
        """One line."""
        where = f"{self.ranks} rank{'s' * (self.ranks > 1)} of {self.hosts} host{'s' * (self.hosts > 1)}, {self.where}"
        if self.error:
            return f"FAILED on {where}: {self.error}"
        if self.failed:
            first, more = self.failed[0], len(self.failed) - 1
            ranks = ", ".join(map(str, sorted({rank for check in self.failed for rank in check["failed_ranks"]})))
            others = f", and {more} other checks" if more else ""
            return f"FAILED on {where}: rank {ranks}; {first['name']}: {first['fault']}{others}"
        return f"PASSED on {where}: {len(self.checks)} checks in {self.seconds:.0f} s{self._cut()}; {self._speed()}"

    def _cut(self) -> str:
        return f", cut off in {', '.join(self.left_out)}" if self.left_out else ""

    def _speed(self) -> str:
        if self.pays is None:
            return "nothing travels between ranks here: start it with torchrun to check collectives and speed"
        ms = {row["wire"]: row["ms"] for row in self.bench}
        best, mb = min(BENCH_WIRES, key=ms.__getitem__), self.bench[0]["mb"]
        times = ", ".join(f"{wire} {ms[wire]:.3g}" for wire in (bench.FLOAT, bench.HALF, *BENCH_WIRES))
        word = "few bits pay here" if self.pays else "this link is so fast that few bits do not pay here"
        faster = ms[bench.FLOAT] / ms[best], ms[bench.HALF] / ms[best]
        compared = f"{best} {faster[0]:.2f}x as fast as fp32 and {faster[1]:.2f}x as bf16"
        return f"{word}: a sum of {mb:.3g} MB in ms: {times}; {compared}"

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "ok": self.ok, "pays": self.pays, "verdict": self.verdict()}


class Ledger:
    """What all ranks found in a check, on every rank: through a channel of its own, so that it outlives theirs."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._began = channel, time.monotonic()

    def add(self, result: Found) -> tuple[dict[str, Any], float]:
        """The check over all ranks, and the seconds so far by the clock of rank 0. Collective."""
        spent = round(1e3 * (time.monotonic() - self._began))
        halves = divmod(result.bits, 1 << 16)
        rows = self._channel.gather(torch.tensor([bool(result.fault), *halves, spent], dtype=torch.int32), result.name)
        bits = [(int(row[1]), int(row[2])) for row in rows]
        usual = Counter(bits).most_common(1)[0][0]
        differ = [rank for rank, own in enumerate(bits) if own != usual]
        wrong = {rank for rank, row in enumerate(rows) if row[0]} | set(differ)
        fault = self._first_fault(result.fault, wrong)
        if differ and not fault:
            fault = "ranks hold different bits"
        return {"name": result.name, "failed_ranks": sorted(wrong), "fault": fault}, float(rows[0][3]) / 1e3

    def _first_fault(self, own: str, wrong: set[int]) -> str:
        """In its own words: that of the first rank that has one. Collective where a rank failed."""
        if not wrong:
            return ""
        text = own.encode()[:400]
        lengths = self._channel.gather(torch.tensor([len(text)], dtype=torch.int32), "length of a fault")
        padded = text.ljust(max(int(length) for length in lengths), b"\0") or b"\0"
        everyones = self._channel.gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8), "fault")
        spoken = (bytes(one.tolist()[: int(n)]) for one, n in zip(everyones, lengths, strict=True))
        return next((one.decode(errors="replace") for one in spoken if one), "")


def run(at: Scope, where: str, say: Say, quick: bool = False) -> Report:
    """All checks and the bench, on every rank of the default group; the same report on each. Collective."""
    channel = Channel(TorchTransport(None))
    report, began = Report(where, at.world), time.monotonic()
    doing = "start"
    try:
        report.hosts = len(nodes_by_host(channel))
        chosen = Scope(at.rank, at.world, at.device, QUICK if quick else at.specs, at.values)
        ledger = Ledger(channel)
        for doing, section in SECTIONS.items():
            report.checks += _section(report, ledger, doing, section(chosen), say)
        doing = "bench"
        report.bench = [] if report.failed else _bench(at, quick)
        for row in report.bench:
            say(f"{row['wire']:<10} {row['ms']:>9.3f} ms {row['over_fp32']:>6.2f}x fp32 {row['over_bf16']:>6.2f}x bf16")
    except Exception as error:  # noqa: BLE001  whatever it is: the other ranks must hear of it, and a verdict follows
        report.error = f"{doing}: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
        for one in (channel, channel_of(None)):
            one.fail(error)
    finally:
        channel.close()
    report.seconds = time.monotonic() - began
    return report


def _section(report: Report, ledger: Ledger, title: str, results: Iterator[Found], say: Say) -> list[dict[str, Any]]:
    """A section's checks over all ranks, until time is up."""
    found: list[dict[str, Any]] = []
    for result in results:
        check, spent = ledger.add(result)
        found.append(check)
        if check["failed_ranks"]:
            ranks = ", ".join(map(str, check["failed_ranks"]))
            say(f"FAILED  {check['name']}: rank {ranks}: {check['fault']}")
        if spent > BUDGET:
            report.left_out.append(title)
            break
    bad = sum(1 for check in found if check["failed_ranks"])
    say(f"{title:<36} {len(found) - bad} of {len(found)} passed")
    return found


def _bench(at: Scope, quick: bool) -> list[dict[str, Any]]:
    """The backend's own sums beside two wires, on as many values as a moment carries. Collective."""
    x, clock = torch.ones(PROBE_VALUES, device=at.device), DeviceClock(at.device)
    seconds = [until_all_done(lambda: dist.all_reduce(x), clock) for _ in range(3)]
    each = statistics.median(seconds) / PROBE_VALUES
    most = PROBE_VALUES if quick else MOST_VALUES
    count = min(most, max(PROBE_VALUES, int(BENCH_SECONDS / each)))
    rows: Sequence[dict[str, Any]] = list(bench.measure_size(count, BENCH_WIRES, BENCH_ROUNDS, at.device))
    return [row for row in rows if row["wire"] in (bench.FLOAT, bench.HALF, *BENCH_WIRES)]


def run_alone(device: torch.device, say: Say, quick: bool = False) -> Report:
    """One process: its kernels, and nothing that travels."""
    report, began = Report("one process", 1), time.monotonic()
    at = Scope(0, 1, device, QUICK) if quick else Scope(0, 1, device)
    for result in kernels(at):
        failed = [0] if result.fault else []
        report.checks.append({"name": result.name, "failed_ranks": failed, "fault": result.fault})
        if failed:
            say(f"FAILED  {result.name}: {result.fault}")
    report.seconds = time.monotonic() - began
    return report
