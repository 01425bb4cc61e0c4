"""What narrowcast computes, as hashes: wires, sums, a training, predictions. A change of structure leaves them equal.

Public names alone are used, so that the same file runs before and after.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import narrowcast as nc

FILE = Path(__file__).with_name("hashes.json")
SUMMED = ["int8/256", "int4/128+sr", "e5m2", "e5m2+aps", "bf16", "nvfp4", "as-is", "onebit/64"]
WITH_FEEDBACK = ["int8/256+ef", "int4/128+sr+ef", "onebit/64+ef"]
ALGORITHMS = ["two_shot", "one_shot", "ring", "tree", "hierarchical", "shared_scale", "native"]
NODES = [[0, 1], [2, 3]]
WORKERS = 4

Hashes = dict[str, str]
Section = Callable[[Iterable[str]], Iterator[tuple[str, str]]]
"""Hashes by name; it is given the specs of codecs."""


def digest(parts: Iterable[Tensor | object]) -> str:
    made = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            made.update(part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            made.update(json.dumps(part, sort_keys=True).encode())
    return made.hexdigest()[:16]


def values(n: int, seed: int = 0) -> Tensor:
    """Many magnitudes, zeros of both signs, subnormals, the largest and what is not finite."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.exp2(16 * torch.rand(n, generator=generator) - 8)
    hard = [0.0, -0.0, 2.0**-149, -(2.0**-130), 3.4e38, 1e-20, 0.5, -0.5, 1.5]
    x[5 : 5 + len(hard)] = torch.tensor(hard)
    x[n // 2] = float("nan")
    x[n // 3] = float("-inf")
    return x


def wires(specs: Iterable[str]) -> Iterator[tuple[str, str]]:
    for spec in specs:
        codec, parts = nc.codec(spec), []
        for n in (257, 4099):
            x, residual = values(n, n), torch.linspace(-1, 1, n)
            made = [codec.encode(values(n, n + k), seed=7 + k) for k in range(3)]
            owing = codec.encode(x, seed=3, residual=residual, unit=2.0) if codec.feedback else x
            total = codec.reduce(torch.stack(made), n, seed=9, divide=3.0)
            parts += [*made, codec.decode(made[0], n), owing, residual, total]
        yield f"wire {spec}", digest(parts)


def simulated(_: object = None) -> Iterator[tuple[str, str]]:
    for algorithm in ALGORITHMS:
        for spec in SUMMED + WITH_FEEDBACK:
            try:
                nodes = NODES if algorithm == "hierarchical" else None
                world = nc.simulate.World(WORKERS, algorithm, spec, nodes=nodes, seed=5)
                x = [[gradients(rank, 3000), gradients(rank + 10, 1777)] for rank in range(WORKERS)]
                parts = [t for step in range(2) for t in world.all_reduce(x, "avg", step=step)[0]]
            except ValueError:  # what an algorithm refuses is refused with the same words
                continue
            yield f"world {algorithm} {spec}", digest(parts)


def gradients(rank: int, n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


class GivenGradients(nn.Module):
    """Its gradients come from a generator: the same on every processor, as those of matrix products are not."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, seed: int) -> Tensor:
        return torch.stack([(w * gradients(seed, w.numel()).view_as(w)).sum() for w in self.weights]).sum()


def _rank(rank: int, port: int, answer: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", rank=rank, world_size=WORKERS, store=store)
    for algorithm in ALGORITHMS:
        for spec in SUMMED:
            x = [gradients(rank, 3000), gradients(rank + 10, 1777)]
            nodes = NODES if algorithm == "hierarchical" else None
            try:
                nc.all_reduce(x, spec, dist.ReduceOp.AVG, algorithm=algorithm, nodes=nodes, step=1, seed=5)
            except ValueError:
                continue
            if rank == 0:
                answer.put((f"ranks {algorithm} {spec}", digest(x)))
    for spec in ["int8/256", "int4/128+ef"]:
        model = nn.parallel.DistributedDataParallel(GivenGradients((300, 64), (300,), (10, 300), (10,)))
        nc.attach(model, spec, min_values=100)
        reduced = []
        for step in range(3):
            model.zero_grad()
            model(100 * step + rank).backward()
            reduced += [p.grad.clone() for p in model.parameters()]
        if rank == 0:
            answer.put((f"ddp {spec}", digest(reduced)))
    dist.barrier()
    if rank == 0:
        answer.put(None)
    dist.destroy_process_group()


def ranks(_: object = None) -> Iterator[tuple[str, str]]:
    """Four processes: all ranks end with the same bits, so one of them answers."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # the tests' forkserver has imported torch already; one by itself does as spawn would
    context = multiprocessing.get_context("forkserver")
    answer: Any = context.Queue()
    processes = [context.Process(target=_rank, args=(r, store.port, answer), daemon=True) for r in range(WORKERS)]
    for process in processes:
        process.start()
    try:
        while (one := answer.get(timeout=100)) is not None:
            yield one
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def trainings(_: object = None) -> Iterator[tuple[str, str]]:
    torch.manual_seed(0)
    x, y = torch.randn(512, 20), torch.randint(0, 5, (512,))
    data = SimpleNamespace(x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
    for spec, lower in [("int4/128+sr+ef", None), ("e5m2+aps", {"weights": "bf16", "activations": "e4m3"})]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 5))
        nc.simulate.train(model, data, workers=4, spec=spec, steps=6, batch=64, min_values=100, lower=lower, lr=0.05)
        yield f"training {spec}", digest(model.parameters())


def predictions(_: object = None) -> Iterator[tuple[str, str]]:
    from narrowcast.predict import Sweep, find_model, load_cluster, presets

    for name in presets():
        cluster = load_cluster(name)
        for model in ("resnet50", "gpt2"):
            sweep = Sweep(find_model(model, cluster=cluster, batch=32).profile, cluster)
            cells = [
                *sweep.cells([2, 8], ["int8/256", "int4/128+ef", "bf16"], ["auto", "one_shot"]),
                *sweep.cells([2, 8], ["int8/256", "bf16"], ["ring"]),
            ]
            yield f"predicted {name} {model}", digest(rounded(asdict(cell)) for cell in cells)


def rounded(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in cell.items()}


EXACT: list[Section] = [wires, simulated, ranks, predictions]
"""Equal on every machine."""
ALL = [*EXACT, trainings]
"""A product of matrices may be added in another order on another processor."""


def known() -> Hashes:
    return dict(json.loads(FILE.read_text()))


def made(sections: Iterable[Section], specs: Iterable[str]) -> Hashes:
    torch.set_num_threads(1)
    return {name: one for section in sections for name, one in section(specs)}


def compared(sections: Iterable[Section]) -> list[str]:
    """Names whose hashes are not those of the file."""
    expected = known()
    specs = [name.removeprefix("wire ") for name in expected if name.startswith("wire ")]
    got = made(sections, specs)
    return [name for name, one in got.items() if name in expected and expected[name] != one] + [
        name for name in expected if name not in got and name.split()[0] in {n.split()[0] for n in got}
    ]


def written() -> None:
    from narrowcast.codecs import all_specs

    FILE.write_text(json.dumps(made(ALL, all_specs()), indent=1, sort_keys=True) + "\n")
