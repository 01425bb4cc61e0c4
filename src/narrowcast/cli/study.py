"""`narrowcast study`: run a study, list those that there are, look at what one has found; and `narrowcast report`."""

from __future__ import annotations

import itertools
import json
import re
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from narrowcast import study as studies
from narrowcast.console import JsonPath, emit, make_console, new_table
from narrowcast.study import KINDS, LAUNCHERS, Finding, Findings, Options, Outcome, formatting, grouped, results

app = typer.Typer(
    help="Can few bits on the wire improve training with no loss of accuracy? Run a study and see.",
    no_args_is_help=True,
)

FOLDER = Path("studies")
BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
STOPPED, FAILED = 130, 1
STANDARD_OUTPUT = Path("-")
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
    study = studies.load(name)
    folder = out or FOLDER / study.name
    if sbatch_script:
        print(studies.sbatch_script(study, name, folder), end="")
        return
    options = Options(folder, launcher, seconds_of(budget) if budget else None, _kinds(only), quiet=json_path == "-")
    # a scheduler that ends us, or a terminal that is closed, gets the same orderly end as Ctrl-C
    for number in ORDERLY:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has us ignore the terminal
            signal.signal(number, signal.default_int_handler)
    try:
        if launcher == "torchrun" and studies.torchrun.rank() != 0:
            studies.torchrun.follow()
            return
        outcome = studies.run(study, options)
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped; what was found is in {folder}; run the same command again to go on\n")
        raise typer.Exit(STOPPED) from None
    _show_outcome(outcome, json_path)
    if outcome.failed:
        raise typer.Exit(FAILED)


def _kinds(only: str | None) -> tuple[str, ...]:
    kinds = tuple(only.split(",")) if only else ()
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"--only: unknown {kind!r}; take some of {','.join(KINDS)}")
    return kinds


def _show_outcome(outcome: Outcome, json_path: str | None) -> None:
    """The table, the verdict and where the report is."""
    report, verdict = studies.write_report(outcome.folder), studies.verdict_text(outcome.folder)
    facts = {**vars(outcome), "folder": str(outcome.folder), "report": str(report), "verdict": verdict}
    if json_path == "-":
        emit(facts, "", "-")
        return
    for table in tables(studies.usable_lines(outcome.folder)):
        make_console().print(table)
    if outcome.failed:
        make_console().print(f"{outcome.failed} of {outcome.total} cases failed; study show {outcome.folder} says why")
    if outcome.left:
        make_console().print(f"{outcome.left} of {outcome.total} cases were not begun; run the same command again")
    emit(facts, f"{verdict}\n\nThe report: {report}", json_path)


@app.command("ls")
def ls(json_path: JsonPath = None) -> None:
    """The studies that come with narrowcast, and those in ./studies."""
    rows = []
    for name in studies.builtins():
        study = studies.load(name)
        rows.append(_study_row(name, study.about, len(list(studies.every_case(study, "lab")))))
    rows += map(_row_of_results, sorted(FOLDER.glob(f"*/{results.FILE}")))
    shown = [[value or "" for value in row.values()] for row in rows]
    table = new_table("Studies: narrowcast study run NAME", "name", "what", "cases", "done", "failed", rows=shown)
    emit(rows, table, json_path)


def _study_row(
    name: str, what: str, cases: int | None = None, done: int | None = None, failed: int | None = None
) -> dict[str, Any]:
    return {"name": name, "what": what, "cases": cases, "done": done, "failed": failed}


def _row_of_results(path: Path) -> dict[str, Any]:
    try:
        lines = studies.usable_lines(path)
    except results.ResultsError as error:
        return _study_row(str(path.parent), str(error))
    ended = [line["status"] for line in results.latest(lines).values()]
    started = [line["started"] for line in lines if line["kind"] == "session"]
    what = f"begun {started[0]}" if started else ""
    return _study_row(str(path.parent), what, len(ended), ended.count("done"), ended.count("failed"))


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A study in ./studies, or a folder.")], json_path: JsonPath = None
) -> None:
    """What a study has found so far, as tables; --json: its lines."""
    folder = Path(name) if Path(name).is_dir() else FOLDER / name
    lines = studies.usable_lines(folder)
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
    done = [line for line in results.latest(lines).values() if line["status"] == "done"]
    by_kind = grouped(done, lambda line: line["kind"])
    makers = {"time": _times, "accuracy": _accuracies}
    return [make(by_kind[kind], baseline) for kind, make in makers.items() if kind in by_kind]


def _step(line: results.Line) -> float:
    return line["step_ms"] if line["source"] == "predicted" else statistics.median(itertools.chain(*line["steps_ms"]))


def _texts(line: results.Line, *names: str) -> list[str]:
    return [str(line.get(name) or "") for name in names]


def _times(lines: list[results.Line], baseline: str) -> Table:
    columns = ("model", "data", "workers", "link", "transport", "parallel", "wire", "algorithm", "step ms", "predicted")
    plain = {Finding(line).place: _step(line) for line in lines if line["wire"] == baseline}
    rows = []
    for line in lines:
        base, untouched = plain.get(Finding(line).place), Finding(line).untouched
        measured = f"{_step(line):.1f}" if line["source"] == "measured" else ""
        expected = line["step_ms"] if line["source"] == "predicted" else line.get("predicted_ms")
        faster = "nothing compressed" if untouched else f"{base / _step(line):.2f}" if base else ""
        sent = (line.get("bytes") or {}).get("claimed")
        axes = _texts(line, "model", "data", "layout", "rate_name", "transport", "parallel", "wire", "algorithm")
        predicted, claimed = f"{expected:.1f}" if expected else "", f"{sent:,.0f}" if sent else ""
        rows.append((*axes, measured, predicted, faster, claimed))
    title = f"Steps, and how many times faster than {baseline}"
    return new_table(title, *columns, "faster", "bytes a step", rows=rows)


def _accuracies(lines: list[results.Line], baseline: str) -> Table:
    columns = ("model", "data", "workers", "wire", "algorithm", "seeds", "accuracy", f"minus {baseline}")
    wires = grouped(lines, lambda line: (Finding(line).place, line["wire"], line["algorithm"]))
    rows = []
    for (place, _, _), runs in wires.items():
        plain = next((same for (where, wire, _), same in wires.items() if (where, wire) == (place, baseline)), [])
        mean = statistics.fmean(line["accuracy"] for line in runs)
        axes = _texts(runs[0], "model", "data", "layout", "wire", "algorithm")
        rows.append((*axes, len(runs), f"{mean:.2f}", _difference(runs, plain)))
    return new_table("Accuracy on the test set, in points, means over seeds", *columns, rows=rows)


def _difference(runs: list[results.Line], plain: list[results.Line]) -> str:
    if Finding(runs[0]).untouched:
        return "nothing compressed"
    base = {line["seed"]: line["accuracy"] for line in plain}
    pairs = [line["accuracy"] - base[line["seed"]] for line in runs if line["seed"] in base]
    return f"{statistics.fmean(pairs):+.2f}" if pairs else ""


MAKERS: dict[str, Callable[[Findings], str]] = {
    "--out": studies.page,
    "--markdown": studies.as_markdown,
    "--csv": studies.as_csv,
    "--json": lambda findings: json.dumps(studies.summary(findings), indent=1) + "\n",
}


def _refuse_to_share(targets: dict[str, Path]) -> None:
    """Of two texts in one file the first would be lost without a word."""
    shared = grouped(
        targets, lambda name: targets[name] if targets[name] == STANDARD_OUTPUT else targets[name].resolve()
    )
    for path, names in shared.items():
        if len(names) > 1:
            raise ValueError(f"{formatting.listed(names)} are all {path}; give each its own file")


def report(
    folder: Annotated[Path, typer.Argument(help="A study's folder, as `narrowcast study run` wrote it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page; report.html in the folder.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown, too; - prints it.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row for each setting, too; - prints it.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Turn the results of a study into one HTML file: the verdict, figures with what they prove, tables."""
    paths = {"--out": out or studies.default_path(folder), "--markdown": markdown, "--csv": csv}
    paths |= {"--json": Path(json_path) if json_path else None}
    targets = {option: path for option, path in paths.items() if path is not None}
    _refuse_to_share({"the results": folder / results.FILE if folder.is_dir() else folder, **targets})
    findings = Findings.of(folder)
    texts = {targets[option]: MAKERS[option](findings) for option in targets}
    printed = texts.pop(STANDARD_OUTPUT, None)
    for path, text in texts.items():
        studies.write(path, text)
    if printed is not None:
        typer.echo(printed, nl=False)
        return
    typer.echo(
        "\n".join([*studies.verdict_lines(studies.judge(findings)), "", *(f"written: {path}" for path in texts)])
    )
