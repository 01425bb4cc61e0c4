"""Hugging Face Accelerate: prepare as always, then attach; residuals are in its checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py

(on GPUs `accelerate launch` will do). Needs the extra: pip install narrowcast[accelerate]. The main process prints one
JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from narrowcast.parallel.integrations.accelerate import attach


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="int4/128+ef", help="the wire of the gradients")
    parser.add_argument("--epochs", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = options()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    x = torch.randn(512, 32)
    loader = DataLoader(TensorDataset(x, x @ torch.randn(32, 8)), batch_size=16)
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3), loader)
    handle = attach(accelerator, model, args.spec, min_values=1000)

    loss = torch.tensor(0.0)
    for _ in range(args.epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    handle.check_ranks()

    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])
        owed = {name: value.clone() for name, value in handle.state_dict().items()}
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        handle.load_state_dict({})
        accelerator.load_state(folder)
        kept = handle.state_dict()
        accelerator.wait_for_everyone()
    stats = handle.stats()
    if accelerator.is_main_process:
        same = all(torch.allclose(kept[name], value, rtol=1e-6) for name, value in owed.items()) and bool(owed)
        facts = {"loss": loss.item(), "steps": stats["steps"], "ratio": stats["ratio"], "residuals_kept": same}
        print(json.dumps(facts), flush=True)
    handle.detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
