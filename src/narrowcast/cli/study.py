"""`narrowcast study`: run a study, list those that there are, look at what one has found; and `narrowcast report`."""

from __future__ import annotations

import itertools
import json
import re
import signal
import statistics
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from narrowcast import study as studies
from narrowcast.console import JsonPath, emit, make_console, new_table, save
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
COMPARISON = "comparison.html"
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


@app.command("init")
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("mine.toml"),
    like: Annotated[str, typer.Option(help="The study to begin with (see `ls`).")] = "quick",
    json_path: JsonPath = None,
) -> None:
    """Begin a study of your own: a copy of one that runs, under a name of its own, to be edited."""
    text = studies.text_of(like)
    if path.suffix != ".toml" or not path.parent.is_dir():
        raise ValueError(f"study init: got {path}; name a file that ends with .toml, in a folder that is there")
    if path.exists():
        raise ValueError(f"study init: {path} is there already; name another file, or remove it")
    text = re.sub(r'^name = ".*"$', f'name = "{path.stem}"', text, count=1, flags=re.MULTILINE)
    studies.parse(text, str(path))
    path.write_text(text)
    emit(
        {"written": str(path), "like": like},
        f"{path}, a copy of {like}: edit it, then narrowcast study run {path}",
        json_path,
    )


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A study in ./studies, or a folder; with --file a built-in one, too.")],
    file: Annotated[bool, typer.Option("--file", help="Print the study's file instead.")] = False,
    json_path: JsonPath = None,
) -> None:
    """What a study has found so far: the verdict, then tables; --json: its lines."""
    if file:
        text = studies.text_of(name)
        save({"name": name, "file": text}, json_path)
        if json_path != "-":
            typer.echo(text, nl=False)
        return
    folder = Path(name) if Path(name).is_dir() else FOLDER / name
    lines = studies.usable_lines(folder)
    if json_path is not None:
        emit(lines, f"written to {json_path}", json_path)
        return
    if any(line["status"] == "done" for line in results.latest(lines).values()):
        make_console().print("\n".join(studies.verdict_lines(studies.judge(Findings.of(folder)))), markup=False)
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
    other: Annotated[
        Path | None, typer.Argument(metavar="[OTHER]", help="Another study's folder: compare the two on one page.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the page; report.html, or comparison.html, in the folder."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as Markdown, too; - prints it.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row for each setting, too; - prints it.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Turn the results of a study into one HTML file: the verdict, figures with what they prove, tables.

    Of two studies: the same cells beside one another, with their differences, and what is in one of them only.
    """
    paths = {"--markdown": markdown, "--csv": csv, "--json": Path(json_path) if json_path else None}
    if other is None:
        paths["--out"] = out or studies.default_path(folder)
    else:
        paths["--out"] = out or studies.default_path(folder).with_name(COMPARISON)
    targets = {option: path for option, path in paths.items() if path is not None}
    read = [_results_of(one) for one in (folder, other) if one is not None]
    _refuse_to_share({**{f"the results {path}": path for path in read}, **targets})
    made = _one(folder, targets) if other is None else _two(folder, other, targets)
    texts = {targets[option]: text for option, text in made.texts.items()}
    printed = texts.pop(STANDARD_OUTPUT, None)
    for path, text in texts.items():
        studies.write(path, text)
    if printed is not None:
        typer.echo(printed, nl=False)
        return
    typer.echo("\n".join([*made.words, "", *(f"written: {path}" for path in texts)]))


def _results_of(folder: Path) -> Path:
    return folder / results.FILE if folder.is_dir() else folder


@dataclass(frozen=True)
class Reported:
    """What goes into files, by option, and what is said in a terminal."""

    texts: dict[str, str]
    words: list[str]


def _one(folder: Path, targets: Collection[str]) -> Reported:
    findings = Findings.of(folder)
    return Reported(
        {option: MAKERS[option](findings) for option in targets}, studies.verdict_lines(studies.judge(findings))
    )


def _two(folder: Path, other: Path, targets: Collection[str]) -> Reported:
    for option in ("--markdown", "--csv"):
        if option in targets:
            raise ValueError(f"{option} is of one study; of two take --json, or a table's CSV from the page")
    if _results_of(folder).resolve() == _results_of(other).resolve():
        raise ValueError(f"{folder} and {other} are one study; give two")
    made = studies.Comparison.of(Findings.of(folder), Findings.of(other))
    a, b = made.names
    counts = {"in both, not compared": made.refused, f"in {a} only": made.only_a, f"in {b} only": made.only_b}
    words = [made.headline, *(f"{what}: {formatting.count(len(some), 'cell')}" for what, some in counts.items())]
    facts = studies.comparison_facts(made)
    texts = {"--out": studies.compare_page(made), "--json": json.dumps(facts, indent=1) + "\n"}
    return Reported({option: texts[option] for option in targets}, words)
