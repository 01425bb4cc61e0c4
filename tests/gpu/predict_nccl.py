"""By hand on a machine with a GPU, root and MPS: DDP steps on NCCL beside what `narrowcast predict` says of them.

    PYTHONPATH=src:research python3 tests/gpu/predict_nccl.py measure FOLDER [--seconds 150] [--hosts 4] [--rate 10gbit]
        [--models gpt2] [--wires edbt18] [--rounds 7]
    PYTHONPATH=src:research python3 tests/gpu/predict_nccl.py read FOLDER

measure: a lab is probed, then steps are timed in it with each wire; all results are in FOLDER as they come, so that
whatever ends the script leaves what was measured. read: the table and the figures of such a folder, as `narrowcast
validate --lab FOLDER` has them, which continues it, too. Without a GPU: over Gloo, with a small model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from narrowcast_research.validation import lab, registry

from narrowcast.lab import Lab, LabError

PROBE_SHARE = 0.55
"""Of the time: the probe is ended then, and its file has what was measured."""


def measure(places: list[lab.Place], wires: list[str], folder: Path, given: argparse.Namespace) -> None:
    began, gpu = time.monotonic(), torch.cuda.is_available()
    folder.mkdir(parents=True, exist_ok=True)
    backend, codecs = ("nccl", wires) if gpu else (lab.GLOO, [wire for wire in wires if wire != lab.BF16_HOOK])

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    def run(name: str, until: float, part: Callable[[Lab, float], None]) -> None:
        # each in a lab of its own: what a client that was ended leaves of MPS is not defined
        with Lab(places[0].hosts, lab.rate_of(places[0].rate), gpu=gpu) as made:
            say(f"{name}: the lab is up")
            try:
                part(made, max(until * given.seconds - (time.monotonic() - began), 1.0))
                say(f"{name}: done")
            except LabError as error:
                say(f"{name}: {error}")

    if not lab.cluster_path(folder, places[0]).exists():
        run("probe", PROBE_SHARE, lambda at, left: lab.probe_lab(at, places[0], backend, codecs, folder, left))
    if left_over := lab.missing(folder, places):
        run("steps", 1.0, lambda at, left: lab.train(at, left_over, backend, codecs, folder, left, given.rounds))
    if (folder / lab.PART).exists():
        lab.keep_part(folder)
        say("steps: not all rounds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "read"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--models", default="gpt2" if torch.cuda.is_available() else "mlp")
    parser.add_argument("--wires", default="gpu", help="gpu, edbt18, or specs separated by commas")
    parser.add_argument("--rounds", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.what == "measure":
        places = lab.grid([chosen.hosts], [chosen.rate], chosen.models.split(","))
        named = {"gpu": lab.GPU_WIRES, "edbt18": lab.EDBT18_WIRES}
        measure(places, list(named.get(chosen.wires, chosen.wires.split(","))), chosen.folder, chosen)
    result = lab.validate(chosen.folder)
    print(registry.markdown([result]))
    return not all(result.met().values())


if __name__ == "__main__":
    sys.exit(main())
