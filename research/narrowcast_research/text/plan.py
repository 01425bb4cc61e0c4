"""The planned trainings in a lab, one after another, as many as fit into a limit of time; those that are done are not
done again, so several calls make the whole.

python -m narrowcast_research.text.plan --text text.bin --runs new/runs.jsonl --done old --gpu --limit 560
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowcast.lab import Lab
from narrowcast_research.text.runs import TextRun, files_in, read

WIRES = ("bf16-hook", "int8/256", "int4/128+ef")
EXPECTED = {"bf16-hook": 0.375, "int8/256": 0.215, "int4/128+ef": 0.150}
"""Seconds a step before any was measured: GPT-2 on 4 ranks at 10 Gb/s. Others count as the slowest."""
START, HELD_OUT, SPARE = 30.0, 0.01, 1.05
"""Seconds that a run takes to begin and end, that held-out loss adds to a step, and what estimates are off."""
ENDING = 5.0


@dataclass(frozen=True)
class Planned:
    wire: str
    seed: int
    steps: int

    def is_done(self, runs: Sequence[TextRun]) -> bool:
        return any((r.wire, r.seed) == (self.wire, self.seed) and r.complete and r.steps >= self.steps for r in runs)

    def seconds(self, runs: Sequence[TextRun], tiny: bool) -> float:
        """What it will take, by the runs of its wire where there are some."""
        same = [run for run in runs if run.wire == self.wire and run.step_seconds() > 0]
        step = max(run.step_seconds() for run in same) if same else 0.0
        start = max((run.end.get("start_seconds", START) for run in same), default=START) + ENDING
        if not same:
            step, start = (0.02, START / 2) if tiny else (EXPECTED.get(self.wire, max(EXPECTED.values())), START)
        return SPARE * self.steps * (step + HELD_OUT) + start


def planned(wires: Sequence[str], seeds: int, first: int, others: int) -> list[Planned]:
    """Many steps with one seed, fewer with the others."""
    return [Planned(wire, seed, others if seed else first) for seed in range(seeds) for wire in wires]


def command(one: Planned, arguments: argparse.Namespace, seconds: float) -> list[str]:
    words = [sys.executable, "-m", "narrowcast_research.text.train", "--wire", one.wire, "--seed", str(one.seed)]
    words += ["--steps", str(one.steps), "--horizon", str(arguments.steps), "--runs", str(arguments.runs)]
    words += ["--until-seconds", f"{seconds:.1f}"]
    words += ["--text", str(arguments.text)] if arguments.text else []
    return words + ["--tiny"] * arguments.tiny + ["--gpu"] * arguments.gpu


def tell(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


def known(arguments: argparse.Namespace) -> list[TextRun]:
    files = files_in(arguments.done)
    if arguments.runs.exists() and arguments.runs not in files:
        files.append(arguments.runs)
    return read(files)


def run_in_lab(one: Planned, arguments: argparse.Namespace, left: float) -> None:
    """A lab of its own for each run: what one leaves behind is no other's."""
    with Lab(arguments.hosts, arguments.rate, gpu=arguments.gpu) as lab:
        # a rank counts its seconds from when torch is imported
        until = max(1.0, left - START / 2 - ENDING)
        result = lab.run(command(one, arguments, until), timeout=max(1.0, left - ENDING))
    if not result.ok:
        tell(f"{one}: {result.summary()}")


def run_all(arguments: argparse.Namespace) -> list[Planned]:
    """What is left in the end."""
    deadline = time.monotonic() + arguments.limit
    tried: set[Planned] = set()
    while True:
        runs = known(arguments)
        every = planned(arguments.wires, arguments.seeds, arguments.steps, arguments.other_steps)
        missing = [one for one in every if not one.is_done(runs)]
        left = deadline - time.monotonic()
        takes = {one: one.seconds(runs, arguments.tiny) for one in missing if one not in tried}
        fitting = [one for one, seconds in takes.items() if seconds <= left]
        if not fitting:
            tell(f"{len(every) - len(missing)} of {len(every)} runs are done, {left:.0f} s are left")
            return missing
        # the longest first: short ones then fill what remains
        one = max(fitting, key=takes.__getitem__)
        tried.add(one)
        tell(f"{one.wire}, seed {one.seed}, {one.steps} steps: about {takes[one]:.0f} s of {left:.0f}")
        run_in_lab(one, arguments, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="The file that runs are appended to.")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="Files or folders with runs of earlier calls.")
    parser.add_argument("--limit", type=float, default=560.0, help="Seconds that this call may take.")
    parser.add_argument("--text", type=Path, help="A token file.")
    parser.add_argument("--wires", nargs="+", default=list(WIRES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="With the first seed.")
    parser.add_argument("--other-steps", type=int, default=300, help="With the others.")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    missing = run_all(parser.parse_args())
    for one in missing:
        tell(f"left: {one.wire}, seed {one.seed}, {one.steps} steps")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
