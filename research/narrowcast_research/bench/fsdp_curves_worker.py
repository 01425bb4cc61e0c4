"""One rank of `narrowcast bench fsdp-curves`: trains a transformer on real text; rank 0 prints one JSON line.

python -m narrowcast_research.bench.fsdp_curves_worker STEPS SEED WIRE, with the environment of torchrun.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from narrowcast.bench import codecs, fsdp, training
from narrowcast.data import help_text
from narrowcast.measure import run_rank

WIDTH, LAYERS, LENGTH, BATCH = 192, 7, 32, 2
RATE, WARM_UP = 1e-3, 50
HELD_OUT, EVALUATIONS, PIECES = 0.1, 10, 32
"""The last part of the text, how often the loss on it is taken, and on how many pieces."""


def train(steps: int, seed: int, wire: str) -> dict[str, object]:
    torch.manual_seed(seed)
    rank, data = dist.get_rank(), help_text()
    cut = int(len(data) * (1 - HELD_OUT))
    model = training.Transformer(WIDTH, LAYERS, LENGTH)
    parameters = sum(p.numel() for p in model.parameters())
    handle, began = fsdp.shard(model, wire), time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    unseen = training.text_batch(data[cut:], 12345, PIECES, LENGTH)
    losses, evaluated = [], {}
    for step in range(steps):
        loss = model(training.text_batch(data[:cut], (seed * 100_000 + step) * 64 + rank, BATCH, LENGTH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ramp.step()
        losses.append(loss.item())
        if (step + 1) % max(1, steps // EVALUATIONS) == 0:
            with torch.no_grad():
                evaluated[step + 1] = model(unseen).item()
    facts: dict[str, object] = {
        "wire": wire,
        "seed": seed,
        "parameters": parameters,
        "machine": codecs.describe_machine(),
    }
    facts["seconds"] = time.perf_counter() - began
    stats = handle.stats() if handle is not None else {}
    return {**facts, "losses": losses, "held_out": evaluated, "sent_bytes": stats.get("sent_bytes")}


if __name__ == "__main__":
    run_rank(lambda: [train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])])
