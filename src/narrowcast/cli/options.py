"""What the commands share: options, lists of specs and workers, and how bad input ends."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from narrowcast.cli.table import BAD_INPUT
from narrowcast.codecs import codec as codec_named
from narrowcast.codecs import refuse_differences
from narrowcast.lab import LabError

Command = TypeVar("Command", bound=Callable[..., None])

ModelName = Annotated[
    str, typer.Option("--model", help="A built-in name, a profile (.toml), module:name or file.py:name.")
]
ClusterName = Annotated[str, typer.Option("--cluster", help="A preset, or a file made by `narrowcast probe`.")]
Batch = Annotated[int, typer.Option(help="Samples a device and step; default the model's own.")]
Bandwidth = Annotated[float, typer.Option(help="Another bandwidth for the outermost link, in Gb/s.")]
Shape = Annotated[str, typer.Option("--input", help="What a real model takes: 3x224x224, or int:VOCABULARY:LENGTH.")]
Flops = Annotated[
    float, typer.Option(help="The device's speed for descriptions, in flops a second as training reaches it.")
]
DeviceName = Annotated[
    str, typer.Option("--device", help="Another device on the cluster's links: a100, h100, ...; --list shows them.")
]
CodecSystem = Annotated[
    str, typer.Option(help="Codecs as slow as those of grace-8bit, dettmers-8bit, ...; predict --list shows them.")
]
ComputeMs = Annotated[float, typer.Option(help="A step on one device as somebody measured it, for descriptions.")]

Parameters = Annotated[
    float,
    typer.Option(help="Instead of --model: their number, such as 10e9. A sample is a token; --batch says how many."),
]
Rtt = Annotated[str, typer.Option(help="Of the outermost link: the time there and back, such as 50ms.")]
Streams = Annotated[int, typer.Option(help="Of the outermost link: streams of TCP to each peer.")]
Window = Annotated[str, typer.Option(help="Of the outermost link: what TCP has under way in a stream, such as 4MB.")]
Every = Annotated[int, typer.Option(help="Local updates: steps between exchanges of a parameter; default 500.")]
Fragments = Annotated[
    int, typer.Option(help="Local updates: parts of the model that are exchanged in turn; default 1.")
]
DelaySteps = Annotated[
    int, typer.Option(help="Local updates: steps that go on during an exchange; default 0, all wait.")
]
Mixing = Annotated[str, typer.Option(help="Local updates: all (default), ring, exponential or pairs.")]
Inside = Annotated[
    str, typer.Option(help="Local updates: how the devices of a worker share it: fsdp (default), data or hsdp.")
]
InsideWire = Annotated[str, typer.Option(help="Local updates: of gradients inside a worker; default bf16.")]


def one_line(command: Command) -> Command:
    """Bad input ends with one line and exit code 2."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except BrokenPipeError:
            raise  # whoever read our output has left: no input is bad
        except (ValueError, LabError, OSError) as error:
            typer.echo(f"narrowcast: {error}".replace("\n", " "), err=True)
            raise typer.Exit(BAD_INPUT) from None

    return run  # type: ignore[return-value]


def positive(option: str, value: float) -> None:
    """0 stands for the default; anything else must be a number above it."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{option}: must be a number above 0, got {value:g}")


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20}
TIMES, SIZES = ("us", "ms", "s"), ("B", "kB", "KiB", "MB", "MiB", "GB")
AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+) ?([A-Za-z]+)")


def amount_of(option: str, text: str, units: Sequence[str]) -> float | None:
    """Seconds of "50ms", bytes of "4MB"; None of nothing."""
    if not text:
        return None
    match = AMOUNT.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"{option}: give a number and a unit ({', '.join(units)}), got {text!r}")
    return float(match[1]) * UNITS[match[2]]


def out_file(option: str, path: str) -> Path:
    """Where something will be written: said to be wrong before the work, not after it."""
    made = Path(path)
    if not made.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {made.parent}; make it first, got {path}")
    if made.is_dir():
        raise ValueError(f"{option}: {path} is a folder; give a file")
    return made


def specs_of(wires: str) -> list[str]:
    """Wires of gradients."""
    codecs = [codec_named(wire.strip()) for wire in wires.split(",") if wire.strip()]
    if not codecs:
        raise ValueError("wires: give at least one codec")
    for codec in codecs:
        refuse_differences("wires", codec)
    return list(map(str, codecs))


def workers_of(text: str) -> list[int]:
    try:
        workers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--workers: give numbers separated by commas, got {text!r}") from None
    if wrong := [n for n in workers if n < 1]:
        raise ValueError(f"--workers: must be 1 or more, got {wrong[0]}")
    return workers


def prices_of(text: str, names: list[str]) -> dict[str, float]:
    """Of `10gbe-tcp=2.0,25gbe-tcp=2.4`."""
    prices: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, amount = part.partition("=")
        try:
            prices[name] = float(amount)
        except ValueError:
            raise ValueError(f"--price: give NAME=DOLLARS, separated by commas, got {part!r}") from None
        if name not in names:
            raise ValueError(f"--price: {name!r} is not among the clusters; they are {', '.join(names)}")
        if not 0 < prices[name] < math.inf:
            raise ValueError(f"--price: must be a number above 0, got {part!r}")
    return prices
