"""`narrowcast probe`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli import options
from narrowcast.cli.options import Shape, one_line, out_file
from narrowcast.console import make_console, new_table
from narrowcast.lab import Lab
from narrowcast.measure import need_cuda, wait_until_quiet
from narrowcast.predict import Cluster, loop, spreads
from narrowcast.predict import cluster as cluster_file
from narrowcast.predict import probe as probing

BUSY = 0.05
"""Of the processors: above it a probe waits, where it is asked to."""


@one_line
def probe(
    out: Annotated[str, typer.Option("--out", "-o", help="Where to write the file.")] = "cluster.toml",
    lab: Annotated[str, typer.Option(help="Probe a lab whose links have this rate (1gbit, none).")] = "",
    hosts: Annotated[int, typer.Option(help="Hosts of the lab.")] = 2,
    gpu: Annotated[bool, typer.Option("--gpu", help="CUDA tensors and NCCL; a lab's ranks share the GPU.")] = False,
    local: Annotated[int, typer.Option(help="Probe so many processes on this machine, over the loopback.")] = 0,
    wires: Annotated[str, typer.Option(help="Codecs to time, separated by commas.")] = ",".join(probing.WIRES),
    seconds: Annotated[float, typer.Option(help="About how long it may take.")] = 60.0,
    name: Annotated[str, typer.Option(help="What the cluster is called.")] = "",
    model: Annotated[
        str, typer.Option(help="module:name or file.py:name: time its DDP steps, too, and calibrate with them.")
    ] = "",
    shape: Shape = "",
    wait: Annotated[float, typer.Option(help="Wait up to so many seconds until nothing else uses the machine.")] = 0.0,
) -> None:
    """Measure a cluster: links, codecs and what overlap costs. Under torchrun, in the lab, or on this machine."""
    specs, file = options.specs_of(wires), out_file("--out", out)
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds: must be above 0, got {seconds:g}")
    if shape and not model:
        raise ValueError(f"--input: goes with --model, whose inputs have this shape; got {shape!r} without it")
    if model:
        loop.prepare(model, shape)  # said to be wrong before a lab is built and ranks start
    if gpu:
        need_cuda()
    if wait:
        options.positive("--wait", wait)
        share = wait_until_quiet(wait, BUSY)
        if share >= BUSY:
            typer.echo(f"probe: after {wait:g} s others still use {100 * share:.0f} % of the processors", err=True)
    steps = [f"model={model}", *([f"input={shape}"] if shape else [])] if model else []
    words = [sys.executable, "-m", "narrowcast.predict.probe", "nccl" if gpu else "gloo", str(seconds)]
    if lab:
        words += [name or f"lab of {hosts} hosts at {lab}", *specs, *steps]
        text = _probe_lab(words, lab, hosts, gpu, seconds)
    elif local:
        text = _probe_local([*words, name or f"{local} processes on one machine", *specs, *steps], local, seconds)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _probe_rank(file, seconds, name, specs, model, shape)
        return
    else:
        raise ValueError("probe: start it with torchrun on every node, or give --lab RATE or --local RANKS")
    file.write_text(text)
    _show_cluster(cluster_file.parse(text, out), file)


def _probe_lab(words: list[str], rate: str, hosts: int, gpu: bool, seconds: float) -> str:
    with Lab(hosts, None if rate == "none" else rate, gpu=gpu) as made:
        done = made.run(words, capture=True, timeout=10 * seconds + 60).check()
    return str(done.json_lines()[-1]["cluster"])


def _probe_local(words: list[str], ranks: int, seconds: float) -> str:
    if ranks < 2:
        raise ValueError(f"probe --local: got {ranks}; communication begins with two")
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node={ranks} --no-python".split()
    words = [sys.executable, *launcher, *words]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10 * seconds + 60)
    if done.returncode:
        raise ValueError(f"probe --local: the ranks failed: {done.stderr.strip().splitlines()[-1:]}")
    *_, whole = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return str(json.loads(whole)["cluster"])


def _probe_rank(file: Path, seconds: float, name: str, specs: list[str], model: str, shape: str) -> None:
    import torch.distributed as dist

    dist.init_process_group()
    first = dist.get_rank() == 0
    say = (lambda text: typer.echo(text, err=True)) if first else lambda text: None
    made = probing.probe(specs, seconds, name or "cluster", say, model, shape)
    if first:
        file.write_text(cluster_file.dump(made))
        _show_cluster(made, file)
    dist.destroy_process_group()


def _show_cluster(made: Cluster, out: Path) -> None:
    rows = [(at.name, f"{at.bandwidth_gbit:.3g}", f"{at.latency_us:.3g}", len(at.tables)) for at in made.levels]
    shown = new_table(f"{made.name} -> {out}", "link", "Gb/s", "latency us", "tables", rows=rows)
    slow = made.overlap
    shown.caption = (
        f"compute is {slow.compute:.2f}x slower beside a collective, a collective {slow.collective:.2f}x beside "
        f"compute, and a rank {slow.together:.2f}x while all compute\n{spreads.rest_words(made)}"
    )
    make_console().print(shown)
