"""How large a wire's error is on the gradients of real trainings, early, in the middle and late, by kind of layer.

python -m narrowcast_research.wires.gradients --out gradients.json --text text.bin --gpu
Models train with exact gradients; at three moments the gradients of all workers go through each wire, once, without
error feedback. The error is that of the mean that every worker gets, against the mean in double precision (L2,
relative): both roundings of a two-shot sum are in it. Low rank has seen the same gradient `WARM_UP` times before.
Wires are applied on the processor: nothing is to be compiled, and by law 6 their bytes are those of a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import codec as codec_named
from narrowcast.simulate import GradientExchange, World
from narrowcast_research.wires import convergence, workloads
from narrowcast_research.wires.workloads import WORKERS, Setting, WorkerLoop

MOMENTS = {"early": 0.05, "middle": 0.5, "late": 1.0}
"""Parts of the steps after which gradients are taken."""
WARM_UP = 3
ALL = "all"
"""The kind that is the whole model."""
RANKS = (1, 2, 4, 8, 16, 32)
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "plain": (
        *("int8/256", "e4m3fn/128", "int4/128", "nf4/64", "mxfp4", "int3/64", "int2/64", "int2/128", "onebit/64"),
        "sign/4096",
    ),
    "rotated": (
        *("int8/256+rot", "int4/128+rot", "nf4/64+rot", "int3/64+rot", "int2/64+rot", "int2/128+rot"),
        "sign/4096+rot",
    ),
    "spikes apart": ("int8/256+spike2", "int4/128+spike2", "int4/128+spike4", "int3/64+spike1", "int2/128+spike1"),
    "sparse": (
        *("int8/4096+top2816", "int8/4096+top1344", "int4/4096+top1024", "int4/4096+top416", "int2/4096+top544"),
        *("sign/4096+top640", "bf16/4096+top64", "nf4/4096+top80", "int4/4096+top80", "int2/4096+top112"),
        *("sign/4096+top128", "int2/4096+top64", "sign/4096+top64"),
    ),
    "low rank": (*(f"bf16+rank{rank}" for rank in RANKS[:4]), *(f"int8/256+rank{rank}" for rank in RANKS[2:])),
}
"""Wires that do one thing, at several sizes."""

Gradients = list[dict[str, Tensor]]
"""Of each worker, by the parameter's name."""


def kind_of(name: str, parameter: Tensor, embeddings: frozenset[str]) -> str:
    """By what a tensor belongs to."""
    if name in embeddings:
        return "embedding"
    return {0: "norm and bias", 1: "norm and bias", 2: "linear"}.get(parameter.dim(), "conv")


def kinds(model: nn.Module) -> dict[str, str]:
    """Of every parameter."""
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    embeddings = frozenset(f"{name}.weight" for name in layers)
    return {name: kind_of(name, p, embeddings) for name, p in model.named_parameters()}


@dataclass(frozen=True)
class ErrorRow:
    """A wire on some tensors of a model at one moment."""

    model: str
    moment: str
    step: int
    family: str
    wire: str
    bits: float
    """Of a value on the wire, over the whole model."""
    kind: str
    values: int
    error: float


class Probe:
    """A model's shapes on the processor, through which gradients are sent; every tensor travels by the wire."""

    def __init__(self, model: nn.Module, ready: Sequence[str]) -> None:
        self.model, self._ready = copy.deepcopy(model).cpu(), ready
        self.kinds = kinds(self.model)

    def exchanged(self, gradients: Gradients, wire: str | Mapping[str, str]) -> tuple[dict[str, Tensor], float]:
        """The mean that arrives, by name, and the bits a value. wire: of all tensors, or of each."""
        # a model of its own: it carries gradients, and others may measure at the same time
        exchange = GradientExchange(copy.deepcopy(self.model), World(len(gradients)), wire, 0, None)
        exchange.rebuild(self._ready)
        exchange.begin_step(0)
        for worker, own in enumerate(gradients):
            for name, parameter in exchange.parameters.items():
                parameter.grad = own[name]
            exchange.take(worker)
        wires = [wire] if isinstance(wire, str) else list(wire.values())
        for step in range(1 + WARM_UP * any(codec_named(one).rank for one in wires)):
            exchange.reduce(step)
        means = {name: p.grad for name, p in exchange.parameters.items() if p.grad is not None}
        return means, workloads.wire_bits(exchange)

    def errors(self, gradients: Gradients, wire: str) -> tuple[dict[str, tuple[int, float]], float]:
        """By kind, the whole among them: how many values, and the relative error. And the wire's bits a value."""
        means, bits = self.exchanged(gradients, wire)
        sums: dict[str, list[float]] = {}
        for name, arrived in means.items():
            exact = sum((own[name].double() for own in gradients[1:]), gradients[0][name].double()) / len(gradients)
            parts = [exact.numel(), float((arrived.double() - exact).square().sum()), float(exact.square().sum())]
            for kind in (self.kinds[name], ALL):
                sums[kind] = [a + b for a, b in zip(sums.get(kind, [0, 0.0, 0.0]), parts, strict=True)]
        found = {kind: (int(n), math.sqrt(lost / had) if had else 0.0) for kind, (n, lost, had) in sums.items()}
        return found, bits


def measure(
    name: str, setting: Setting, families: Mapping[str, Sequence[str]], threads: int = 1, seed: int = 0
) -> Iterator[ErrorRow]:
    """Train a model, and look at its gradients at each moment: so many wires at once, each on one thread."""
    loop = WorkerLoop(workloads.workload(name, seed, setting), "fp32")
    wires = {wire: family for family, members in families.items() for wire in members}
    for moment, part in MOMENTS.items():
        step = max(1, math.ceil(part * loop.work.steps))
        while loop.done < step:
            loop.step()
        gradients = [loop.gradients(worker) for worker in range(WORKERS)]
        probe = Probe(loop.work.model, loop.exchange.ready)
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for wire, (found, bits) in zip(wires, pool.map(partial(probe.errors, gradients), wires), strict=True):
                of = (name, moment, step, wires[wire], wire, round(bits, 5))
                yield from (ErrorRow(*of, kind, values, round(error, 6)) for kind, (values, error) in found.items())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="The JSON file to write.")
    parser.add_argument("--models", nargs="+", default=list(workloads.MODELS), choices=workloads.MODELS)
    parser.add_argument("--threads", type=int, default=1, help="Wires that are measured at once.")
    convergence.add_settings(parser)
    parser.set_defaults(epochs=2.0, steps=300)
    arguments = parser.parse_args(words)
    setting, rows = convergence.setting_of(arguments), []
    facts: dict[str, Any] = {"where": convergence.where(setting), "workers": WORKERS, "warm_up": WARM_UP}
    facts |= {"epochs": setting.epochs, "batch": setting.batch, "steps": setting.steps, "tiny": setting.tiny}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.models:
        began = time.monotonic()
        rows += [asdict(row) for row in measure(name, setting, FAMILIES, arguments.threads)]
        convergence.tell(f"{name}: {time.monotonic() - began:.1f} s")
        lines = ",\n".join(json.dumps(row) for row in rows)
        arguments.out.write_text(f'{{"facts": {json.dumps(facts)},\n"rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
