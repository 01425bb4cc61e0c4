"""Every encoding of a run draws its own random numbers: errors that should average out would add up otherwise."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dist.algorithms import flat_names
from dist.models import loss, mlp, wrapped
from dist.noise_record import Draw, recorded, shared
from dist.pool import Crew
from dist.shards import sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import narrowcast as nc
from narrowcast.collectives import isend
from narrowcast.parallel import tensor
from narrowcast.parallel.expert import MoE
from narrowcast.parallel.pipeline import Boundary
from narrowcast.parallel.wires import Wires
from narrowcast.simulate import World, train
from narrowcast.simulate.precision import optim

BLOCKS, WHOLE = "int4/64+sr", "int4+sr"
"""A codec with blocks, and one with a scale for each tensor, of which biases have few values."""
BOTH = {"*.weight": BLOCKS, "*.bias": WHOLE}


def same_values(*shape: int) -> Tensor:
    """Equal on all ranks and in all calls: only noise tells one encoding from another."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def ddp(group: dist.ProcessGroup) -> None:
    """Two models at once, one again after it was detached, and one in each of two groups; buckets, codecs, samples."""
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    groups = [group, group, halves[dist.get_rank() // 2]]
    models = [wrapped(each) for each in groups]
    handles = [nc.attach(model, BOTH, min_values=1, sample_every=2) for model in models]
    for step in range(3):
        for model in models:
            model.zero_grad()
            loss(model, 0, step).backward()
    handles[0].detach()
    handles.append(nc.attach(models[0], BOTH, min_values=1))
    loss(models[0], 0, 0).backward()
    for handle in handles:
        handle.detach()


def fsdp(group: dist.ProcessGroup) -> None:
    """Two sharded models, gradients in two codecs between shards and replicas, parameters forward and backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options = {"gradients": BOTH, "between": BOTH, "parameters": BOTH, "min_values": 1, "sample_every": 2}
    models = [sharded(mesh), sharded(mesh), sharded(mesh["shard"])]
    handles = [nc.attach(model, **options) for model in models[:2]]
    handles.append(nc.attach(models[2], BOTH, parameters=BOTH, min_values=1))
    for step in range(2):
        for model in models:
            model.zero_grad()
            loss(model, 0, step).backward()
    for handle in handles:
        handle.detach()


def local_sgd(group: dist.ProcessGroup) -> None:
    workers = [nc.LocalSGD(mlp(), every=1, spec=BOTH, min_values=1) for _ in range(2)]
    for _ in range(3):
        for worker in workers:
            worker.step()
    for worker in workers:
        worker.close()


def activations(group: dist.ProcessGroup) -> None:
    """Tensor, pipeline and expert parallelism, each in two places, forward and backward, several microbatches."""
    again = dist.new_group(range(dist.get_world_size()))
    places = [Wires(BLOCKS, WHOLE, group=each) for each in (group, group, again)]
    boundaries = [Boundary((6, 24), BLOCKS, number=number) for number in (0, 0, 1)]
    experts = [MoE(24, [nn.Linear(24, 24)], top_k=2, dispatch=BLOCKS, combine=WHOLE, group=group) for _ in range(2)]
    for _ in range(2):
        for place in places:
            x = same_values(8, 24).requires_grad_()
            total = tensor.reduce(x, place) + tensor.reduce(tensor.copy(x, place), place)
            total.sum().backward()
        for boundary in boundaries:
            leaf = boundary.seal(same_values(6, 24)).requires_grad_()
            boundary.open(leaf).backward(same_values(6, 24))
        for expert in experts:
            x = same_values(9, 24).requires_grad_()
            expert(x).sum().backward()


ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in flat_names(4)},
    "hierarchical": {"nodes": [[0, 1], [2, 3]], "inner": BLOCKS},
}


def collectives(group: dist.ProcessGroup) -> None:
    """Each by itself: short segments, parts that begin anywhere, every algorithm."""
    rank, world, step = dist.get_rank(), dist.get_world_size(), 0
    biases = [same_values(2) for _ in range(64)]
    uneven = [same_values(3 + 5 * peer) for peer in range(world)]
    for spec in (BLOCKS, WHOLE):
        for algorithm, more in ALGORITHMS.items():
            for tensors in ([same_values(1000)], biases):
                step += 1
                nc.all_reduce([t.clone() for t in tensors], spec, algorithm=algorithm, step=step, seed=9, **more)
        low = same_values(1000)
        nc.all_reduce(low, spec, algorithm="ring", accumulator="low", step=step + 1, seed=9)
        nc.reduce_scatter(torch.empty(3 + 5 * rank), uneven, spec, step=step + 2, seed=9)
        nc.all_gather([torch.empty(3 + 5 * peer) for peer in range(world)], uneven[rank], spec, step=step + 3, seed=9)
        sizes = [3 + 5 * peer for peer in range(world)]
        arrived = torch.empty(world * sizes[rank])
        splits = {"output_split_sizes": [sizes[rank]] * world, "input_split_sizes": sizes}
        nc.all_to_all(arrived, torch.cat(uneven), spec, step=step + 4, seed=9, **splits)
        nc.broadcast(low, spec, src=1, step=step + 5, seed=9)
        step += 6
        sent_to_two(spec, (step, 0))
        dist.barrier()


def sent_to_two(spec: str, step: tuple[int, ...]) -> None:
    """One rank sends the same to two others."""
    rank = dist.get_rank()
    if rank == 0:
        for work in [isend(same_values(40), spec, dst=peer, step=step, seed=9) for peer in (1, 2)]:
            work.wait()
    elif rank in (1, 2):
        nc.recv(torch.empty(40), spec, src=0)


PARTS = (ddp, fsdp, local_sgd, activations, collectives)


def run(group: dist.ProcessGroup) -> list[Draw]:
    """All of it in one process, as one run, every part with the default seed."""
    draws: list[Draw] = []
    with recorded(draws):
        for part in PARTS:
            before = len(draws)
            part(group)
            draws[before:] = [draw._replace(where=f"{part.__name__}: {draw.where}") for draw in draws[before:]]
    return draws


def told(found: list[tuple[Draw, Draw]], draws: list[Draw]) -> str:
    pairs = Counter((one.where, other.where) for one, other in found)
    return f"{len(found)} of {len(draws)} draws share random numbers with another: {pairs.most_common(8)}"


def test_every_encoding_of_a_run_draws_its_own_random_numbers() -> None:
    """Of DDP, FSDP2 and HSDP, LocalSGD, tensor, pipeline and expert parallelism, and of every collective."""
    with Crew(4, run, timeout=60) as crew:
        outcomes = [crew.outcome(rank) for rank in range(4)]
    assert [outcome.error for outcome in outcomes] == [""] * 4, outcomes[0].traceback
    draws = [draw._replace(where=f"rank {r}, {draw.where}") for r, o in enumerate(outcomes) for draw in o.value]
    found = shared(draws)
    assert not found, told(found, draws)
    assert set(Counter(draw.where.split(", ")[1].split(":")[0] for draw in draws)) == {part.__name__ for part in PARTS}


def noisy_training(draws: list[Draw]) -> None:
    """Low precision wherever rounding can be stochastic: the wire, weights, activations, gradients, the optimizer."""
    from dist.test_simulate_train import data, net

    noisy = {"weights": "e4m3+sr", "activations": "e5m2+sr", "gradients": "e5m2+sr", "seed": 3}
    with recorded(draws):
        for seed in (0, 1):
            train(
                net(), data(), workers=World(3, "two_shot", seed=seed), spec=BOTH, steps=3, batch=24, seed=seed,
                optimizer=partial(optim.SGD, lr=0.1, momentum=0.9, weights="bf16+sr", states="bf16+sr", seed=seed),
                min_values=1, bucket_cap_mb=0.001, lower={**noisy, "seed": 3 + seed},
            )  # fmt: skip


def test_every_rounding_of_a_simulated_training_draws_its_own_random_numbers() -> None:
    draws: list[Draw] = []
    noisy_training(draws)
    found = shared(draws)
    assert not found, told(found, draws)
    assert {draw.where for draw in draws} >= {"encode", "round_to"}
