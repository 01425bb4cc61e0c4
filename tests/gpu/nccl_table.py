"""By hand on a machine with a GPU, root and MPS: the speed of everything on NCCL in a lab, as one table.

    PYTHONPATH=src:research python3 tests/gpu/nccl_table.py measure FILE.jsonl [--only sums,ddp,...] [--seconds 500]
    PYTHONPATH=src:research python3 tests/gpu/nccl_table.py read FILE.jsonl

measure: rows are in FILE as they come, so that whatever ends the script leaves what was measured; parts that would
begin after the time are left out. read: what is promised, what was measured, and whether it was kept; ends with 1 where
a promise was not kept. `check_nccl.py` is the other half: bits, faults, activations.
Without a GPU: small sizes on Gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from narrowcast.bench import collectives, ddp, fsdp
from narrowcast.bench.ranks import UNLIMITED, Ranks

HAS_GPU = torch.cuda.is_available()
RATE = "10gbit"
WHOLE_MB = 104.8576
"""26,214,400 float32."""
SPECS = ("bf16", "fp16", "int8/256", "e4m3fn/256", "int4/128", "int2/64")
FASTER = 1.15
"""Where moving the bytes is so much faster than NCCL's bf16 sum, a wire must not be slower than that sum."""
Row = dict[str, Any]
Promise = tuple[str, float, float | None]
"""What, what must be reached, what was measured. Times are negative: less is better."""


def sums() -> Iterator[Row]:
    sizes = (1.0, 4.0, 16.0, 64.0, WHOLE_MB, 256.0) if HAS_GPU else (0.1,)
    for count in (4, 2, 8) if HAS_GPU else (2,):
        yield from collectives.run(Ranks(count, RATE, HAS_GPU), SPECS, sizes, small=count == 4)


def without_limit() -> Iterator[Row]:
    yield from collectives.run(
        Ranks(4, UNLIMITED, HAS_GPU), ("int8/256", "int4/128"), (WHOLE_MB, 256.0) if HAS_GPU else (0.1,)
    )


def ddp_steps() -> Iterator[Row]:
    yield from ddp.run(Ranks(4, RATE, HAS_GPU), model="gpt2" if HAS_GPU else "small", steps=7 if HAS_GPU else 1)


def fsdp_steps() -> Iterator[Row]:
    yield from fsdp.run(Ranks(4, RATE, HAS_GPU), model="gpt2" if HAS_GPU else "small", steps=7 if HAS_GPU else 1)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "sums": sums,
    "no-limit": without_limit,
    "ddp": ddp_steps,
    "fsdp": fsdp_steps,
}


def measure(file: Path, parts: list[str], seconds: float) -> None:
    began = time.monotonic()
    with file.open("a") as out:
        for part in parts:
            if time.monotonic() - began > seconds:
                print(f"{part}: left out, {seconds:g} s are over", flush=True)
                continue
            for row in PARTS[part]():
                out.write(json.dumps({"part": part, **row}) + "\n")
                out.flush()
            print(f"{time.monotonic() - began:6.1f} s  {part}: done", flush=True)


class Rows:
    """What was measured, to be asked for."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = [row for row in rows if "machine" not in row]

    def get(self, what: str, **where: Any) -> float | None:
        """The newest row that fits."""
        fits = [row for row in self._rows if all(row.get(key) == value for key, value in where.items())]
        return fits[-1].get(what) if fits else None

    def ratio(self, one: str, other: str, part: str) -> float | None:
        """How many times as fast one wire's step is."""
        ours, theirs = (self.get("step", part=part, wire=wire) for wire in (one, other))
        return theirs / ours if ours and theirs else None


def promises(rows: Rows) -> Iterator[Promise]:
    whole = round(WHOLE_MB * 1e6) // 4
    shares = {"int8/256": {2: 0.90, 4: 0.90, 8: 0.85}, "int4/128": {2: 0.88, 4: 0.85, 8: 0.80}, "int2/64": {4: 0.75}}
    for spec, by_world in shares.items():
        for world, least in by_world.items():
            share = rows.get("share_of_limit", part="sums", values=whole, wire=spec, hosts=world)
            yield f"{spec}, {world} ranks: share of the limit", least, share
    for spec in ("bf16", "fp16"):
        share = rows.get("over_bf16", part="sums", values=whole, wire=spec, hosts=4)
        yield f"{spec}, 4 ranks: x NCCL's bf16 sum", 0.97, share
    yield from sizes(rows)
    for spec, least in (("int8/256", 1.5), ("int4/128", 2.6)):
        over = rows.get("over_bf16", part="no-limit", values=whole, wire=spec)
        yield f"{spec}, 4 ranks, no limit to the rate: x NCCL's bf16 sum", least, over
    for values in collectives.SMALL:
        beyond = rows.get("beyond_ms", part="sums", values=values, small=True, wire="int8/256", hosts=4)
        yield f"int8/256 of {values} values: ms beyond NCCL's own", -0.4, None if beyond is None else -beyond
    powersgd = rows.ratio("int4/128", "powersgd-4", "ddp")
    yield "DDP int8/256: x plain", 3.1, rows.ratio("int8/256", "plain", "ddp")
    yield "DDP int8/256: x torch's bf16 hook", 1.8, rows.ratio("int8/256", "bf16-hook", "ddp")
    yield "DDP int4/128: x plain", 4.7, rows.ratio("int4/128", "plain", "ddp")
    yield "DDP int4/128: x torch's PowerSGD", 1.0, powersgd
    yield "DDP int4/128+ef: x plain", 4.7, rows.ratio("int4/128+ef", "plain", "ddp")
    yield "DDP int4/128+ef: x torch's PowerSGD", 1.0, rows.ratio("int4/128+ef", "powersgd-4", "ddp")
    yield "DDP bf16: x torch's bf16 hook", 0.98, rows.ratio("bf16", "bf16-hook", "ddp")
    both, four = fsdp.WIRES[True][1:]
    yield f"FSDP2 {both}: x plain bf16", 1.75, rows.ratio(both, "plain", "fsdp")
    yield f"FSDP2 {four}: x plain bf16", 2.0, rows.ratio(four, "plain", "fsdp")


def sizes(rows: Rows) -> Iterator[Promise]:
    """Every wire and size where the bytes allow it."""
    for world in (2, 4, 8):
        for megabytes in (1, 4, 16, 64, 256):
            for spec in ("int8/256", "e4m3fn/256", "int4/128", "int2/64"):
                where = {"part": "sums", "values": megabytes * 250_000, "wire": spec, "hosts": world}
                over, share = rows.get("over_bf16", **where), rows.get("share_of_limit", **where)
                if over is None or share is None:
                    yield f"{spec}, {world} ranks, {megabytes} MB: x NCCL's bf16 sum", 1.0, None
                elif over / share >= FASTER:
                    yield f"{spec}, {world} ranks, {megabytes} MB: x NCCL's bf16 sum", 1.0, over
                else:
                    print(f"  -   {spec}, {world} ranks, {megabytes} MB: the bytes alone {over / share:.2f}x")


def read(file: Path) -> int:
    missed = 0
    for what, least, found in promises(Rows([json.loads(line) for line in file.read_text().splitlines()])):
        kept = found is not None and found >= least
        missed += not kept
        word = "kept" if kept else "not measured" if found is None else "MISSED"
        print(f"{word:12} {what}: {'-' if found is None else f'{abs(found):.2f}'} ({abs(least):g} promised)")
    return int(missed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("measure", "read"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=500.0, help="after which no part begins")
    chosen = parser.parse_args()
    parts = chosen.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if chosen.what == "measure":
        measure(chosen.file, parts, chosen.seconds)
    return read(chosen.file)


if __name__ == "__main__":
    sys.exit(main())
