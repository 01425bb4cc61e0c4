"""Is "auto" as accurate as float32? Paired seeds and the study's test of equality, on lines of `convergence`.

python -m narrowcast_research.wires.accuracy --out accuracy.jsonl --text text.bin --models fashion davidnet lm poisoned
It trains what is missing in --out, each model through float32, int4/128 and auto on a link that is described, and goes
on where it was cut. Then it says for each wire what the differences to float32 show, at margins fixed beforehand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from narrowcast.study import Equivalence, equivalence
from narrowcast_research.wires import convergence
from narrowcast_research.wires.workloads import AUTO

PLAIN = "fp32"
WIRES = (PLAIN, "int4/128", AUTO)
MODELS = ("fashion", "davidnet", "lm", "poisoned")
SEEDS = 5
MARGINS = {"fashion": 0.5, "poisoned": 0.5, "davidnet": 0.5, "resnet18": 0.5, "lm": 0.02}
"""Points of accuracy; of the language model, of its loss on held-out text, which is better where it is lower."""


def differences(lines: Iterable[dict[str, Any]], model: str, wire: str) -> list[float | None]:
    """By seed, how much better than float32; None: that training was lost."""
    scores = {(line["wire"], line["seed"]): line["score"] for line in lines if line["model"] == model}
    better, found = -1.0 if model == "lm" else 1.0, list[float | None]()
    for seed in sorted(seed for name, seed in scores if name == wire):
        one, plain = scores[wire, seed], scores.get((PLAIN, seed))
        if plain is not None:
            found.append(None if one is None else better * (one - plain))
    return found


def verdicts(lines: Sequence[dict[str, Any]], models: Sequence[str]) -> Iterator[tuple[str, str, Equivalence | str]]:
    """Of each model and wire."""
    for model in models:
        for wire in WIRES[1:]:
            found = differences(lines, model, wire)
            lost = found.count(None)
            said = f"{lost} of {len(found)} trainings ended in NaN" if lost else ""
            yield model, wire, said or equivalence([one for one in found if one is not None], MARGINS[model])


def main(words: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if words is None else words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="The file that lines are appended to.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MARGINS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.epilog = "All other options are those of narrowcast_research.wires.convergence."
    own, others = parser.parse_known_args(given)
    trained = ["--out", str(own.out), "--models", *own.models, "--seeds", str(own.seeds), "--wires", *WIRES]
    code = convergence.main([*trained, *others])
    settings = argparse.ArgumentParser(add_help=False)
    convergence.add_settings(settings)
    setting = convergence.setting_of(settings.parse_known_args(others)[0])
    jobs = convergence.planned(own.models, WIRES, own.seeds)
    every = convergence.read([own.out])
    lines = [line for line in every if any(convergence.is_done(job, [line], setting) for job in jobs)]
    for model, wire, said in verdicts(lines, own.models):
        if isinstance(said, Equivalence):
            low, high = said.interval.low, said.interval.high
            said = f"{said.mean:+.3f} ({low:+.3f} to {high:+.3f}), margin {said.margin:g}: {said.conclusion.value}"
        sys.stdout.write(f"{model:10} {wire:10} {said}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
