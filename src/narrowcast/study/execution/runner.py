"""Runs a study: what is not done yet, in the file's order, each result on the disk before the next case begins."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import narrowcast
from narrowcast.lab import parse_rate
from narrowcast.measure import describe_machine
from narrowcast.predict import Cluster, Profile, load_cluster, load_profile
from narrowcast.study.cases import LOOPBACK, Case, Place, Setting, expand, settings
from narrowcast.study.execution import launch, predicted
from narrowcast.study.execution.accuracy import TrainingPool
from narrowcast.study.execution.launch import Launcher, LaunchError
from narrowcast.study.execution.progress import Progress, kind_of
from narrowcast.study.execution.results import Results, ResultsError, latest
from narrowcast.study.file import KINDS, StudyFile
from narrowcast.study.jobs import CaseMeasured, LinkMeasured, RankJob, RankMessage, SettingBegins


@dataclass(frozen=True)
class Options:
    """How to run a study."""

    out: Path
    launcher: str = "auto"
    budget: float | None = None
    """Seconds after which no new case begins."""
    only: tuple[str, ...] = ()
    """Kinds of cases to run; none: all."""
    processes: int = 0
    """For trainings in the simulator; 0: one for each processor."""
    quiet: bool = False


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    folder: Path
    total: int
    done: int
    failed: int
    left: int
    """Not begun: the budget was used up."""
    seconds: float


def run(study: StudyFile, options: Options) -> Outcome:
    """Run what is missing; a second call with the same folder goes on."""
    launcher = launch.choose(options.launcher)
    try:
        with Results(options.out) as results:
            check_same(study, results)
            grids = expand(study, launcher.name)
            # from here on the folder is this study's: what can be refused was
            results.append(**session(study, launcher.name))
            return _Runner(study, options, launcher, results).run(grids)
    finally:
        launcher.end()


def check_same(study: StudyFile, results: Results) -> None:
    """A folder holds one study: cases of another version of it would look alike and not be comparable."""
    for before in results.sessions()[-1:]:
        if before.get("text") != study.text:
            raise ResultsError(
                f"{results.folder}: holds results of {before.get('study')!r} as it was before its file was changed; "
                "give --out another folder, or remove this one"
            )


def session(study: StudyFile, launcher: str) -> dict[str, Any]:
    own = {name: getattr(study, name) for name in ("margin", "primary", "baseline", "targets")}
    versions = {"narrowcast": narrowcast.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "kind": "session",
        "study": study.name,
        "text": study.text,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "launcher": launcher,
        "machine": describe_machine(),
        "versions": versions,
        "commit": commit(),
        **own,
    }


def commit() -> str | None:
    """Of the source tree that this package runs from, with + where it has changes; None where it is installed."""
    root = Path(narrowcast.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head, changes = _git(root, "rev-parse", "--short=12", "HEAD"), _git(root, "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changes else "")


def _git(root: Path, *words: str) -> str:
    # safe.directory: the tree may belong to another user
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


@dataclass(frozen=True)
class ResultRecorder:
    """Writes what a case gave, and tells the progress."""

    results: Results
    progress: Progress

    def done(self, case: Case, facts: dict[str, Any]) -> None:
        self.results.append(**case.axes(), status="done", **{"seconds": 0.0, **facts})
        self.progress.ended(case, "done")

    def failed(self, case: Case, error: str, seconds: float = 0.0) -> None:
        self.results.append(**case.axes(), status="failed", error=error, seconds=seconds)
        self.progress.ended(case, "failed", error)


class _Runner:
    def __init__(self, study: StudyFile, options: Options, launcher: Launcher, results: Results) -> None:
        self.study, self.options, self.launcher, self.results = study, options, launcher, results
        self.began = time.time()
        self.deadline = None if options.budget is None else self.began + options.budget
        self.kept = Kept(results.folder)
        self.starts = 0

    def in_time(self) -> bool:
        return self.deadline is None or time.time() < self.deadline

    def run(self, every_grid: Sequence[Sequence[Case]]) -> Outcome:
        kinds = self.options.only or KINDS
        grids = [[case for case in grid if kind_of(case) in kinds] for grid in every_grid]
        every = [case for grid in grids for case in grid]
        with Progress(self.study.name, every, self.results.done(), self.options.quiet) as progress:
            self.record = ResultRecorder(self.results, progress)
            self._all(grids)
            if not self.in_time():
                progress.note("the budget is used up; run the same command again to go on")
        known = {name: line.get("status") for name, line in latest(self.results.lines).items()}
        ended = [known.get(case.id) for case in every]
        done, failed, left = (sum(status == name for status in ended) for name in ("done", "failed", None))
        return Outcome(self.results.folder, len(every), done, failed, left, time.time() - self.began)

    def _all(self, grids: Sequence[Sequence[Case]]) -> None:
        """Grid by grid; ranks that are there already measure everything first, and then need not wait."""
        if self.launcher.waits:
            for grid in grids:
                self._measure(self._missing(grid))
            self.launcher.end()
        for grid in grids:
            if not self.launcher.waits:
                self._measure(self._missing(grid))
            self._predict([case for case in self._missing(grid) if case.source == "predicted"])
            self._train([case for case in self._missing(grid) if case.source == "simulated"])

    def _missing(self, grid: Sequence[Case]) -> list[Case]:
        done = self.results.done()
        return [case for case in grid if case.id not in done]

    def _measure(self, cases: Sequence[Case]) -> None:
        measured = [case for case in cases if case.source == "measured"]
        other = [case for case in measured if not self.launcher.fits(case)]
        if other:
            ranks = ", ".join(sorted({f"{case.layout} workers over {case.transport}" for case in other}))
            self.record.progress.note(f"left out: {len(other)} cases with {ranks}; {self.launcher.name} has none")
        mine = settings([case for case in measured if self.launcher.fits(case)])
        for place, group in groupby(mine, key=lambda setting: setting.place):
            if self.in_time():
                self._launch(place, list(group))

    def _launch(self, place: Place, waiting: list[Setting]) -> None:
        """Settings of one place in one start of ranks; what fails is tried again by itself, and the rest goes on."""
        probe = self._probe_seconds(place, waiting)
        while waiting and self.in_time():
            self.record.progress.doing(f"{place.layout} workers, {place.rate_name}, {place.transport}")
            start = _RankStart(waiting, self._next_start())
            try:
                self._start(place, start, probe)
                return
            except LaunchError as error:
                if start.at is None and probe:
                    self.record.progress.note(f"{place.slug}: measuring the link failed: {error}; going on without")
                    probe = 0.0
                    continue
                waiting = self._after_failure(place, start, waiting, str(error))
            probe = 0.0

    def _next_start(self) -> str:
        """A name that no other start of ranks has, of whatever session: wires of one start took turns."""
        self.starts += 1
        return f"{self.results.sessions()[-1]['started']} {self.starts}"

    def _start(self, place: Place, start: _RankStart, probe: float) -> None:
        job = RankJob(
            name=f"{self.launcher.name} of {place.layout} workers at {place.rate_name}",
            transport=place.transport,
            deadline=self.deadline,
            probe_seconds=probe,
            probe_wires=predicted.PROBED,
            settings=tuple(start.settings),
        )
        self.launcher.run(place, job, lambda message: self._take(place, start, message))

    def _after_failure(self, place: Place, start: _RankStart, waiting: list[Setting], error: str) -> list[Setting]:
        """Record, or try again wire by wire; the settings that remain."""
        if start.at is None:
            for case in (case for setting in waiting for case in setting.cases):
                self.record.failed(case, error, start.seconds)
            return []
        missing = [case for case in waiting[start.at].cases if case.id not in start.measured]
        if len(missing) == 1:
            self.record.failed(missing[0], error, start.seconds)
        else:
            for case in missing:
                self._alone(place, case)
        return waiting[start.at + 1 :]

    def _alone(self, place: Place, case: Case) -> None:
        """One wire by itself, after its setting failed."""
        start = _RankStart([Setting((case,))], self._next_start())
        try:
            self._start(place, start, 0.0)
        except LaunchError as error:
            if case.id not in start.measured:
                self.record.failed(case, str(error), start.seconds)

    def _take(self, place: Place, start: _RankStart, message: RankMessage) -> None:
        """What the ranks tell, as it comes."""
        if isinstance(message, LinkMeasured):
            self.kept.write(place.slug, message.cluster)
        elif isinstance(message, SettingBegins):
            start.at = message.number
            first = start.settings[start.at].first
            what = f"{first.model} on {first.data}" if first.model else "collectives alone"
            self.record.progress.doing(f"{what}, {place.layout} workers, {place.rate_name}, {place.transport}")
        elif isinstance(message, CaseMeasured):
            setting = start.settings[message.setting]
            case = next(case for case in setting.cases if case.id == message.case)
            start.measured.add(case.id)
            facts = {**message.result, "start": start.name}
            if message.profile:
                self.kept.write(setting.slug, message.profile)
            if case.kind == "time":
                facts |= predicted.beside(case, self.kept.profile(setting.slug), self._link(case))
            self.record.done(case, facts)

    def _link(self, case: Case) -> Cluster | None:
        """As it was measured, or as it follows from a measurement at another rate."""
        own = self.kept.cluster(Place(case.layout, case.rate_name, case.transport).slug)
        if own is not None or case.grid is None or not case.grid.probe_at or case.rate is None:
            return own
        base = self.kept.cluster(Place(case.layout, case.grid.probe_at, case.transport).slug)
        share = case.rate / parse_rate(case.grid.probe_at).bits_per_second
        return None if base is None else base.with_bandwidth(share * base.levels[-1].bandwidth_gbit)

    def _probe_seconds(self, place: Place, waiting: Sequence[Setting]) -> float:
        """0 where the link is known already, or nobody asks."""
        if place.transport != "gloo" or self.kept.cluster(place.slug) is not None:
            return 0.0
        grids = [setting.first.how for setting in waiting if setting.first.kind == "time"]
        named = (place.rate_name, "") if self.launcher.name == "lab" else None
        asking = [grid for grid in grids if named is None or grid.probe_at in named]
        return max([grid.probe_seconds for grid in asking], default=0.0)

    def _predict(self, cases: Sequence[Case]) -> None:
        if cases:
            self.record.progress.doing("predictions")
        for case in cases:
            began = time.perf_counter()
            try:
                facts = self._prediction(case)
            except ValueError as error:
                self.record.failed(case, str(error))
                continue
            if facts is not None:
                self.record.done(case, {**facts, "seconds": time.perf_counter() - began})

    def _prediction(self, case: Case) -> dict[str, Any] | None:
        """None: what it rests on was not measured, since the budget was used up or it failed."""
        if case.how.kind == "predicted":
            return predicted.on_cluster(case)
        place = Place(case.layout, LOOPBACK, case.transport)
        like = Case("time", "measured", case.model, case.data, case.wire, case.algorithm, case.layout, LOOPBACK, "gloo")
        profile, cluster = self.kept.profile(Setting((like,)).slug), self.kept.cluster(place.slug)
        return None if profile is None or cluster is None else predicted.at_rate(case, profile, cluster)

    def _train(self, cases: Sequence[Case]) -> None:
        if not cases or not self.in_time():
            return
        self.record.progress.doing("training in the simulator")
        by_id = {case.id: case for case in cases}
        pool = TrainingPool(self.options.processes or describe_machine()["cores"] or 1)
        for trained in pool.run(cases, self.in_time):
            if trained.result is not None:
                self.record.done(by_id[trained.case], trained.result)
            else:
                self.record.failed(by_id[trained.case], trained.error)


@dataclass
class _RankStart:
    """Where a start of ranks is."""

    settings: Sequence[Setting]
    name: str
    at: int | None = None
    measured: set[str] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Kept:
    """Measured links and models, as files in the study's folder: predictions rest on them, and people can use them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "measured"

    def _file(self, slug: str) -> Path:
        return self._folder / f"{slug}.toml"

    def write(self, slug: str, text: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / f".{slug}.{os.getpid()}"
        part.write_text(text)
        part.replace(self._file(slug))

    def cluster(self, slug: str) -> Cluster | None:
        return load_cluster(self._file(slug)) if self._file(slug).is_file() else None

    def profile(self, slug: str) -> Profile | None:
        return load_profile(self._file(slug)) if self._file(slug).is_file() else None


def every_case(study: StudyFile, launcher: str) -> Iterator[Case]:
    return (case for grid in expand(study, launcher) for case in grid)
