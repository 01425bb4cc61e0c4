"""The closed form is the queue; the step lies between its bounds; DDP's bucket rule is DDP's own."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import codec as codec_named
from narrowcast.parallel import overlap
from narrowcast.parallel.overlap import Contention
from narrowcast.predict.model import TensorTime, attach_calls, ddp_buckets, merged_calls


def exact(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(20))
def test_the_closed_form_is_the_queue(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 40)
    # sixteenths: sums are exact, so the two must be equal to the last bit
    arrive = sorted(draw.randint(0, 400) / 16 for _ in range(count))
    service = [draw.randint(0, 60) / 16 for _ in range(count)]
    assert overlap.queue(exact(arrive), exact(service))[0].tolist() == overlap.queue_by_steps(arrive, service)


def test_a_step_by_hand() -> None:
    """Backward from 1 to 4; buckets ready at 2, 3 and 4 take 2 each: done at 4, 6 and 8; then an update of 1."""
    span = overlap.step(torch.tensor([5.0]).double(), torch.tensor([4.0]).double(), exact([2, 3, 4]), exact([2, 2, 2]))
    assert (float(span.step), float(span.exposed), float(span.communication)) == (9.0, 4.0, 6.0)


def test_contention_by_hand() -> None:
    """While calls run the rest of backward takes twice as long (2 to 6), and calls too until it ends."""
    span = overlap.step(
        torch.tensor([4.0]).double(), torch.tensor([4.0]).double(), exact([2.0]), exact([3.0]), Contention(2.0, 2.0)
    )
    # by 6 the call has done 2 of its 3 seconds of work
    assert (float(span.backward_end), float(span.step)) == (6.0, 7.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_step_lies_between_its_bounds(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    ready = torch.rand(1, 12, generator=draw, dtype=torch.float64).sort(dim=1).values
    service = torch.rand(1, 12, generator=draw, dtype=torch.float64) / 4
    compute, end = torch.tensor([1.5]).double(), torch.tensor([1.0]).double()
    step = float(overlap.step(compute, end, ready, service).step)
    assert max(1.5, float(service.sum()) + 0.5) <= step + 1e-12
    assert step <= 1.5 + float(service.sum()) + 1e-12


def test_levels_with_queues_of_their_own_by_hand() -> None:
    """Two calls at 0, each 1 inside, 3 outside, 1 inside: the second is outside from 4 to 7 and done at 8."""
    made = overlap.queue_by_levels(exact([0, 0]), exact([5, 5]), exact([2, 2]))
    assert made[0].tolist() == [5.0, 8.0]
    # one after the other they would take 10
    assert overlap.queue(exact([0, 0]), exact([5, 5]))[0].tolist() == [5.0, 10.0]


def test_a_level_cannot_be_done_before_it_has_moved_everything() -> None:
    assert overlap.queue_by_levels(exact([0, 0]), exact([4.5, 4.5]), exact([4, 4]))[0, -1] == 8.0


def test_no_calls_is_compute() -> None:
    span = overlap.step(torch.tensor([2.0]), torch.tensor([1.0]), torch.zeros(1, 0), torch.zeros(1, 0))
    assert (float(span.step), float(span.exposed)) == (2.0, 0.0)


# ---- decisions -------------------------------------------------------------------------------------------------------


def versions(first: float, spread: float) -> torch.Tensor:
    return torch.tensor([first, *(first * (1 + spread * k / 10) for k in range(-10, 11))], dtype=torch.float64)


@pytest.mark.parametrize(
    "plain, other, wire, sure",
    [
        (versions(2.0, 0.01), versions(1.0, 0.01), "int8/256", True),
        (versions(1.0, 0.01), versions(1.5, 0.01), "fp32", True),
        (versions(1.01, 0.0), versions(1.0, 0.0), "fp32", True),
        (versions(1.2, 0.0), versions(1.0, 0.5), "fp32", False),
    ],
)
def test_decisions(plain: torch.Tensor, other: torch.Tensor, wire: str, sure: bool) -> None:
    made = overlap.decide({"fp32": plain, "int8/256": other}, "fp32")
    assert (made.wire, made.sure) == (wire, sure)


def test_with_nothing_to_choose_from_it_stays_as_it_is() -> None:
    assert overlap.decide({"fp32": versions(1.0, 0.0)}, "fp32").wire == "fp32"


# ---- buckets ---------------------------------------------------------------------------------------------------------


def real_buckets(module: nn.Module, cap_mb: float) -> list[int]:
    """The sizes that DDP itself hands to a hook, once it has made its buckets anew."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model, seen = DistributedDataParallel(module, bucket_cap_mb=cap_mb), []

        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append(bucket.buffer().numel())
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        hook.__annotations__.clear()  # DDP does not know these strings
        model.register_comm_hook(None, hook)
        for _ in range(3):
            seen.clear()
            model(torch.randn(2, 64)).sum().backward()
        return list(seen)
    finally:
        dist.destroy_process_group()


def test_buckets_are_those_of_ddp() -> None:
    widths = [64, 700, 900, 300, 1100, 500, 64]
    module = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    # gradients get ready from the last layer to the first, a bias before its weight
    order = [p.numel() for layer in reversed(list(module)) for p in (layer.bias, layer.weight)]
    tensors = tuple(TensorTime(str(i), n, float(i)) for i, n in enumerate(order))
    made = ddp_buckets(tensors, bucket_bytes=2 << 20)
    assert sorted(b.values for b in made) == sorted(real_buckets(module, 2.0))


def test_small_tensors_of_a_bucket_travel_apart() -> None:
    tensors = (TensorTime("bias", 100, 1.0), TensorTime("weight", 1_000_000, 2.0), TensorTime("rest", 50_000, 3.0))
    cut = ddp_buckets(tensors)
    assert [(b.values, b.small, b.ready) for b in cut] == [(1_000_100, 100, 2.0), (50_000, 0, 3.0)]
    made = attach_calls(cut, "int8/256")
    assert [(c.values, c.wire) for c in made] == [(1_000_000, "int8/256"), (100, "fp32"), (50_000, "int8/256")]
    assert [(c.values, c.wire) for c in attach_calls(cut, "fp32")] == [(1_000_100, "fp32"), (50_000, "fp32")]


def test_on_a_device_they_travel_with_the_others_and_small_buckets_together() -> None:
    sizes = (("bias", 100), ("weight", 1_000_000), ("rest", 50_000), ("large", 7_000_000), ("norm", 40))
    tensors = tuple(TensorTime(name, n, float(at)) for at, (name, n) in enumerate(sizes))
    cut = ddp_buckets(tensors)
    assert [(b.values, b.small) for b in cut] == [(1_000_100, 100), (7_050_000, 0), (40, 40)]
    first, last = merged_calls(cut, "int8/256")
    # 1 MB on the wire waits for 7 MB; what is left is small tensors alone
    codec = codec_named("int8/256")
    # 100 float32 have the bytes of 394 values of this wire
    beside = round(100 * (32 / codec.bits_per_value - 1))
    assert (first.values, first.beside, first.ready, first.wire) == (8_050_100, beside, 3.0, "int8/256")
    assert (last.values, last.beside, last.wire) == (40, 0, "fp32")
    (planned,) = first.sums
    assert codec.nbytes(planned.values) == pytest.approx(codec.nbytes(8_050_000) + 400, abs=8)
