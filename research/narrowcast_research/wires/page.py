"""Tables of trainings and of gradients, into pages.

python -m narrowcast_research.wires.page --convergence FILES --page docs/convergence.md
python -m narrowcast_research.wires.page --gradients FILE --page docs/gradients.md
Without --page they are printed. They go between the page's two marks; what is written around them is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.study import Conclusion, Equivalence, equivalence, holm
from narrowcast_research.text import figure, runs
from narrowcast_research.wires import convergence
from narrowcast_research.wires.gradients import ALL, FAMILIES, MOMENTS

Line = dict[str, Any]
FIRST = "fp32"
"""What all others are compared with."""
MARGINS = {"davidnet": 0.5, "resnet18": 0.5, "lm": 0.02}
"""Points of accuracy, and loss, within which two wires count as equal: fixed before anything was measured."""
TITLES = {"davidnet": "DavidNet on CIFAR-10", "resnet18": "ResNet-18 on CIFAR-10", "lm": "The language model"}
TINY_TITLES = {
    "davidnet": "A small DavidNet on digits",
    "resnet18": "A small ResNet-18 on digits",
    "lm": "A small language model on the help pages of Python",
}
SCORES = {"davidnet": "accuracy, %", "resnet18": "accuracy, %", "lm": "held-out loss"}
LEVELS = (8.0, 4.0, 2.0, 1.0, 0.25)
"""Bits a value at which wires are compared."""
NEAR = (0.6, 1.2)
"""What counts as such a level, as factors of it."""
SHOWN = ("int4/128", "int4/128+rot", "int4/128+spike2", "sign/4096+top64", "int2/4096+top64", "bf16+rank4")
"""Wires whose errors are shown by kind of layer."""


DAY = re.compile(r", \d{4}-\d\d-\d\d$")
"""Of a machine's text: on another day it is the same machine."""
SETTING = ("length", "batch", "workers", "parameters", "tiny", "where")
"""What runs that are compared have in common; one that lost its numbers made fewer steps of the same length."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def title(model: str, tiny: bool) -> str:
    return (TINY_TITLES if tiny else TITLES)[model]


def scores(lines: Sequence[Line], model: str) -> dict[str, dict[int, float | None]]:
    """By wire and seed; None where a run lost its numbers. A later line of the same run replaces an earlier one."""
    found: dict[str, dict[int, float | None]] = {}
    own = [line for line in lines if line["model"] == model]
    settings = {tuple(f"{key} {DAY.sub('', str(line[key]))}" for key in SETTING) for line in own}
    if len(settings) > 1:
        several = "; ".join(", ".join(one) for one in sorted(settings))
        raise ValueError(f"{model}: runs of several settings are no twins ({several}); give the files of one")
    for line in own:
        found.setdefault(line["wire"], {})[line["seed"]] = line["score"]
    return found


def differences(own: Mapping[int, float | None], first: Mapping[int, float | None], gain: int) -> list[float]:
    """By seed that both have, the wire's score less that of the first; gain: -1 where less is better."""
    pairs = [(own[seed], first[seed]) for seed in sorted(own.keys() & first.keys())]
    return [gain * (a - b) for a, b in pairs if a is not None and b is not None]


def verdict(test: Equivalence) -> str:
    """In words. Positive differences are better."""
    margin = f"{test.margin:g}"
    match test.conclusion:
        case Conclusion.EQUAL:
            return f"equal within {margin}"
        case Conclusion.LOST:
            return f"loses more than {margin}"
        case Conclusion.BETTER:
            return f"better by more than {margin}"
    if test.interval.high < 0:
        return f"loses; whether more than {margin}, cannot be told"
    if test.interval.low > 0:
        return f"better; whether by more than {margin}, cannot be told"
    return "cannot tell"


def convergence_row(wire: str, own: Mapping[int, float | None], first: Mapping[int, float | None], model: str) -> Line:
    """What the table shows of one wire, as text."""
    gain, digits = (-1, 3) if model == "lm" else (1, 2)
    kept = [score for score in own.values() if score is not None]
    spread = f" ± {statistics.stdev(kept):.{digits}f}" if len(kept) > 1 else ""
    row = {"seeds": str(len(own)), "score": f"{statistics.fmean(kept):.{digits}f}{spread}" if kept else ""}
    test = equivalence(differences(own, first, gain), MARGINS[model])
    lost = len(own) - len(kept)
    if wire == FIRST or test.seeds == 0:
        row |= {"difference": "", "verdict": ""}
    else:
        # as a score: of a loss, more is worse
        low, high = sorted((gain * test.interval.low, gain * test.interval.high))
        interval = f" ({low:+.{digits}f} to {high:+.{digits}f})" if test.seeds > 1 else ""
        row |= {"difference": f"{gain * test.mean:+.{digits}f}{interval}", "verdict": verdict(test)}
    if lost:
        row["verdict"] = f"{lost} of {len(own)} runs lost their numbers"
    return row


def equal_after_all(found: Mapping[str, Mapping[int, float | None]], model: str) -> dict[str, tuple[str, str]]:
    """By wire the probability of its test for equality, alone and corrected for all wires of the model."""
    pairs = {wire: differences(own, found[FIRST], 1) for wire, own in found.items() if wire != FIRST}
    alone = {wire: equivalence(some, MARGINS[model]).p for wire, some in pairs.items() if len(some) > 1}
    both = zip(alone.values(), holm(list(alone.values())), strict=True)
    return {wire: (f"{p:.3f}", f"{all_:.3f}") for wire, (p, all_) in zip(alone, both, strict=True)}


def convergence_text(lines: Sequence[Line]) -> str:
    """A table for each model that has lines, wires in the order of their first one."""
    parts = []
    for model in (name for name in TITLES if any(line["model"] == name for line in lines)):
        found = scores(lines, model)
        if FIRST not in found:
            raise ValueError(f"{model}: no run with {FIRST}, which others are compared with; let convergence make some")
        bits = {line["wire"]: line["bits"] for line in lines if line["model"] == model}
        score, less = SCORES[model], f"less that of `{FIRST}` (95 %)"
        rows = [["wire", "bytes a value", "seeds", score, less, "p (equal)", "p (Holm)", "verdict"]]
        corrected = equal_after_all(found, model)
        for wire in sorted(found, key=lambda name: (name != FIRST, -bits[name])):
            row = convergence_row(wire, found[wire], found[FIRST], model)
            shown = [row["seeds"], row["score"], row["difference"], *corrected.get(wire, ("", "")), row["verdict"]]
            rows.append([f"`{wire}`", f"{bits[wire] / 8:.3g}", *shown])
        one = next(line for line in lines if line["model"] == model)
        where = ", ".join(sorted({line["where"] for line in lines if line["model"] == model}))
        size = f"{one['parameters'] / 1e6:.1f} million parameters, {one['workers']} workers, {one['steps']} steps"
        parts.append(f"## {title(model, one['tiny'])}\n\n{size}; {where}.\n\n{table(rows)}")
    return "\n\n".join(parts)


def best_at(rows: Sequence[Line], level: float) -> dict[str, str]:
    """By family, the wire of least error (mean over moments) of about so many bits; families without one are absent."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["kind"] == ALL and NEAR[0] * level <= row["bits"] <= NEAR[1] * level:
            errors.setdefault((row["family"], row["wire"]), []).append(row["error"])
    found: dict[str, str] = {}
    for (family, wire), _ in sorted(errors.items(), key=lambda item: statistics.fmean(item[1])):
        found.setdefault(family, wire)
    return found


def by_moment(rows: Sequence[Line], wire: str, kind: str = ALL) -> list[float]:
    found = {row["moment"]: row["error"] for row in rows if row["wire"] == wire and row["kind"] == kind}
    return [found[moment] for moment in MOMENTS if moment in found]


def _errors(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2g}" if value < 0.1 else f"{value:.2f}" for value in values)


def level_table(rows: Sequence[Line]) -> str:
    """Errors of the best wire of each family, by bits; the smallest of a level is bold."""
    bits = {row["wire"]: row["bits"] for row in rows}
    lines = [["bits a value", *FAMILIES]]
    for level in LEVELS:
        chosen = best_at(rows, level)
        means = {family: statistics.fmean(by_moment(rows, wire)) for family, wire in chosen.items()}
        cells = [f"about {level:g}"]
        for family in FAMILIES:
            if family not in chosen:
                cells.append("")
                continue
            wire, text = chosen[family], _errors(by_moment(rows, chosen[family]))
            text = f"**{text}**" if means[family] == min(means.values()) else text
            cells.append(f"{text}<br>`{wire}`, {bits[wire]:.3g} bits")
        lines.append(cells)
    return table(lines)


def kind_table(rows: Sequence[Line]) -> str:
    """The late errors of some wires by kind of layer."""
    late = [row for row in rows if row["moment"] == list(MOMENTS)[-1]]
    kinds = {row["kind"]: row["values"] for row in late}
    lines = [["layers", "values", *(f"`{wire}`" for wire in SHOWN)]]
    for kind, values in sorted(kinds.items(), key=lambda item: (item[0] == ALL, -item[1])):
        errors = {row["wire"]: row["error"] for row in late if row["kind"] == kind}
        lines.append([kind, f"{values:,}", *(_errors([errors[wire]]) for wire in SHOWN)])
    return table(lines)


def gradients_text(found: Mapping[str, Any]) -> str:
    """Two tables for each model."""
    facts, parts = found["facts"], []
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["model"] == model]
        steps = {row["moment"]: row["step"] for row in rows}
        when = ", ".join(f"{moment} {step}" for moment, step in steps.items())
        size = next(row["values"] for row in rows if row["kind"] == ALL)
        head = f"{size / 1e6:.1f} million values, {facts['workers']} workers; steps: {when}."
        whole = f"## {title(model, facts['tiny'])}\n\n{head}\n\n{level_table(rows)}"
        parts.append(f"{whole}\n\nLate, by kind of layer:\n\n{kind_table(rows)}")
    return f"{facts['where']}.\n\n" + "\n\n".join(parts)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--convergence", type=Path, nargs="+", help="Files or folders of lines.")
    which.add_argument("--gradients", type=Path, nargs="+", help="What narrowcast_research.wires.gradients wrote.")
    parser.add_argument("--page", type=Path, help="Markdown with two marks.")
    arguments = parser.parse_args(words)
    if arguments.convergence:
        text = convergence_text(convergence.read(runs.files_in(arguments.convergence)))
    else:
        text = "\n\n".join(gradients_text(json.loads(file.read_text())) for file in arguments.gradients)
    if arguments.page is None:
        sys.stdout.write(text + "\n")
    else:
        arguments.page.write_text(figure.put_into(arguments.page.read_text(), text))


if __name__ == "__main__":
    main()
