"""all_reduce against an emulation, bit for bit: every algorithm, world size, shape, dtype, op and family of codecs."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from dist import emulation
from dist.algorithms import flat_names, nodes_of
from dist.pool import WORLDS, Pool
from torch import Tensor

import narrowcast as nc
from narrowcast.collectives.algorithms.record import ALGORITHMS, Order

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = ("sum", "avg", "premul")
FACTOR = 0.37

# at least one of every family, with and without a scale for the tensor, stochastic or not
CODECS = (
    *("as-is", "fp32", "bf16", "fp16", "int8/32", "int4/16+sr", "int2/64", "int8", "int8/128+sbf16", "int8/32+se8m0"),
    *("e5m2", "e4m3fn/32", "e4m3@1", "e5m2@1024", "e5m2+aps", "e4m3+aps", "e3m0+aps", "mxfp8", "mxfp4+sr", "nvfp4"),
    *("uint8/16", "onebit/16", "sign/32", "ternary/32", "qsgd4/32+l2", "nf4/64", "posit8.1", "dynamic8/64"),
    *("dtree8", "stree8@1000", "fixed2.6/64+sr", "udynamic8/64"),
)

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "0-d": [()],
    "empty": [(0,)],
    "shorter than the world": [(3,)],
    "odd": [(331,)],
    "2-d": [(13, 21)],
    "segments": [(33,), (0,), (1,), (17, 5), (64,)],
    "not contiguous": [(18, 11)],
    "segments, not contiguous": [(10, 7), (40,)],
    "no segments": [],
}


@dataclass(frozen=True)
class Case:
    """One call, as every rank makes it."""

    spec: str
    shape: str
    dtype: torch.dtype
    op: str
    algorithm: str
    step: int = 3
    nodes: tuple[tuple[int, ...], ...] | None = None
    inner: str = "as-is"
    accumulator: str = "float32"
    exact: bool = False
    """Whether the inputs are small integers, whose sums are exact in any order."""

    def tensors(self, rank: int) -> list[Tensor]:
        made = torch.Generator().manual_seed(zlib.crc32(f"{self.shape} {self.spec} {self.op}".encode()) * 16 + rank)
        return [self._tensor(shape, made).to(self.dtype) for shape in SHAPES[self.shape]]

    def _tensor(self, shape: tuple[int, ...], made: torch.Generator) -> Tensor:
        stored = shape[::-1] if "not contiguous" in self.shape else shape
        if self.exact:
            x = torch.randint(-7, 8, stored, generator=made).float()
        else:
            magnitude = 2.0 ** torch.randint(-6, 6, stored, generator=made)
            x = torch.randn(stored, generator=made) * magnitude
        return x.t() if "not contiguous" in self.shape and x.dim() == 2 else x

    def reduction(self, world: int) -> tuple[object, float, float]:
        """The op, and what it divides and multiplies by."""
        if self.op == "avg":
            return dist.ReduceOp.AVG, float(world), 1.0
        if self.op == "premul":
            return dist._make_nccl_premul_sum(FACTOR), 1.0, FACTOR
        return dist.ReduceOp.SUM, 1.0, 1.0

    def expected(self, world: int) -> tuple[Tensor, list[int]]:
        """What every rank holds afterwards, flat, and the bytes that each sends."""
        ranks = [self.tensors(rank) for rank in range(world)]
        lengths = [t.numel() for t in ranks[0]]
        xs = [torch.cat([t.reshape(-1) for t in ts]) if ts else torch.empty(0, dtype=self.dtype) for ts in ranks]
        _, divide, multiply = self.reduction(world)
        setting = emulation.Setting(
            nc.codec(self.spec),
            lengths,
            self.dtype,
            step=self.step,
            seed=5,
            divide=divide,
            multiply=multiply,
            nodes=self.nodes,
            inner=self.inner,
            low=self.accumulator == "low",
        )
        return emulation.all_reduce(self.algorithm, setting, xs), setting.sent


def reduce_all(group: dist.ProcessGroup, cases: list[Case]) -> list[tuple[bytes, int]]:
    """Run each case; the bits of the result, and the bytes sent."""
    found = []
    for case in cases:
        tensors = case.tensors(dist.get_rank(group))
        one = tensors[0] if len(tensors) == 1 else tensors
        work = nc.all_reduce(
            one,
            case.spec,
            case.reduction(dist.get_world_size(group))[0],
            group,
            async_op=True,
            algorithm=case.algorithm,
            step=case.step,
            seed=5,
            nodes=case.nodes,
            inner=case.inner,
            accumulator=case.accumulator,
        )
        assert work.wait()
        found.append((bits(tensors), work.sent_bytes))
    return found


def bits(tensors: list[Tensor]) -> bytes:
    return b"".join(t.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def check(pool: Pool, world: int, cases: list[Case]) -> None:
    ranks = pool.run(world, reduce_all, cases)
    for number, case in enumerate(cases):
        value, sent = case.expected(world)
        for rank in range(world):
            got, got_sent = ranks[rank][number]
            assert got == ranks[0][number][0], f"{case}: rank {rank} holds other bits than rank 0"
            assert got == bits([value]), f"{case}: rank {rank} got {got[:32].hex()}, not {bits([value])[:32].hex()}"
            assert got_sent == sent[rank], f"{case}: rank {rank} sent {got_sent} bytes, not {sent[rank]}"


def rotated(algorithm: str, codecs: tuple[str, ...], every: int, **more: object) -> list[Case]:
    """Codecs by shapes, with dtypes and ops in turn; `every`: which fraction of the product."""
    cases = []
    for i, spec in enumerate(codecs):
        for j, shape in enumerate(SHAPES):
            if (i + j) % every == 0:
                dtype, op = DTYPES[(i // 3 + j) % 3], OPS[(i + j // 3) % 3]
                cases.append(Case(spec, shape, dtype, op, algorithm, **more))
    return cases


def share_of(algorithm: str, world: int) -> int:
    """Of many ranks every codec once, since a call of eight costs ten times as much as one of two."""
    return 9 if world > 4 else 3 if world in (3, 4) and algorithm == "two_shot" else 5


@pytest.mark.parametrize(
    "algorithm, world, every",
    [
        *((name, world, share_of(name, world)) for world in WORLDS for name in flat_names(world)),
        *(pytest.param(name, world, 2, marks=pytest.mark.slow) for world in WORLDS for name in flat_names(world)),
    ],
)
def test_every_rank_holds_exactly_the_bits_of_the_emulation(pool: Pool, algorithm: str, world: int, every: int) -> None:
    check(pool, world, rotated(algorithm, CODECS, every))


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((3, 1), (0, 2)), ((0,), (1,), (2,), (3,)), ((0, 1, 2, 3),)])
@pytest.mark.parametrize("inner", ["as-is", "int8/48", "int4/16+sr"])
@pytest.mark.parametrize("every", [9, pytest.param(4, marks=pytest.mark.slow)])
def test_hierarchical_holds_exactly_the_bits_of_the_emulation(
    pool: Pool, nodes: tuple[tuple[int, ...], ...], inner: str, every: int
) -> None:
    check(pool, 4, rotated("hierarchical", CODECS, every, nodes=nodes, inner=inner))


@pytest.mark.parametrize("world, size", [(1, 1), (2, 2), (8, 4), (8, 2)])
def test_hierarchical_works_in_other_worlds(pool: Pool, world: int, size: int) -> None:
    check(pool, world, rotated("hierarchical", CODECS, every=9, nodes=nodes_of(world, size), inner="bf16"))


@pytest.mark.parametrize("world", WORLDS)
def test_a_ring_with_a_low_precision_accumulator_holds_the_bits_of_the_emulation(pool: Pool, world: int) -> None:
    check(pool, world, rotated("ring", CODECS, every=9, accumulator="low"))


@pytest.mark.parametrize("world", WORLDS)
def test_shared_scale_holds_the_bits_of_the_emulation(pool: Pool, world: int) -> None:
    check(pool, world, rotated("shared_scale", ("int8/32", "int8/64", "int8/16"), every=1))


@pytest.mark.parametrize("world", WORLDS)
def test_native_is_exact_where_every_order_of_the_sum_is(pool: Pool, world: int) -> None:
    check(pool, world, rotated("native", ("as-is", "fp32", "bf16"), every=1, exact=True))


@pytest.mark.parametrize("algorithm", [name for name in flat_names(4) if ALGORITHMS[name].order is Order.RANKS])
@pytest.mark.parametrize("world", WORLDS)
def test_a_lossless_codec_gives_exactly_the_rank_order_sum(pool: Pool, algorithm: str, world: int) -> None:
    cases = [Case(spec, shape, torch.float32, "sum", algorithm) for spec in ("as-is", "fp32") for shape in SHAPES]
    ranks = pool.run(world, reduce_all, cases)
    for number, case in enumerate(cases):
        parts = [case.tensors(rank) for rank in range(world)]
        total = [emulation.summed([ts[i] for ts in parts]) for i in range(len(parts[0]))]
        assert {ranks[rank][number][0] for rank in range(world)} == {bits(total)}


def chunked(group: dist.ProcessGroup, spec: str, n: int, step: int) -> tuple[bytes, int]:
    made = torch.Generator().manual_seed(dist.get_rank(group))
    x = [torch.randn(n, generator=made), torch.randn(n // 3, generator=made)]
    work = nc.all_reduce(x, spec, group=group, step=step, algorithm="two_shot", async_op=True)
    work.wait()
    return bits(x), work.sent_bytes


@pytest.mark.parametrize("spec", ["int8/256", "e5m2+aps", "int8", "int4/128+sr", "nvfp4"])
def test_a_tensor_in_many_chunks_holds_the_bits_of_the_emulation(pool: Pool, spec: str) -> None:
    n = 3_000_017
    found = pool.run(2, chunked, spec, n, 9)
    xs = []
    for rank in range(2):
        made = torch.Generator().manual_seed(rank)
        xs.append(torch.cat([torch.randn(n, generator=made), torch.randn(n // 3, generator=made)]))
    setting = emulation.Setting(nc.codec(spec), [n, n // 3], step=9)
    value = emulation.all_reduce("two_shot", setting, xs)
    assert [sent for _, sent in found] == setting.sent
    assert found[0][0] == found[1][0] == bits([value])


def repeated(group: dist.ProcessGroup, cases: list[Case]) -> bool:
    return reduce_all(group, cases) == reduce_all(group, cases)


def test_a_call_repeated_gives_the_same_bits(pool: Pool) -> None:
    cases = [Case(spec, "segments", torch.float32, "avg", name) for spec in CODECS for name in flat_names(3)]
    assert pool.run(3, repeated, cases) == [True] * 3


def noisy(group: dist.ProcessGroup) -> list[bytes]:
    """The same values with other steps and seeds."""
    found = []
    for step, seed in [(0, 0), (1, 0), (0, 1), (0, 0)]:
        x = torch.linspace(-1, 1, 999)
        nc.all_reduce(x, "int4/64+sr", group=group, step=step, seed=seed)
        found.append(bits([x]))
    return found


def test_the_noise_depends_on_step_and_seed_and_on_nothing_else(pool: Pool) -> None:
    for zero, step, seed, again in pool.run(2, noisy):
        assert zero == again
        assert len({zero, step, seed}) == 3


def noise_of_ranks(group: dist.ProcessGroup) -> Tensor:
    x = torch.full((256,), 0.3)
    x[::64] = 1.0
    nc.all_reduce(x, "int4/64+sr", group=group, step=0, algorithm="one_shot")
    return x


def test_ranks_with_the_same_values_do_not_share_their_noise(pool: Pool) -> None:
    total = pool.run(4, noise_of_ranks)[0]
    # with the same noise on every rank each sum would be 4 times one of two neighbouring codes
    assert len(set(total.tolist())) > 3


def refused(group: dist.ProcessGroup, arguments: dict[str, object], dtype: torch.dtype) -> int:
    """A call that must be refused, and one after it that must work."""
    x = torch.ones(40, dtype=dtype)
    spec = arguments.pop("spec", "int8/16")
    try:
        nc.all_reduce(x, spec, group=group, **arguments)
    finally:
        y = torch.ones(40)
        nc.all_reduce(y, "as-is", group=group)
        assert torch.equal(y, torch.full((40,), float(dist.get_world_size(group))))
    return 0


REFUSED = [
    (3, {"algorithm": "tree"}, "ValueError: all_reduce: algorithm 'tree' needs a power-of-two world, got 3 ranks"),
    (7, {"algorithm": "tree"}, "got 7 ranks"),
    (4, {"algorithm": "hierarchical"}, "needs nodes="),
    (4, {"nodes": [[0, 1], [2]]}, "must name each of the ranks 0 to 3 once"),
    (4, {"nodes": [[0, 1], [1, 2, 3]]}, "must name each of the ranks 0 to 3 once"),
    (4, {"nodes": [[0, 1, 2], [3]]}, "differ in size"),
    (2, {"algorithm": "fastest"}, "unknown algorithm 'fastest'; take auto, two_shot"),
    (2, {"algorithm": "native"}, "'native' takes as-is, fp32, bf16 or fp16, got int8/16"),
    (2, {"algorithm": "shared_scale", "spec": "int4/16"}, "'shared_scale' takes int8/BLOCK"),
    (2, {"spec": "int4/16+sr"}, "stochastic rounding needs step="),
    (4, {"nodes": [[0, 1], [2, 3]], "inner": "int4/16+sr"}, "stochastic rounding needs step="),
    (4, {"nodes": [[0, 1], [2, 3]], "inner": "int4/16+ef"}, "error feedback inside a node needs it between nodes"),
    (2, {"spec": "int4/16+ef"}, "+ef needs residuals="),
    (2, {"spec": "int4/16+ef", "algorithm": "ring", "residuals": True}, "error feedback goes with two_shot, one_shot"),
    (2, {"op": dist.ReduceOp.MAX}, "is not a sum; take SUM, AVG or PREMUL_SUM"),
    (2, {"accumulator": "double"}, "take 'float32' or 'low'"),
    (2, {"accumulator": "low"}, "accumulator='low' is for 'ring'"),
    (2, {"spec": "int9/16"}, "int9"),
]


@pytest.mark.parametrize("world, arguments, message", REFUSED, ids=[message[:30] for _, _, message in REFUSED])
def test_what_cannot_be_done_is_refused_on_every_rank_and_the_channel_works_on(
    pool: Pool, world: int, arguments: dict[str, object], message: str
) -> None:
    for outcome in pool.outcomes(world, refused, arguments, torch.float32):
        assert outcome.error.startswith("ValueError")
        assert message in outcome.error


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.bool])
def test_another_dtype_is_refused_by_name(pool: Pool, dtype: torch.dtype) -> None:
    for outcome in pool.outcomes(2, refused, {}, dtype):
        assert outcome.error.startswith("TypeError")
        assert f"got {dtype}; codecs take float32, float16 and bfloat16" in outcome.error


def mixed(group: dist.ProcessGroup) -> None:
    nc.all_reduce([torch.ones(3), torch.ones(3, dtype=torch.bfloat16)], "int8/16", group=group)


def test_tensors_of_one_call_have_one_dtype(pool: Pool) -> None:
    for outcome in pool.outcomes(2, mixed):
        assert "all tensors of one call must have one dtype" in outcome.error


def with_gradient(group: dist.ProcessGroup) -> float:
    x = torch.ones(50, requires_grad=True)
    nc.all_reduce(x, "int8/16", group=group)
    assert x.requires_grad
    assert x.grad_fn is None
    return float(x.sum().detach())


def test_a_tensor_that_requires_grad_is_changed_in_place(pool: Pool) -> None:
    assert pool.run(2, with_gradient) == [100.0, 100.0]


def test_the_docstring_says_how_many_bytes_a_rank_sends(pool: Pool) -> None:
    """Where n divides evenly: (W-1) nbytes(n) for one_shot, 2 (W-1)/W nbytes(n) for the others."""
    codec, n = nc.codec("int8/32"), 4 * 32 * 5
    for algorithm, share in [("one_shot", 3.0), ("two_shot", 1.5), ("ring", 1.5), ("tree", 1.5)]:
        for _, sent in pool.run(4, chunked_small, algorithm, n):
            assert sent == share * codec.nbytes(n)
    nodes = pool.run(4, chunked_small, "hierarchical", n)
    assert {sent for _, sent in nodes} == {2 * 1 // 2 * 4 * n + codec.nbytes(n // 2)}


def chunked_small(group: dist.ProcessGroup, algorithm: str, n: int) -> tuple[float, int]:
    x, nodes = torch.ones(n), ((0, 1), (2, 3)) if algorithm == "hierarchical" else None
    work = nc.all_reduce(x, "int8/32", group=group, algorithm=algorithm, nodes=nodes, async_op=True)
    work.wait()
    return math.fsum(x.tolist()), work.sent_bytes
