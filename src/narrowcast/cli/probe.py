"""`narrowcast probe` and `profile`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.options import Batch, ComputeMs, Flops, Shape, one_line, out_file, specs_of
from narrowcast.console import JsonPath, emit, make_console, new_table
from narrowcast.lab import Lab
from narrowcast.predict import Cluster, Profile
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import model as model_file
from narrowcast.predict import probe as probing
from narrowcast.predict import profile as profiling


@one_line
def probe(
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the file.")] = "cluster.toml",
    lab: Annotated[str, typer.Option(help="Probe a lab whose links have this rate (1gbit, none).")] = "",
    hosts: Annotated[int, typer.Option(help="Hosts of the lab.")] = 2,
    local: Annotated[int, typer.Option(help="Probe so many processes on this machine, over the loopback.")] = 0,
    wires: Annotated[str, typer.Option(help="Codecs to time, separated by commas.")] = ",".join(probing.WIRES),
    seconds: Annotated[float, typer.Option(help="About how long it may take.")] = 60.0,
    name: Annotated[str, typer.Option(help="What the cluster is called.")] = "",
) -> None:
    """Measure a cluster: links, codecs and what overlap costs. Under torchrun, in the lab, or on this machine."""
    specs, file = specs_of(wires), out_file("--out", out)
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds: must be above 0, got {seconds:g}")
    if lab:
        text = _probe_lab(lab, hosts, seconds, name, specs)
    elif local:
        text = _probe_local(local, seconds, name, specs)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _probe_rank(file, seconds, name, specs)
        return
    else:
        raise ValueError("probe: start it with torchrun on every node, or give --lab RATE or --local RANKS")
    file.write_text(text)
    _show_cluster(cluster_file.parse(text, out), file)


def _worker(seconds: float, name: str, specs: list[str]) -> list[str]:
    return [sys.executable, "-m", "narrowcast.predict.probe", str(seconds), name, *specs]


def _probe_lab(rate: str, hosts: int, seconds: float, name: str, specs: list[str]) -> str:
    words = _worker(seconds, name or f"lab of {hosts} hosts at {rate}", specs)
    with Lab(hosts, None if rate == "none" else rate) as made:
        done = made.run(words, capture=True, timeout=10 * seconds + 60).check()
    return done.text(0).partition(probing.MARK + "\n")[2]


def _probe_local(ranks: int, seconds: float, name: str, specs: list[str]) -> str:
    if ranks < 2:
        raise ValueError(f"probe --local: got {ranks}; communication begins with two")
    words = _worker(seconds, name or f"{ranks} processes on one machine", specs)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--no-python",
    ]
    done = subprocess.run([*launcher, *words], capture_output=True, text=True, check=False, timeout=10 * seconds + 60)
    if done.returncode:
        raise ValueError(f"probe --local: the ranks failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.partition(probing.MARK + "\n")[2]


def _probe_rank(file: Path, seconds: float, name: str, specs: list[str]) -> None:
    import torch.distributed as dist

    from narrowcast.predict import probe as probing

    dist.init_process_group()
    first = dist.get_rank() == 0
    made = probing.probe(
        specs, seconds, name or "cluster", (lambda text: typer.echo(text, err=True)) if first else lambda text: None
    )
    if first:
        file.write_text(cluster_file.dump(made))
        _show_cluster(made, file)
    dist.destroy_process_group()


def _show_cluster(made: Cluster, out: Path) -> None:
    shown = new_table(f"{made.name} -> {out}", "link", "Gb/s", "latency us", "tables")
    for level in made.levels:
        shown.add_row(level.name, f"{level.bandwidth_gbit:.3g}", f"{level.latency_us:.3g}", str(len(level.tables)))
    slow = made.overlap
    shown.caption = (
        f"compute is {slow.compute:.2f}x slower beside a collective, a collective {slow.collective:.2f}x beside "
        f"compute, and a rank {slow.together:.2f}x while all compute"
    )
    make_console().print(shown)


def _profile_ranks(model: str, batch: int, shape: str, steps: int) -> tuple[Profile, bool]:
    """The mean over all ranks of the process group, and whether this rank shows it."""
    import torch.distributed as dist

    dist.init_process_group()
    device = probing.local_device()
    module = profiling.build(model).to(device)
    made = profiling.profile_together(
        module, profiling.example_batch(module, shape, batch or profiling.DEFAULT_BATCH).to(device), model, steps
    )
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
        made = profiling.resolve(
            model, batch=batch, shape=shape, flops=flops, compute_ms=compute_ms, steps=steps
        ).profile
    file.write_text(model_file.dump(made))
    shown = new_table(f"{made.name}: {made.numel} values, batch {made.batch} -> {out}", "part", "ms")
    for part in ("forward", "backward", "update"):
        shown.add_row(part, f"{1e3 * getattr(made, part):.3f}")
    shown.caption = f"{len(made.tensors)} tensors; {made.source}; spread of the mean {100 * made.spread:.1f} %"
    tensors = [{"name": t.name, "numel": t.numel, "ready": t.ready} for t in made.tensors]
    emit({**{k: v for k, v in vars(made).items() if k != "tensors"}, "tensors": tensors}, shown, json_path)
