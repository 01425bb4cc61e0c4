"""All validations by name, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from narrowcast_research.validation import (
    calibrate,
    collectives,
    ddl,
    dettmers2016,
    formulas,
    grace,
    lab,
    qsgd,
    transfer,
)
from narrowcast_research.validation.metrics import Cell, Figures, Result

Make = Callable[[], list[Result]]

VALIDATIONS: dict[str, Make] = {
    "dettmers2016": lambda: [
        dettmers2016.node_result(),
        dettmers2016.cluster_result("paper"),
        dettmers2016.cluster_result("honest"),
    ],
    "formulas": lambda: [formulas.validate()],
    "collectives": lambda: [collectives.validate()],
    "transfer": lambda: [transfer.validate()],
    "ddl": lambda: [ddl.validate()],
    "qsgd": lambda: [qsgd.validate()],
    "grace": lambda: [grace.validate()],
    "lab": lambda: [lab.validate()] if lab.read(lab.SHIPPED) else [],
    "nccl": lambda: [lab.validate_nccl()],
    "edbt18-nccl": lambda: [lab.validate_edbt18()],
    "intervals": lambda: [calibrate.validate()],
}


def run(names: Sequence[str] = ()) -> Iterable[Result]:
    unknown = [name for name in names if name not in VALIDATIONS]
    if unknown:
        raise ValueError(f"validate: unknown {unknown[0]!r}; there are {', '.join(VALIDATIONS)}")
    for name in names or VALIDATIONS:
        yield from VALIDATIONS[name]()


HEADINGS = ("cells", "MAPE", "median", "largest", "bias", "in 5-95 %", "rank correlation", "decisions")


def figure_row(found: Figures) -> list[str]:
    """The figures as words: errors in percent, decisions as a share of the cases."""
    errors = [
        f"{getattr(found, key):{'+' if key == 'bias' else ''}.1f} %" for key in ("mape", "median", "largest", "bias")
    ]
    rank = "" if found.rank is None else f"{found.rank:.2f}"
    share = "" if found.decisions is None else f"{100 * found.decisions:.0f} % of {found.decided}"
    inside = "" if found.inside is None else f"{100 * found.inside:.0f} %"
    return [str(found.cells), *errors, inside, rank, share]


LABELS = {
    "mape": "MAPE",
    "largest": "largest error",
    "decisions": "decision accuracy",
    "rank": "rank correlation",
    "order": "right order",
    "inside": "share in the interval",
}
PERCENT = ("mape", "largest")


def target_lines(result: Result) -> list[str]:
    """What was to be reached, and whether it was."""
    lines = []
    for name, (sign, wanted) in result.targets.items():
        part, _, figure = name.rpartition("/")
        got = result.value(name)
        unit = " %" if figure in PERCENT else ""
        label = " ".join(filter(None, [part, LABELS.get(figure, figure)]))
        state = "reached" if result.met()[name] else "NOT reached"
        lines.append(f"{label} {sign} {wanted:g}{unit}: {state} ({got:.3g}{unit})")
    return lines


PAGE = """# How good predictions are

Written by `narrowcast validate --markdown docs/validation.md`: every figure here is computed from data in
`research/narrowcast_research/validation/data` (its `SOURCES.md` says whose), and `narrowcast validate` fails where a
promised one is missed.

- **MAPE** is the mean of the relative errors' sizes, **bias** that of the errors with their sign.
- **In 5-95 %** is the share of measured cells in the predicted interval, of which 85 to 97 % are promised: the last
  table has it for clusters of which the spreads know nothing.
- **Rank correlation** is Kendall's tau between measured and predicted, within each case, averaged.
- **Decisions**: the share of cases whose predicted best wire is the best measured one, or within 3 % of it.
- Cells that are *not counted* are shown and take no part in the figures.

`narrowcast validate NAME` prints every cell of one table; NAME is in brackets.
"""


def markdown(results: Iterable[Result], cells: int = 60) -> str:
    """A page: a summary, then each table."""
    results = list(results)
    return "\n".join([PAGE, *_table(SUMMARY, summary(results)), "", *sections(results, cells)])


def sections(results: Iterable[Result], cells: int = 60) -> list[str]:
    """For each table what was fitted, the figures, and its cells, or some of very many."""
    parts = []
    for result in results:
        heads = ["", *HEADINGS]
        rows = [["all", *figure_row(result.figures)]]
        rows += [[name, *figure_row(found)] for name, found in result.extra.items()]
        lines = [f"## {result.title} [{result.name}]", "", f"Fitted: {result.fitted}.", "", *_table(heads, rows), ""]
        lines += [f"- {line}" for line in [*target_lines(result), *result.notes]]
        parts.append("\n".join([*lines, "", *_cells(result, cells)]) + "\n")
    return parts


def _cells(result: Result, most: int) -> list[str]:
    unit = f" ({result.unit})" if result.unit else ""
    heads = [
        *result.columns,
        f"measured{unit}",
        f"predicted{unit}",
        *(["5-95 %"] if has_intervals(result) else []),
        "error",
    ]
    each = -(-len(result.cells) // most)
    rows = [cell_row(result, cell) for cell in result.cells[::each]]
    more = [f"One in {each} of {len(result.cells)} cells:", ""] if each > 1 else []
    return [*more, *_table(heads, rows)]


def cell_row(result: Result, cell: Cell) -> list[str]:
    measured, predicted = (f"{value * result.scale:.4g}" for value in (cell.measured, cell.predicted))
    mark = "" if cell.counted else " (not counted)"
    ends = [f"{cell.low * result.scale:.4g}-{cell.high * result.scale:.4g}"] if has_intervals(result) else []
    return [*cell.key, measured, predicted, *ends, f"{100 * cell.error:+.1f} %{mark}"]


def has_intervals(result: Result) -> bool:
    return any(cell.high for cell in result.cells)


def summary(results: Iterable[Result]) -> list[list[str]]:
    """A line for each data set, and for each part of it: error, bias and share in the interval."""
    rows = []
    for result in results:
        for part, found in {"": result.figures, **result.extra}.items():
            inside = "" if found.inside is None else f"{100 * found.inside:.0f} %"
            rows.append([result.name, part, str(found.cells), f"{found.mape:.1f} %", f"{found.bias:+.1f} %", inside])
    return rows


SUMMARY = ("data", "part", "cells", "MAPE", "bias", "in 5-95 %")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
