"""Tensor parallelism through codecs, by functions and by torch's styles: fp32 changes no bit, 8 bits err by design."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of
from dist.pool import Crew, Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel import style as theirs

import narrowcast as nc
from narrowcast.kernels.noise import Noise
from narrowcast.parallel import tensor, wires
from narrowcast.parallel import tensor_styles as ours
from narrowcast.parallel.wires import Wires

WORLDS = (1, 2, 3, 4)


def values(rank: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def whole_numbers(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """So small that sums of products are exact: no order of additions can matter."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(100 * seed + rank)).float()


def through(x: Tensor, spec: str) -> Tensor:
    return nc.codec(spec).decode(nc.codec(spec).encode(x), x.numel()).view(x.shape)


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


# ---- the functions ---------------------------------------------------------------------------------------------------

FUNCTIONS = ("copy", "reduce", "all_gather", "reduce_scatter", "split", "gather")
THERE, BACK = "int8/16", "e4m3fn/16"


def applied(group: dist.ProcessGroup, specs: tuple[str, str], dim: int) -> list[tuple[Tensor, Tensor]]:
    """Every function on this rank's values: what comes out, and the gradient of what went in."""
    rank, found = dist.get_rank(group), []
    for function in FUNCTIONS:
        used = Wires(*specs, group=group)
        # what all ranks hold must be the same, what they hold shards or terms of not
        x = values(0 if function in ("copy", "split") else rank, 12, 12).requires_grad_()
        y = getattr(tensor, function)(x, used, *(() if function in ("copy", "reduce") else (dim,)))
        same_gradient = function in ("reduce", "gather")
        y.backward(values(0 if same_gradient else rank, *y.shape, seed=1))
        found.append((y.detach(), x.grad))
    return found


def expected(function: str, world: int, specs: tuple[str, str], dim: int) -> list[tuple[Tensor, Tensor]]:
    """The same from the table in the module's docstring, all ranks in one process."""
    same_input, same_gradient = function in ("copy", "split"), function in ("reduce", "gather")
    xs = [values(0 if same_input else rank, 12, 12) for rank in range(world)]
    there, back = specs if world > 1 else ("fp32", "fp32")

    def gathered(parts: list[Tensor], spec: str) -> list[Tensor]:
        return [torch.cat([through(part, spec) for part in parts], dim)] * world

    def reduced(parts: list[Tensor], spec: str) -> list[Tensor]:
        return [summed([through(part, spec) for part in parts])] * world

    def scattered(parts: list[Tensor], spec: str) -> list[Tensor]:
        cut = [part.chunk(world, dim) for part in parts]
        return [summed([through(shards[rank].contiguous(), spec) for shards in cut]) for rank in range(world)]

    def kept(parts: list[Tensor], _: str) -> list[Tensor]:
        return [part.chunk(world, dim)[rank] for rank, part in enumerate(parts)]

    def nothing(parts: list[Tensor], _: str) -> list[Tensor]:
        return parts

    forward, backward = {
        "copy": (nothing, reduced),
        "reduce": (reduced, nothing),
        "all_gather": (gathered, scattered),
        "reduce_scatter": (scattered, gathered),
        "split": (kept, gathered),
        "gather": (gathered, kept),
    }[function]
    ys = forward(xs, there)
    gradients = [values(0 if same_gradient else rank, *y.shape, seed=1) for rank, y in enumerate(ys)]
    return list(zip(ys, backward(gradients, back), strict=True))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("specs", [("fp32", "fp32"), (THERE, BACK)], ids=str)
def test_each_function_and_its_gradient_are_what_the_table_says_bit_for_bit(
    pool: Pool, world: int, specs: tuple[str, str]
) -> None:
    for dim in (0, 1):
        ranks = pool.run(world, applied, specs, dim)
        for number, function in enumerate(FUNCTIONS):
            for rank, (y, gradient) in enumerate(expected(function, world, specs, dim)):
                assert torch.equal(ranks[rank][number][0], y), f"{function} {dim} rank {rank}"
                assert torch.equal(ranks[rank][number][1], gradient), f"gradient of {function} {dim} rank {rank}"


def uneven(group: dist.ProcessGroup) -> list[Tensor]:
    """Ten rows over the ranks as torch.chunk cuts them, there and back."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    full = torch.arange(30.0).view(10, 3)
    shards = [*full.chunk(world), *[full[:0]] * world]
    x = shards[rank].clone().requires_grad_()
    used = Wires("fp32", group=group)
    y = tensor.reduce_scatter(tensor.all_gather(x, used, 0, 10) * (rank + 1), used)
    y.backward(torch.ones_like(y))
    return [y.detach() - shards[rank] * sum(range(1, world + 1)), x.grad - world * (world + 1) // 2]


@pytest.mark.parametrize("world", [3, 4, 7])
def test_shards_may_differ_in_size(pool: Pool, world: int) -> None:
    assert not any(difference.any() for rank in pool.run(world, uneven) for difference in rank)


# ---- torch's styles --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Embedding, norm, two branches that share their input, a residual sum, a head."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 16), nn.LayerNorm(16)
        self.mlp = Branches(hidden)
        self.head = nn.Linear(16, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mlp(self.norm(x))
        return self.head(x)


class Branches(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, hidden), nn.Linear(16, hidden, bias=False)
        self.down = nn.Linear(hidden, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.left(x) * self.right(x))


def sequence_plan(kind: Any, **specs: str) -> dict[str, Any]:
    return {
        "embed": kind.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **specs),
        "norm": kind.SequenceParallel(use_local_output=True, **specs),
        "mlp": kind.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), **specs),
        "mlp.left": kind.ColwiseParallel(**specs),
        "mlp.right": kind.ColwiseParallel(**specs),
        "mlp.down": kind.RowwiseParallel(output_layouts=Shard(1), **specs),
        "head": kind.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), **specs),
    }


def plain_plan(kind: Any, **specs: str) -> dict[str, Any]:
    return {
        "embed": kind.ColwiseParallel(output_layouts=Replicate(), **specs),
        "mlp.left": kind.ColwiseParallel(**specs),
        "mlp.right": kind.ColwiseParallel(**specs),
        "mlp.down": kind.RowwiseParallel(**specs),
        "head": kind.RowwiseParallel(input_layouts=Replicate(), **specs),
    }


def dtensor_plan(kind: Any, **specs: str) -> dict[str, Any]:
    """DTensors from layer to layer, so that gradients arrive as terms of a sum."""
    return {
        "embed": kind.ColwiseParallel(output_layouts=Replicate(), use_local_output=False, **specs),
        "norm": kind.SequenceParallel(**specs),
        "mlp": kind.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), **specs),
        "mlp.left": kind.ColwiseParallel(use_local_output=False, **specs),
        "mlp.right": kind.ColwiseParallel(use_local_output=False, **specs),
        "mlp.down": kind.RowwiseParallel(use_local_output=False, **specs),
        "head": kind.ColwiseParallel(output_layouts=Shard(0), use_local_output=False, **specs),
        "": kind.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate(), **specs),
    }


PLANS = {"sequence": sequence_plan, "plain": plain_plan, "dtensor": dtensor_plan}


def block(exact: bool, hidden: int) -> Block:
    torch.manual_seed(0)
    made = Block(hidden)
    if exact:
        made.norm = nn.Identity()
        for number, p in enumerate(made.parameters()):
            p.data = whole_numbers(number, *p.shape)
    return made


def gradients_of(model: nn.Module) -> list[Tensor]:
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def styled(group: dist.ProcessGroup, plan: str, exact: bool, hidden: int, specs: dict[str, str]) -> Any:
    """Output and gradients with torch's styles and with ours, and the collectives that DTensor made under ours."""
    mesh = DeviceMesh.from_group(group, "cpu")
    tokens = torch.randint(0, 12, (4, 8), generator=torch.Generator().manual_seed(3))
    found = []
    for kind in (theirs, ours):
        model = block(exact, hidden)
        layers = PLANS[plan](kind, **(specs if kind is ours else {}))
        layers = {name: style for name, style in layers.items() if not (exact and name == "norm")}
        parallelize_module(model, mesh, layers)
        with CommDebugMode() as seen:
            y = model(tokens)
            (y * whole_numbers(9, *y.shape)).sum().backward()
        found.append([y.detach(), *gradients_of(model)])
    seen = {str(op): count for op, count in seen.get_comm_counts().items()}
    return *found, seen, wires.stats(model), wires.explain(model)


@pytest.mark.parametrize("plan", ["sequence", "plain"])
def test_with_fp32_two_ranks_give_the_bits_of_torchs_own_styles(pool: Pool, plan: str) -> None:
    for plain, found, *_ in pool.run(2, styled, plan, False, 24, {"forward": "fp32"}):
        assert len(plain) == len(found) > 6
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize(
    "plan, world, hidden", [("plain", 4, 24), ("sequence", 4, 24), ("dtensor", 2, 10), ("dtensor", 4, 10)]
)
def test_where_sums_are_exact_any_number_of_ranks_gives_the_bits_of_torchs_own_styles(
    pool: Pool, plan: str, world: int, hidden: int
) -> None:
    """Whole numbers do not care about the order of sums: Gloo adds in its own, we in rank order, and where DTensors go
    from layer to layer torch adds gradients of branches before it adds those of ranks. Layers of 10 do not divide.
    """
    for plain, found, *_ in pool.run(world, styled, plan, True, hidden, {"forward": "fp32"}):
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_nothing_is_left_for_dtensor_to_send(pool: Pool, plan: str) -> None:
    for _, _, seen, counted, table in pool.run(2, styled, plan, False, 24, {"forward": "int8/256"}):
        assert seen == {}
        assert counted["forward_sent_bytes"] < counted["forward_plain_bytes"] / 3
        assert counted["backward_sent_bytes"] < counted["backward_plain_bytes"] / 3
        assert re.search(r"^mlp.down.output +forward +int8/256 +1 ", table, re.MULTILINE)


# ---- 8 bits: the error is the codec's --------------------------------------------------------------------------------

TOKENS, WIDTH, HIDDEN = 64, 256, 512


def megatron(group: dist.ProcessGroup, specs: tuple[str, str]) -> tuple[Tensor, Tensor, Tensor]:
    """Two layers, the first cut by columns and the second by rows. The output, and gradients of input and weight."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    entry, exit_ = Wires(*specs, group=group), Wires(*specs, group=group)
    x = values(0, TOKENS, WIDTH).requires_grad_()
    up = values(1, HIDDEN, WIDTH).chunk(world)[rank].requires_grad_()
    down = values(2, WIDTH, HIDDEN).chunk(world, 1)[rank]
    y = tensor.reduce(torch.tanh(tensor.copy(x, entry) @ up.T / 16) @ down.T, exit_)
    y.square().sum().backward()
    return y.detach(), x.grad, up.grad


def shares(world: int, y: Tensor | None = None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each rank's term of the output and of the input's gradient, and its weight's gradient, given the output y."""
    found = []
    for rank in range(world):
        x = values(0, TOKENS, WIDTH).requires_grad_()
        up = values(1, HIDDEN, WIDTH).chunk(world)[rank].requires_grad_()
        share = torch.tanh(x @ up.T / 16) @ values(2, WIDTH, HIDDEN).chunk(world, 1)[rank].T
        if y is not None:
            share.backward(2 * y)
        found.append((share.detach(), x.grad, up.grad))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_error_of_8_bit_gradients_is_the_sum_of_what_the_codecs_lose(pool: Pool, world: int) -> None:
    """Exactly: each gradient differs from the plain one by the errors of the encodings on its way, and nothing else.

    In size: the encodings' errors are independent, so their squares add, and each is that of uniform rounding, a
    twelfth of a step squared a value.
    """
    spec = "int8/256"
    ranks = pool.run(world, megatron, ("fp32", spec))
    (plain_y, plain_x, _), *_ = pool.run(world, megatron, ("fp32", "fp32"))
    terms = [gradient for _, gradient, _ in shares(world, plain_y)]
    assert all(torch.equal(y, plain_y) for y, _, _ in ranks)
    assert all(torch.equal(x, ranks[0][1]) for _, x, _ in ranks)
    # two shots: every term is encoded once, then the sum of what arrived
    first = summed([through(term, spec) for term in terms])
    assert torch.equal(ranks[0][1], through(first, spec))
    assert torch.equal(plain_x, summed(terms))
    error, predicted = ranks[0][1] - plain_x, sum(steps(t, spec) for t in [*terms, first]) / 12
    assert 0.97 < float(error.double().square().sum() / predicted) < 1.03


def steps(x: Tensor, spec: str) -> float:
    """The sum over all values of the squared distance between neighbours on the codec's grid."""
    block = nc.codec(spec).block
    return float((x.view(-1, block).abs().amax(1).double() / 127).square().sum() * block)


def test_8_bits_forward_change_the_weights_gradient_by_the_error_of_the_output_alone(pool: Pool) -> None:
    spec = "int8/256"
    ranks = pool.run(2, megatron, (spec, "fp32"))
    rounded = through(summed([through(share, spec) for share, _, _ in shares(2)]), spec)
    assert torch.equal(ranks[0][0], rounded)
    for (_, _, found), (_, _, wanted) in zip(ranks, shares(2, rounded), strict=True):
        assert torch.equal(found, wanted)


# ---- noise -----------------------------------------------------------------------------------------------------------


def noises(group: dist.ProcessGroup) -> list[tuple[str, int, int]]:
    """The key and the stream of every encoding of a step with several places, microbatches and directions."""
    used, rank = [], dist.get_rank(group)
    for seed in (0, 1):
        for _ in range(3):
            place = Wires("int4/16+sr", group=group, seed=seed)
            for direction in wires.Direction:
                for _ in range(4):
                    turn = place.turn(direction)
                    used += [Noise(turn.seed).derive(turn.step, rank, phase) for phase in range(2)]
    return used


def two_groups(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return noises(halves[dist.get_rank(group) // 2])


def crewed(world: int, function: Any) -> list[Any]:
    """In processes of their own, which may make groups as they like."""
    with Crew(world, function, timeout=20) as crew:
        found = [crew.outcome(rank) for rank in range(world)]
    assert [outcome.error for outcome in found] == [""] * world
    return [outcome.value for outcome in found]


def test_no_two_encodings_share_their_noise() -> None:
    """Not of two places, microbatches, directions, ranks, or replicas of the model."""
    used = [one for rank in crewed(4, two_groups) for one in rank]
    assert len(set(used)) == len(used) == 4 * 2 * 3 * 2 * 4 * 2


def stochastic(group: dist.ProcessGroup) -> list[Tensor]:
    place = Wires("int4/16+sr", group=group)
    return [tensor.reduce(torch.full((16, 16), 0.3).cumsum(0), place) for _ in range(400)]


def test_stochastic_rounding_is_unbiased_over_calls(pool: Pool) -> None:
    ranks = pool.run(2, stochastic)
    assert all(torch.equal(a, b) for a, b in zip(*ranks, strict=True))
    wanted = 2 * torch.full((16, 16), 0.3).cumsum(0)
    mean = torch.stack(ranks[0]).mean(0)
    # a step is at most 9.6 / 7; 400 means of three roundings
    assert float((mean - wanted).abs().max()) < 5 * 1.4 / (400 / 3) ** 0.5


# ---- faults ----------------------------------------------------------------------------------------------------------


def faults(group: dist.ProcessGroup) -> dict[str, str]:
    rank = dist.get_rank(group)
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    line = DeviceMesh.from_group(group, "cpu")
    used = Wires("int8/16", group=group)
    layer = nn.Linear(8, 8)

    def applied(style: Any, module: nn.Module | None = None, mesh: DeviceMesh = line) -> Any:
        return lambda: parallelize_module(copy.deepcopy(module or layer), mesh, style)

    maximum = DTensor.from_local(torch.ones(4, 4), line, [Partial("max")], run_check=False)
    found = {
        "mesh": applied(ours.ColwiseParallel(forward="int8/16"), mesh=square),
        "mesh input": applied(ours.PrepareModuleInput(forward="int8/16"), mesh=square),
        "spec": lambda: ours.RowwiseParallel(forward="int9/16"),
        "feedback": lambda: ours.SequenceParallel(backward="int4/16+ef"),
        "module": applied(ours.ColwiseParallel(forward="int8/16"), nn.Conv2d(1, 1, 1)),
        "dtype": lambda: tensor.copy(torch.zeros(4, dtype=torch.int64), used),
        "maximum": lambda: ours.redistribute(maximum, Replicate(), used),
        "length": lambda: tensor.all_gather(torch.zeros(4, 2), used, 0, 10),
        "dim": lambda: tensor.all_gather(torch.zeros(4, 2), used, 2),
        "dim from the end": lambda: tensor.reduce_scatter(torch.zeros(4, 2), used, -3),
        "no dim": lambda: tensor.split(torch.tensor(1.0), used),
        "dim of gather": lambda: tensor.gather(torch.zeros(4, 2), used, -4),
        "ranks": lambda: tensor.all_gather(torch.zeros(4 + (rank == 2), 2), used),
        "input": lambda: parallelize_module(copy.deepcopy(layer), line, ours.ColwiseParallel())([1.0]),
        "outsider": lambda: Wires("int8/16", group=dist.GroupMember.NON_GROUP_MEMBER),
    }
    return {name: error_of(attempt) for name, attempt in found.items()}


def test_wrong_uses_say_what_is_wrong() -> None:
    for found in crewed(4, faults):
        assert "ColwiseParallel: the mesh has 2 dimensions ('dp', 'tp')" in found["mesh"]
        assert "give mesh['tp']" in found["mesh"]
        assert "PrepareModuleInput: the mesh has 2 dimensions" in found["mesh input"]
        assert "int9" in found["spec"]
        assert "SequenceParallel: backward=int4/16+ef" in found["feedback"]
        assert "leave out +ef" in found["feedback"]
        assert "nn.Linear and nn.Embedding" in found["module"]
        assert "codecs take float32, float16 and bfloat16" in found["dtype"]
        assert "only a sum" in found["maximum"]
        assert "this rank's shard has 4 values along dimension 0" in found["length"]
        assert "IndexError: all_gather: dim=2 of a tensor of shape (4, 2)" in found["dim"]
        assert "IndexError: reduce_scatter: dim=-3" in found["dim from the end"]
        assert "IndexError: split: dim=0 of a tensor of shape ()" in found["no dim"]
        assert "IndexError: gather: dim=-4" in found["dim of gather"]
        assert "DisagreementError" in found["ranks"]
        assert "rank 2" in found["ranks"]
        assert "the input is list; give a tensor" in found["input"]
        assert "no member of the group" in found["outsider"]
