"""How many bytes a wire for each tensor saves at the error of one wire for all, on the gradients of real trainings.

python -m narrowcast_research.wires.mixed --out mixed.json --tiny
As in `gradients`: models train with exact gradients, and at some steps the gradients of all workers go through each
wire. For each wire that no other beats in both bytes and error, the autopilot's own search finds the wires of tensors
with the fewest bytes whose error of the mean gradient is no larger; that mixture is then exchanged and measured itself.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import Problem, solve
from narrowcast_research.wires import convergence, gradients, workloads
from narrowcast_research.wires.workloads import WORKERS, WorkerLoop

WIRES = (
    *("bf16", "int8/256", "int8/256+spike2", "int6/128", "int5/128", "int4/128", "int4/128+rot", "int4/128+spike2"),
    *("nf4/64", "int3/64", "int3/64+rot", "int2/64", "int4/4096+top1024", "int4/4096+top416", "int8/256+rank4"),
    *("int8/256+rank8", "int8/256+rank16", "int8/256+rank32"),
)
TRIES = 6
"""With a smaller bound each, until the error that is measured is no larger."""


@dataclass(frozen=True)
class MixedRow:
    """At the error of one wire for all: its bits a value, and those of a wire for each tensor."""

    model: str
    step: int
    wire: str
    bits: float
    error: float
    mixed_bits: float
    mixed_error: float
    """Measured."""
    saved: float
    wires: dict[str, int]
    """How many tensors have each."""


def lost_by_tensor(means: dict[str, Tensor], sent: gradients.Gradients) -> dict[str, float]:
    """Energy of what arrived less the exact mean."""
    found = {}
    for name, arrived in means.items():
        exact = sum((own[name].double() for own in sent[1:]), sent[0][name].double()) / len(sent)
        found[name] = float((arrived.double() - exact).square().sum())
    return found


def rows_at(model: str, step: int, probe: gradients.Probe, sent: gradients.Gradients) -> Iterator[MixedRow]:
    """One row for each wire of the front."""
    shapes = {name: tuple(p.shape) for name, p in probe.model.named_parameters()}
    values = {name: math.prod(shape) for name, shape in shapes.items()}
    total, energy = sum(values.values()), 0.0
    for name in shapes:
        exact = sum((own[name].double() for own in sent[1:]), sent[0][name].double()) / len(sent)
        energy += float(exact.square().sum())
    lost = {wire: lost_by_tensor(probe.exchanged(sent, wire)[0], sent) for wire in WIRES}
    codecs = {wire: codec_named(wire) for wire in WIRES}
    bits = {w: {n: c.for_shape(shapes[n])[0].bits_for(shapes[n]) for n in shapes} for w, c in codecs.items()}
    size = {wire: sum(bits[wire][n] * values[n] for n in shapes) for wire in WIRES}
    error = {wire: math.fsum(lost[wire].values()) for wire in WIRES}
    names = list(shapes)
    for wire in WIRES:
        # no other beats it, and of those that are the same only the first counts
        others = [(o, size[o], error[o]) for o in WIRES if o != wire]
        if any(
            (s <= size[wire] and e < error[wire])
            or ((s, e) == (size[wire], error[wire]) and WIRES.index(o) < WIRES.index(wire))
            for o, s, e in others
        ):
            continue
        bound = error[wire]
        for _ in range(TRIES):
            problem = Problem(
                ready=(0.0,),
                buckets=(tuple(range(len(names))),),
                seconds=tuple((32.0 * values[n], *(bits[w][n] * values[n] for w in WIRES)) for n in names),
                errors=tuple((0.0, *(lost[w][n] for w in WIRES)) for n in names),
                latency=(0.0,) * (1 + len(WIRES)),
                bound=bound,
            )
            choice = dict(zip(names, (("fp32", *WIRES)[number] for number in solve(problem).choice), strict=True))
            means, mixed_bits = probe.exchanged(sent, choice)
            mixed = math.fsum(lost_by_tensor(means, sent).values())
            if not mixed > error[wire]:
                break
            # tensors of one wire share blocks at their edges, which costs more for a mixture
            bound *= 0.95 * error[wire] / mixed
        if mixed > error[wire] or mixed_bits >= size[wire] / total:
            # one wire for all is a mixture, too
            choice, mixed, mixed_bits = dict.fromkeys(names, wire), error[wire], size[wire] / total
        counts = {w: list(choice.values()).count(w) for w in dict.fromkeys(choice.values())}
        found = (size[wire] / total, math.sqrt(error[wire] / energy), mixed_bits, math.sqrt(mixed / energy))
        yield MixedRow(model, step, wire, *found, 1 - mixed_bits / (size[wire] / total), counts)


def measure(name: str, setting: workloads.Setting, steps: Sequence[int]) -> Iterator[MixedRow]:
    loop = WorkerLoop(workloads.workload(name, 0, setting), "fp32")
    for step in steps:
        while loop.done < step:
            loop.step()
        sent = [loop.gradients(worker) for worker in range(WORKERS)]
        yield from rows_at(name, step, gradients.Probe(loop.work.model, loop.exchange.ready), sent)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="The JSON file to write.")
    parser.add_argument("--models", nargs="+", default=list(workloads.MODELS), choices=workloads.MODELS)
    parser.add_argument("--at", type=int, nargs="+", default=[10, 60], help="Steps at which to look.")
    convergence.add_settings(parser)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    setting, rows = convergence.setting_of(arguments), list[dict[str, object]]()
    for name in arguments.models:
        began = time.monotonic()
        rows += [asdict(row) for row in measure(name, setting, arguments.at)]
        convergence.tell(f"{name}: {time.monotonic() - began:.1f} s")
        arguments.out.write_text(json.dumps({"where": convergence.where(setting), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
