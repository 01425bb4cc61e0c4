"""The command line: `narrowcast formats`, `codecs`, `bench`, `doctor`. Each has --help and --json."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable
from typing import Annotated, Any

try:
    import typer
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"narrowcast: the command line needs typer and rich ({missing}); run: pip install 'narrowcast[cli]'")

import torch
from narrowcast_research.bench import dettmers2016, nonfinite
from narrowcast_research.reproductions.cli import simulate as simulate_command

import narrowcast
from narrowcast.bench import codecs as bench_codecs
from narrowcast.bench import cuda as bench_cuda
from narrowcast.bench.check import failure
from narrowcast.cli.bench import app as bench_app
from narrowcast.cli.data import app as data_app
from narrowcast.cli.lab import app as lab_app
from narrowcast.cli.report import report as report_command
from narrowcast.cli.study import app as study_app
from narrowcast.codecs import Codec, all_specs, error_report
from narrowcast.codecs import codec as codec_named
from narrowcast.console import JsonPath, emit, new_table, number, percent, progress
from narrowcast.data import DataError
from narrowcast.formats import Format, all_formats, families
from narrowcast.kernels import native, ops, triton_loader
from narrowcast.lab import LabError
from narrowcast.measure import cpu_name
from narrowcast.predict import cli as predict_cli

app = typer.Typer(
    help="Fewer bits on the wire when deep networks train on many devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")
predict_cli.register(app)
app.add_typer(data_app, name="data")
app.command("simulate")(simulate_command)
app.add_typer(study_app, name="study")
app.command("report")(report_command)


def main() -> None:
    """Entry point: an error that we raised on purpose is one line and status 2, without a traceback."""
    try:
        app()
    except (ValueError, TypeError, NotImplementedError, LabError, DataError) as error:
        print(f"narrowcast: {error}", file=sys.stderr)
        sys.exit(2)


# ---- formats ---------------------------------------------------------------------------------------------------------


def _format_row(fmt: Format) -> dict[str, Any]:
    return {
        "name": fmt.name,
        "bits": fmt.bits,
        "max": fmt.max,
        "min": fmt.min,
        "smallest_normal": fmt.smallest_normal,
        "smallest_subnormal": fmt.smallest_subnormal,
        "smallest": fmt.smallest,
        "values": len(fmt.grid),
        "overflow_rules": list(fmt.overflows),
        "rules": fmt.rules,
    }


@app.command()
def formats(json_path: JsonPath = None) -> None:
    """List the number formats: bits, largest and smallest values, specials, corner rules."""
    rows = [_format_row(fmt) for fmt in all_formats()]
    columns = (
        "format",
        "bits",
        "max",
        "smallest normal",
        "subnormal",
        "smallest",
        "overflow",
        "NaN ->",
        "Inf ->",
        "-0 ->",
    )
    table = new_table("Formats", *columns)
    for row in rows:
        limits = [number(row[key]) for key in ("max", "smallest_normal", "smallest_subnormal", "smallest")]
        rules = [row["rules"][key] for key in ("overflow", "nan", "inf", "-0")]
        table.add_row(row["name"], str(row["bits"]), *limits, *rules)
    patterns = "; ".join(f"{family.pattern}: {family.meaning}" for family in families())
    table.caption = f"Any member of a family can be named. {patterns}"
    emit(rows, table, json_path)


# ---- codecs ----------------------------------------------------------------------------------------------------------

LIST_VALUES = 4 << 20
SLOW_VALUES = 1 << 16
"""Without native kernels the listing takes fewer values."""


def _codec_row(spec: str, x: torch.Tensor) -> dict[str, Any]:
    codec = codec_named(spec)
    report = error_report(x, codec)
    runs = bench_codecs.implementation(spec)
    part = x if runs != "reference" else x[:SLOW_VALUES]
    speed = bench_codecs.measure_codec(spec, part, "listing", rounds=3)
    return {
        "codec": spec,
        "bits_per_value": codec.bits_per_value,
        "block": codec.block,
        "snr_db": report.snr_db,
        "relative_error": report.relative_error,
        "bias": report.bias,
        "flushed": report.flushed,
        "encode_share": speed.encode,
        "decode_share": speed.decode,
        "runs_on": runs,
        "failed": speed.failed,
        "exempt": codec.exemptions,
    }


@app.command()
def codecs(
    table: Annotated[str | None, typer.Option(help="A table to print instead: dettmers2016 or nonfinite.")] = None,
    json_path: JsonPath = None,
) -> None:
    """List every codec: bits per value, error on normal data, and speed on this machine."""
    if table is not None:
        _published(table)(json_path)
        return
    x = bench_codecs.data(4 * LIST_VALUES)
    specs = all_specs()
    rows = [_codec_row(spec, x) for spec in progress(specs, len(specs), "codecs")]
    shown = new_table(
        f"Codecs on {x.numel()} values of N(0,1); speed as a share of copy_, one thread",
        *("codec", "bits/value", "SNR dB", "relative error", "encode", "decode", "runs on", "exempt from"),
    )
    for row in rows:
        exempt = "; ".join(row["exempt"]) if not row["failed"] else f"FAILED: {row['failed']}"
        numbers = f"{row['bits_per_value']:.3f}", f"{row['snr_db']:.1f}", f"{row['relative_error']:.3g}"
        speeds = percent(row["encode_share"]), percent(row["decode_share"])
        shown.add_row(row["codec"], *numbers, *speeds, row["runs_on"], exempt)
    emit({"machine": bench_codecs.describe_machine(), "codecs": rows}, shown, json_path)


def _published(name: str) -> Callable[[str | None], None]:
    tables = {"dettmers2016": _dettmers, "nonfinite": _nonfinite}
    if name not in tables:
        raise ValueError(f"codecs --table: unknown table {name!r}; there are {', '.join(tables)}")
    return tables[name]


def _nonfinite(json_path: str | None) -> None:
    rows = list(nonfinite.run())
    columns = ("codec", "NaN ->", "Inf ->", "3.4e38 ->", "others lost", "kept", "exempt from")
    shown = new_table("One NaN, one Inf and one 3.4e38 in 4096 values of N(0,1)", *columns)
    for row in rows:
        shown.add_row(
            row.codec, row.nan, row.inf, row.huge, str(row.others_lost), "yes" if row.kept else "NO", row.exempt
        )
    shown.caption = "3.4e38 is sent by itself; the others lost are those that share a scale with the NaN or the Inf."
    emit([row.as_dict() for row in rows], shown, json_path)


def _dettmers(json_path: str | None) -> None:
    cells = list(progress(dettmers2016.run(), len(dettmers2016.PUBLISHED), "cells"))
    columns = ("distribution", "type", "abs", "abs corrected", "sq", "sq corrected", "sq paper")
    shown = new_table(
        "Dettmers 2016, table 2, errors of the four types", *columns, "rel %", "rel corrected", "rel paper", "off by"
    )
    for cell in cells:
        then = cell.published
        absolute = number(cell.absolute), number(then.absolute)
        squared = number(cell.squared), number(then.squared), number(then.paper_squared)
        relative = f"{cell.relative:.3f}", number(then.relative), number(then.paper_relative)
        shown.add_row(cell.distribution, cell.codec, *absolute, *squared, *relative, f"{cell.deviation:.2%}")
    shown.caption = "The paper calls its squared error 'mean absolute error'; see docs/dettmers2016.md."
    emit([cell.as_dict() for cell in cells], shown, json_path)


# ---- doctor ----------------------------------------------------------------------------------------------------------

EXTRAS = ("typer", "rich", "numpy", "ml_dtypes", "gfloat", "bitsandbytes", "torchao", "qtorch", "softposit")


def _slow_codecs() -> dict[str, str]:
    """Codecs that do not run on the fastest path, and why."""
    found = {}
    for spec in all_specs():
        codec: Codec = codec_named(spec)
        reasons = {choice.why for choice in codec.explain() if choice.why}
        if reasons:
            found[spec] = "; ".join(sorted(reasons))
    return found


def _cuda_devices() -> list[str]:
    return [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]


def _failures() -> dict[str, str]:
    """What differs from the reference: every codec on the CPU; on a GPU, which compiles first, one of each kind."""
    found = {spec: failure(codec_named(spec)) for spec in all_specs()}
    if torch.cuda.is_available():
        found |= {f"{spec} on cuda": failure(codec_named(spec), torch.device("cuda")) for spec in bench_cuda.TARGETS}
    return {what: why for what, why in found.items() if why}


@app.command()
def doctor(json_path: JsonPath = None) -> None:
    """What runs on this machine, what does not, and why. Ends with 1 where a kernel fails its check."""
    library, where = native.load()
    failures = _failures()
    facts: dict[str, Any] = {
        "narrowcast": narrowcast.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "native": library is not None,
        "native_where": where,
        "isa": native.isa() if library is not None else None,
        "cuda": _cuda_devices(),
        "triton": triton_loader.load()[1],
        "ops": [vars(choice) for choice in ops.explain()],
        "slow": _slow_codecs(),
        "failed_checks": failures,
        "extras": {name: importlib.util.find_spec(name) is not None for name in EXTRAS},
    }
    emit(facts, _doctor_table(facts), json_path)
    if failures:
        raise typer.Exit(1)


def _doctor_table(facts: dict[str, Any]) -> Table:
    shown = new_table("narrowcast doctor", "what", "finding")
    shown.columns[1].justify = "left"
    for key in ("narrowcast", "torch", "python", "cpu", "threads"):
        shown.add_row(key, str(facts[key]))
    state = f"yes, {facts['isa']}" if facts["native"] else f"NO: {facts['native_where']}"
    shown.add_row("native CPU kernels", state)
    shown.add_row("CUDA devices", ", ".join(facts["cuda"]) or "none here")
    shown.add_row(
        "Triton kernels", facts["triton"] if facts["cuda"] else f"{facts['triton']}; no CUDA device uses them"
    )
    for choice in facts["ops"]:
        shown.add_row(
            f"{choice['op']} on {choice['device']}", " ".join(filter(None, [choice["implementation"], choice["why"]]))
        )
    for spec, why in facts["slow"].items() if facts["native"] else ():
        shown.add_row(f"slow: {spec}", why)
    for spec, why in facts["failed_checks"].items():
        shown.add_row(f"FAILED: {spec}", why)
    here, absent = ([name for name, found in facts["extras"].items() if found is state] for state in (True, False))
    shown.add_row("optional packages", f"here: {', '.join(here)}; not here: {', '.join(absent) or 'none'}")
    return shown
