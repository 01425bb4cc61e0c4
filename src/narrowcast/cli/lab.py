"""`narrowcast lab run`, `check` and `clean`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from narrowcast.console import JsonPath, emit, new_table
from narrowcast.lab import TOLERANCE, Lab, LabError, RateCheck, check_rates, clean

app = typer.Typer(
    help="A cluster in a box: hosts in network namespaces, joined by links that hold a rate. Needs Linux and root.",
    no_args_is_help=True,
)

Hosts = Annotated[int, typer.Option(help="Number of hosts.")]

INTERRUPTED = 130
RATES, GPU_RATES = ("200mbit", "1gbit"), ("1gbit", "10gbit")


@contextmanager
def _plain_errors() -> Iterator[None]:
    """An error that we raised on purpose is shown without a traceback."""
    try:
        yield
    except (LabError, ValueError) as error:
        typer.echo(f"narrowcast: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _slow(pairs: list[str]) -> dict[int, str]:
    """`2=100mbit` -> {2: "100mbit"}."""
    rates = {}
    for pair in pairs:
        host, equals, rate = pair.partition("=")
        if not (host.isdigit() and equals and rate):
            raise ValueError(f"--slow: got {pair!r}; give a host and its rate, such as 2=100mbit")
        rates[int(host)] = rate
    return rates


def _racks(text: str | None) -> list[list[int]] | None:
    """`0,1/2,3` -> [[0, 1], [2, 3]]."""
    if text is None:
        return None
    try:
        return [[int(host) for host in rack.split(",")] for rack in text.split("/")]
    except ValueError:
        raise ValueError(f"--racks: got {text!r}; give hosts by rack, such as 0,1/2,3") from None


@app.command("run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[list[str], typer.Argument(help="The command, best after --: -- python train.py ...")],
    hosts: Hosts = 4,
    rate: Annotated[str, typer.Option(help="Rate of every link, such as 200mbit or 10gbit; none: no limit.")] = "1gbit",
    slow: Annotated[
        list[str] | None, typer.Option(metavar="HOST=RATE", help="Another rate for a host; may be repeated.")
    ] = None,
    racks: Annotated[str | None, typer.Option(help="Hosts by rack, such as 0,1/2,3.")] = None,
    uplink: Annotated[str | None, typer.Option(help="Rate of the link from each rack to the others.")] = None,
    delay: Annotated[
        str | None, typer.Option(help="What a packet takes from host to host, one way, such as 50ms.")
    ] = None,
    jitter: Annotated[str | None, typer.Option(help="Up to so much more, one way, at random, such as 5ms.")] = None,
    loss: Annotated[float, typer.Option(help="Share of packets that get lost, such as 0.001.")] = 0.0,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks on each host.")] = 1,
    mpirun: Annotated[bool, typer.Option("--mpirun", help="Start the ranks with Open MPI's mpirun.")] = False,
    gpu: Annotated[bool, typer.Option("--gpu", help="Ranks share this machine's GPUs; NCCL uses the links.")] = False,
    mps: Annotated[
        bool, typer.Option(help="With --gpu: start MPS; without it ranks take turns, and their times mean nothing.")
    ] = True,
    timeout: Annotated[float | None, typer.Option(help="Seconds until all ranks are ended.")] = None,
    grace: Annotated[float, typer.Option(help="Seconds that the others have when a rank fails.")] = 5.0,
) -> None:
    """Run a command as one rank on each host, with torchrun's environment. Ends with the first failing rank's code."""
    launcher: Literal["env", "mpirun"] = "mpirun" if mpirun else "env"
    with _plain_errors():
        links = {"rates": _slow(slow or []), "racks": _racks(racks), "uplink": uplink}
        late = {"delay": delay, "jitter": jitter, "loss": loss}
        shape = {**links, **late, "gpu": gpu, "mps": mps}
        with Lab(hosts, None if rate == "none" else rate, **shape) as lab:  # type: ignore[arg-type]
            result = lab.run(command, launcher=launcher, ranks_per_host=ranks_per_host, timeout=timeout, grace=grace)
        if not result.ok:
            typer.echo(f"narrowcast: {result.summary()}", err=True)
            raise typer.Exit(result.code)


@app.command("check")
def check_command(
    hosts: Hosts = 4,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A rate to check; may be repeated. Default: {', '.join(RATES)}; with --gpu {', '.join(GPU_RATES)}."
        ),
    ] = None,
    mb: Annotated[
        float | None, typer.Option(help="Megabytes to reduce; default 25 to 100, as the rate asks; with --gpu 100 MiB.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="All-reduces that the median is taken over; default 3, with --gpu 5.")
    ] = None,
    delay: Annotated[
        str | None,
        typer.Option(help="What a packet takes from host to host, one way, such as 50ms; then it is what must hold."),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="NCCL's all-reduce on this machine's GPUs.")] = False,
    json_path: JsonPath = None,
) -> None:
    """Do the links hold their rate? Gloo's float32 all-reduce, or NCCL's, against arithmetic. Ends with 1 if not."""
    rates = rate or list(GPU_RATES if gpu else RATES)
    nbytes = None if mb is None else round(mb * 1e6)
    with _plain_errors(), Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        checks = check_rates(hosts, rates, nbytes, rounds, gpu, delay)
        rows = list(progress.track(checks, total=len(rates), description="links"))
    emit([row.as_dict() for row in rows], _check_table(rows), json_path)
    if not all(row.held for row in rows):
        raise typer.Exit(1)


def _check_table(rows: list[RateCheck]) -> Table:
    library = {"gloo": "Gloo", "nccl": "NCCL"}[rows[0].backend]
    columns = (
        "rate",
        "hosts",
        "MB",
        "expected s",
        "measured s",
        "ratio",
        "share of the rate",
        "round trip ms",
        f"within {TOLERANCE:.0%}",
    )
    shown = new_table(f"{library} float32 all-reduce, 2(W - 1)/W bytes a host", *columns)
    shown.columns[0].justify = "right"
    for row in rows:
        numbers = (f"{row.nbytes / 1e6:.0f}", f"{row.expected:.3f}", f"{row.measured:.3f}", f"{row.ratio:.3f}")
        shares = f"{row.share:.1%}", f"{1e3 * row.round_trip:.1f}"
        shown.add_row(row.rate, str(row.hosts), *numbers, *shares, "yes" if row.held else "NO")
    return shown


@app.command("clean")
def clean_command(json_path: JsonPath = None) -> None:
    """Remove labs whose owner is gone. There should be none: a lab goes down with its owner, however that ends."""
    with _plain_errors():
        removed = [vars(leftover) for leftover in clean()]
    lines = [f"removed a lab that process {each['owner']} left (guard {each['guard']})" for each in removed]
    emit(removed, "\n".join(lines or ["nothing was left behind"]), json_path)
