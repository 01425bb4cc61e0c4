"""`narrowcast formats` and `codecs`."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from narrowcast import plugins
from narrowcast.bench import codecs as bench_codecs
from narrowcast.codecs import all_specs, error_report
from narrowcast.codecs import codec as codec_named
from narrowcast.console import JsonPath, emit, new_table, number, percent, progress
from narrowcast.formats import Format, all_formats, families

LIST_VALUES = 4 << 20
SLOW_VALUES = 1 << 16
"""Without native kernels the listing takes fewer values."""


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
    emit({"machine": bench_codecs.describe_machine(), "codecs": rows}, shown, json_path)


def _print_table(name: str, json_path: str | None) -> None:
    tables = plugins.loaded().tables
    if name in tables:
        plugins.resolve(tables[name])(json_path)
        return
    if name in plugins.RESEARCH_TABLES:
        raise plugins.research_needed(f"codecs --table {name}")
    raise ValueError(f"codecs --table: unknown table {name!r}; there are {', '.join(tables) or 'none'}")
