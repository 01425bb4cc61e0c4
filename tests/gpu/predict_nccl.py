"""By hand on a machine with a GPU, root and MPS: what `narrowcast predict` says of DDP steps of GPT-2 on NCCL, and what
they take.

    PYTHONPATH=src:research python3 tests/gpu/predict_nccl.py measure FOLDER [--seconds 150] [--hosts 4] [--rate 10gbit]
    PYTHONPATH=src:research python3 tests/gpu/predict_nccl.py read FOLDER

measure: a lab is probed, then steps are timed in it with each wire; all results are in FOLDER as they come, so that
whatever ends the script leaves what was measured. read: the table and the figures of such a folder, as `narrowcast
validate --lab FOLDER` has them, which continues it, too. Without a GPU: over Gloo, with a small model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from narrowcast_research.validation import lab, registry

from narrowcast.lab import Lab, LabError

PROBE_SHARE = 0.55
"""Of the time: the probe is ended then, and its file has what was measured."""


def measure(place: lab.Place, folder: Path, seconds: float, gpu: bool) -> None:
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    backend, wires = ("nccl", lab.GPU_WIRES) if gpu else (lab.GLOO, [w for w in lab.GPU_WIRES if w != lab.BF16_HOOK])

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    for name, part, until in (("probe", lab.probe_lab, PROBE_SHARE), ("steps", lab.train, 1.0)):
        # each in a lab of its own: what a client that was ended leaves of MPS is not defined
        with Lab(place.hosts, place.rate, gpu=gpu) as made:
            say(f"{name}: the lab is up")
            left = until * seconds - (time.monotonic() - began)
            try:
                part(made, place, backend, wires, folder, limit=max(left, 1.0))
                say(f"{name}: done")
            except LabError as error:
                say(f"{name}: {error}")
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
    parser.add_argument("--model", default="gpt2" if torch.cuda.is_available() else "mlp")
    chosen = parser.parse_args()
    if chosen.what == "measure":
        place = lab.Place(chosen.hosts, chosen.rate, chosen.model)
        measure(place, chosen.folder, chosen.seconds, torch.cuda.is_available())
    result = lab.validate(chosen.folder)
    print(registry.markdown([result]))
    return not all(result.met().values())


if __name__ == "__main__":
    sys.exit(main())
