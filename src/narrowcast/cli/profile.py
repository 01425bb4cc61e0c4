"""`narrowcast profile`: when each gradient of a model is ready."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from narrowcast.cli.options import Batch, ComputeMs, Flops, Shape, one_line, out_file
from narrowcast.console import JsonPath, emit, new_table
from narrowcast.predict import Profile
from narrowcast.predict import model as model_file
from narrowcast.predict import probe as probing
from narrowcast.predict import profile as profiling


def _profile_ranks(model: str, batch: int, shape: str, steps: int) -> tuple[Profile, bool]:
    """The mean over all ranks of the process group, and whether this rank shows it."""
    import torch.distributed as dist

    dist.init_process_group()
    device = probing.local_device()
    module = profiling.build(model).to(device)
    examples = profiling.example_batch(module, shape, batch or profiling.DEFAULT_BATCH).to(device)
    made = profiling.profile_together(module, examples, model, steps)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return made, first


@one_line
def profile(
    model: Annotated[str, typer.Argument(help="module:name, file.py:name, or a built-in description.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the profile.")] = "model.toml",
    batch: Batch = 0,
    shape: Shape = "",
    steps: Annotated[int, typer.Option(help="Steps a mean is taken over.")] = profiling.STEPS,
    flops: Flops = 0.0,
    compute_ms: ComputeMs = 0.0,
    json_path: JsonPath = None,
) -> None:
    """When each gradient of a model is ready: from a few real steps, or from a description of its layers.

    Under torchrun all ranks step at the same time, so that what they share shows.
    """
    file = out_file("--out", out)
    profiling.check_numbers(batch=batch, flops=flops, compute_ms=compute_ms, steps=steps)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and ":" in model:
        made, first = _profile_ranks(model, batch, shape, steps)
        if not first:
            return
    else:
        source = profiling.resolve(model, batch=batch, shape=shape, flops=flops, compute_ms=compute_ms, steps=steps)
        made = source.profile
    file.write_text(model_file.dump(made))
    rows = [(part, f"{1e3 * getattr(made, part):.3f}") for part in ("forward", "backward", "update")]
    shown = new_table(f"{made.name}: {made.numel} values, batch {made.batch} -> {out}", "part", "ms", rows=rows)
    shown.caption = f"{len(made.tensors)} tensors; {made.source}; spread of the mean {100 * made.spread:.1f} %"
    tensors = [{"name": t.name, "numel": t.numel, "ready": t.ready, "shape": t.shape} for t in made.tensors]
    emit({**{k: v for k, v in vars(made).items() if k != "tensors"}, "tensors": tensors}, shown, json_path)
