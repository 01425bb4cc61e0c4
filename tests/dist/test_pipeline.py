"""Envelopes between the stages of a pipeline: torch's schedules as they are, four ranks, bits and bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import error_of
from dist.pool import Crew, Pool
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import narrowcast as nc
from narrowcast.parallel import seeds, wires
from narrowcast.parallel.pipeline import Boundary, attach_stage, boundaries_of

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
STAGES, MICROBATCHES, STEPS = 4, 6, 2
SHAPE = (3, 7, 32)
"""Of a microbatch: 672 values, no multiple of 256."""
VALUES = 3 * 7 * 32


def stages(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)) for _ in range(STAGES)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    size = (MICROBATCHES * SHAPE[0], *SHAPE[1:])
    return torch.randn(size, generator=made), torch.randn(size, generator=made)


def attached(module: nn.Module, rank: int, specs: tuple[str, str], known: bool) -> Any:
    if known:
        before, after = (Boundary(SHAPE, *specs, number=n, seed=5) for n in (rank - 1, rank))
    else:
        found = boundaries_of(stages(), torch.empty(SHAPE), *specs, seed=5)
        before, after = ([None, *found][rank], [*found, None][rank])
    ends = {"before": before if rank > 0 else None, "after": after if rank < STAGES - 1 else None}
    return attach_stage(module, **ends)


def counting(stage: PipelineStage, sent: dict[str, list[int]]) -> None:
    """Note the size of every message that the schedule is given to send."""
    for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
        sent[name] = []
        setattr(stage, name, noted(getattr(stage, name), sent[name]))


def noted(original: Callable[[int], Any], sizes: list[int]) -> Callable[[int], Any]:
    def ops_of(index: int) -> Any:
        ops = original(index)
        sizes.extend(op.tensor.numel() * op.tensor.element_size() for op in ops)
        return ops

    return ops_of


def trained(group: dist.ProcessGroup, schedule: str, specs: tuple[str, str] | None, known: bool = False) -> Any:
    """Losses, gradients, weights and sent bytes of this rank's stage after some steps."""
    rank = dist.get_rank(group)
    module = stages()[rank]
    handle = attached(module, rank, specs, known) if specs else None
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"), group=group)
    sent: dict[str, list[int]] = {}
    counting(stage, sent)
    runner = SCHEDULES[schedule](stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses: list[Tensor] = []
    for step in range(STEPS):
        (x, y), latest = batch(step), []
        optimizer.zero_grad()
        if rank == 0:
            runner.step(x)
        elif rank == STAGES - 1:
            runner.step(target=y, losses=latest)
        else:
            runner.step()
        optimizer.step()
        losses += [loss.detach() for loss in latest]
    gradients = [p.grad.clone() for p in module.parameters()]
    weights = [p.detach().clone() for p in module.parameters()]
    return losses, gradients, weights, sent, handle.stats() if handle else None


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_fp32_losses_gradients_and_weights_are_those_of_the_plain_pipeline_bit_for_bit(
    pool: Pool, schedule: str
) -> None:
    plain = pool.run(STAGES, trained, schedule, None)
    ours = pool.run(STAGES, trained, schedule, ("fp32", "fp32"))
    for theirs, mine in zip(plain, ours, strict=True):
        assert all(same(theirs[place], mine[place]) for place in range(3))
        for name, sizes in theirs[3].items():
            assert mine[3][name] == [size + 4 for size in sizes], (
                "an envelope of float32 is a word larger than the tensor"
            )
    assert len(ours[-1][0]) == STEPS * MICROBATCHES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_8_bits_the_boundary_carries_a_quarter_and_the_bits_are_those_of_the_codec(
    pool: Pool, schedule: str
) -> None:
    specs = ("int8/64", "e4m3fn/64")
    ranks = pool.run(STAGES, trained, schedule, specs, True)
    # 672 codes, 11 scales of 4 bytes and the mark: 720 bytes, where float32 takes 2688
    envelope = VALUES + 4 * 11 + 4
    for rank, (_, _, _, sent, counted) in enumerate(ranks):
        messages = STEPS * MICROBATCHES
        assert sent["get_fwd_send_ops"] == ([envelope] * messages if rank < STAGES - 1 else [])
        assert sent["get_bwd_send_ops"] == ([envelope] * messages if rank > 0 else [])
        # torch's inference of shapes sends nothing, but runs each stage once: backward, too, in versions after 2.11
        assert counted["forward_sent_bytes"] == ((messages + 1) * envelope if rank < STAGES - 1 else 0)
        runs = (messages, messages + 1) if rank > 0 else (0,)
        assert counted["backward_plain_bytes"] in [run * 4 * VALUES for run in runs]
    losses, gradients, weights = emulated(*specs)
    assert same(ranks[-1][0], losses)
    for rank in range(STAGES):
        assert same(ranks[rank][1], gradients[rank])
        assert same(ranks[rank][2], weights[rank])


class Passage(torch.autograd.Function):
    """What a boundary does, in one process and with nothing but the codec."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: str, back: str) -> Tensor:
        ctx.back = back
        return through(x, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return through(gradients[0], ctx.back), None, None


def through(x: Tensor, spec: str) -> Tensor:
    return nc.codec(spec).decode(nc.codec(spec).encode(x), x.numel()).view(x.shape)


def emulated(there: str, back: str) -> Any:
    parts = stages()
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.05)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            value = xs
            for number, part in enumerate(parts):
                value = part(value if number == 0 else Passage.apply(value, there, back))
            losses.append(nn.functional.mse_loss(value, ys))
            losses[-1].backward()
        for part in parts:
            for p in part.parameters():
                p.grad.div_(MICROBATCHES)
        optimizer.step()
    gradients = [[p.grad for p in part.parameters()] for part in parts]
    weights = [[p.detach() for p in part.parameters()] for part in parts]
    return [loss.detach() for loss in losses], gradients, weights


# ---- one process -----------------------------------------------------------------------------------------------------


def test_every_byte_pattern_survives_the_way_through_autograd() -> None:
    """Envelopes hold NaN patterns of all kinds; what autograd and copies do to them must be nothing."""
    boundary = Boundary((4096,), "fp32", number=0)
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    bits[:6] = torch.tensor([0x7F800001, 0x7FC00000, -0x7FFFFF, -1, 0x7F800000, 1])
    patterns = bits.view(torch.float32).clone()
    # a cast writes one NaN
    bits = torch.where(patterns.isnan(), 0x7FC00000, bits)
    x = torch.zeros(4096, requires_grad=True)
    boundary.seal(x).backward(torch.cat([patterns, torch.zeros(1)]))
    assert torch.equal(x.grad.view(torch.int32), bits)
    leaf = torch.zeros(4097, requires_grad=True)
    boundary.open(leaf).backward(patterns.clone())
    assert torch.equal(leaf.grad[:-1].view(torch.int32), bits)
    assert torch.equal(boundary.open(boundary.seal(patterns)).view(torch.int32), bits)


@pytest.mark.parametrize(
    "spec", ["int8/64", "int4/32", "e5m2", "mxfp6", "uint8/64", "dtree8", "nf4/64", "posit8.1", "sign/64"]
)
def test_garbage_in_an_envelope_is_no_error(spec: str) -> None:
    """torch infers shapes by running stages on memory that nobody has written."""
    boundary = Boundary((5, 33), spec, number=0)
    made = torch.Generator().manual_seed(1)
    garbage = torch.randint(0, 256, (boundary.nbytes,), dtype=torch.uint8, generator=made).view(torch.float32)
    opened = boundary.open(garbage.requires_grad_())
    opened.backward(torch.ones_like(opened))
    assert opened.shape == (5, 33)
    assert garbage.grad.shape == garbage.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_larger_of_the_two_wires_decides_the_envelope(dtype: torch.dtype) -> None:
    boundary = Boundary((3, 100), "int4/32", "as-is", number=0, dtype=dtype)
    assert boundary.nbytes == 300 * dtype.itemsize + 4
    # 150 codes, 10 scales, 2 bytes to fill a word, and the mark
    assert Boundary((3, 100), "int4/32", number=0, dtype=dtype).nbytes == 196
    x = torch.randn(3, 100).to(dtype).requires_grad_()
    y = boundary.open(boundary.seal(x))
    assert y.dtype == dtype
    y.backward(torch.full_like(y, 0.1))
    assert torch.equal(x.grad, torch.full_like(x, 0.1))


def test_shapes_are_found_without_values_and_on_the_meta_device() -> None:
    found = boundaries_of(stages(), torch.empty(SHAPE), "int8/256")
    assert [(b.shape, b.name) for b in found] == [(torch.Size(SHAPE), f"boundary {n}") for n in range(3)]
    with torch.device("meta"):
        assert [b.shape for b in boundaries_of(stages(), torch.empty(SHAPE))] == [torch.Size(SHAPE)] * 3
    boundary = found[0]
    envelope = boundary.seal(torch.empty(SHAPE, device="meta"))
    assert (envelope.device.type, envelope.shape) == ("meta", (boundary.words,))
    assert boundary.open(envelope).shape == SHAPE


def test_no_two_messages_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "_COUNTS", weakref.WeakKeyDictionary())
    x = torch.linspace(-1, 1, 64)
    boundaries = [Boundary((64,), "int4/64+sr", number=n, seed=s) for n in (0, 1) for s in (0, 1)]
    wires_ = []
    for boundary in boundaries:
        for _ in range(3):
            leaf = boundary.seal(x).requires_grad_()
            boundary.open(leaf).backward(x)
            wires_ += [leaf.detach(), leaf.grad]
    # less the last word, which is the boundary's and not the message's
    assert len({wire[:-1].view(torch.int32).numpy().tobytes() for wire in wires_}) == len(wires_) == 24
    other = Boundary((64,), "int4/64+sr", number=0, seed=0)
    assert not torch.equal(other.seal(x)[:-1], wires_[0][:-1]), "nor do two pipelines of one run"
    seeds._COUNTS.clear()
    again = Boundary((64,), "int4/64+sr", number=0, seed=0)
    assert torch.equal(again.seal(x).view(torch.int32), wires_[0].view(torch.int32)), (
        "and a second run repeats the first"
    )


def sealed_alike(group: dist.ProcessGroup) -> list[bytes]:
    """What replicas of one stage send of equal values, forward and backward."""
    boundary, x = Boundary((64,), "int4/64+sr", number=0), torch.linspace(-1, 1, 64)
    leaf = boundary.seal(x).clone().requires_grad_()
    boundary.open(leaf).backward(x)
    return [wire.view(torch.int32).numpy().tobytes() for wire in (boundary.seal(x), leaf.grad)]


def test_replicas_share_no_noise(pool: Pool) -> None:
    found = [wire for rank in pool.run(2, sealed_alike) for wire in rank]
    assert len(set(found)) == 4


DIFFERENT = {
    "forward": Boundary((64,), "e4m3fn/64", "int8/64", number=0),
    "backward": Boundary((64,), "int8/64", "e4m3fn/64", number=0),
    "shape": Boundary((8, 8), "int8/64", number=0),
    "seed": Boundary((64,), "int8/64", number=0, seed=1),
    "number": Boundary((64,), "int8/64", number=1),
}


@pytest.mark.parametrize("other", DIFFERENT.values(), ids=DIFFERENT)
def test_neighbours_that_differ_find_out_though_their_envelopes_are_of_one_size(other: Boundary) -> None:
    boundary, x = Boundary((64,), "int8/64", number=0), torch.randn(other.shape)
    # as torch infers shapes
    boundary.open(torch.full((boundary.words,), torch.nan))
    assert "was not sealed by an equal boundary" in error_of(lambda: boundary.open(other.seal(x)))
    sent = torch.zeros(64, requires_grad=True)
    boundary.seal(sent).backward(torch.ones(boundary.words))
    error = error_of(lambda: boundary.seal(sent).backward(other.seal(x)))
    assert error.startswith("RuntimeError: boundary 0: what came backward was not sealed by an equal boundary")


def test_once_an_envelope_was_right_none_is_looked_at_again() -> None:
    boundary = Boundary((64,), "int8/64", number=0)
    boundary.open(torch.zeros(boundary.words))
    boundary.open(boundary.seal(torch.ones(64)))
    for _ in range(2):  # another schedule infers the shapes anew
        boundary.open(torch.zeros(boundary.words))


def disagreeing(group: dist.ProcessGroup) -> None:
    """Two stages with other specs of one size."""
    rank = dist.get_rank(group)
    boundary = Boundary((4, 32), "int8/32" if rank == 0 else "e4m3fn/32", number=0)
    module = nn.Linear(32, 32)
    attach_stage(module, **({"after": boundary} if rank == 0 else {"before": boundary}))
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=group)
    runner = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        runner.step(torch.randn(8, 32))
    else:
        runner.step(target=torch.zeros(8, 32))


def test_stages_that_disagree_do_not_train_on_garbage() -> None:
    with Crew(2, disagreeing, timeout=20) as crew:
        outcome = crew.outcome(1)
    assert outcome is not None
    # torch raises its own error from ours
    assert "RuntimeError: boundary 0: what came forward was not sealed by an equal boundary" in outcome.traceback


def test_hooks_leave_names_alone_and_can_be_taken_off() -> None:
    module = stages()[0]
    names = list(module.state_dict())
    handle = attach_stage(module, after=Boundary(SHAPE, "int8/256", number=0))
    assert list(module.state_dict()) == names
    assert module(torch.randn(SHAPE)).dim() == 1
    assert "boundary 0  forward    int8/256" in handle.explain()
    handle.detach()
    assert module(torch.randn(SHAPE)).shape == SHAPE
    assert wires.routes(module) == {}
    attach_stage(module, after=[Boundary(SHAPE, number=0)]).detach()


def test_wrong_uses_say_what_is_wrong() -> None:
    boundary = Boundary(SHAPE, "int8/256", number=2)
    assert "boundary 2: the stage gives (3, 5) of torch.float32" in error_of(lambda: boundary.seal(torch.zeros(3, 5)))
    assert "an envelope is (172,)" in error_of(lambda: boundary.open(torch.zeros(171)))
    assert "attach_stage: after='int8/256'; give a Boundary" in error_of(
        lambda: attach_stage(nn.Identity(), after="int8/256")
    )
    assert "attach_stage: before=['int8/256']" in error_of(lambda: attach_stage(nn.Identity(), before=["int8/256"]))
    assert "leave out +ef" in error_of(lambda: Boundary(SHAPE, "int8/256+ef", number=0))
    assert "codecs take float32" in error_of(lambda: Boundary(SHAPE, number=0, dtype=torch.float64))
    module = nn.Identity()
    handle = attach_stage(module, before=boundary)
    assert "attached already" in error_of(lambda: attach_stage(module, after=boundary))
    assert "2 inputs for 1 boundaries" in error_of(lambda: module(torch.zeros(172), torch.zeros(1)))
    handle.detach()
