"""A rank of torchrun: steps with error feedback, `save_state`, and `load_state` into another model.

resume_accelerate.py (ddp | fsdp | scaler | without) FOLDER. Every rank writes what it saw as FOLDER/RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowcast.parallel import Handle
from narrowcast.parallel.integrations.accelerate import attach

State = dict[str, Tensor]


def prepared(accelerator: Accelerator, how: str) -> tuple[nn.Module, Any, Handle]:
    torch.manual_seed(0)
    # 33 rows: the last rank's part is smaller
    model: Any = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 8))
    if how == "fsdp":
        # on CPUs Accelerate leaves its FSDP plugin out and takes DDP, so that the model is sharded by hand
        fully_shard(model, mesh=init_device_mesh("cpu", (accelerator.num_processes,)))
    else:
        model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer, attach(accelerator, model, "int4/64+ef", min_values=1)


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + accelerator.process_index)
    accelerator.backward(model(torch.randn(8, 16, generator=generator)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def owed(handle: Handle) -> State:
    found = handle.state_dict()
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for name, v in found.items()}


def resumed(how: str, folder: Path) -> dict[str, State]:
    """What is owed when the state is saved; then in a model that comes after, before and after it loads it."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, handle = prepared(accelerator, how)
    for number in range(4):
        step(accelerator, model, optimizer, number)
    before = owed(handle)
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    handle.detach()
    accelerator.free_memory()
    accelerator = Accelerator(cpu=True)
    model, _, handle = prepared(accelerator, how)
    fresh = owed(handle)
    accelerator.load_state(str(folder / "state"))
    after = owed(handle)
    handle.detach()
    return {"before": before, "fresh": fresh, "after": after}


def scaled(with_scaler: bool) -> State:
    """The parameters after some steps, with a loss scale that grows or with none."""
    accelerator = Accelerator(cpu=True)
    if with_scaler:
        # Accelerate makes one for float16 alone, which it does not train on a CPU
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model, optimizer, handle = prepared(accelerator, "ddp")
    for number in range(6):
        step(accelerator, model, optimizer, number)
    if with_scaler:
        assert accelerator.scaler.get_scale() > 1024.0
    handle.detach()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def linear(accelerator: Accelerator) -> tuple[nn.Module, Any]:
    model = accelerator.prepare(nn.Linear(16, 33))
    return model, accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))


def without(folder: Path) -> dict[str, State]:
    """A checkpoint made without narrowcast and loaded with it, then the reverse; and a compiled model."""
    accelerator = Accelerator(cpu=True)
    model, optimizer = linear(accelerator)
    accelerator.save_state(str(folder / "plain"))
    handle = attach(accelerator, model, "int4/64+ef", min_values=1)
    accelerator.load_state(str(folder / "plain"))
    step(accelerator, model, optimizer, 0)
    before = owed(handle)
    accelerator.save_state(str(folder / "ours"))
    handle.detach()

    plain = Accelerator(cpu=True)
    linear(plain)
    plain.wait_for_everyone()
    plain.load_state(str(folder / "ours"))

    compiled = Accelerator(cpu=True, dynamo_backend="eager")
    model, optimizer = linear(compiled)
    handle = attach(compiled, model, "int8/256", min_values=1)
    step(compiled, model, optimizer, 0)
    handle.detach()
    return {"before": before, "ratio": {"compiled": torch.tensor(handle.stats()["ratio"])}}


def main() -> None:
    how, folder = sys.argv[1], Path(sys.argv[2])
    if how == "scaler":
        found = {"plain": scaled(False), "scaled": scaled(True)}
    else:
        found = without(folder) if how == "without" else resumed(how, folder)
    torch.save(found, folder / f"{Accelerator(cpu=True).process_index}.pt")
    Accelerator(cpu=True).end_training()


if __name__ == "__main__":
    main()
