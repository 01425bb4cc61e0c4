"""The command line: `narrowcast formats`, `codecs`, `bench`, `doctor`. Each has --help and --json."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"narrowcast: the command line needs typer and rich ({missing}); run: pip install 'narrowcast[cli]'")

import torch

import narrowcast
from narrowcast.bench import codecs as bench_codecs
from narrowcast.bench import collectives, ddp, dettmers2016, peers
from narrowcast.bench.check import failure
from narrowcast.bench.timing import ROUNDS
from narrowcast.codecs import Codec, all_specs, error_report
from narrowcast.codecs import codec as codec_named
from narrowcast.formats import Format, all_formats, families
from narrowcast.kernels import native, ops
from narrowcast.lab.cli import app as lab_app

T = TypeVar("T")

app = typer.Typer(
    help="Fewer bits on the wire when deep networks train on many devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Speed, as a ratio to a copy measured in the same run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
app.add_typer(lab_app, name="lab")

JsonPath = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write JSON to FILE; - is standard output.")
]

PLAIN_WIDTH = 200


def main() -> None:
    """Entry point: an error that we raised on purpose is shown without a traceback."""
    try:
        app()
    except (ValueError, TypeError, NotImplementedError) as error:
        sys.exit(f"narrowcast: {error}")


# ---- output ----------------------------------------------------------------------------------------------------------


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, no_color=True)


def _emit(data: Any, table: Table, path: str | None) -> None:
    """The table for people, or JSON for programs; with a file name both."""
    if path == "-":
        print(json.dumps(data, indent=1))
        return
    if path is not None:
        Path(path).write_text(json.dumps(data, indent=1) + "\n")
    _console().print(table)


def _progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Show how far a long job is, on a terminal only and never in the output."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(what, total=total)
        for item in items:
            yield item
            progress.advance(task)


def _table(title: str, *columns: str) -> Table:
    style = box.HEAVY_HEAD if sys.stdout.isatty() else box.SIMPLE
    table = Table(title=title, title_justify="left", caption_justify="left", box=style)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


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
    table = _table("Formats", *columns)
    for row in rows:
        limits = [_number(row[key]) for key in ("max", "smallest_normal", "smallest_subnormal", "smallest")]
        rules = [row["rules"][key] for key in ("overflow", "nan", "inf", "-0")]
        table.add_row(row["name"], str(row["bits"]), *limits, *rules)
    patterns = "; ".join(f"{family.pattern}: {family.meaning}" for family in families())
    table.caption = f"Any member of a family can be named. {patterns}"
    _emit(rows, table, json_path)


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
    table: Annotated[str | None, typer.Option(help="A published table to print instead: dettmers2016.")] = None,
    json_path: JsonPath = None,
) -> None:
    """List every codec: bits per value, error on normal data, and speed on this machine."""
    if table == "dettmers2016":
        _dettmers(json_path)
        return
    if table is not None:
        raise ValueError(f"codecs --table: unknown table {table!r}; there is dettmers2016")
    x = bench_codecs.data(4 * LIST_VALUES)
    specs = all_specs()
    rows = [_codec_row(spec, x) for spec in _progress(specs, len(specs), "codecs")]
    shown = _table(
        f"Codecs on {x.numel()} values of N(0,1); speed as a share of copy_, one thread",
        *("codec", "bits/value", "SNR dB", "relative error", "encode", "decode", "runs on", "exempt from"),
    )
    for row in rows:
        exempt = "; ".join(row["exempt"]) if not row["failed"] else f"FAILED: {row['failed']}"
        numbers = f"{row['bits_per_value']:.3f}", f"{row['snr_db']:.1f}", f"{row['relative_error']:.3g}"
        speeds = _percent(row["encode_share"]), _percent(row["decode_share"])
        shown.add_row(row["codec"], *numbers, *speeds, row["runs_on"], exempt)
    _emit({"machine": bench_codecs.describe_machine(), "codecs": rows}, shown, json_path)


def _dettmers(json_path: str | None) -> None:
    cells = list(_progress(dettmers2016.run(), len(dettmers2016.PUBLISHED), "cells"))
    columns = ("distribution", "type", "abs", "abs corrected", "sq", "sq corrected", "sq paper")
    shown = _table(
        "Dettmers 2016, table 2, errors of the four types", *columns, "rel %", "rel corrected", "rel paper", "off by"
    )
    for cell in cells:
        then = cell.published
        absolute = _number(cell.absolute), _number(then.absolute)
        squared = _number(cell.squared), _number(then.squared), _number(then.paper_squared)
        relative = f"{cell.relative:.3f}", _number(then.relative), _number(then.paper_relative)
        shown.add_row(cell.distribution, cell.codec, *absolute, *squared, *relative, f"{cell.deviation:.2%}")
    shown.caption = "The paper calls its squared error 'mean absolute error'; see docs/dettmers2016.md."
    _emit([cell.as_dict() for cell in cells], shown, json_path)


# ---- bench -----------------------------------------------------------------------------------------------------------


@bench_app.command("codecs")
def bench_codecs_command(
    spec: Annotated[list[str] | None, typer.Argument(help="Codecs; by default those with a promised speed.")] = None,
    size: Annotated[
        list[str] | None, typer.Option(help=f"Any of {', '.join(bench_codecs.SIZES)}; default all.")
    ] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Thread counts; default 1 and 2.")] = None,
    isa: Annotated[
        str | None, typer.Option(help="Instruction set: avx512, avx2 or baseline; default the best.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds a median is taken over.")] = ROUNDS,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time other libraries too.")] = True,
    json_path: JsonPath = None,
) -> None:
    """Encode and decode speed as a share of copy_, after each codec's bits were checked against the reference."""
    if isa is not None:
        native.set_isa(isa)
    specs = [str(codec_named(s)) for s in spec] if spec else list(bench_codecs.TARGETS)
    sizes, counts = size or list(bench_codecs.SIZES), threads or [1, 2]
    unknown = sorted(set(sizes) - set(bench_codecs.SIZES))
    if unknown:
        raise ValueError(f"bench codecs --size: unknown size {unknown[0]!r}; take {', '.join(bench_codecs.SIZES)}")
    results = bench_codecs.Results()
    total = len(sizes) * len(counts) * (len(specs) + (0 if spec else len(bench_codecs.ROUND_TARGETS)))
    results.rows = list(_progress(bench_codecs.run(specs, sizes, counts, rounds), total, "codecs"))
    results.calls = [bench_codecs.call_cost(s) for s in specs]
    results.peers = list(_progress(peers.run(), 16, "peers")) if with_peers else []
    _emit(results.as_dict(), _speed_table(results), json_path)
    if json_path != "-":
        _console().print(_call_table(results))
        if with_peers:
            _console().print(_peer_table(results))


@bench_app.command("collectives")
def bench_collectives_command(
    spec: Annotated[list[str] | None, typer.Argument(help="Codecs; by default those with a promised speedup.")] = None,
    rate: Annotated[str, typer.Option("--lab", help="Rate of every link of the lab.")] = "1gbit",
    hosts: Annotated[int, typer.Option(help="Hosts, one rank each.")] = 4,
    values: Annotated[int, typer.Option(help="Float32 values to reduce.")] = collectives.VALUES,
    rounds: Annotated[int, typer.Option(help="Rounds a median is taken over.")] = collectives.ROUNDS,
    json_path: JsonPath = None,
) -> None:
    """All-reduce through codecs on rate-limited links, beside Gloo's float32 all-reduce in the same run. Needs root."""
    specs = spec or list(collectives.SPECS)
    rows = list(_progress(collectives.run(hosts, rate, specs, values, rounds), len(specs), "codecs"))
    title = f"All-reduce of {values} values on {hosts} hosts at {rate}, one thread a rank"
    shown = _table(title, "codec", "float32 s", "ours s", "speedup", "promised", "bytes allow", "error", "kept")
    for row in rows:
        times = f"{row.plain_seconds:.3f}", f"{row.seconds:.3f}", f"{row.speedup:.2f}x"
        kept = {True: "yes", False: "NO", None: ""}[row.met]
        shown.add_row(row.spec, *times, _number(row.target), f"{row.limit:.2f}x", f"{row.error:.3g}", kept)
    _emit({"machine": bench_codecs.describe_machine(), "rows": [row.as_dict() for row in rows]}, shown, json_path)


@bench_app.command("ddp")
def bench_ddp_command(
    wire: Annotated[list[str] | None, typer.Argument(help="Specs, plain, fp16-hook or powersgd-RANK.")] = None,
    rate: Annotated[str, typer.Option("--lab", help="Rate of every link of the lab.")] = "1gbit",
    hosts: Annotated[int, typer.Option(help="Hosts, one rank each.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps a median is taken over.")] = ddp.STEPS,
    json_path: JsonPath = None,
) -> None:
    """Training steps of a 24-million-parameter MLP under DDP on rate-limited links. Needs root."""
    wires = ["plain", *(w for w in wire if w != "plain")] if wire else list(ddp.WIRES)
    rows = list(_progress(ddp.run(hosts, rate, wires, steps), len(wires), "wires"))
    shown = _table(
        f"DDP step of an MLP on {hosts} hosts at {rate}, batch 16 and one thread a rank",
        *("wire", "step s", "compute s", "exposed s", "speedup", "error of the mean gradient"),
    )
    for row in rows:
        seconds = (f"{row[key]:.3f}" for key in ("step", "compute", "exposed"))
        shown.add_row(row["wire"], *seconds, f"{rows[0]['step'] / row['step']:.2f}x", f"{row['error']:.3g}")
    _emit({"machine": bench_codecs.describe_machine(), "rows": rows}, shown, json_path)


def _speed_table(results: bench_codecs.Results) -> Table:
    machine = results.machine
    title = f"Share of copy_ (bytes read + written per second) on {machine['cpu']}, {machine['isa']}"
    shown = _table(title, "what", "size", "threads", "encode", "promised", "decode", "promised", "copy GB/s", "kept")
    for row in results.rows:
        kept = f"FAILED: {row.failed}" if row.failed else {True: "yes", False: "NO", None: ""}[row.met]
        encode, decode = _percent(row.encode), _percent(row.decode)
        wanted = _percent(row.target_encode), _percent(row.target_decode)
        shown.add_row(
            row.what, row.size, str(row.threads), encode, wanted[0], decode, wanted[1], f"{row.copy_gbs:.1f}", kept
        )
    return shown


def _call_table(results: bench_codecs.Results) -> Table:
    shown = _table("One call on a 4 KiB tensor, microseconds", "codec", "encode", "decode")
    for call in results.calls:
        shown.add_row(call.what, f"{call.encode_us:.1f}", f"{call.decode_us:.1f}")
    return shown


def _peer_table(results: bench_codecs.Results) -> Table:
    columns = ("peer", "bits", "encode", "decode", "relative error", "NaN ->", "Inf ->", "zeros kept")
    shown = _table("Peers on the same data, 64 MiB, one thread, outputs allocated by each call", *columns)
    for row in results.peers:
        if "missing" in row:
            shown.add_row(str(row["name"]), f"not installed: {row['missing']}")
            continue
        peer = peers.PeerRow(**row)  # type: ignore[arg-type]
        speeds = _percent(peer.encode), _percent(peer.decode), f"{peer.relative_error:.3g}"
        shown.add_row(
            peer.name, f"{peer.bits:g}", *speeds, peer.nan_becomes, peer.inf_becomes, _percent(peer.zeros_kept)
        )
    return shown


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


@app.command()
def doctor(json_path: JsonPath = None) -> None:
    """What runs on this machine, what does not, and why. Ends with 1 where a kernel fails its check."""
    library, where = native.load()
    failures = {spec: why for spec in all_specs() if (why := failure(codec_named(spec)))}
    facts: dict[str, Any] = {
        "narrowcast": narrowcast.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": bench_codecs.cpu_name(),
        "threads": torch.get_num_threads(),
        "native": library is not None,
        "native_where": where,
        "isa": native.isa() if library is not None else None,
        "ops": [vars(choice) for choice in ops.explain()],
        "slow": _slow_codecs(),
        "failed_checks": failures,
        "extras": {name: importlib.util.find_spec(name) is not None for name in EXTRAS},
    }
    _emit(facts, _doctor_table(facts), json_path)
    if failures:
        raise typer.Exit(1)


def _doctor_table(facts: dict[str, Any]) -> Table:
    shown = _table("narrowcast doctor", "what", "finding")
    shown.columns[1].justify = "left"
    for key in ("narrowcast", "torch", "python", "cpu", "threads"):
        shown.add_row(key, str(facts[key]))
    state = f"yes, {facts['isa']}" if facts["native"] else f"NO: {facts['native_where']}"
    shown.add_row("native CPU kernels", state)
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


if __name__ == "__main__":
    main()
