"""The answer to a study, in words with numbers: does the primary wire train faster with no loss of accuracy?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowcast.measure import torch_threads
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import NOTHING, F, Finding, grouped, one_each, percent, share_words
from narrowcast.study.analysis.findings import Accuracy, Findings, Step, Uncompared
from narrowcast.study.analysis.statistics import Conclusion, Interval
from narrowcast.study.spec_bits import bits_name

FEW_SEEDS = 5
TOO_SMALL = "every tensor has fewer than min_values values and travelled as it is"


class Answer(Enum):
    """Of the whole study."""

    YES = "yes"
    DEPENDS = "it depends on the link"
    NO = "no"
    LOST = "accuracy lost"
    UNKNOWN = "cannot tell"


class Speed(Enum):
    """Of one link rate, over all places that have it."""

    FASTER = "faster"
    MIXED = "mixed"
    NOT_FASTER = "not faster"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True)
class RateFinding:
    """What the primary wire does at one link rate."""

    rate_name: str | None
    steps: Sequence[Step]

    @property
    def predicted(self) -> bool:
        return self.steps[0].predicted

    @property
    def speedups(self) -> list[Interval]:
        return [step.speedup for step in self.steps if step.speedup is not None]

    @property
    def speed(self) -> Speed:
        known = [step.faster for step in self.steps]
        if all(known):
            return Speed.FASTER
        if any(known):
            return Speed.MIXED
        return Speed.UNKNOWN if all(faster is None for faster in known) else Speed.NOT_FASTER

    @property
    def gain(self) -> str:
        """`2.9×`, or `1.8× to 2.9×` over several places."""
        ordered = sorted(self.speedups, key=lambda x: x.value)
        first, last = formatting.times(ordered[0]), formatting.times(ordered[-1])
        return first if first == last else f"{first} to {last}"

    def sentence(self) -> str:
        how = "predicted" if self.predicted else "measured"
        head = formatting.capital(f"{formatting.at_rate(self.rate_name)} ({how}): ")
        if len(self.steps) == 1:
            return head + f"{formatting.times_between(self.speedups[0])} as fast; {self.speed.value}."
        faster, slower = (sum(step.faster is state for step in self.steps) for state in (True, False))
        rest = len(self.steps) - faster - slower
        counts = [f"faster in {faster} of {formatting.count(len(self.steps), 'setting')}"]
        counts += [f"slower in {slower}"] * bool(slower) + [f"no difference that can be told in {rest}"] * bool(rest)
        return head + f"{self.gain} as fast; {formatting.listed(counts)}."


@dataclass(frozen=True)
class Verdict:
    """The answer and what it rests on."""

    findings: Findings
    rates: list[RateFinding]
    accuracies: list[Accuracy]
    """Of the primary wire: one for each model, data set and number of workers."""
    uncompared: list[Uncompared]
    """Where it was trained, or should have been, and no seed can be compared."""
    untouched: list[Finding] = field(default_factory=list)
    """Steps and trainings of the primary wire in which nothing was compressed: they count for nothing."""

    @property
    def accuracy(self) -> Conclusion | None:
        """Over all data sets: one that lost is a loss, and each must be kept for EQUAL. None: nothing was trained."""
        conclusions = [*(row.conclusion for row in self.accuracies), *(Conclusion.UNKNOWN for _ in self.uncompared)]
        bad = (kind for kind in (Conclusion.LOST, Conclusion.UNKNOWN) if kind in conclusions)
        return next(bad, Conclusion.EQUAL) if conclusions else None

    @property
    def faster(self) -> list[RateFinding]:
        return [rate for rate in self.rates if rate.speed is Speed.FASTER]

    @property
    def settings(self) -> list[Step]:
        return [step for rate in self.rates for step in rate.steps]

    @property
    def everywhere(self) -> bool:
        """Faster at every rate. Each setting may fail this, so it needs no correction for their number."""
        return bool(self.rates) and all(rate.speed is Speed.FASTER for rate in self.rates)

    @cached_property
    def beyond_chance(self) -> bool:
        """Faster everywhere, or in one setting corrected for their number: among many one looks faster by chance."""
        if self.everywhere:
            return True
        with torch_threads(1):
            return any(step.faster_among(len(self.settings)) for step in self.settings if step.faster)

    @property
    def answer(self) -> Answer:
        if not self.beyond_chance:
            slower = bool(self.rates) and all(rate.speed is Speed.NOT_FASTER for rate in self.rates)
            return Answer.NO if slower else Answer.UNKNOWN
        if self.accuracy is Conclusion.LOST:
            return Answer.LOST
        if self.accuracy is not Conclusion.EQUAL:
            return Answer.UNKNOWN
        return Answer.YES if self.everywhere else Answer.DEPENDS

    def as_dict(self) -> dict[str, Any]:
        return {
            "answer": self.answer.value,
            "headline": headline(self),
            "primary": self.findings.primary,
            "baseline": self.findings.baseline,
            "margin": self.findings.margin,
            "speed": [_rate_data(rate) for rate in self.rates],
            "accuracy": [_accuracy_data(row) for row in self.accuracies],
            "uncompared": [_facts(row, "why") for row in self.uncompared],
            "nothing_compressed": [row.line["case"] for row in self.untouched],
            "sentences": [*speed_sentences(self), *accuracy_sentences(self)],
            "how_sure": how_sure(self),
        }


def _facts(row: Finding, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("model", "data", "workers", *names)}


def _rate_data(rate: RateFinding) -> dict[str, Any]:
    places = [{**_facts(s, "transport"), "speedup": vars(s.speedup), "compressed": s.compressed} for s in rate.steps]
    return {"rate": rate.rate_name, "speed": rate.speed.value, "predicted": rate.predicted, "places": places}


def _accuracy_data(row: Accuracy) -> dict[str, Any]:
    tested = row.difference
    assert tested is not None
    numbers = {"seeds": tested.seeds, "difference": vars(tested.interval), "p": tested.p, "failed": len(row.failed)}
    return {**_facts(row), **numbers, "compressed": row.compressed, "conclusion": _conclusion(row).value}


def _conclusion(row: Accuracy) -> Conclusion:
    assert row.conclusion is not None
    return row.conclusion


def _rates(findings: Findings) -> list[RateFinding]:
    steps = [step for step in findings.here if step.parallel == "data" and step.speedup is not None]
    ordered = sorted(one_each(steps, findings.primary), key=lambda step: (step.rate_bits, step.predicted))
    by_rate = grouped(ordered, lambda step: step.rate_name)
    measured = {name: [step for step in same if not step.predicted] for name, same in by_rate.items()}
    return [RateFinding(name, measured[name] or same) for name, same in by_rate.items()]


def _data_parallel(rows: Sequence[F], wire: str) -> list[F]:
    return [row for row in rows if row.wire == wire and row.parallel == "data"]


def judge(findings: Findings) -> Verdict:
    """Answer the study's question."""
    primary = findings.primary
    compared = [row for row in _data_parallel(findings.accuracies, primary) if row.difference is not None]
    uncompared = _data_parallel(findings.uncompared, primary)
    return Verdict(findings, _rates(findings), compared, uncompared, _data_parallel(findings.untouched, primary))


def _where(rates: Sequence[RateFinding]) -> str:
    """`2.9× as fast at 100 Mb/s and 1.6× at 1 Gb/s`."""
    first, *others = [(rate.gain, formatting.at_rate(rate.rate_name)) for rate in rates]
    return formatting.listed([f"{first[0]} as fast {first[1]}", *(f"{gain} {place}" for gain, place in others)])


def _where_and_where_not(verdict: Verdict) -> str:
    rest = [rate for rate in verdict.rates if rate.speed is not Speed.FASTER]
    if not verdict.faster or not rest:
        return _where(verdict.rates)
    return f"{_where(verdict.faster)}, but only {_where(rest)}"


def _accuracy_kept(verdict: Verdict) -> str:
    sets = formatting.count(len({row.data for row in verdict.accuracies}), "data set")
    if any(row.conclusion is Conclusion.BETTER for row in verdict.accuracies):
        return f"accuracy is not lost on {sets}"
    return f"accuracy stays within {formatting.margin(verdict.findings.margin)} on {sets}"


def _rows_with(verdict: Verdict, conclusion: Conclusion) -> list[Accuracy]:
    return [row for row in verdict.accuracies if row.conclusion is conclusion]


def _lost(verdict: Verdict) -> str:
    lost = [(row.difference, row.data) for row in _rows_with(verdict, Conclusion.LOST)]
    return formatting.listed([f"{formatting.signed(d.mean, 1)} points on {data}" for d, data in lost if d is not None])


def _unsure_accuracy(verdict: Verdict) -> str:
    if verdict.accuracy is None:
        return "accuracy was not compared"
    if verdict.accuracy is Conclusion.LOST:
        return f"accuracy is lost ({_lost(verdict)})"
    if verdict.accuracy is Conclusion.EQUAL:
        return _accuracy_kept(verdict)
    unsure = [f"{row.model} on {row.data}" for row in [*_rows_with(verdict, Conclusion.UNKNOWN), *verdict.uncompared]]
    return f"whether accuracy is kept with {formatting.listed(list(dict.fromkeys(unsure)))} cannot be told"


def _subject(wire: str) -> str:
    """`8 bits on the wire train`."""
    name = bits_name(wire)
    if name == wire:
        return f"Codes of {wire} on the wire train"
    return f"{formatting.capital(name)} on the wire {'trains' if name == '1 bit' else 'train'}"


def headline(verdict: Verdict) -> str:
    """One sentence: the answer, the speed and the accuracy."""
    subject = _subject(verdict.findings.primary)
    match verdict.answer:
        case Answer.YES:
            return f"Yes. {subject} {_where(verdict.rates)}, and {_accuracy_kept(verdict)}."
        case Answer.DEPENDS:
            return f"It depends on the link. {subject} {_where_and_where_not(verdict)}; {_accuracy_kept(verdict)}."
        case Answer.LOST:
            return f"No. {subject} {_where_and_where_not(verdict)}; accuracy is lost: {_lost(verdict)}."
        case Answer.NO:
            return f"No. {subject} only {_where(verdict.rates)}; {_unsure_accuracy(verdict)}."
    if verdict.untouched and not verdict.rates and not verdict.accuracies:
        return f"Cannot tell. With {verdict.findings.primary} {NOTHING}; {TOO_SMALL}."
    if not verdict.rates:
        return f"Cannot tell. No step times of {verdict.findings.primary} beside {verdict.findings.baseline}."
    if all(rate.speed is Speed.UNKNOWN for rate in verdict.rates):
        return f"Cannot tell. {subject} {_where(verdict.rates)}, a difference that could be chance."
    if not verdict.beyond_chance:
        speed = f"{_where(verdict.rates)}, nowhere faster beyond chance"
        return f"Cannot tell. {subject} {speed}; {_unsure_accuracy(verdict)}."
    return f"Cannot tell. {subject} {_where_and_where_not(verdict)}; {_unsure_accuracy(verdict)}."


def speed_sentences(verdict: Verdict) -> list[str]:
    return [rate.sentence() for rate in verdict.rates]


MEANING = {
    Conclusion.EQUAL: "equal within the margin",
    Conclusion.BETTER: "better by more than the margin",
    Conclusion.LOST: "lost more than the margin",
    Conclusion.UNKNOWN: "cannot tell",
}


def _share_sentences(verdict: Verdict) -> list[str]:
    """How much of what travelled the wire was made for."""
    sentences = []
    for kind, thing in (("time", "step time"), ("accuracy", "training")):
        if same := [row for row in verdict.untouched if row.kind == kind]:
            sentences.append(f"{formatting.capital(NOTHING)} in {formatting.count(len(same), thing)}; {TOO_SMALL}.")
    if partly := [row for row in (*verdict.settings, *verdict.accuracies) if row.mostly_plain]:
        least = min(partly, key=lambda row: row.compressed or 0.0)
        sentences.append(
            f"Less than half of the values were compressed in {formatting.count(len(partly), 'comparison')}, with "
            f"{least.model} on {least.data} {percent(least)}; the rest travelled as it is."
        )
    return sentences


def failed_words(row: Accuracy) -> list[str]:
    return [f"{formatting.count(len(row.failed), 'training')} failed"] if row.failed else []


def _asides(row: Accuracy) -> list[str]:
    return [*share_words(row), *failed_words(row)]


def _trained(row: Finding) -> str:
    return f"{row.model} on {row.data}, {formatting.count(row.workers, 'worker')}"


def _accuracy_words(row: Accuracy) -> str:
    tested = row.difference
    assert tested is not None
    facts = [formatting.points(tested.interval), formatting.count(tested.seeds, "seed"), *_asides(row)]
    return f"{_trained(row)}: {', '.join(facts)}; {MEANING[_conclusion(row)]}."


def conclusion_words(row: Accuracy) -> str:
    """For a cell of a table."""
    return ", ".join([MEANING[_conclusion(row)], *_asides(row)])


def unknown_words(row: Uncompared) -> str:
    return NOTHING if row.untouched else f"{row.why}; {MEANING[Conclusion.UNKNOWN]}"


def accuracy_sentences(verdict: Verdict) -> list[str]:
    unknown = [f"{_trained(row)}: {unknown_words(row)}." for row in verdict.uncompared]
    return [*(_accuracy_words(row) for row in verdict.accuracies), *unknown]


def how_sure(verdict: Verdict) -> list[str]:
    """What the answer rests on, and what it does not cover."""
    findings, sentences = verdict.findings, []
    if verdict.rates:
        kinds = {rate.predicted for rate in verdict.rates}
        source = {frozenset([False]): "measured here", frozenset([True]): "predicted, not measured"}
        sentences.append(f"Speed is {source.get(frozenset(kinds), 'measured at some rates and predicted at others')}.")
    if apart := sum(step.apart for step in verdict.settings):
        sentences.append(
            f"{formatting.count(apart, 'setting')} not interleaved: after a failure {findings.primary} and "
            f"{findings.baseline} were measured one after the other, and drift of the machine widens the interval."
        )
    faster = sum(step.faster is True for step in verdict.settings)
    if faster and not verdict.beyond_chance:
        look = f"{faster} of {formatting.count(len(verdict.settings), 'setting')} look faster, each at 95 %"
        sentences.append(f"{look}; corrected for their number none is: this may be chance.")
    seeds = [row.difference.seeds for row in verdict.accuracies if row.difference is not None]
    if seeds:
        number = formatting.count(max(seeds), "paired seed")
        number = number if min(seeds) == max(seeds) else f"{min(seeds)} to {number}"
        sentences.append(
            f"Accuracy: {number}, two one-sided tests against a margin of {formatting.margin(findings.margin)} "
            "that was fixed beforehand."
        )
        if min(seeds) < FEW_SEEDS:
            sentences.append(
                f"Fewer than {FEW_SEEDS} seeds are few: an interval is wide, and an unlucky seed counts much."
            )
    sentences += _share_sentences(verdict)
    if findings.failures:
        sentences.append(f"{formatting.count(len(findings.failures), 'case')} failed and could not count.")
    return sentences


def verdict_lines(verdict: Verdict) -> list[str]:
    lines = [headline(verdict), ""]
    for title, sentences in {
        f"Speed of {verdict.findings.primary} over {verdict.findings.baseline}": speed_sentences(verdict),
        "Accuracy": accuracy_sentences(verdict),
        "How sure": how_sure(verdict),
    }.items():
        lines += [f"{title}:", *(f"  {sentence}" for sentence in sentences)] if sentences else []
    return lines


def verdict_text(folder: Path | str) -> str:
    """The verdict on a study's folder, for a terminal."""
    return "\n".join(verdict_lines(judge(Findings.of(folder))))
