"""`--parallel local` of `narrowcast predict` and `advise`: rounds of steps between exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.table import Table

from narrowcast.cli import options
from narrowcast.console import emit, new_table, progress
from narrowcast.predict import Cluster, Profile, local, local_advice, rounds

EVERY = 500
"""DiLoCo's."""


@dataclass(frozen=True)
class Rounds:
    """The options as they were given; empty ones are not."""

    every: int
    fragments: int
    delay_steps: int
    mixing: str
    inside: str
    inside_wire: str

    def check(self, parallel: str) -> None:
        """Refuse what only local updates have a use for."""
        given = [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value]
        if given and parallel != rounds.LOCAL:
            raise ValueError(f"{given[0]}: is for --parallel {rounds.LOCAL}, got --parallel {parallel}")

    def setup(self, world: int, wire: str) -> rounds.LocalSetup:
        named = {key: value for key in ("mixing", "inside", "inside_wire") if (value := getattr(self, key))}
        return rounds.LocalSetup(world, wire, self.every or EVERY, self.fragments or 1, self.delay_steps, **named)


def workers_of(made: Cluster, counts: Sequence[int]) -> list[int]:
    """Numbers of devices: those asked for, or all that the cluster joins, or eight workers."""
    if counts:
        return list(counts)
    total = 1
    for level in made.levels[:-1]:
        total *= level.ranks
    return [total * (made.levels[-1].ranks or 8)]


def predict(
    profile: Profile, made: Cluster, counts: Sequence[int], wires: Sequence[str], asked: Rounds, json_path: str | None
) -> None:
    predictor = local.LocalPredictor(profile, made)
    setups = [asked.setup(world, wire) for world in workers_of(made, counts) for wire in wires or local_advice.WIRES]
    # beside what was asked for, the exchange that all wait for
    setups = [each for setup in setups for each in dict.fromkeys((setup, setup.blocking))]
    cells = list(progress(map(predictor.predict, setups), len(setups), "cells"))
    if json_path != "-":
        typer.echo(_verdict(cells) + "\n")
    emit([cell.as_dict() for cell in cells], _table(profile, made, cells), json_path)


def advise(
    profile: Profile, made: Cluster, world: int, wires: Sequence[str] | None, asked: Rounds, json_path: str | None
) -> None:
    predictor = local.LocalPredictor(profile, made)
    (world,) = workers_of(made, [world] if world else [])
    answer = local_advice.advise_local(predictor, asked.setup(world, "fp32"), wires or local_advice.WIRES)
    emit(answer.as_dict(), answer.text, json_path)


def _verdict(cells: Sequence[local.LocalPrediction]) -> str:
    """In a sentence: what computes most where most workers are."""
    most = max(cell.workers for cell in cells)
    best = max((cell for cell in cells if cell.workers == most), key=lambda cell: (cell.share_interval[0], cell.share))
    computing = f"compute {local_advice.shares(best)} of the time"
    return f"{most} workers {computing} with {best.wire}, {local_advice.schedule(best)}."


def _table(profile: Profile, made: Cluster, cells: Sequence[local.LocalPrediction]) -> Table:
    state = "measured" if made.measured else "NOT measured"
    mixing = "" if cells[0].mixing == "all" else f", mixing {cells[0].mixing}"
    shown = new_table(
        f"{profile.name} (batch {profile.batch}) with local updates{mixing} on {made.name}, {state}",
        *("workers", "wire", "H/F/delay", "computing %", "step s", "exchange s", "Gb/s for 95 %", "H for 95 %"),
        *("GB a day", "limit"),
        rows=[_row(cell) for cell in cells],
    )
    outer, most = made.levels[-1], max(cells, key=lambda cell: cell.memory_bytes)
    window = f" of {outer.window_mb:g} MB" if outer.window_mb else ""
    gib, has = most.memory_bytes / 2**30, made.device.memory_gib
    shown.caption = (
        "H: steps between exchanges; F: fragments; delay: steps under each. computing: steps of a worker by itself "
        "over wall time. exchange: the longest. GB a day: sent by a worker. In brackets 5 to 95 %. A device holds "
        f"up to {gib:.3g} GiB without activations{f', MORE THAN ITS {has:g}' if 0 < has < gib else ''}. {outer.name}: "
        f"{outer.bandwidth_gbit:g} Gb/s, {outer.rtt_ms:g} ms there and back, {outer.streams} stream(s){window} to a "
        f"peer. cluster: {made.source}"
    )
    return shown


def _row(cell: local.LocalPrediction) -> tuple[Any, ...]:
    return (
        f"{cell.workers} x {-(-cell.devices // cell.workers)}",
        cell.wire,
        f"{cell.every}/{cell.fragments}/{cell.delay}",
        local_advice.shares(cell).replace(" %", ""),
        local_advice.between(cell.step, cell.step_interval),
        local_advice.between(cell.exchange, cell.exchange_interval),
        local_advice.between(cell.needed_gbit, cell.needed_interval),
        *(cell.needed_every, f"{cell.bytes_a_day / 1e9:.3g}", cell.limit),
    )


def linked(made: Cluster, rtt: str, streams: int, window: str) -> Cluster:
    """With another outermost link, where options say so."""
    seconds = options.amount_of("--rtt", rtt, options.TIMES)
    held = options.amount_of("--window", window, options.SIZES)
    if streams < 0:
        raise ValueError(f"--streams: must be 1 or more, got {streams}")
    if held and not (seconds or made.levels[-1].rtt_ms):
        raise ValueError("--window: limits what is under way in a round trip; give its time, too, as --rtt 50ms")
    if seconds is None and held is None and not streams:
        return made
    return made.with_link(seconds, held, streams or None)


def refuse(command: str, parallel: str, given: Mapping[str, object]) -> None:
    for option in (name for name, value in given.items() if value):
        raise ValueError(f"{command}: {option} has no meaning with --parallel {parallel}; leave it out")
