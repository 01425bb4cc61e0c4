"""`narrowcast bench`: speed, always beside something measured in the same run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from narrowcast.bench import codecs, collectives, cuda, ddp, peers
from narrowcast.codecs import codec as codec_named
from narrowcast.console import JsonPath, emit, make_console, new_table, number, percent, progress
from narrowcast.kernels import native
from narrowcast.measure import ROUNDS

app = typer.Typer(
    help="Speed, as a ratio to a copy or a plain all-reduce measured in the same run.", no_args_is_help=True
)

LabRate = Annotated[str, typer.Option("--lab", help="Rate of every link of the lab.")]
Hosts = Annotated[int, typer.Option(help="Hosts, one rank each.")]
KEPT = {True: "yes", False: "NO", None: ""}
"""Whether a promise was."""


def _plain_first(wires: list[str]) -> list[str]:
    return ["plain", *(wire for wire in wires if wire != "plain")]


@app.command("codecs")
def codecs_command(
    spec: Annotated[list[str] | None, typer.Argument(help="Codecs; by default those with a promised speed.")] = None,
    size: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(codecs.SIZES)}; default all.")] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="Thread counts; default 1 and 2.")] = None,
    isa: Annotated[
        str | None, typer.Option(help="Instruction set: avx512, avx2 or baseline; default the best.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds a median is taken over.")] = ROUNDS,
    with_peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time other libraries too.")] = True,
    device: Annotated[str, typer.Option(help="cpu, or cuda: then size, threads, isa and peers are left out.")] = "cpu",
    values: Annotated[int, typer.Option(help="Float32 values of a large tensor, with --device cuda.")] = cuda.VALUES,
    json_path: JsonPath = None,
) -> None:
    """Encode and decode speed as a share of copy_, after each codec's bits were checked against the reference."""
    if device != "cpu":
        _cuda_codecs(device, spec, values, json_path)
        return
    if isa is not None:
        native.set_isa(isa)
    specs = [str(codec_named(s)) for s in spec] if spec else list(codecs.TARGETS)
    sizes, counts = size or list(codecs.SIZES), threads or [1, 2]
    if unknown := sorted(set(sizes) - set(codecs.SIZES)):
        raise ValueError(f"bench codecs --size: unknown size {unknown[0]!r}; take {', '.join(codecs.SIZES)}")
    results = codecs.CodecResults()
    total = len(sizes) * len(counts) * (len(specs) + (0 if spec else len(codecs.ROUND_TARGETS)))
    results.rows = list(progress(codecs.run(specs, sizes, counts, rounds), total, "codecs"))
    results.calls = [codecs.call_cost(s) for s in specs]
    results.peers = list(progress(peers.run(), 16, "peers")) if with_peers else []
    emit(results.as_dict(), _speed_table(results), json_path)
    if json_path != "-":
        make_console().print(_call_table(results))
        if with_peers:
            make_console().print(_peer_table(results))


@app.command("collectives")
def collectives_command(
    spec: Annotated[list[str] | None, typer.Argument(help="Codecs; by default those with a promised speedup.")] = None,
    rate: LabRate = "1gbit",
    hosts: Hosts = 4,
    values: Annotated[int, typer.Option(help="Float32 values to reduce.")] = collectives.VALUES,
    rounds: Annotated[int, typer.Option(help="Rounds a median is taken over.")] = collectives.ROUNDS,
    json_path: JsonPath = None,
) -> None:
    """All-reduce through codecs on rate-limited links, beside Gloo's float32 all-reduce in the same run. Needs root."""
    specs = spec or list(collectives.SPECS)
    rows = list(progress(collectives.run(hosts, rate, specs, values, rounds), len(specs), "codecs"))
    title = f"All-reduce of {values} values on {hosts} hosts at {rate}, one thread a rank"
    shown = new_table(title, "codec", "float32 s", "ours s", "speedup", "promised", "bytes allow", "error", "kept")
    for row in rows:
        times = f"{row.plain_seconds:.3f}", f"{row.seconds:.3f}", f"{row.speedup:.2f}x"
        shown.add_row(row.spec, *times, number(row.target), f"{row.limit:.2f}x", f"{row.error:.3g}", KEPT[row.met])
    emit({"machine": codecs.describe_machine(), "rows": [row.as_dict() for row in rows]}, shown, json_path)


@app.command("ddp")
def ddp_command(
    wire: Annotated[list[str] | None, typer.Argument(help="Specs, plain, fp16-hook or powersgd-RANK.")] = None,
    rate: LabRate = "1gbit",
    hosts: Hosts = 4,
    steps: Annotated[int, typer.Option(help="Steps a median is taken over.")] = ddp.STEPS,
    json_path: JsonPath = None,
) -> None:
    """Training steps of a 24-million-parameter MLP under DDP on rate-limited links. Needs root."""
    wires = _plain_first(wire) if wire else list(ddp.WIRES)
    rows = list(progress(ddp.run(hosts, rate, wires, steps), len(wires), "wires"))
    shown = new_table(
        f"DDP step of an MLP on {hosts} hosts at {rate}, batch 16 and one thread a rank",
        *("wire", "step s", "compute s", "exposed s", "speedup", "error of the mean gradient"),
    )
    for row in rows:
        seconds = (f"{row[key]:.3f}" for key in ("step", "compute", "exposed"))
        shown.add_row(row["wire"], *seconds, f"{rows[0]['step'] / row['step']:.2f}x", f"{row['error']:.3g}")
    emit({"machine": codecs.describe_machine(), "rows": rows}, shown, json_path)


@app.command("fsdp")
def fsdp_command(
    wire: Annotated[list[str] | None, typer.Argument(help="plain, or gradients=SPEC,parameters=SPEC.")] = None,
    rate: LabRate = "200mbit",
    hosts: Hosts = 4,
    steps: Annotated[int | None, typer.Option(help="Steps a median is taken over; default 10.")] = None,
    json_path: JsonPath = None,
) -> None:
    """Training steps of a 10-million-parameter transformer under FSDP2 on rate-limited links. Needs root."""
    from narrowcast.bench import fsdp

    wires = _plain_first(wire) if wire else list(fsdp.WIRES)
    rows = list(progress(fsdp.run(hosts, rate, wires, steps or fsdp.STEPS), len(wires), "wires"))
    columns = ("wire", "step s", "fastest", "slowest", "MB sent a step", "fewer bytes", "speedup", "kept")
    shown = new_table(f"FSDP2 step of a transformer on {hosts} hosts at {rate}, one thread a rank", *columns)
    for row in rows:
        seconds = (f"{row[key]:.3f}" for key in ("step", "fastest", "slowest"))
        ratios = f"{row['fewer_bytes']:.2f}x", f"{row['speedup']:.2f}x"
        shown.add_row(row["wire"], *seconds, f"{row['link_bytes'] / 1e6:.2f}", *ratios, KEPT[row["met"]])
    emit({"machine": codecs.describe_machine(), "rows": rows}, shown, json_path)


def _cuda_codecs(device: str, spec: list[str] | None, values: int, json_path: str | None) -> None:
    if device != "cuda":
        raise ValueError(f"bench codecs --device: unknown device {device!r}; take cpu or cuda")
    cuda.require()
    specs = [str(codec_named(s)) for s in spec] if spec else list(cuda.TARGETS)
    results = cuda.CudaResults(cuda.describe_machine())
    results.rows = list(progress(cuda.run(specs, values), len(specs), "codecs"))
    good = [row.codec for row in results.rows if not row.failed]
    results.buckets = list(progress(cuda.run_buckets(good), len(good), "buckets of 25 MB"))
    emit(results.as_dict(), _cuda_table(results, values), json_path)


def _cuda_table(results: cuda.CudaResults, values: int) -> Table:
    machine, buckets = results.machine, {bucket.codec: bucket for bucket in results.buckets}
    title = f"Share of copy_ on {machine['gpu']}, {values} float32, {machine['kernels']}; a bucket has 25 MB"
    shown = new_table(title, "codec", "encode", "decode", f"reduce {cuda.WORLD}", "bucket us", "launches", "missed")
    for row in results.rows:
        shares = (percent(share) for share in (row.encode, row.decode, row.reduce))
        bucket = buckets.get(row.codec)
        small = (f"{bucket.encode_us:.1f}", str(bucket.launches)) if bucket else ("", "")
        shown.add_row(row.codec, *shares, *small, "; ".join(row.missed))
    return shown


def _speed_table(results: codecs.CodecResults) -> Table:
    machine = results.machine
    title = f"Share of copy_ (bytes read + written per second) on {machine['cpu']}, {machine['isa']}"
    shown = new_table(title, "what", "size", "threads", "encode", "promised", "decode", "promised", "copy GB/s", "kept")
    for row in results.rows:
        kept = f"FAILED: {row.failed}" if row.failed else KEPT[row.met]
        shares = map(percent, (row.encode, row.target_encode, row.decode, row.target_decode))
        shown.add_row(row.what, row.size, str(row.threads), *shares, f"{row.copy_gbs:.1f}", kept)
    return shown


def _call_table(results: codecs.CodecResults) -> Table:
    rows = ((call.what, f"{call.encode_us:.1f}", f"{call.decode_us:.1f}") for call in results.calls)
    return new_table("One call on a 4 KiB tensor, microseconds", "codec", "encode", "decode", rows=rows)


def _peer_table(results: codecs.CodecResults) -> Table:
    columns = ("peer", "bits", "encode", "decode", "relative error", "NaN ->", "Inf ->", "zeros kept")
    shown = new_table("Peers on the same data, 64 MiB, one thread, outputs allocated by each call", *columns)
    for row in results.peers:
        if "missing" in row:
            shown.add_row(str(row["name"]), f"not installed: {row['missing']}")
            continue
        peer = peers.PeerRow(**row)  # type: ignore[arg-type]
        numbers = f"{peer.bits:g}", percent(peer.encode), percent(peer.decode), f"{peer.relative_error:.3g}"
        shown.add_row(peer.name, *numbers, peer.nan_becomes, peer.inf_becomes, percent(peer.zeros_kept))
    return shown
