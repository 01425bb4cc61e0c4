"""Real training in the lab against predictions from `probe` and `profile` alone. Resumable: a row a line, appended."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowcast.lab import Lab, LabError, check_machine
from narrowcast.predict import Cluster, Profile, Setup, StepPredictor, costs, probe
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import model as model_file
from narrowcast.toml_file import FileError, parse_toml, read_text
from narrowcast_research.validation.lab_models import MODELS
from narrowcast_research.validation.metrics import Cell, Result, figures

SHIPPED = Path(__file__).with_name("data") / "lab"
HOSTS, RATES = (2, 4), ("100mbit", "1gbit", "10gbit")
WIRES = ("fp32", "bf16", "int8/256", "int4/128")
ROUNDS = {"100mbit": 5, "1gbit": 9, "10gbit": 15}
PROBE_SECONDS = 40
RUNS = "runs.jsonl"
ROW: dict[str, type] = {"hosts": int, "rate": str, "model": str, "profile": str, "seconds": dict}
GLOO = "gloo"
NOT_COUNTED = (4, "10gbit", GLOO)
"""Four hosts at 10 Gb/s: two processors are the limit there, not the link."""


@dataclass(frozen=True)
class Place:
    """One lab and one model."""

    hosts: int
    rate: str
    model: str


def grid(
    hosts: Sequence[int] = HOSTS, rates: Sequence[str] = RATES, models: Sequence[str] = tuple(MODELS)
) -> list[Place]:
    return [Place(h, rate, model) for rate in rates for h in hosts for model in models]


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows so far; a last line that was cut off is left out."""
    path = folder / RUNS
    *whole, _ = read_text(path).split("\n") if path.exists() else [""]
    return [_row(path, number, text) for number, text in enumerate(whole, 1) if text]


def _row(path: Path, number: int, text: str) -> dict[str, Any]:
    """A line, checked: a place, a profile, and the seconds of each wire."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}:{number}: no JSON ({error})") from None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), kind) for key, kind in ROW.items()):
        raise FileError(f"{path}:{number}: a row has {', '.join(ROW)}; remove the line, it is measured again")
    for wire, seconds in found["seconds"].items():
        if not isinstance(seconds, list) or not seconds or not all(_is_time(each) for each in seconds):
            raise FileError(f"{path}:{number}: seconds.{wire}: must be a list of numbers above 0")
    return found


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def missing(folder: Path, places: Sequence[Place]) -> list[Place]:
    have = {Place(row["hosts"], row["rate"], row["model"]) for row in read(folder)}
    return [place for place in places if place not in have]


def measure(folder: Path, places: Sequence[Place], wires: Sequence[str] = WIRES, gpu: bool = False) -> Iterator[Place]:
    """Measure what is missing, one line a place; a lab is probed when its first model is measured. gpu: with NCCL."""
    check_machine()
    backend = "nccl" if gpu else GLOO
    if others := {row.get("backend", GLOO) for row in read(folder)} - {backend}:
        raise ValueError(f"{folder}: has runs over {others.pop()}; give another folder for those over {backend}")
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing(folder, places):
        with Lab(place.hosts, place.rate, gpu=gpu) as lab:
            known = folder / f"cluster-{place.hosts}-{place.rate}.toml"
            if not known.exists():
                known.write_text(_probe(lab, place, backend, wires))
            row = _train(lab, place, backend, wires)
        with (folder / RUNS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        yield place


def _python(module: str, *words: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def _probe(lab: Lab, place: Place, backend: str, wires: Sequence[str]) -> str:
    name = f"lab of {place.hosts} hosts at {place.rate}"
    words = _python(probe.__name__, backend, PROBE_SECONDS, name, *wires)
    done = lab.run(words, capture=True, timeout=300).check()
    return done.text(0).partition(probe.MARK + "\n")[2]


def _train(lab: Lab, place: Place, backend: str, wires: Sequence[str]) -> dict[str, Any]:
    rounds = ROUNDS.get(place.rate, 7)
    words = _python("narrowcast_research.validation.lab_worker", backend, place.model, rounds, *wires)
    done = lab.run(words, capture=True, timeout=900).check()
    results = done.json_lines()
    if not results:
        raise LabError(f"{place}: rank 0 ended without a result; run the same command again")
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    where = {"hosts": place.hosts, "rate": place.rate, "backend": backend}
    return {**where, "model": place.model, "date": when, **results[-1]}


def _profile(row: dict[str, Any], folder: Path) -> Profile:
    return model_file.read_profile(parse_toml(row["profile"], f"{folder / RUNS}: {row['model']}"))


def predicted(folder: Path) -> Iterator[tuple[dict[str, Any], Profile, StepPredictor]]:
    """Each row with its profile and what predicts its steps."""
    clusters: dict[str, Cluster] = {}
    for row in read(folder):
        name = f"cluster-{row['hosts']}-{row['rate']}.toml"
        if name not in clusters:
            clusters[name] = cluster_file.load(folder / name)
        profile = _profile(row, folder)
        yield row, profile, StepPredictor(profile, costs.Costs(clusters[name]))


def cells(folder: Path) -> Iterator[Cell]:
    for row, _, steps in predicted(folder):
        for wire, seconds in row["seconds"].items():
            made = steps.predict(Setup(row["hosts"], wire))
            key = (row["model"], row["rate"], str(row["hosts"]), wire)
            counted = (row["hosts"], row["rate"], row.get("backend", GLOO)) != NOT_COUNTED
            yield Cell(key, statistics.median(seconds), made.step, counted, made.low, made.high)


def validate(folder: Path = SHIPPED) -> Result:
    """Measured steps beside predicted ones."""
    found = sorted(cells(folder), key=lambda c: (c.key[1], c.key[2], c.key[0]))
    counted = [cell for cell in found if cell.counted]
    notes = []
    if len(found) != len(counted):
        notes.append("4 hosts at 10 Gb/s are shown and not counted: two processors are the limit there")
    return Result(
        name="lab",
        title="Training in the lab, seconds a step",
        fitted="nothing; the link, codecs and overlap come from `probe`, the model's times from steps"
        " without communication on all ranks",
        columns=("model", "rate", "hosts", "wire"),
        cells=found,
        figures=figures(found, case=lambda cell: cell.key[:3]),
        targets={"mape": ("<=", 10.0), "largest": ("<=", 25.0), "decisions": (">=", 0.9)},
        notes=notes,
        unit="ms",
        scale=1e3,
    )
