"""`narrowcast formats`, `codecs` and `doctor`: what there is, and what of it runs on this machine."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.table import Table

import narrowcast
from narrowcast import plugins
from narrowcast.bench import check
from narrowcast.bench import codecs as bench_codecs
from narrowcast.bench import cuda as bench_cuda
from narrowcast.codecs import all_specs, error_report, low_rank_specs
from narrowcast.codecs import codec as codec_named
from narrowcast.console import JsonPath, emit, new_table, number, percent, progress
from narrowcast.formats import Format, all_formats, families
from narrowcast.kernels import explain, native, triton_loader
from narrowcast.kernels import low_rank as low_rank_kernels
from narrowcast.lab import LabError, check_machine, find_mpirun
from narrowcast.measure import cpu_name
from narrowcast.selftest import SPECS

LIST_VALUES = 4 << 20
SLOW_VALUES = 1 << 16
"""Without native kernels the listing takes fewer values."""
MPI_PACKAGE = "mpi4py"
EXTRAS = ("typer", "rich", "numpy", "ml_dtypes", "gfloat", "bitsandbytes", "torchao", "qtorch", "softposit")


def _format_row(fmt: Format) -> dict[str, Any]:
    names = ("name", "bits", "max", "min", "smallest_normal", "smallest_subnormal", "smallest")
    rules = {"values": len(fmt.grid), "overflow_rules": list(fmt.overflows), "rules": fmt.rules}
    return {name: getattr(fmt, name) for name in names} | rules


def formats(json_path: JsonPath = None) -> None:
    """List the number formats: bits, largest and smallest values, specials, corner rules."""
    rows = [_format_row(fmt) for fmt in all_formats()]
    columns = ("format", "bits", "max", "smallest normal", "subnormal", "smallest", "overflow")
    table = new_table("Formats", *columns, "NaN ->", "Inf ->", "-0 ->")
    for row in rows:
        limits = [number(row[key]) for key in ("max", "smallest_normal", "smallest_subnormal", "smallest")]
        rules = [row["rules"][key] for key in ("overflow", "nan", "inf", "-0")]
        table.add_row(row["name"], str(row["bits"]), *limits, *rules)
    patterns = "; ".join(f"{family.pattern}: {family.meaning}" for family in families())
    table.caption = f"Any member of a family can be named. {patterns}"
    emit(rows, table, json_path)


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
        **{name: getattr(report, name) for name in ("snr_db", "relative_error", "bias", "flushed")},
        "encode_share": speed.encode,
        "decode_share": speed.decode,
        "runs_on": runs,
        "failed": speed.failed,
        "exempt": codec.exemptions,
    }


def codecs(
    table: Annotated[str | None, typer.Option(help="A table to print instead: dettmers2016 or nonfinite.")] = None,
    json_path: JsonPath = None,
) -> None:
    """List every codec: bits per value, error on normal data, and speed on this machine."""
    if table is not None:
        _print_table(table, json_path)
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
    low_rank = [_low_rank_row(spec) for spec in low_rank_specs()]
    for row in low_rank:
        bits = f"{row['bits_per_value']:.3f} of a 1024 x 1024 matrix"
        shown.add_row(row["codec"], bits, *([""] * 4), row["runs_on"], "; ".join(row["exempt"]))
    facts = {"machine": bench_codecs.describe_machine(), "codecs": rows, "low_rank": low_rank}
    emit(facts, shown, json_path)


def _low_rank_row(spec: str) -> dict[str, Any]:
    """A kind of call rather than a codec: it has neither an error on flat values nor a speed of its own."""
    codec, (runs, _) = codec_named(spec), low_rank_kernels.explain()
    return {"codec": spec, "bits_per_value": codec.bits_per_value, "runs_on": runs, "exempt": codec.exemptions}


def _print_table(name: str, json_path: str | None) -> None:
    tables = plugins.loaded().tables
    if name in tables:
        plugins.resolve(tables[name])(json_path)
        return
    if name in plugins.RESEARCH_TABLES:
        raise plugins.research_needed(f"codecs --table {name}")
    raise ValueError(f"codecs --table: unknown table {name!r}; there are {', '.join(tables) or 'none'}")


def _slow_codecs() -> dict[str, str]:
    """Codecs that do not run on the fastest path, and why."""
    slow = {}
    for spec in all_specs():
        reasons = {choice.why for choice in codec_named(spec).explain() if choice.why}
        if reasons:
            slow[spec] = "; ".join(sorted(reasons))
    return slow


def _failures(specs: Sequence[str]) -> dict[str, str]:
    """What differs from the reference: these codecs on the CPU; on a GPU, which compiles first, one of each kind."""
    checks = {spec: check.failure(codec_named(spec)) for spec in specs}
    for spec in bench_cuda.TARGETS if torch.cuda.is_available() else ():
        checks[f"{spec} on cuda"] = check.failure(codec_named(spec), torch.device("cuda"))
    return {what: why for what, why in checks.items() if why}


def _nccl() -> str:
    if not dist.is_nccl_available():
        return f"no: torch {torch.__version__} was built without"
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return f"yes, {version}" + ("" if torch.cuda.is_available() else "; no CUDA device uses it")


def _mpi() -> str:
    """As a second transport."""
    if importlib.util.find_spec(MPI_PACKAGE) is None:
        return "no: mpi4py is not here; pip install 'narrowcast[mpi]'"
    return _unless_refused(find_mpirun)


def _unless_refused(look: Callable[[], object]) -> str:
    try:
        found = look()
    except LabError as error:
        return f"no: {error}"
    return f"yes{f', {found}' if found else ''}"


def doctor(
    every: Annotated[
        bool, typer.Option("--all", help="Compare every codec with the reference, not one of each kind.")
    ] = False,
    json_path: JsonPath = None,
) -> None:
    """What runs on this machine, what does not, and why. Ends with 1 where a kernel fails its check."""
    library, where = native.load()
    checked = all_specs() if every else list(SPECS)
    failures = _failures(checked)
    facts: dict[str, Any] = {
        "narrowcast": narrowcast.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "native": library is not None,
        "native_where": where,
        "isa": native.isa() if library is not None else None,
        "cuda": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
        "triton": triton_loader.load()[1],
        "ops": [vars(choice) for choice in explain()],
        "nccl": _nccl(),
        "mpi": _mpi(),
        "lab": _unless_refused(check_machine),
        "slow": _slow_codecs(),
        "checked": checked,
        "failed_checks": failures,
        "extras": {name: importlib.util.find_spec(name) is not None for name in EXTRAS},
    }
    emit(facts, _doctor_table(facts), json_path)
    if failures:
        raise typer.Exit(1)


def _checked(facts: dict[str, Any]) -> str:
    count, there = len(facts["checked"]), len(all_specs())
    return f"{count} codecs, bit for bit" + (
        "" if count == there else f", one or more of each kind; --all: all {there}"
    )


def _doctor_table(facts: dict[str, Any]) -> Table:
    state = f"yes, {facts['isa']}" if facts["native"] else f"NO: {facts['native_where']}"
    here, absent = ([name for name, there in facts["extras"].items() if there is wanted] for wanted in (True, False))
    rows = [
        *((key, facts[key]) for key in ("narrowcast", "torch", "python", "cpu", "threads")),
        ("native CPU kernels", state),
        ("CUDA devices", ", ".join(facts["cuda"]) or "none here"),
        ("Triton kernels", facts["triton"] + ("" if facts["cuda"] else "; no CUDA device uses them")),
        ("NCCL", facts["nccl"]),
        ("MPI", facts["mpi"]),
        ("lab", facts["lab"]),
        *((f"{op['op']} on {op['device']}", f"{op['implementation']} {op['why']}".strip()) for op in facts["ops"]),
        *((f"slow: {spec}", why) for spec, why in facts["slow"].items() if facts["native"]),
        ("compared with the reference", _checked(facts)),
        *((f"FAILED: {spec}", why) for spec, why in facts["failed_checks"].items()),
        ("optional packages", f"here: {', '.join(here)}; not here: {', '.join(absent) or 'none'}"),
    ]
    shown = new_table("narrowcast doctor", "what", "finding", rows=rows)
    shown.columns[1].justify = "left"
    return shown
