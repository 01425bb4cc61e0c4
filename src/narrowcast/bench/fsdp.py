"""FSDP2 training steps: plain, and gradients and parameters through codecs, in turn in the same run.

A wire is "plain" or what attach gets: "gradients=int8/256,parameters=e4m3fn/128".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowcast.bench import ranks, training
from narrowcast.bench.ranks import Ranks, Row
from narrowcast.bench.training import Transformer, WireTrainer
from narrowcast.codecs import codec as codec_named
from narrowcast.codecs import refuse_differences, refuse_low_rank
from narrowcast.measure import rank_device
from narrowcast.parallel import Handle, attach

PLAIN = "plain"
BOTH = "gradients=int8/256,parameters=e4m3fn/128"
WIRES = {
    False: (PLAIN, "gradients=int8/256", "gradients=int4/128+ef", "parameters=e4m3fn/128", BOTH),
    True: (PLAIN, BOTH, "gradients=int4/128+ef,parameters=e4m3fn/128"),
}
"""By default on processors, and on GPUs."""
TASKS = {"small": training.TEXT, "gpt2": training.GPT2}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

TARGETS = {("200mbit", BOTH): (3.5, 2.5)}
"""How many times fewer bytes and faster steps we promise on 4 hosts of processors, by rate and wire."""


def run(
    at: Ranks, wires: Sequence[str] | None = None, model: str = "small", steps: int = training.STEPS
) -> Iterator[Row]:
    """The machine, then a row for each wire: its step and what the links of rank 0's host carried, beside plain
    FSDP2, which is always there.
    """
    chosen = list(dict.fromkeys([PLAIN, *(wires or WIRES[at.gpu])]))
    for wire in chosen:
        check_wire(wire)
    plain: Row = {}
    for row in ranks.rows(at, __name__, measure, {"wires": chosen, "model": model, "steps": steps}):
        if "machine" in row:
            yield row
            continue
        plain = plain or row
        yield {**at.as_dict(), "model": model, **row, **comparison(row, plain, at)}


def comparison(row: Row, plain: Row, at: Ranks) -> Row:
    """A link that counts nothing (InfiniBand) says nothing of bytes."""
    fewer = plain["link_bytes"] / row["link_bytes"] if row["link_bytes"] else None
    faster = plain["step"] / row["step"]
    target = TARGETS.get((at.rate, row["wire"])) if at.count == 4 and not at.gpu else None
    met = None if target is None or fewer is None else fewer >= target[0] and faster >= target[1]
    return {"fewer_bytes": fewer, "speedup": faster, "target": target, "met": met}


def check_wire(wire: str) -> None:
    """Before a lab is built."""
    refuse = {"gradients": refuse_differences, "parameters": refuse_low_rank}
    for role, spec in attach_arguments(wire).items():
        refuse[role](f"bench fsdp: {role}", codec_named(spec))


def attach_arguments(wire: str) -> dict[str, str]:
    """The arguments of attach in "gradients=int8/256,parameters=e4m3fn/128"; none for "plain"."""
    if wire == PLAIN:
        return {}
    arguments = dict(part.partition("=")[::2] for part in wire.split(","))
    unknown = sorted(set(arguments) - {"gradients", "parameters"})
    if unknown:
        raise ValueError(f"wire {wire!r}: {unknown[0]!r} is neither 'gradients' nor 'parameters'")
    return {"gradients": "as-is", **arguments}


def shard(model: Transformer, wire: str, device: str = "cpu", bf16: bool = False) -> Handle | None:
    """Every block a unit of its own; what `wire` says attached."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": BF16} if bf16 else {"mesh": mesh}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return attach(model, **attach_arguments(wire)) if wire != PLAIN else None  # type: ignore[arg-type]


def make_trainer(task: training.Task, wire: str, device: torch.device) -> WireTrainer:
    model = task.model_on(device)
    assert isinstance(model, Transformer)
    handle = shard(model, wire, device.type, task.bf16)
    return WireTrainer(task, model, handle, device, autocast=False)


def measure(wires: Sequence[str], model: str, steps: int, gpu: bool) -> Iterator[Row]:
    """On a rank: all wires in turn."""
    task, device = TASKS[model], rank_device(gpu)
    trainers = {wire: make_trainer(task, wire, device) for wire in wires}
    facts = {wire: _warmed_up(wire, trainer) for wire, trainer in trainers.items()}
    took = training.in_turn({wire: trainer.step for wire, trainer in trainers.items()}, steps, device)
    for wire, trainer in trainers.items():
        yield {"wire": wire, **training.times_of(took[wire]), **facts[wire], "loss": trainer.loss.item()}
        trainer.close()


def _warmed_up(wire: str, trainer: WireTrainer) -> Row:
    sent = training.warm_up(wire, trainer)
    stats = trainer.handle.stats() if trainer.handle is not None else None
    trainer.go()
    payload = None if stats is None else stats["sent_bytes"] / training.WARM_UP
    values = sum(p.numel() for p in trainer.model.parameters())
    return {"parameters": values, "link_bytes": sent, "payload_bytes": payload}


if __name__ == "__main__":
    ranks.main(measure)
