"""`attach` on FSDP2: every value that a rank gets is what the codec says, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from dist.models import batch, error_of, local_gradients, mlp, rank_order_mean, same
from dist.pool import Pool
from dist.shards import full, loss, mesh_of, rows_of, seed_of, sharded, tensors_of, through
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.parallel import TensorInfo, policy
from narrowcast.parallel.fsdp import sharded_rows as messages
from narrowcast.parallel.fsdp.torch_parts import param_groups

STEPS = 3


# ---- the mean --------------------------------------------------------------------------------------------------------


def exact_mean(group: dist.ProcessGroup, options: dict[str, object]) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model, twin = sharded(mesh_of(group), **options), mlp()
    handle = nc.attach(model, "as-is", parameters="as-is")
    optimizer, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(STEPS):
        expected = rank_order_mean(twin, world, step)
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        assert same(full(model), expected), step
        optimizer.step()
        for p, gradient in zip(twin.parameters(), expected, strict=True):
            p.grad = gradient
        theirs.step()
        assert same(full(model, "parameters"), [p.detach() for p in twin.parameters()])
    assert handle.step == STEPS
    handle.check_ranks()
    handle.detach()


OPTIONS = {
    "reshards": {"reshard_after_forward": True},
    "keeps": {"reshard_after_forward": False},
    "by itself": {},
    "one unit": {"nested": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_as_is_gives_exactly_the_rank_order_mean(pool: Pool, world: int, options: dict[str, object]) -> None:
    pool.run(world, exact_mean, options)


def test_a_model_resharded_to_fewer_ranks_gives_the_same_mean(pool: Pool) -> None:
    # over all ranks of the pool: FSDP makes groups for it, which is collective over the world
    pool.run(8, exact_mean, {"reshard_after_forward": 2})


def against_the_codec(group: dist.ProcessGroup, spec: str, dim: int) -> None:
    """Gradients of weights through the codec, biases as they are, all in one unit: by hand, bit for bit."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    placed = {"shard_placement_fn": lambda p: Shard(dim)} if dim else {}
    module = nn.Linear(24, 40) if not dim else nn.Linear(24, 40, bias=False)
    model = sharded(mesh_of(group), module, nested=False, **placed)
    initial = [t.clone() for t in full(model, "parameters")]
    handle = nc.attach(model, {"weight": spec, "bias": "as-is"}, min_values=1, seed=7)
    codec = nc.codec(spec)
    for step in range(2):
        model.zero_grad()
        loss(model, rank, step).backward()
        twin = nn.Linear(24, 40, bias=not dim)
        with torch.no_grad():
            for p, value in zip(twin.parameters(), initial, strict=True):
                p.copy_(value)
        local, seed = local_gradients(twin, world, step, loss), seed_of(handle.seed, "gradient")
        expected = by_hand(local, codec, world, step, dim, seed)
        assert same(full(model), expected)
    handle.detach()


def by_hand(local: list[list[Tensor]], codec: nc.Codec, world: int, step: int, dim: int, seed: int) -> list[Tensor]:
    """The weight's part of each row in one run, which begins where the row begins; sums in rank order."""
    total = None
    swapped = [[g.transpose(0, dim) if i == 0 else g for i, g in enumerate(gs)] for gs in local] if dim else local
    for rank, gradients in enumerate(swapped):
        if dim:
            # each part keeps its own shape, so a part is cut from the tensor as it is
            parts = torch.stack([part.reshape(-1) for part in local[rank][0].chunk(world, dim=dim)])
        else:
            parts = rows_of(gradients, world)
        weights = parts.shape[1] if dim else -(-40 // world) * 24
        sent = parts.clone()
        for row in range(world):
            offset = row * parts.shape[1]
            sent[row, :weights] = through(codec, parts[row, :weights], offset, seed, (step, rank, 0))
        total = sent if total is None else total + sent
    mean = total / world
    if dim:
        return [torch.cat([row.view(40, -1) for row in mean], dim=1)]
    return tensors_of(mean, swapped[0])


@pytest.mark.parametrize("spec", ["int8/256", "int4/128", "e4m3fn/128+sr", "bf16", "e5m2", "onebit/64"])
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_what_the_codec_makes_of_them(pool: Pool, world: int, spec: str) -> None:
    pool.run(world, against_the_codec, spec, 0)


def test_parameters_sharded_along_another_dimension_too(pool: Pool) -> None:
    pool.run(2, against_the_codec, "int8/64", 1)


def aps(group: dist.ProcessGroup) -> None:
    """One power-of-two scale for the whole weight, over all ranks and rows."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    module = nn.Linear(24, 40, bias=False)
    model = sharded(mesh_of(group), module, nested=False)
    value = full(model, "parameters")[0].clone()
    handle = nc.attach(model, "e5m2+aps", min_values=1)
    loss(model, rank, 0).backward()
    twin = nn.Linear(24, 40, bias=False)
    with torch.no_grad():
        twin.weight.copy_(value)
    local = [g[0] for g in local_gradients(twin, world, 0, loss)]
    exponents = [torch.log2(world * g.abs().max().double()).ceil() for g in local]
    codec = nc.codec("e5m2+aps")
    scale = torch.tensor([2.0 ** (int(max(exponents)) - 15)])
    total = torch.zeros(40, 24)
    for g in local:
        total += codec.decode(codec.encode(g, scale=scale), g.numel()).view(40, 24)
    assert same(full(model), [total / world])
    handle.detach()


def test_aps_agrees_on_one_scale_for_a_whole_parameter(pool: Pool) -> None:
    pool.run(3, aps)


def gathered(group: dist.ProcessGroup, spec: str) -> None:
    """Forward and backward both see decode(encode(shard)), on every rank, its own part too."""
    world = dist.get_world_size(group)
    model = sharded(mesh_of(group), nn.Linear(24, 40), nested=False, reshard_after_forward=True)
    handle = nc.attach(model, "as-is", parameters={"weight": spec, "*": "as-is"}, min_values=1)
    weight, bias = full(model, "parameters")
    rows, codec = rows_of([weight], world), nc.codec(spec)
    length = rows.shape[1] + -(-40 // world)
    for row in range(world):
        rows[row] = through(codec, rows[row], row * length, seed_of(handle.seed, "parameter"), (0, row, 1))
    expected = tensors_of(rows, [weight])[0]
    x = batch(0, 0).requires_grad_()
    y = model(x)
    assert torch.equal(y, nn.functional.linear(x, expected, bias))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(y) @ expected)
    handle.check_ranks()
    handle.detach()


@pytest.mark.parametrize("spec", ["e4m3fn/128", "int8/256+sr", "e5m2"])
def test_parameters_are_what_the_codec_makes_of_the_shards(pool: Pool, spec: str) -> None:
    pool.run(3, gathered, spec)


# ---- what FSDP can be told -------------------------------------------------------------------------------------------


def with_op(group: dist.ProcessGroup, how: str) -> None:
    """AVG, SUM and PREMUL_SUM, as FSDP hands them over."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mixed = MixedPrecisionPolicy(reduce_dtype=torch.float16) if how == "fp16" else MixedPrecisionPolicy()
    model, twin = sharded(mesh_of(group), mp_policy=mixed), mlp()
    seen = []
    handle = nc.attach(model, "as-is")
    for module in [m for m in model.modules() if isinstance(m, FSDPModule)]:
        if how in ("factor", "factor of sums"):
            module.set_gradient_divide_factor(8.0)
        if how in ("sums", "factor of sums"):
            module.set_force_sum_reduction_for_comms(True)
        for unit in param_groups(module):
            spy(unit.collectives[0], seen)
    loss(model, rank, 0).backward()
    mean = rank_order_mean(twin, world, 0)
    expected = [m * world / 8 for m in mean] if "factor" in how else mean
    for ours, theirs in zip(full(model), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=2e-3 if how == "fp16" else 1e-6, atol=1e-6)
    assert set(seen) == {{"mean": "AVG", "factor": "PREMUL_SUM"}.get(how, "SUM")}
    handle.detach()


def spy(comm: object, seen: list[str]) -> None:
    call = type(comm).__call__

    class Spy(type(comm)):
        def __call__(self, *args: object, **kwargs: object) -> object:
            op = kwargs["op"]
            kind = op.op if hasattr(op, "op") else op
            seen.append(str(kind).rpartition(".")[2])
            return call(self, *args, **kwargs)

    comm.__class__ = Spy


@pytest.mark.parametrize("how", ["mean", "sums", "factor", "factor of sums", "fp16"])
def test_the_op_is_honoured(pool: Pool, how: str) -> None:
    pool.run(3, with_op, how)


def mixed(group: dist.ProcessGroup, reduce: torch.dtype | None) -> tuple[str, list[float]]:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    options = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model, plain = sharded(mesh_of(group), mp_policy=options), sharded(mesh_of(group), mp_policy=options)
    handle = nc.attach(model, "int8/256", parameters="e4m3fn/128", min_values=1)
    seen = []
    for of in (model, plain):
        for step in range(2):
            loss(of, rank, step).backward()
        seen.append(torch.cat([g.flatten() for g in full(of)]))
    rows = {row.name: row for row in handle.rows()}
    assert all(g.dtype == torch.float32 for g in full(model))
    stats = handle.stats()
    numel = -(-40 // world) * world * 25
    size = (reduce or torch.bfloat16).itemsize
    assert stats["gradient_plain_bytes"] > 2 * numel * size * (world - 1) // world
    handle.detach()
    return rows["0.weight"].wire, [float((seen[0] - seen[1]).norm() / seen[1].norm())]


@pytest.mark.parametrize("reduce", [None, torch.bfloat16, torch.float32])
def test_mixed_precision_policies(pool: Pool, reduce: torch.dtype | None) -> None:
    for wire, (error,) in pool.run(2, mixed, reduce):
        assert wire == "e4m3fn/128"
        assert 0 < error < 0.2


def accumulated(group: dist.ProcessGroup) -> None:
    """Two micro-batches without communication, one with: they are added before they travel, once."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model, twin = sharded(mesh_of(group)), mlp()
    handle = nc.attach(model, "as-is", parameters="as-is")
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        loss(model, rank, step).backward()
        assert handle.step == (1 if step == 2 else 0)
    local = [local_gradients(twin, world, step, loss) for step in range(3)]
    sums = [[local[0][r][i] + local[1][r][i] + local[2][r][i] for i in range(6)] for r in range(world)]
    expected = [sums[0][i] + sums[1][i] for i in range(6)]
    assert same(full(model), [e / world for e in expected])
    assert handle.stats()["gradient_calls"] == 3
    handle.detach()


def test_gradients_accumulate_without_communication(pool: Pool) -> None:
    pool.run(2, accumulated)


class Partly(nn.Module):
    """Uses one of its tensors in even steps and another in odd ones; one is never used, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Parameter(torch.randn(24, 30)), nn.Parameter(torch.randn(24, 30))
        self.never = nn.Parameter(torch.randn(7, 3))
        self.frozen = nn.Parameter(torch.randn(30), requires_grad=False)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return x @ (self.left if left else self.right) + self.frozen


def partly_used(group: dist.ProcessGroup) -> None:
    """The two have one size, so the buffer does not tell which of them is in it."""
    rank = dist.get_rank(group)
    model = fully_shard(Partly(), mesh=mesh_of(group))
    seen = []
    handle = nc.attach(model, lambda info, step: seen.append(info.name) or "int8/256+ef")
    for step in range(4):
        seen.clear()
        model.zero_grad()
        model(batch(rank, step), step % 2 == 0).square().mean().backward()
        used, other = (model.left, model.right) if step % 2 == 0 else (model.right, model.left)
        assert seen == ["left" if step % 2 == 0 else "right"]
        assert used.grad is not None
        assert other.grad is model.never.grad is model.frozen.grad is None
    owed = {name: float(value.full_tensor().norm()) for name, value in handle.state_dict().items()}
    assert owed["left"] > 0 < owed["right"]
    assert owed["never"] == 0
    assert "frozen" not in owed
    handle.detach()


def test_a_unit_that_is_used_in_part_keeps_its_names(pool: Pool) -> None:
    pool.run(2, partly_used)


def from_meta(group: dist.ProcessGroup) -> None:
    """Attached before the parameters have values, with an optimizer from before that."""
    rank = dist.get_rank(group)
    with torch.device("meta"):
        module = mlp()
    model = sharded(mesh_of(group), module)
    handle = nc.attach(model, "int8/256", parameters="e4m3fn/128", min_values=1)
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        loss(model, rank, step).backward()
        optimizer.step()
    assert handle.step == 2
    handle.check_ranks()
    handle.detach()


def inferred(group: dist.ProcessGroup) -> None:
    """A forward pass in inference mode, and training afterwards."""
    rank, model = dist.get_rank(group), sharded(mesh_of(group))
    handle = nc.attach(model, "int8/256", parameters="e4m3fn/128", min_values=1)
    with torch.no_grad():
        expected = loss(model, rank, 0)
    with torch.inference_mode():
        assert torch.equal(loss(model, rank, 0), expected)
    loss(model, rank, 0).backward()
    handle.check_ranks()
    handle.detach()


def test_inference_mode(pool: Pool) -> None:
    pool.run(2, inferred)


def test_a_model_from_the_meta_device(pool: Pool) -> None:
    pool.run(2, from_meta)


def prefetched(group: dist.ProcessGroup) -> list[bytes]:
    """FSDP's prefetching gathers in the background; the values are the same."""
    rank, found = dist.get_rank(group), []
    for explicit in (False, True):
        model = sharded(mesh_of(group), reshard_after_forward=True)
        handle = nc.attach(model, "int8/256", parameters="e4m3fn/128", min_values=1)
        if explicit:
            layers = [m for m in model if isinstance(m, FSDPModule)]
            layers[0].set_modules_to_forward_prefetch(layers[1:])
            layers[2].set_modules_to_backward_prefetch([layers[1], layers[0]])
            layers[0].unshard(async_op=True)
        loss(model, rank, 0).backward()
        found.append(b"".join(g.numpy().tobytes() for g in full(model)))
        handle.detach()
    return found


def test_prefetching_changes_no_bit(pool: Pool) -> None:
    for first, second in pool.run(3, prefetched):
        assert first == second


def overlapped(group: dist.ProcessGroup) -> list[bool]:
    """Of every all-gather but the first: whether the layer before began to compute while it was under way."""
    model = sharded(mesh_of(group), reshard_after_forward=True)
    layers = [m for m in model if isinstance(m, FSDPModule)]
    handle = nc.attach(model, "as-is", parameters="int8/256", min_values=1)
    computing = [threading.Event() for _ in layers]
    for before, after, begun in zip(layers, layers[1:], computing, strict=False):
        before.set_modules_to_forward_prefetch([after])
        # after FSDP's own hook, which gathers this layer and begins with the next
        before.register_forward_pre_hook(lambda *_, begun=begun: begun.set())
    original, found = messages.all_gather, []

    def held_up(*args: object) -> None:
        # the first has nothing to overlap with
        found.append(not found or computing[len(found) - 1].wait(15))
        original(*args)

    messages.all_gather = held_up
    try:
        with torch.no_grad():
            model(batch(0, 0))
    finally:
        messages.all_gather = original
    handle.detach()
    return found


def test_the_next_layer_is_gathered_while_one_computes(pool: Pool) -> None:
    """The all-gather is held up until then: whoever waits for it in place would wait in vain."""
    assert pool.run(2, overlapped) == [[True, True, True]] * 2


class Checkpointed(nn.Module):
    """Layers that compute again in backward; reentrant=None: that do not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            again = self._reentrant
            x = layer(x).tanh() if again is None else checkpoint(layer, x, use_reentrant=again).tanh()
        return x


def checkpointed(group: dist.ProcessGroup, reentrant: bool | None) -> tuple[list[bytes], int, float]:
    rank, found = dist.get_rank(group), []
    model = Checkpointed(reentrant)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh_of(group))
    fully_shard(model, mesh=mesh_of(group))
    handle = nc.attach(model, "int8/64+sr", parameters="int8/64+sr", min_values=1)
    for step in range(STEPS):
        model.zero_grad()
        model(batch(rank, step).requires_grad_()).square().mean().backward()
        found.append(b"".join(g.numpy().tobytes() for g in full(model)))
    steps, counted = handle.step, handle.stats()["steps"]
    handle.detach()
    return found, steps, counted


def test_activation_checkpoints_change_no_bit_and_no_count(pool: Pool) -> None:
    """What is computed again sees the parameters of the first time, noise and all."""
    plain = pool.run(2, checkpointed, None)
    for reentrant in (False, True):
        assert pool.run(2, checkpointed, reentrant) == plain
    assert [(steps, counted) for _, steps, counted in plain] == [(STEPS, STEPS)] * 2


class Largest(policy.Watching):
    """8 bits until a gradient of any rank has been seen, then 4; remembers the sums."""

    def __init__(self, looks_at: str = "local") -> None:
        self.looks_at, self.sums = looks_at, dict[str, float]()

    def __call__(self, info: TensorInfo, step: int) -> str:
        return "int4/128" if info.name in self.sums else "int8/256"

    def look(self, info: TensorInfo, gradient: Tensor) -> tuple[float, ...]:
        assert tuple(gradient.shape) == info.shape
        return (float(gradient.abs().max()),)

    def decide(self, step: int, seen: Mapping[str, tuple[float, ...]], world: int) -> None:
        self.sums |= {name: numbers[0] for name, numbers in seen.items()}

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


def watched(group: dist.ProcessGroup) -> tuple[dict[str, float], list[str]]:
    """A policy that learns sees every rank's whole gradient, and all ranks decide alike."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    model, learning = sharded(mesh_of(group)), Largest()
    handle = nc.attach(model, learning, min_values=1)
    seen = []
    for step in range(2):
        model.zero_grad()
        seen.append({row.wire for row in handle.rows()})
        loss(model, rank, step).backward()
    assert seen == [{"int8/256"}, {"int8/256"}]
    assert {row.wire for row in handle.rows()} == {"int4/128"}
    handle.detach()
    local = local_gradients(mlp(), world, 0, loss)
    names = [name for name, _ in mlp().named_parameters()]
    for i, name in enumerate(names):
        assert learning.sums[name] == pytest.approx(sum(float(g[i].abs().max()) for g in local))
    refused = [
        error_of(lambda: nc.attach(model, Largest("mean"))),
        error_of(lambda: nc.attach(model, "int8/256", parameters=Largest())),
    ]
    return learning.sums, refused


def test_policies_that_learn_see_the_gradients_of_all_ranks(pool: Pool) -> None:
    found = pool.run(3, watched)
    assert found[0] == found[1] == found[2]
    mean, parameters = found[0][1]
    assert "ValueError: attach: Largest looks at the mean gradient" in mean
    assert "ValueError: attach: Largest learns from a rank's gradients; as the policy of parameter" in parameters


# ---- the handle ------------------------------------------------------------------------------------------------------


def counted(group: dist.ProcessGroup, specs: tuple[str, str]) -> dict[str, float]:
    model = sharded(mesh_of(group), nn.Linear(24, 40), nested=False, reshard_after_forward=True)
    handle = nc.attach(model, specs[0], parameters=specs[1], min_values=1)
    for step in range(2):
        loss(model, dist.get_rank(group), step).backward()
    stats, events = handle.stats(), handle.events()
    assert sum(event.sent_bytes for event in events) == stats["sent_bytes"]
    assert [event.start for event in events] == sorted(event.start for event in events)
    handle.detach()
    return stats


def test_stats_count_every_byte(pool: Pool) -> None:
    world, specs = 4, ("int4/128", "e4m3fn/128")
    row = 10 * 24 + 10
    for stats in pool.run(world, counted, specs):
        assert stats["steps"] == 2
        assert stats["gradient_calls"] == 2
        # forward and backward of two steps
        assert stats["parameter_calls"] == 4
        assert stats["gradient_sent_bytes"] == 2 * (world - 1) * nc.codec(specs[0]).nbytes(row)
        assert stats["parameter_sent_bytes"] == 4 * (world - 1) * nc.codec(specs[1]).nbytes(row)
        assert stats["gradient_plain_bytes"] == 2 * (world - 1) * row * 4
        assert stats["parameter_plain_bytes"] == 4 * (world - 1) * row * 4
        assert stats["ratio"] == stats["plain_bytes"] / stats["sent_bytes"]


def explained(group: dist.ProcessGroup) -> tuple[str, list[tuple[str, str, str, str]]]:
    model = sharded(mesh_of(group))
    by_step = nc.schedule({0: {"0.*": "int8/256", "2.*": "as-is"}, 1: "int4/128"})
    handle = nc.attach(model, by_step, parameters={"*.weight": "e4m3fn/128"}, min_values=100, sample_every=1)
    rows = [(row.name, row.role, row.wire, row.why) for row in handle.rows()]
    loss(model, dist.get_rank(group), 0).backward()
    assert set(handle.errors()) == {"0.weight"}
    assert {row.wire for row in handle.rows() if row.role == "gradient"} == {"int4/128", "as-is"}
    text = handle.explain()
    handle.detach()
    return text, rows


def test_explain_lists_every_tensor_in_every_role(pool: Pool) -> None:
    for text, rows in pool.run(2, explained):
        listed = {(name, role): (wire, why) for name, role, wire, why in rows}
        assert len(listed) == 12
        assert listed["0.weight", "gradient"] == ("int8/256", "")
        assert listed["0.bias", "gradient"] == ("as-is", "has 40 values, under 100")
        assert listed["2.weight", "gradient"] == ("as-is", "asked for")
        assert listed["4.weight", "gradient"] == ("as-is", "no pattern matches its name")
        assert listed["4.weight", "parameter"] == ("e4m3fn/128", "")
        assert listed["4.bias", "parameter"] == ("as-is", "no pattern matches its name")
        assert all(name in text and role in text for name, role in listed)


def detached(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    model, twin = sharded(mesh_of(group)), sharded(mesh_of(group))
    for round_ in range(2):
        handle = nc.attach(model, "int4/128", parameters="int4/128", min_values=1)
        model.zero_grad()
        loss(model, rank, round_).backward()
        ours = full(model)
        handle.detach()
        handle.detach()
        for of in (model, twin):
            of.zero_grad()
            loss(of, rank, round_).backward()
        assert same(full(model), full(twin)), "detached is not plain FSDP"
        assert not same(ours, full(twin))


def test_detached_is_plain_fsdp_and_attach_works_again(pool: Pool) -> None:
    pool.run(2, detached)


def two_optimizers(group: dist.ProcessGroup) -> list[bytes]:
    """An optimizer from before attach is as good as one from after: attach replaces no parameter."""
    rank, found = dist.get_rank(group), []
    for before in (True, False):
        model = sharded(mesh_of(group))
        optimizer = torch.optim.Adam(model.parameters()) if before else None
        handle = nc.attach(model, "int8/256", parameters="e4m3fn/128", min_values=1)
        optimizer = optimizer or torch.optim.Adam(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        found.append(b"".join(p.numpy().tobytes() for p in full(model, "parameters")))
        handle.detach()
    return found


def test_an_optimizer_made_before_attach_gives_the_same_bits(pool: Pool) -> None:
    for first, second in pool.run(2, two_optimizers):
        assert first == second
