"""simulate.train gives the weights that DDP with `nc.attach` gives on real processes, bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.parallel.ddp import buckets
from narrowcast.simulate import Batches, World, train
from narrowcast.simulate.settings import seed_of

STEPS, BATCH, SEED, MIN_VALUES = 6, 24, 5, 50
CAP_MB = 0.02
"""Several buckets, rebuilt after the first step."""

SPECS: dict[str, object] = {
    "aps": "e5m2+aps",
    "noise and feedback": "int4/128+sr+ef",
    "dtree8": "dtree8",
    "by name": {"head.*": "as-is", "*.weight": "mxfp4", "*": "int8/64"},
    "low rank": "bf16+rank2+ef",
    "low rank in turn": "int8/64+acp2+sr+ef",
    "low rank later": nc.schedule({0: "int4/128+ef", 2: {"left.*": "fp32+rank2", "*": "int4/64+rank3+sr+ef"}}),
    "by step": nc.schedule({0: "as-is", 2: "int4/128+ef", 4: "int4/64+ef"}),
}


class Net(nn.Module):
    """A little of everything that has to be kept apart by worker: batch statistics, dropout, two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        # a parameter whose memory is not in row-major order
        self.left.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.hidden, self.head = nn.Linear(8 * 64, 40), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.norm(self.left(x) + self.right(x)).flatten(1)
        return self.head(self.drop(F.relu(self.hidden(x))))


def net() -> Net:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        return Net()


def data() -> SimpleNamespace:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(110, 1, 8, 8, generator=made)
    y = (x.flatten(1) @ torch.randn(64, 10, generator=made)).argmax(dim=1)
    return SimpleNamespace(x_train=x[:90], y_train=y[:90], x_test=x[90:], y_test=y[90:])


def shifted(x: Tensor, made: torch.Generator) -> Tensor:
    return x.roll(int(torch.randint(-1, 2, (), generator=made)), dims=3)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def state_bits(module: nn.Module) -> dict[str, bytes]:
    return {
        name: t.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for name, t in module.state_dict().items()
    }


def real(
    group: dist.ProcessGroup, spec: object, algorithm: str, lower: dict[str, Any] | None = None, **levels: Any
) -> tuple[dict[str, bytes], dict[str, Tensor], int]:
    rank, world, examples = dist.get_rank(group), dist.get_world_size(group), data()
    batches = Batches(len(examples.x_train), BATCH, world, SEED)
    plain = net()
    lowered = None if lower is None else nc.simulate.lower(plain, **lower)
    model = DDP(plain, process_group=group, bucket_cap_mb=CAP_MB)
    handle = nc.attach(model, spec, min_values=MIN_VALUES, algorithm=algorithm, seed=SEED, **levels)
    optimizer = adam(list(model.parameters()))
    for step in range(STEPS):
        indices = batches.indices(step, rank)
        made = torch.Generator().manual_seed(seed_of(SEED, step, rank, "augment"))
        x, y = shifted(examples.x_train[indices], made), examples.y_train[indices]
        torch.manual_seed(seed_of(SEED, step, rank))
        if lowered is not None:
            lowered.set_step(step, rank)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    owed = handle.state_dict()
    handle.detach()
    return state_bits(model.module), owed, handle.seed


def real_in_nodes(
    group: dist.ProcessGroup, levels: dict[str, Any], *case: Any
) -> tuple[dict[str, bytes], dict[str, Tensor], int]:
    return real(group, *case, **levels)


@pytest.fixture
def one_thread() -> object:
    """Ranks have one thread each; how many there are changes the bits of a convolution."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def simulated(
    world: int, spec: object, algorithm: str, lower: dict[str, Any] | None = None, noise: int = SEED, **levels: Any
) -> tuple[dict[str, bytes], dict[str, Tensor]]:
    run = train(
        net(),
        data(),
        workers=World(world, algorithm, seed=noise, **levels),
        spec=spec,
        steps=STEPS,
        batch=BATCH,
        optimizer=adam,
        seed=SEED,
        augment=shifted,
        min_values=MIN_VALUES,
        bucket_cap_mb=CAP_MB,
        lower=lower,
    )
    return state_bits(run.model), run.world.state_dict()


def check(
    pool: Pool, world: int, spec: object, algorithm: str, lower: dict[str, Any] | None = None, **levels: Any
) -> None:
    ranks = pool.run(world, real_in_nodes, levels, spec, algorithm, lower)
    ours, owed = simulated(world, spec, algorithm, lower, noise=ranks[0][2], **levels)
    # buffers are those of rank 0, which DDP hands on before the next forward pass
    assert ours == ranks[0][0]
    for theirs, their_debt, _ in ranks:
        weights = {name for name, _ in net().named_parameters()}
        assert {name: theirs[name] for name in weights} == {name: ours[name] for name in weights}
        assert sorted(their_debt) == sorted(owed)
        # the simulator keeps flat rows in the order of memory, a handle's state is in that of the indices
        named = dict(net().named_parameters())
        flat = {name: buckets.flat_copy(their_debt[name], p) for name, p in named.items() if name in owed}
        factors = {key: named[key.partition(":")[0]] for key in owed if key not in named}
        flat |= {
            key: buckets.memory_order(their_debt[key], p) for key, p in factors.items() if key.endswith("right factor")
        }
        flat |= {key: their_debt[key] for key in factors if key.endswith("left factor")}
        assert [name for name in owed if not torch.equal(flat[name], owed[name])] == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("world", [2, 4])
def test_a_simulated_training_ends_with_the_weights_of_a_real_one(pool: Pool, world: int, spec: object) -> None:
    check(pool, world, spec, "auto")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("algorithm, spec", [("ring", "e5m2+aps"), ("tree", "mxfp4"), ("two_shot", "int8")])
def test_with_other_algorithms_too(pool: Pool, algorithm: str, spec: str) -> None:
    check(pool, 4, spec, algorithm)


LEVELS = [
    ("int4/128+ef", "int8/256"),
    ("int4/128+sr+ef", "int4/64+sr+ef"),
    ("int4/128+ef", "as-is"),
    ("bf16+rank2+ef", "int8/256+ef"),
    (SPECS["by name"], "bf16"),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("spec, inner", LEVELS, ids=str)
def test_with_nodes_and_a_codec_inside_of_them(pool: Pool, spec: object, inner: str) -> None:
    check(pool, 4, spec, "auto", nodes=[[0, 1], [2, 3]], inner=inner)


@pytest.mark.usefixtures("one_thread")
def test_with_a_lowered_model_and_its_noise_too(pool: Pool) -> None:
    """Ranks are given one seed, so every worker draws the same numbers in a step."""
    noisy = {"weights": "e4m3+sr", "activations": "e5m2+sr", "gradients": "e5m2+sr", "seed": 3}
    check(pool, 2, "int8/64", "auto", noisy)


@pytest.mark.usefixtures("one_thread")
def test_the_comparison_would_notice_another_codec_seed_or_order() -> None:
    """The weights depend on all of what is compared above."""
    base = simulated(4, "int4/128+sr", "two_shot")[0]
    assert base != simulated(4, "int4/64+sr", "two_shot")[0]
    assert base != simulated(4, "int4/128+sr", "ring")[0]
    backwards = World(4, "two_shot", order="reversed", seed=SEED)
    options = {"steps": STEPS, "batch": BATCH, "optimizer": adam, "seed": SEED, "augment": shifted}
    run = train(
        net(), data(), workers=backwards, spec="int4/128+sr", min_values=MIN_VALUES, bucket_cap_mb=CAP_MB, **options
    )
    assert base != state_bits(run.model)
