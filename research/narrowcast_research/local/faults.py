"""Faults under elastic local updates, in a lab: what the others see, how long they stand still, and what is lost.

python -m narrowcast_research.local.faults --out faults.json      (root, and narrowcast[elastic]; minutes)
Hosts train a small model under torchft; host 0 has the lighthouse. Two runs, `each` with one fault of every kind and
`random` with --faults drawn from --seed; a run that is in --out is not made again. It prints a table of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from narrowcast.lab import Job, Lab, LabError
from narrowcast.lab import Line as Said
from narrowcast_research.local.member import NAME as MEMBER
from narrowcast_research.local.member import Course
from narrowcast_research.local.sums import Record, law
from narrowcast_research.wires.page import table

KINDS = ("joins", "killed in an exchange", "killed between two", "cut", "store's host killed", "lighthouse killed")
PORT, HEARTBEAT, JOIN = 29510, 1.0, 15.0
LONGEST = 240.0
LOOK = 0.05


@dataclass(frozen=True)
class Fault:
    """What happens at which step, to whom, and for how long it is cut or away."""

    kind: str
    step: int
    host: int
    seconds: float


def each(setting: Course, cut: float) -> list[Fault]:
    """One of every kind; the last host comes at its step."""
    hosts = {"joins": setting.hosts, "lighthouse killed": 0}
    seconds = {"cut": cut, "joins": 0.0}
    kinds = enumerate(KINDS)
    return [
        Fault(kind, setting.spacing * (n + 1), hosts.get(kind, 1 + n % 3), seconds.get(kind, 2.0)) for n, kind in kinds
    ]


def drawn(setting: Course, number: int, seed: int) -> list[Fault]:
    """Without "joins" by itself: whoever is killed comes again, as a new one."""
    draw, kinds = random.Random(seed), [kind for kind in KINDS if kind != "joins"]
    made = []
    for n in range(number):
        kind = draw.choices(kinds, (8, 8, 6, 4, 4))[0]
        host = 0 if kind == "lighthouse killed" else draw.randint(1, setting.hosts)
        made.append(Fault(kind, setting.spacing * (n + 1), host, round(draw.uniform(0.5, 4.0), 1)))
    return made


class Cluster:
    """The members' hosts, what they write down, and the lighthouse."""

    def __init__(self, lab: Lab, folder: Path, setting: Course, absent: set[int]) -> None:
        self.lab, self.folder, self.setting = lab, folder, setting
        self.jobs: dict[int, Job] = {}
        self.lives: dict[int, int] = defaultdict(int)
        self.records: dict[int, list[Record]] = defaultdict(list)
        self.fell: list[dict[str, Any]] = []
        self._read: dict[Path, int] = {}
        self._said: dict[int, list[str]] = defaultdict(list)
        self.start_lighthouse()
        for host in range(1, setting.hosts + 1):
            if host not in absent:
                self.start(host)

    def _on(self, host: int, words: list[str]) -> Job:
        script = f'test "$GROUP_RANK" != {host} || exec "$0" "$@"'
        return self.lab.start(["sh", "-c", script, *words], keep=True, output=self._hear)

    def _hear(self, line: Said) -> None:
        self._said[line.host] = [*self._said[line.host][-30:], line.text]

    def start_lighthouse(self) -> None:
        program = str(Path(sys.executable).parent / "torchft_lighthouse")
        facts = {"min_replicas": 1, "join_timeout_ms": int(1e3 * JOIN), "heartbeat_timeout_ms": int(1e3 * HEARTBEAT)}
        words = [word for name, value in facts.items() for word in (f"--{name}", str(value))]
        self._on(0, [program, "--bind", f"[::]:{PORT}", *words])

    def start(self, host: int) -> None:
        self.lives[host] += 1
        words = {"folder": str(self.folder), "host": host, "life": self.lives[host], "port": PORT}
        arguments = json.dumps({**words, "setting": asdict(self.setting)})
        self.jobs[host] = self._on(host, [sys.executable, "-m", MEMBER, arguments])

    def look(self) -> None:
        """Read what is new, and start whoever ended with an error again."""
        for path in self.folder.glob("*.jsonl"):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read().rpartition("\n")
            self._read[path] = self._read.get(path, 0) + len(whole + end)
            self.records[int(path.name.split(".")[0])] += map(json.loads, whole.splitlines())
        for host, job in list(self.jobs.items()):
            if not job.running:
                if not any(job.wait().codes):
                    continue
                self.fell.append({"host": host, "t": time.monotonic(), "said": self._said[host][-3:]})
                self.start(host)

    def until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LONGEST
        while not done():
            if time.monotonic() > end or (self.over() and not done()):
                said = {host: words[-8:] for host, words in self._said.items()}
                raise LabError(f"not seen in {LONGEST:.0f} s, or before all steps were done: {what}; {said}")
            time.sleep(LOOK)
            self.look()

    def last(self, host: int, kind: str) -> Record:
        return next((r for r in reversed(self.records[host]) if r["kind"] == kind), {})

    @property
    def step(self) -> int:
        return max((self.last(host, "step").get("step", 0) for host in self.jobs), default=0)

    def together(self, since: float) -> bool:
        """All have made an exchange with all since."""
        lasts = [self.last(host, "exchange") for host in self.jobs]
        return all(r.get("t", 0.0) > since and r["members"] == len(lasts) for r in lasts)

    def over(self) -> bool:
        return not any(job.running for job in self.jobs.values())

    def kill(self, fault: Fault) -> int:
        """Kill -9 to all of a host; which it was."""
        host = fault.host
        if fault.kind.startswith("store"):
            host = int(self.last(next(iter(self.jobs)), "begins")["store"].removeprefix("host"))
        elif fault.kind.endswith("exchange"):
            job, order = self.jobs[host], self.folder / f"die.{host}"
            order.touch()
            while job.running:
                time.sleep(LOOK / 5)
            order.unlink()
        else:
            middle = self.setting.every // 2
            self.until(lambda: self.last(host, "step").get("step", 0) % self.setting.every == middle, "a step")
        job = self.jobs.pop(host)
        self.lab.kill(host)
        job.wait(10)
        return host

    def make(self, fault: Fault) -> int:
        """Make a fault, and what ends it; returns whom it met."""
        host = fault.host
        if fault.kind == "cut":
            self.lab.cut(host)
        elif fault.kind.startswith("lighthouse"):
            self.lab.kill(0)
        elif fault.kind != "joins":
            host = self.kill(fault)
        end = time.monotonic() + fault.seconds
        while time.monotonic() < end:
            time.sleep(LOOK)
            self.look()
        if fault.kind == "cut":
            self.lab.heal(host)
        elif fault.kind.startswith("lighthouse"):
            self.start_lighthouse()
        else:
            self.start(host)
        return host


def through(cluster: Cluster, fault: Fault) -> dict[str, Any]:
    """Wait for the fault's step, make it, and wait until all are together again; what was seen."""
    cluster.until(lambda: cluster.step >= fault.step, f"step {fault.step}")
    began, step, fallen = time.monotonic(), cluster.step, len(cluster.fell)
    there = set(cluster.jobs)
    host = cluster.make(fault)
    mended = time.monotonic()
    cluster.until(lambda: cluster.together(mended), f"all together after {fault}")
    end = time.monotonic()
    others = {other: seen(cluster.records[other], began, end) for other in sorted(there - {host})}
    sys.stderr.write(f"{step}: {fault.kind}, host {host}: {[o['still'] for o in others.values()]} s\n")
    fell = [f"host {who['host']}: {who['said']}" for who in cluster.fell[fallen:]]
    facts = {"kind": fault.kind, "host": host, "step": step, "seconds": fault.seconds, "took": round(end - began, 2)}
    return facts | {"others": others, "fell": fell}


def seen(records: Sequence[Record], began: float, end: float) -> dict[str, Any]:
    """By one of the others: how long it made no step, and the attempts that failed."""
    times = [r["t"] for r in records if r["kind"] == "step"]
    gaps = [after - before for before, after in itertools.pairwise(times) if after > began and before < end]
    failed = [r["error"] for r in records if r["kind"] == "failed" and began <= r["t"] <= end]
    return {"still": round(max(gaps, default=0.0), 2), "failed": [text[:160] for text in failed]}


def play(setting: Course, faults: Sequence[Fault], folder: Path) -> Iterator[tuple[str, Any]]:
    """A whole run; facts for its line."""
    absent = {fault.host for fault in faults if fault.kind == "joins"}
    with Lab(setting.hosts + 1, setting.rate, delay=setting.delay) as lab:
        cluster = Cluster(lab, folder, setting, absent)
        began = time.monotonic()
        yield "faults", [through(cluster, fault) for fault in faults]
        cluster.until(cluster.over, "the end")
        cluster.look()
        yield "seconds", round(time.monotonic() - began, 1)
    yield "fell", cluster.fell
    yield "ended", {h: {k: cluster.last(h, "ended").get(k) for k in ("steps", "exchanges")} for h in cluster.jobs}
    yield "law 8", law(cluster.records)
    yield "loss", curve(cluster.records, setting)
    yield "usual", usual(cluster.records, setting)


def usual(records: dict[int, list[Record]], setting: Course) -> float:
    """The median time from step to step where an exchange is between."""
    found = []
    for own in records.values():
        steps = [r for r in own if r["kind"] == "step"]
        pairs = itertools.pairwise(steps)
        found += [after["t"] - before["t"] for before, after in pairs if after["step"] % setting.every == 0]
    return round(statistics.median(found), 3)


def curve(records: dict[int, list[Record]], setting: Course) -> list[tuple[int, float]]:
    """The mean loss of all hosts, by half the steps between two faults."""
    found: dict[int, list[float]] = defaultdict(list)
    width = max(1, setting.spacing // 2)
    for r in (r for own in records.values() for r in own if r["kind"] == "step"):
        found[r["step"] // width * width].append(r["loss"])
    return [(step, round(statistics.fmean(losses), 4)) for step, losses in sorted(found.items())]


def table_of(runs: Sequence[dict[str, Any]]) -> str:
    """As Markdown: a row for every kind of fault of a run."""
    rows = [("run", "fault", "times", "others stood still, s: median", "most", "exchanges they made again")]
    for run in runs:
        for kind in KINDS:
            of_kind = [other for f in run["faults"] if f["kind"] == kind for other in f["others"].values()]
            times = sum(fault["kind"] == kind for fault in run["faults"])
            if of_kind:
                still = [other["still"] for other in of_kind]
                numbers = f"{statistics.median(still):.1f}", f"{max(still):.1f}"
                again = max(len(other["failed"]) for other in of_kind)
                rows.append((run["name"], kind, str(times), *numbers, f"at most {again}"))
    return table(rows)


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="The file of runs.")
    parser.add_argument("--faults", type=int, default=30, help="Of the random run.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=("each", "random"), default=["each", "random"])
    parser.add_argument("--cut", type=float, default=20.0, help="Seconds, of the run with one of each.")
    parser.add_argument("--hosts", type=int, default=4, help="That train.")
    parser.add_argument("--spacing", type=int, default=200, help="Steps from a fault to the next.")
    parser.add_argument("--pace", type=float, default=0.04, help="Seconds that a step takes at least.")
    chosen = parser.parse_args(words)
    runs = json.loads(chosen.out.read_text()) if chosen.out.exists() else []
    setting = Course(hosts=chosen.hosts, spacing=chosen.spacing, pace=chosen.pace, seed=chosen.seed)
    planned = {"each": each(setting, chosen.cut), "random": drawn(setting, chosen.faults, chosen.seed)}
    for name in chosen.only:
        own = replace(setting, steps=setting.spacing * (len(planned[name]) + 3))
        same = {"name": name, "setting": asdict(own), "planned": [asdict(fault) for fault in planned[name]]}
        if any(same.items() <= run.items() for run in runs):
            continue
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            runs.append({**same, "began": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())})
            runs[-1] |= dict(play(own, planned[name], Path(folder)))
        chosen.out.write_text(json.dumps(runs) + "\n")
    sys.stdout.write(table_of(runs) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
