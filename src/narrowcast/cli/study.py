"""`narrowcast study`: run a study, list those that there are, and look at what one has found."""

from __future__ import annotations

import itertools
import re
import signal
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from narrowcast.console import JsonPath, emit, make_console, new_table
from narrowcast.study import (
    KINDS,
    LAUNCHERS,
    Finding,
    Options,
    Outcome,
    StudyFile,
    file,
    grouped,
    results,
    runner,
    sbatch,
    torchrun,
    usable_lines,
)

app = typer.Typer(
    help="Can few bits on the wire improve training with no loss of accuracy? Run a study and see.",
    no_args_is_help=True,
)

FOLDER = Path("studies")
BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
STOPPED, FAILED = 130, 1
ORDERLY = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


def seconds_of(text: str) -> float:
    """`"60m"` -> 3600.0."""
    match = BUDGET.fullmatch(text)
    if match is None:
        raise ValueError(f"--budget: got {text!r}; give a number and s, m or h, such as 90s, 60m or 1.5h")
    return float(match[1]) * UNITS[match[2]]


@app.command("run")
def run(
    name: Annotated[str, typer.Argument(help="A built-in study (see `ls`), or a file.")] = "quick",
    out: Annotated[Path | None, typer.Option(help="The folder for its results; default studies/NAME.")] = None,
    budget: Annotated[str | None, typer.Option(help="Begin no new case after this long: 90s, 60m, 1.5h.")] = None,
    launcher: Annotated[str, typer.Option(help=f"What starts ranks: {', '.join(LAUNCHERS)}.")] = "auto",
    only: Annotated[str | None, typer.Option(help=f"Kinds of cases: some of {','.join(KINDS)}.")] = None,
    sbatch_script: Annotated[bool, typer.Option("--sbatch", help="Print a SLURM script instead.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Run a study, or go on with one. Every result is on the disk at once; the report is written at the end.

    Ends with 1 where cases failed, and with 130 where it was stopped.
    """
    # a study may name a package of the user's own, as python itself would find it
    sys.path.insert(0, "")
    study = file.load(name)
    folder = out or FOLDER / study.name
    if sbatch_script:
        print(sbatch.script(study, name, folder), end="")
        return
    options = Options(folder, launcher, seconds_of(budget) if budget else None, _kinds(only), quiet=json_path == "-")
    # a scheduler that ends us, or a terminal that is closed, gets the same orderly end as Ctrl-C
    for number in ORDERLY:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has us ignore the terminal
            signal.signal(number, signal.default_int_handler)
    try:
        if launcher == "torchrun" and torchrun.rank() != 0:
            torchrun.follow()
            return
        outcome = runner.run(study, options)
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped; what was found is in {folder}; run the same command again to go on\n")
        raise typer.Exit(STOPPED) from None
    _tell(study, outcome, json_path)
    if outcome.failed:
        raise typer.Exit(FAILED)


def _kinds(only: str | None) -> tuple[str, ...]:
    kinds = tuple(only.split(",")) if only else ()
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"--only: unknown {kind!r}; take some of {','.join(KINDS)}")
    return kinds


def _tell(study: StudyFile, outcome: Outcome, json_path: str | None) -> None:
    """The table, the verdict and where the report is."""
    from narrowcast.study import verdict_text, write_report

    lines = usable_lines(outcome.folder)
    report, verdict = write_report(outcome.folder), verdict_text(outcome.folder)
    facts = {**vars(outcome), "folder": str(outcome.folder), "report": str(report), "verdict": verdict}
    if json_path == "-":
        emit(facts, "", "-")
        return
    for table in tables(lines):
        make_console().print(table)
    if outcome.failed:
        make_console().print(f"{outcome.failed} of {outcome.total} cases failed; study show {outcome.folder} says why")
    if outcome.left:
        make_console().print(f"{outcome.left} of {outcome.total} cases were not begun; run the same command again")
    text = f"{verdict}\n\nThe report: {report}"
    emit(facts, text, json_path)


@app.command("ls")
def ls(json_path: JsonPath = None) -> None:
    """The studies that come with narrowcast, and those in ./studies."""
    rows = [*(_builtin(name) for name in file.builtins()), *_finished()]
    table = new_table("Studies: narrowcast study run NAME", "name", "what", "cases", "done", "failed")
    for row in rows:
        table.add_row(row["name"], row["what"], *(str(row[key] or "") for key in ("cases", "done", "failed")))
    emit(rows, table, json_path)


def _builtin(name: str) -> dict[str, Any]:
    study = file.load(name)
    count = sum(1 for _ in runner.every_case(study, "lab"))
    return {"name": name, "what": study.about, "cases": count, "done": None, "failed": None}


def _finished() -> Iterable[dict[str, Any]]:
    for path in sorted(FOLDER.glob(f"*/{results.FILE}")):
        try:
            lines = usable_lines(path)
        except results.ResultsError as error:
            yield {"name": str(path.parent), "what": str(error), "cases": None, "done": None, "failed": None}
            continue
        found = [line["status"] for line in results.latest(lines).values()]
        started = [line["started"] for line in lines if line["kind"] == "session"]
        counts = {status: found.count(status) for status in ("done", "failed")}
        what = f"begun {started[0]}" if started else ""
        yield {"name": str(path.parent), "what": what, "cases": len(found), **counts}


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A study in ./studies, or a folder.")], json_path: JsonPath = None
) -> None:
    """What a study has found so far, as tables; --json: its lines."""
    folder = Path(name) if Path(name).is_dir() else FOLDER / name
    lines = usable_lines(folder)
    if json_path is not None:
        emit(lines, f"written to {json_path}", json_path)
        return
    for table in tables(lines):
        make_console().print(table)
    for line in results.latest(lines).values():
        if line["status"] == "failed":
            make_console().print(f"failed: {line['case']}: {line.get('error')}", markup=False)


def tables(lines: list[results.Line]) -> list[Table]:
    """Step times with speedups over the baseline, and accuracies with differences from it."""
    sessions = [line for line in lines if line["kind"] == "session"]
    baseline = sessions[-1]["baseline"] if sessions else "fp32"
    found = [line for line in results.latest(lines).values() if line["status"] == "done"]
    times = [line for line in found if line["kind"] == "time"]
    trained = [line for line in found if line["kind"] == "accuracy"]
    made = []
    if times:
        made.append(_times(times, baseline))
    if trained:
        made.append(_accuracies(trained, baseline))
    return made


def _step(line: results.Line) -> float:
    return line["step_ms"] if line["source"] == "predicted" else statistics.median(itertools.chain(*line["steps_ms"]))


SETTING = ("model", "data", "layout", "rate_name", "transport", "parallel")


def _times(lines: list[results.Line], baseline: str) -> Table:
    columns = ("model", "data", "workers", "link", "transport", "parallel", "wire", "algorithm", "step ms", "predicted")
    table = new_table(f"Steps, and how many times faster than {baseline}", *columns, "faster", "bytes a step")
    plain = {Finding(line).place: _step(line) for line in lines if line["wire"] == baseline}
    for line in lines:
        base = plain.get(Finding(line).place)
        measured = f"{_step(line):.1f}" if line["source"] == "measured" else ""
        expected = line["step_ms"] if line["source"] == "predicted" else line.get("predicted_ms")
        sent = (line.get("bytes") or {}).get("claimed")
        table.add_row(
            *(str(line.get(key) or "") for key in SETTING),
            *(line["wire"], line["algorithm"], measured, f"{expected:.1f}" if expected else ""),
            _faster(line, base),
            f"{sent:,.0f}" if sent else "",
        )
    return table


def _faster(line: results.Line, base: float | None) -> str:
    if Finding(line).untouched:
        return "nothing compressed"
    return f"{base / _step(line):.2f}" if base else ""


def _accuracies(lines: list[results.Line], baseline: str) -> Table:
    columns = ("model", "data", "workers", "wire", "algorithm", "seeds", "accuracy", f"minus {baseline}")
    table = new_table("Accuracy on the test set, in points, means over seeds", *columns)
    wires = grouped(lines, lambda line: (Finding(line).place, line["wire"], line["algorithm"]))
    for (place, _, _), runs in wires.items():
        plain = next((same for (where, wire, _), same in wires.items() if (where, wire) == (place, baseline)), [])
        axes = (str(runs[0].get(key) or "") for key in ("model", "data", "layout", "wire", "algorithm"))
        mean = statistics.fmean(line["accuracy"] for line in runs)
        table.add_row(*axes, str(len(runs)), f"{mean:.2f}", _difference(runs, plain))
    return table


def _difference(runs: list[results.Line], plain: list[results.Line]) -> str:
    if Finding(runs[0]).untouched:
        return "nothing compressed"
    base = {line["seed"]: line["accuracy"] for line in plain}
    pairs = [line["accuracy"] - base[line["seed"]] for line in runs if line["seed"] in base]
    return f"{statistics.fmean(pairs):+.2f}" if pairs else ""
