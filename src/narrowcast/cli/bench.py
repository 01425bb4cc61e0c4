"""`narrowcast bench`: speed, always beside something measured in the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from narrowcast.bench import auto, codecs, collectives, cuda, ddp, peers, ranks, training
from narrowcast.codecs import codec as codec_named
from narrowcast.console import GrowingTable, JsonPath, emit, make_console, new_table, number, percent, progress, save
from narrowcast.kernels import native
from narrowcast.measure import ROUNDS

app = typer.Typer(
    help="Speed, as a ratio to a copy or a plain all-reduce measured in the same run.", no_args_is_help=True
)

LabRate = Annotated[
    str | None,
    typer.Option(
        "--lab",
        "--rate",
        help="Rate of every link of the lab, or none; default 1gbit, with --gpu 10gbit. Under torchrun: no lab.",
    ),
]
Hosts = Annotated[str, typer.Option(help="Hosts of the lab, one rank each; 2,4,8 makes one after another.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="CUDA tensors and NCCL; in a lab all ranks share this machine's GPU.")]
ModelSize = Annotated[str | None, typer.Option(help="small, or gpt2 (124 M parameters), which --gpu takes.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps a median is taken over.")]
KEPT = {True: "yes", False: "NO", None: ""}
"""Whether a promise was."""


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
    spec: Annotated[list[str] | None, typer.Argument(help="Codecs; by default five, from 16 bits to 2.")] = None,
    rate: LabRate = None,
    hosts: Hosts = "4",
    gpu: Gpu = False,
    sizes: Annotated[
        str, typer.Option(help="Megabytes of float32, as 1,4,16; default 100, with --gpu 1,4,16,64,256.")
    ] = "",
    small: Annotated[bool, typer.Option("--small", help="Also 1, 1,000 and 100,000 values: a call's cost.")] = False,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds a median is taken over; default 3, with --gpu 7.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """All-reduces through codecs, in turn with Gloo's (or NCCL's) own: float32, bf16, and the bytes of each wire."""
    results = _Results(json_path)
    megabytes = _megabytes(sizes)
    for at in ranks.choose(rate, hosts, gpu):
        title, columns, cells = _cluster_columns(at) if at.rate == ranks.CLUSTER else _lab_columns(at)
        table = results.table(title, *columns)
        for row in results.keep(collectives.run(at, spec, megabytes, rounds, small)):
            table.add_row(*cells(row))
    results.end()


Cells = Callable[[ranks.Row], tuple[str, ...]]


def _lab_columns(at: ranks.Ranks) -> tuple[str, tuple[str, ...], Cells]:
    """Beside the limit that the wire's bytes set, and what was promised."""
    title = f"All-reduce on {at}; limit: {at.backend}'s own all_to_all and all_gather of the wire's bytes"
    speeds = ("        wire", "ms", "x fp32", "x bf16", "of limit", "host ms", "beyond ms")
    columns = (f"{'size':<14}", *speeds, "error", "promised", "kept")

    def cells(row: ranks.Row) -> tuple[str, ...]:
        ratios = f"{row['over_fp32']:.2f}x", f"{row['over_bf16']:.2f}x", percent(row.get("share_of_limit"))
        beyond = f"{row['beyond_ms']:+.3f}" if row.get("small") else ""
        judged = number(row["target"]), KEPT[row["met"]]
        times = row["wire"], f"{row['ms']:.3f}", *ratios, f"{row['host_ms']:.3f}", beyond
        size = f"{row['values']:,} values" if row.get("small") else f"{row['mb']:g} MB"
        return size, *times, f"{row['error']:.3g}" if "error" in row else "", *judged

    return title, columns, cells


def _cluster_columns(at: ranks.Ranks) -> tuple[str, tuple[str, ...], Cells]:
    """Those of nccl-tests, for whoever knows them: bytes, values, type, microseconds, GB/s."""
    title = f"All-reduce on {at}; size and GB/s are of float32, as nccl-tests reckons"
    columns = (f"{'size':<10}", "    count", "        type", "  time us", "algbw", "busbw", "x fp32", "x bf16")

    def cells(row: ranks.Row) -> tuple[str, ...]:
        speeds = f"{row['us']:.1f}", f"{row['algbw']:.2f}", f"{row['busbw']:.2f}"
        ratios = f"{row['over_fp32']:.2f}x", f"{row['over_bf16']:.2f}x"
        return str(row["size"]), str(row["values"]), row["wire"], *speeds, *ratios

    return title, columns, cells


@app.command("ddp")
def ddp_command(
    wire: Annotated[list[str] | None, typer.Argument(help="Specs, plain, bf16-hook, fp16-hook, powersgd-RANK.")] = None,
    rate: LabRate = None,
    hosts: Hosts = "4",
    gpu: Gpu = False,
    model: ModelSize = None,
    steps: Steps = training.STEPS,
    json_path: JsonPath = None,
) -> None:
    """Training steps under DDP: plain, torch's own hooks and codecs, in turn in one run."""
    results = _Results(json_path)
    for at in ranks.choose(rate, hosts, gpu):
        name = _model(model, at, ddp.TASKS)
        peers_ = [peer for peer in dict.fromkeys([ddp.PLAIN, *(wire or ddp.WIRES[gpu])]) if ddp.is_torchs(peer)]
        columns = ("step ms", "compute ms", "exposed ms", *(f"x {peer}" for peer in peers_), "gradient's error")
        table = results.table(f"DDP step of {ddp.TASKS[name].title} a rank, {at}", f"{'wire':<16}", *columns)
        for row in results.keep(ddp.run(at, wire, name, steps)):
            times = (f"{1e3 * row[key]:.1f}" for key in ("step", "compute", "exposed"))
            ratios = (f"{row['over'][peer]:.2f}x" for peer in peers_)
            table.add_row(row["wire"], *times, *ratios, f"{row['error']:.3g}")
    results.end()


@app.command("auto")
def auto_command(
    wire: Annotated[list[str] | None, typer.Argument(help="Specs that stay, beside plain, half and auto.")] = None,
    rate: Annotated[
        str | None,
        typer.Option("--lab", "--rate", help="Rates of the lab, as 100mbit,1gbit,none; under torchrun none."),
    ] = None,
    hosts: Hosts = "4",
    gpu: Gpu = False,
    model: Annotated[str | None, typer.Option(help=f"Any of {', '.join(auto.TASKS)}, as small,conv.")] = None,
    rounds: Annotated[
        int, typer.Option(min=2, help=f"Turns of {auto.TURN} steps a median is taken over.")
    ] = auto.ROUNDS,
    json_path: JsonPath = None,
) -> None:
    """The autopilot beside wires that stay, in turn in one run; each cell with the noise of the same wire twice."""
    results = _Results(json_path)
    table = results.table("DDP steps, ms", f"{'model':<8}", f"{'rate':<10}", f"{'wire':<16}", "step ms", "verdict")
    for at in [at for one in (rate or "").split(",") for at in ranks.choose(one or None, hosts, gpu)]:
        for name in model.split(",") if model else auto.MODELS[gpu]:
            _model(name, at, auto.TASKS)
            for row in results.keep(auto.run(at, name, wire or auto.WIRES, rounds)):
                step = f"{1e3 * row['step']:.1f}" if row["wire"] else ""
                table.add_row(name, at.rate, row["wire"], step, _auto_verdict(row))
    results.end()


def _auto_verdict(row: ranks.Row) -> str:
    if row["wire"]:
        share = row.get("watch_share")
        return {True: "", False: "over the bound", None: "no candidate"}[row["allowed"]] + (
            f"watching {percent(share)}" if share is not None else ""
        )
    counted = "" if row["counted"] else ", not counted"
    return (
        f"noise {100 * row['noise']:.1f} %{counted}; auto {100 * row['behind_best']:+.1f} % to {row['best']}, "
        f"{100 * row['behind_plain_or_half']:+.1f} % to the better of plain and half"
    )


@app.command("fsdp")
def fsdp_command(
    wire: Annotated[list[str] | None, typer.Argument(help="plain, or gradients=SPEC,parameters=SPEC.")] = None,
    rate: LabRate = None,
    hosts: Hosts = "4",
    gpu: Gpu = False,
    model: ModelSize = None,
    steps: Steps = training.STEPS,
    json_path: JsonPath = None,
) -> None:
    """Training steps of a transformer under FSDP2: plain, and gradients and parameters through codecs, in one run."""
    from narrowcast.bench import fsdp

    results = _Results(json_path)
    for at in ranks.choose(rate, hosts, gpu):
        name = _model(model, at, fsdp.TASKS)
        columns = ("step ms", "fastest", "slowest", "MB a step", "fewer bytes", "x plain", "kept")
        table = results.table(f"FSDP2 step of {fsdp.TASKS[name].title} a rank, {at}", f"{'wire':<42}", *columns)
        for row in results.keep(fsdp.run(at, wire, name, steps)):
            times = (f"{1e3 * row[key]:.1f}" for key in ("step", "fastest", "slowest"))
            fewer = "" if row["fewer_bytes"] is None else f"{row['fewer_bytes']:.2f}x"
            ratios = f"{row['link_bytes'] / 1e6:.2f}", fewer, f"{row['speedup']:.2f}x"
            table.add_row(row["wire"], *times, *ratios, KEPT[row["met"]])
    results.end()


class _Results:
    """Rows as ranks tell them: shown at once, and in the JSON file at once, so that what is cut short is not lost."""

    def __init__(self, json_path: str | None) -> None:
        self._path, self._machine, self._rows = json_path, dict[str, str](), list[ranks.Row]()

    def table(self, title: str, *columns: str) -> GrowingTable:
        return GrowingTable(title, *columns, shown=self._path != "-")

    def keep(self, rows: Iterable[ranks.Row]) -> Iterator[ranks.Row]:
        for row in rows:
            if "machine" in row:
                self._machine = row["machine"]
                continue
            self._rows.append(row)
            if self._path != "-":
                save(self._data(), self._path)
            yield row

    def _data(self) -> dict[str, Any]:
        return {"machine": self._machine, "rows": self._rows}

    def end(self) -> None:
        """Under torchrun only rank 0 has rows."""
        if self._path == "-" and self._rows:
            save(self._data(), self._path)


def _megabytes(sizes: str) -> list[float] | None:
    try:
        found = [float(part) for part in sizes.split(",")] if sizes else None
    except ValueError:
        found = [0.0]
    if found is not None and not all(0 < mb < math.inf for mb in found):
        raise ValueError(f"--sizes: got {sizes!r}; give megabytes of float32 separated by commas, as 1,4,16")
    return found


def _model(name: str | None, at: ranks.Ranks, known: Mapping[str, object]) -> str:
    chosen = name or ("gpt2" if at.gpu else "small")
    if chosen not in known:
        raise ValueError(f"--model: unknown {chosen!r}; take {' or '.join(known)}")
    return chosen


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
