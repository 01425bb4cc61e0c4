"""DDP training steps: plain, torch's own hooks, and `attach`, in turn in the same run.

A wire is a codec spec, "plain" (DDP without a hook), "half" (the backend's own sum in bfloat16), "auto", "bf16-hook",
"fp16-hook" or "powersgd-RANK" (torch's own hooks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from narrowcast.bench import ranks, training
from narrowcast.bench.ranks import Ranks, Row
from narrowcast.bench.training import WireTrainer
from narrowcast.codecs import codec as codec_named
from narrowcast.codecs import refuse_differences
from narrowcast.measure import Timing, rank_device
from narrowcast.parallel import Handle, attach, half_road

PLAIN, COMPUTE, HALF, AUTO = "plain", "compute", "half", "auto"
HOOKS = {"bf16-hook": default_hooks.bf16_compress_hook, "fp16-hook": default_hooks.fp16_compress_hook}
POWERSGD = "powersgd-"
WIRES = {
    False: (PLAIN, "fp16-hook", "powersgd-4", "bf16", "int8/256", "e5m2+aps", "int4/128", "int4/128+ef"),
    True: (PLAIN, "bf16-hook", "powersgd-4", "bf16", "int8/256", "int4/128", "int4/128+ef"),
}
"""By default on processors, and on GPUs."""
TASKS = {"small": training.MLP, "gpt2": training.GPT2}
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30), "MALLOC_ARENA_MAX": "1"}
"""glibc otherwise gives the memory of large gradients back at every step, and getting it anew takes a fifth of the
compute time. For all wires alike, the plain one included."""


def is_torchs(wire: str) -> bool:
    """Whether a wire is DDP's own or one of torch's hooks."""
    return wire == PLAIN or wire in HOOKS or wire.startswith(POWERSGD)


def run(
    at: Ranks, wires: Sequence[str] | None = None, model: str = "small", steps: int = training.STEPS
) -> Iterator[Row]:
    """The machine, then a row for each wire: its step, the part of it that communication adds, and the error of the
    mean gradient, beside plain DDP, which is always there, and torch's hooks.
    """
    chosen = list(dict.fromkeys([PLAIN, *(wires or WIRES[at.gpu])]))
    for wire in chosen:
        check_wire(wire, at.gpu)
    options = {"wires": chosen, "model": model, "steps": steps}
    for row in ranks.rows(at, __name__, measure, options, KEEP_MEMORY):
        yield row if "machine" in row else {**at.as_dict(), "model": model, **row}


def check_wire(wire: str, gpu: bool) -> None:
    """Before a lab is built."""
    if wire.startswith(POWERSGD) and not wire.removeprefix(POWERSGD).isdigit():
        raise ValueError(f"wire {wire!r}: give PowerSGD's rank as a number, as powersgd-4")
    if wire == "bf16-hook" and not gpu:
        raise ValueError(f"wire {wire!r}: torch has this hook for NCCL alone; take fp16-hook, or --gpu")
    if not is_torchs(wire) and wire not in (HALF, AUTO):
        refuse_differences("bench ddp", codec_named(wire))


def attach_wire(model: DistributedDataParallel, wire: str) -> Handle | None:
    if wire in HOOKS:
        model.register_comm_hook(None, HOOKS[wire])
    elif wire.startswith(POWERSGD):
        rank = int(wire.removeprefix(POWERSGD))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif wire != PLAIN:
        return attach(model, half_road() if wire == HALF else wire)
    return None


def make_trainer(
    task: training.Task, wire: str, device: torch.device, first: WireTrainer | None, bucket_views: bool = True
) -> WireTrainer:
    """A wire's trainer; its weights and the optimizer's state are the first one's, so that many fit into memory."""
    module = task.model_on(device)
    if first is not None:
        for own, shared in zip(module.parameters(), first.model.parameters(), strict=True):
            own.data = shared.data
    gpu = device.type == "cuda"
    # torch's PowerSGD hook waits inside a callback: with two buckets under way both of Gloo's threads wait for ever
    one_bucket = wire.startswith(POWERSGD) and not gpu
    model = DistributedDataParallel(
        module,
        device_ids=[device] if gpu else None,
        bucket_cap_mb=1024 if one_bucket else None,
        gradient_as_bucket_view=bucket_views,
    )
    trainer = WireTrainer(task, model, attach_wire(model, wire), device, autocast=task.bf16)
    if first is not None:
        _share_state(first, trainer)
    return trainer


def _share_state(first: WireTrainer, other: WireTrainer) -> None:
    for own, shared in zip(other.model.parameters(), first.model.parameters(), strict=True):
        other.optimizer.state[own] = first.optimizer.state[shared]


def relative_error(gradients: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """L2 difference over the plain one's norm."""
    pairs = list(zip(gradients, plain, strict=True))
    off = torch.stack([(mine - its).norm() for mine, its in pairs]).norm()
    return float(off / torch.stack([its.norm() for _, its in pairs]).norm())


def measure(wires: Sequence[str], model: str, steps: int, gpu: bool) -> Iterator[Row]:
    """On a rank: all wires, and compute alone (`no_sync`: nothing travels), in turn."""
    task, device = TASKS[model], rank_device(gpu)
    trainers: dict[str, WireTrainer] = {}
    facts: dict[str, Row] = {}
    plain: list[Tensor] = []
    for wire in wires:
        trainer = trainers[wire] = make_trainer(task, wire, device, trainers.get(PLAIN))
        sent = training.warm_up(wire, trainer)
        plain = plain or [gradient.clone() for gradient in trainer.gradients()]
        facts[wire] = {"error": relative_error(trainer.gradients(), plain), "link_bytes": sent}
    del plain
    for trainer in trainers.values():
        trainer.go()
    candidates = {wire: trainer.step for wire, trainer in trainers.items()}
    alone = {COMPUTE: lambda: trainers[PLAIN].step(communicate=False)}
    took = training.in_turn({**candidates, **alone}, steps, device)
    for wire, trainer in trainers.items():
        stats = trainer.handle.stats() if trainer.handle is not None else None
        yield {**compared(wire, took), **facts[wire], "loss": trainer.loss.item(), "stats": stats}
    for trainer in trainers.values():
        trainer.close()


def compared(wire: str, took: dict[str, Timing]) -> Row:
    """Seconds of a wire's step, and how many times faster it is than plain DDP and than torch's hooks."""
    alone, step = took[COMPUTE].median, took[wire].median
    over = {other: took[other].median / step for other in took if is_torchs(other)}
    return {"wire": wire, **training.times_of(took[wire]), "compute": alone, "exposed": step - alone, "over": over}


if __name__ == "__main__":
    ranks.main(measure)
