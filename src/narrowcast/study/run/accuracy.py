"""One training of a study, in the simulator: as many workers as on the cluster, and the same bits."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

from narrowcast.simulate.training.files import Record
from narrowcast.simulate.training.train import Run, train
from narrowcast.simulate.world.world import World
from narrowcast.study import datasets, models
from narrowcast.study.analysis import compressed
from narrowcast.study.cases import Case
from narrowcast.study.run.worker import end_with_parent

LOOKS = 4
"""How often in a training the error of each layer is measured."""


def job_of(case: Case) -> dict[str, Any]:
    """What a training needs to know, for JSON."""
    assert case.grid is not None
    options = {key: getattr(case.grid, key) for key in ("batch", "epochs", "lr", "examples", "tests", "min_values")}
    axes = {key: getattr(case, key) for key in ("model", "data", "wire", "algorithm", "seed")}
    return {"case": case.id, **axes, **options, "workers": case.layout.workers, "nodes": case.layout.nodes}


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Train, and say how it went: the result fields of a line."""
    began = time.perf_counter()
    examples = datasets.load(job["data"], job["examples"], job["tests"])
    model = models.build(job["model"], examples, job["seed"])
    batch = job["batch"] * job["workers"]
    steps = max(1, round(job["epochs"] * (len(examples.x_train) // batch)))
    nodes = job["nodes"] if job["algorithm"] == "hierarchical" else None
    run = train(
        model,
        examples,
        workers=World(job["workers"], job["algorithm"], nodes=nodes, seed=job["seed"]),
        spec=job["wire"],
        min_values=job["min_values"],
        steps=steps,
        batch=batch,
        # to zero in a straight line: the last steps then settle, and runs can be compared
        lr=lambda step: job["lr"] * (1 - step / steps),
        seed=job["seed"],
        error_every=max(1, steps // LOOKS),
    )
    return {**_ended(run, examples.positions), "seconds": time.perf_counter() - began}


def _ended(run: Run, positions: int) -> dict[str, Any]:
    curve = [_point(record, positions) for record in run.history]
    return {
        "accuracy": curve[-1]["accuracy"],
        "loss": curve[-1]["loss"],
        "epochs": run.epoch,
        "steps_per_epoch": run.batches.steps_per_epoch,
        "curve": curve,
        "layers": _layers(run),
        "compressed": compressed.share(run.exchange.rows()),
    }


def _point(record: Record, positions: int) -> dict[str, Any]:
    return {"epoch": record["epoch"], "accuracy": 100 * record["accuracy"] / positions, "loss": record["loss"]}


def _layers(run: Run) -> list[dict[str, Any]]:
    """The mean over the looks, of every layer that lost something."""
    values = {row.name: row.numel for row in run.exchange.rows()}
    looks: dict[str, list[Record]] = {}
    for record in run.log.of_kind("error"):
        if record["relative_error"]:
            looks.setdefault(record["name"], []).append(record)
    return [{"name": name, "values": values[name], **_mean(found)} for name, found in looks.items()]


def _mean(looks: list[Record]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for key in ("bias", "snr_db", "flushed", "saturated"):
        known = [look[key] for look in looks if look[key] is not None]
        found[key] = statistics.fmean(known) if known else None
    return found


def main() -> None:
    """A process that trains what it is told, line by line: a job in, a result out."""
    end_with_parent()
    torch.set_num_threads(1)
    for text in sys.stdin:
        job = json.loads(text)
        try:
            found = {"case": job["case"], "result": run_job(job)}
        except Exception as error:  # noqa: BLE001  whatever it is, it belongs to this case alone
            found = {"case": job["case"], "error": f"{type(error).__name__}: {error}".replace("\n", " ")}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
