"""The insights that Grubic et al. (EDBT 2018) are remembered for, each held against the data of a study.

The statements come from memory of the paper, not from its text. Where a study measured nothing that bears on one, its
predictions are asked instead, and the answer says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from narrowcast.study import (
    Accuracy,
    Conclusion,
    Findings,
    Insight,
    Statements,
    Step,
    Support,
    Uncompared,
    code_bits,
    formatting,
    grouped,
)

CONVOLUTIONAL = re.compile(r"cnn|conv|alexnet|vgg|resnet|inception|davidnet|lenet")
LARGE = re.compile(r"alexnet|vgg|lstm")
"""Many parameters for little compute."""
LITTLE = 1.1
"""A speedup of less than this is little."""
RESHAPED = 64
"""Values in a bucket from which on 1-bit SGD counts as reshaped; columns of a convolution are shorter."""


Judged = tuple[Support, str]


def _unknown(why: str) -> Judged:
    return Support.UNKNOWN, why


def _yes_if(condition: bool, because: str) -> Judged:
    return (Support.YES if condition else Support.NO), because


def _source(steps: Iterable[Step]) -> str:
    kinds = {step.predicted for step in steps}
    return "measured and predicted" if len(kinds) > 1 else "predicted" if True in kinds else "measured"


def _gain(step: Step) -> float:
    assert step.speedup is not None
    return step.speedup.value


def _mean_gain(steps: Iterable[Step]) -> float:
    return geometric_mean(map(_gain, steps))


def _narrow(findings: Findings) -> list[Step]:
    """Steps with 8 bits or fewer, measured and predicted."""
    compared = [step for step in findings.steps if step.speedup is not None and step.parallel == "data"]
    return [step for step in compared if code_bits(step.wire) <= 8]


def _prefer_measured(steps: Sequence[Step]) -> list[Step]:
    measured = [step for step in steps if not step.predicted]
    return measured or list(steps)


def _with_conclusion(rows: Sequence[Accuracy], conclusion: Conclusion) -> list[Accuracy]:
    return [row for row in rows if row.conclusion is conclusion]


def _compared(findings: Findings, least: int, most: int) -> list[Accuracy]:
    rows = [row for row in findings.accuracies if row.difference is not None]
    return [row for row in rows if least <= code_bits(row.wire) <= most]


def _uncompared(findings: Findings, least: int, most: int) -> list[Uncompared]:
    return [row for row in findings.uncompared if least <= code_bits(row.wire) <= most]


def _named(rows: Sequence[Accuracy]) -> str:
    shown = [
        f"{row.wire} on {row.model}, {row.data} ({formatting.signed(row.difference.mean, 1)})"
        for row in rows
        if row.difference is not None
    ]
    more = [f"{len(shown) - 3} more"] if len(shown) > 4 else []
    return formatting.listed([*shown[: 3 if more else 4], *more])


def _tally(rows: Sequence[Accuracy]) -> str:
    equal, lost = len(_with_conclusion(rows, Conclusion.EQUAL)), len(_with_conclusion(rows, Conclusion.LOST))
    better, unknown = len(_with_conclusion(rows, Conclusion.BETTER)), len(_with_conclusion(rows, Conclusion.UNKNOWN))
    parts = [f"{equal} equal within the margin", f"{lost} lost"]
    parts += [f"{better} better"] * bool(better) + [f"{unknown} cannot be told"] * bool(unknown)
    return f"of {formatting.count(len(rows), 'comparison')} {formatting.listed(parts)}"


def _without(rows: Sequence[Uncompared]) -> str:
    shown = [f"{row.wire} on {row.model}, {row.data} ({row.why})" for row in rows]
    return f"; not compared: {formatting.listed(shown)}" if shown else ""


def _few_bits_keep_accuracy(findings: Findings) -> Judged:
    rows, missing = _compared(findings, 4, 8), _uncompared(findings, 4, 8)
    if not rows:
        return _unknown("no training with 4 to 8 bits beside float32" + _without(missing))
    lost, unsure = _with_conclusion(rows, Conclusion.LOST), _with_conclusion(rows, Conclusion.UNKNOWN)
    because = _tally(rows) + (f": {_named(lost or unsure)}" if lost or unsure else "") + _without(missing)
    if lost:
        return _yes_if(False, because)
    return _unknown(because) if unsure or missing else _yes_if(True, because)


def _one_or_two_bits_lose(findings: Findings) -> Judged:
    rows = [row for row in _compared(findings, 1, 2) if CONVOLUTIONAL.search(row.model)]
    missing = [row for row in _uncompared(findings, 1, 2) if CONVOLUTIONAL.search(row.model)]
    if not rows:
        return _unknown("no convolutional network was trained with 1 or 2 bits" + _without(missing))
    lost, unsure = _with_conclusion(rows, Conclusion.LOST), _with_conclusion(rows, Conclusion.UNKNOWN)
    because = _tally(rows) + (f": {_named(lost)}" if lost else "") + _without(missing)
    if len(lost) + len(unsure) < len(rows):
        return _yes_if(False, because)
    return _unknown(because) if unsure or missing else _yes_if(True, because)


def _mpi_helps(findings: Findings) -> Judged:
    steps = _prefer_measured([step for step in _narrow(findings) if step.transport == "mpi"])
    if not steps:
        return _unknown("no steps over MPI with 8 bits or fewer")
    faster, slower = ([step for step in steps if step.faster is state] for state in (True, False))
    because = f"{_source(steps)}: faster in {len(faster)} of {len(steps)}, slower in {len(slower)}"
    if len(faster) == len(steps):
        return _yes_if(True, because)
    return _yes_if(False, because) if slower else _unknown(because)


def _large_networks_gain_most(findings: Findings) -> Judged:
    steps = _prefer_measured(_narrow(findings))
    large = [step for step in steps if LARGE.search(step.model)]
    other = [step for step in steps if not LARGE.search(step.model)]
    if not large or not other:
        return _unknown("needs AlexNet, VGG or LSTM and another network")
    most, rest = _mean_gain(large), _mean_gain(other)
    because = f"{_source(steps)}: on average {formatting.ratio(most)} on these, {formatting.ratio(rest)} on the others"
    return _yes_if(most > rest, because)


def _pairs(
    steps: Sequence[Step], key: Callable[[Step], tuple[Any, ...]], one: Callable[[list[Step]], list[Step]]
) -> list[list[Step]]:
    """The two steps of each group that `one` picks, where it finds two."""
    picked = [one(same) for same in grouped(steps, key).values()]
    return [pair for pair in picked if len(pair) == 2]


def _fewest_and_most(same: list[Step]) -> list[Step]:
    ordered = sorted(same, key=lambda step: step.workers)
    return [ordered[0], ordered[-1]] if ordered[0].workers < ordered[-1].workers else []


def _all_but_workers(step: Step) -> tuple[Any, ...]:
    what = (step.model, step.data, step.wire, step.algorithm)
    return (*what, step.rate_name, step.transport, step.cluster, step.min_values)


def _many_workers_gain_more(findings: Findings) -> Judged:
    steps = _prefer_measured(_narrow(findings))
    pairs = _pairs(steps, _all_but_workers, _fewest_and_most)
    if not pairs:
        return _unknown("needs two numbers of workers")
    few, many = _mean_gain(pair[0] for pair in pairs), _mean_gain(pair[1] for pair in pairs)
    rises = sum(_gain(pair[1]) > _gain(pair[0]) for pair in pairs)
    because = (
        f"{_source(steps)}: on average {formatting.ratio(few)} with the fewest workers, "
        f"{formatting.ratio(many)} with the most; it rises in {rises} of {formatting.count(len(pairs), 'setting')}"
    )
    return _yes_if(many > few and rises > len(pairs) / 2, because)


def _by_transport(same: list[Step]) -> list[Step]:
    found = {step.transport: step for step in same}
    return [found["mpi"], found["nccl"]] if {"mpi", "nccl"} <= set(found) else []


def _machine(step: Step) -> tuple[Any, ...]:
    # not the cluster: a machine has one file for each primitive
    return (step.model, step.data, step.workers, step.rate_name, step.predicted, step.min_values)


def _nccl_gains_less(findings: Findings) -> Judged:
    steps = _narrow(findings)
    pairs = _pairs(steps, lambda s: (*_machine(s), s.wire, s.algorithm), _by_transport)
    if not pairs:
        return _unknown("needs the same steps over MPI and over NCCL")
    mpi, nccl = _mean_gain(pair[0] for pair in pairs), _mean_gain(pair[1] for pair in pairs)
    because = (
        f"{_source(step for pair in pairs for step in pair)}, {formatting.count(len(pairs), 'pair')}: on average "
        f"{formatting.ratio(mpi)} over MPI, {formatting.ratio(nccl)} over NCCL"
    )
    if mpi <= 1:
        return _unknown(f"{because}: no gain over MPI that could shrink")
    # strongly: less than half of the gain is left
    return _yes_if(nccl - 1 < (mpi - 1) / 2, because)


def _plain_nccl_beats_narrow_mpi(findings: Findings) -> Judged:
    wins, places, used = 0, 0, []
    for same in grouped(findings.steps, _machine).values():
        plain = [s for s in same if s.transport == "nccl" and s.wire == findings.baseline]
        narrow = [s for s in same if s.transport == "mpi" and code_bits(s.wire) <= 8 and not s.untouched]
        if plain and narrow:
            places += 1
            used += [*plain, *narrow]
            wins += min(s.time.value for s in plain) < min(s.time.value for s in narrow)
    if not places:
        return _unknown("needs float32 over NCCL beside few bits over MPI")
    because = f"{_source(used)}: in {wins} of {formatting.count(places, 'setting')} float32 over NCCL is faster"
    return _yes_if(wins >= places / 2, because)


def _dgx_has_little_left(findings: Findings) -> Judged:
    steps = [s for s in _narrow(findings) if s.transport == "nccl" and "dgx" in str(s.cluster).lower()]
    large = [s for s in steps if re.search("alexnet|vgg", s.model)]
    other = [s for s in steps if s not in large]
    if not large or not other:
        return _unknown("needs a DGX-1 with NCCL, with and without AlexNet or VGG")
    most, rest = _mean_gain(large), _mean_gain(other)
    gains = f"{formatting.ratio(most)} on AlexNet and VGG, {formatting.ratio(rest)} on the others"
    because = f"{_source(steps)}: on average {gains}"
    return _yes_if(rest < LITTLE <= most, because)


def _best_of_each_kind(same: list[Step]) -> list[Step]:
    middle = [s for s in same if 4 <= code_bits(s.wire) <= 8]
    least = [s for s in same if code_bits(s.wire) <= 2]
    return [max(middle, key=_gain), max(least, key=_gain)] if middle and least else []


def _diminishing_returns(findings: Findings) -> Judged:
    steps = _prefer_measured(_narrow(findings))
    pairs = _pairs(steps, lambda s: s.place, _best_of_each_kind)
    if not pairs:
        return _unknown("needs 1 or 2 bits beside 4 or 8 bits")
    first, second = _mean_gain(pair[0] for pair in pairs), _mean_gain(pair[1] for pair in pairs)
    extra = second / first
    because = (
        f"{_source(steps)}, best wire of each kind: on average {formatting.ratio(first)} with 4 to 8 bits, "
        f"{formatting.ratio(second)} with 1 or 2, which is {formatting.ratio(extra)} more"
    )
    return _yes_if(extra < first and extra < 2**0.5, because)


def _block(wire: str) -> int:
    found = re.search(r"/(\d+)", wire)
    return int(found[1]) if found else 0


def _stock_one_bit(findings: Findings) -> Judged:
    steps = [s for s in _prefer_measured(_narrow(findings)) if s.wire.startswith("onebit")]
    steps = [s for s in steps if CONVOLUTIONAL.search(s.model)]
    stock = [s for s in steps if _block(s.wire) < RESHAPED]
    reshaped = [s for s in steps if _block(s.wire) >= RESHAPED]
    if not stock or not reshaped:
        return _unknown("needs 1-bit SGD with short columns beside the reshaped one, on a convolutional network")
    slower = [s for s in stock if s.faster is False]
    fixed = [s for s in reshaped if s.faster is not False]
    because = (
        f"{_source(steps)}: short columns are slower than float32 in {len(slower)} of {len(stock)} settings "
        f"({formatting.ratio(_mean_gain(stock))} on average), reshaped ones not slower in {len(fixed)} of "
        f"{len(reshaped)} ({formatting.ratio(_mean_gain(reshaped))})"
    )
    return _yes_if(bool(slower) and len(fixed) == len(reshaped), because)


def _cheap_instances_win(findings: Findings) -> Judged:
    won, places = 0, 0
    priced = [s for s in findings.steps if s.line.get("dollars_per_epoch") is not None]
    for same in grouped(priced, lambda s: (s.model, s.data, s.workers, s.min_values)).values():
        # not the cluster: a machine has one file for each primitive, and one price
        plain = grouped((s for s in same if s.wire == findings.baseline), lambda s: s.rate_name)
        if len(plain) < 2:
            continue
        fastest = min(plain, key=lambda machine: min(s.time.value for s in plain[machine]))
        narrow = [s for s in same if s.rate_name != fastest and code_bits(s.wire) <= 8 and not s.untouched]
        if narrow:
            places += 1
            won += min(map(_dollars, narrow)) < min(map(_dollars, plain[fastest]))
    if not places:
        return _unknown("needs prices of two machines")
    settings = formatting.count(places, "setting")
    because = f"predicted: an epoch costs less so than on the faster machine in {won} of {settings}"
    return _yes_if(won > places / 2, because)


def _dollars(step: Step) -> float:
    return float(step.line["dollars_per_epoch"])


STATEMENTS: tuple[tuple[str, Callable[[Findings], Judged]], ...] = (
    ("4 to 8 bits keep the accuracy of every network", _few_bits_keep_accuracy),
    ("1 or 2 bits lose accuracy on convolutional networks", _one_or_two_bits_lose),
    ("Over MPI, 8 bits or fewer help everywhere", _mpi_helps),
    ("AlexNet, VGG and LSTM gain most", _large_networks_gain_most),
    ("The more workers, the larger the gain", _many_workers_gain_more),
    ("Over NCCL the gain shrinks strongly (to less than half)", _nccl_gains_less),
    ("float32 over NCCL often beats few bits over MPI", _plain_nccl_beats_narrow_mpi),
    ("On a DGX-1 with NCCL little is left to gain, except for AlexNet and VGG", _dgx_has_little_left),
    ("Going below 4 bits brings diminishing returns", _diminishing_returns),
    ("1-bit SGD in its stock form can be slower than 32 bits on convolutions; reshaping mends it", _stock_one_bit),
    ("Few bits on a cheap machine cost less than a faster link", _cheap_instances_win),
)


def insights(findings: Findings) -> list[Insight]:
    """Every statement, with what these data say about it."""
    return [Insight(statement, *judged(findings)) for statement, judged in STATEMENTS]


GRUBIC = Statements(
    source="Grubic et al. (EDBT 2018)",
    note=(
        "The insights that Grubic et al. (EDBT 2018) are remembered for. The wording is ours and was not checked "
        "against the paper's text; the judgement is computed from this study alone."
    ),
    judge=insights,
)
