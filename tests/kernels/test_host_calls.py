"""What the host does for one launch: few calls of Python, and arguments of the kind that the kernel was compiled for.

There is no GPU here: CPU tensors go the way of CUDA's, and a stub stands where Triton compiles and CUDA launches.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.codecs import Codec
from narrowcast.collectives.runtime.channel import Channel
from narrowcast.collectives.runtime.streams import DeviceStream, Way
from narrowcast.collectives.transports.base import RowsBySwap
from narrowcast.kernels import Feedback, Finish, Noise, dispatch, ops

pytest.importorskip("triton")

from narrowcast.kernels.triton import decode as decoding
from narrowcast.kernels.triton import encode as encoding
from narrowcast.kernels.triton import launch, start

N = 1 << 16
BASE_ARGUMENTS = 13
"""Grid, stream, function and what else a compiled kernel is launched with before its own arguments."""
MOST_CALLS = {"encode": 32, "encode with all": 40, "decode": 28, "reduce": 38, "reduce with all": 45, "sum": 12}
MOST_CALLS |= {"encode rows": 20, "decode rows": 12}
"""Calls of Python functions for one launch; it was 94, 109, 61, 125 and 144 when every launch was prepared anew."""


class StubKernel:
    """What `triton.jit` makes, as far as a launch needs it: it remembers arguments and computes nothing."""

    def __init__(self, kernel: Any) -> None:
        self.params = kernel.params
        self.compiled: list[StubCompiled] = []
        self.last: tuple[Any, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., StubCompiled]:
        def run(*args: Any, **options: Any) -> StubCompiled:
            self.last = args
            self.compiled.append(StubCompiled(self, args))
            return self.compiled[-1]

        return run


class StubCompiled:
    """What Triton compiled for the arguments `first`, and the arguments of the launches that came after."""

    def __init__(self, kernel: StubKernel, first: tuple[Any, ...]) -> None:
        self.kernel, self.first, self.later = kernel, first, list[tuple[Any, ...]]()
        self.watched = 0
        self.function, self.packed_metadata = 1, (4, 1, 0)
        self.run = SimpleNamespace(
            launch=self.launch, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0,
            profile_scratch_size=0,
        )  # fmt: skip

    def launch(self, *args: Any) -> None:
        self.later.append(args[BASE_ARGUMENTS:])
        # constants are those that it was compiled for
        self.kernel.last = (*self.later[-1][:-2], *self.first[-2:])

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            self.watched += 1

        return run


KERNELS = [(encoding, name) for name in ("encode_kernel", "parts_kernel", "sums_kernel")] + [
    (decoding, "decode_kernel")
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StubKernel]]:
    """All kernels as stubs, and every codec on the way of CUDA tensors."""
    stubs = []
    for module, name in KERNELS:
        stubs.append(StubKernel(getattr(module, name)))
        monkeypatch.setattr(module, name, stubs[-1])
    monkeypatch.setattr(start, "FAST", True)
    monkeypatch.setattr(start, "current_stream", lambda device: 7)
    monkeypatch.setattr(dispatch, "kernels_for", lambda plan, device: launch)
    yield stubs
    for spec in SPECS:
        launch.forget(nc.codec(spec).plan_for(torch.float32))


def python_calls(function: Callable[[], object]) -> int:
    """How many Python functions a call of `function` calls, itself left out."""
    count = 0

    def look(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # what it lets go of is not the call's
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count - 1


def calls_of(codec: Codec) -> dict[str, Callable[[], object]]:
    x, out, residual = torch.zeros(N), torch.zeros(N), torch.zeros(N)
    wire, rows = codec.encode(x), ops.aligned_rows(4, codec.nbytes(N))
    noise, finish = {"seed": 2**64 - 1, "stream": 3, "offset": 128}, Finish(4.0)
    parts, plan = ops.aligned_rows(4, codec.nbytes(N // 4)), codec.plan_for(torch.float32)
    return {
        "encode rows": lambda: ops.encode_rows(plan, x, N // 4, parts, Noise(3), Feedback(residual)),
        "decode rows": lambda: ops.decode_rows(plan, parts, N // 4, out),
        "sum": lambda: ops.sum_wires(plan, rows, N, out, finish),
        "encode": lambda: codec.encode(x, out=wire),
        "encode with all": lambda: codec.encode(x, **noise, residual=residual, unit=3.0, out=wire),
        "decode": lambda: codec.decode(wire, N, out=out),
        "reduce": lambda: codec.reduce(rows, N, out=wire, decoded=out),
        "reduce with all": lambda: codec.reduce(
            rows, N, **noise, residual=residual, unit=3.0, divide=4.0, out=wire, decoded=out
        ),
    }


SPECS = ("int8/256", "int4/128+sr+ef", "bf16", "int8", "nvfp4", "onebit/8192")


@pytest.mark.parametrize("spec", ["int8/256", "int4/128+sr+ef", "bf16"])
def test_one_launch_takes_few_calls_of_python(spec: str, kernels: list[StubKernel]) -> None:
    found = {}
    for name, call in calls_of(nc.codec(spec)).items():
        for _ in range(3):
            call()
        found[name] = python_calls(call)
    assert {name: count for name, count in found.items() if count > MOST_CALLS[name]} == {}


def test_the_stub_is_what_was_launched(kernels: list[StubKernel]) -> None:
    """Else the count above would be that of something else."""
    for call in calls_of(nc.codec("int8/256")).values():
        for _ in range(3):
            call()
    encodes, parts, sums, decodes = kernels
    # `calls_of` encodes once by itself
    assert [len(one.later) for one in encodes.compiled] == [3, 2, 2, 2, 2]
    assert [len(one.later) for one in decodes.compiled] == [2, 2, 2]
    assert not parts.compiled
    assert not sums.compiled


class Nowhere(RowsBySwap):
    """One of four ranks, whose wires go nowhere, and at once."""

    shared_by_threads = True
    rank, world = 0, 4

    def carries(self, device: torch.device) -> bool:
        return True

    def share(self, text: str) -> list[str]:
        return [text] * self.world

    def tell(self, place: str) -> dict[int, str]:
        return {}

    def all_to_all(self, arriving: Tensor, leaving: Tensor) -> Nowhere:
        return self

    def all_gather(self, rows: Tensor, row: Tensor) -> Nowhere:
        return self

    def wait(self) -> None: ...

    def close(self) -> None: ...


MOST_CALLS_OF_SUMS = {1: 120, 1_000: 120, 100_000: 235}
"""For a whole all-reduce, by its values; a long one has seven launches here. It was 205 and 410 when codecs
looked at every wire."""


@pytest.mark.parametrize("values", MOST_CALLS_OF_SUMS)
def test_an_all_reduce_takes_few_calls_of_python(values: int, kernels: list[StubKernel]) -> None:
    channel = Channel(Nowhere())
    channel.streams[torch.device("cpu")] = DeviceStream(torch.device("cpu"), Way.ROUNDS)
    x = torch.zeros(values)

    def call() -> None:
        nc.all_reduce(x, "int8/256", channel=channel)

    for _ in range(4):
        call()
    count = python_calls(call)
    channel.close()
    assert count <= MOST_CALLS_OF_SUMS[values]


def kind(value: Any, parameter: Any) -> object:
    """All that Triton compiles for in an argument; an address stands for its tensor."""
    if isinstance(value, Tensor):
        value = value.data_ptr()
    if isinstance(value, float) or parameter.is_constexpr:
        return "float" if isinstance(value, float) else "constant"
    if parameter.annotation_type:
        assert -(2**63) <= value < 2**63
        return parameter.annotation_type
    width = -(2**31) <= value < 2**31
    return width if parameter.do_not_specialize else (width, value % 16 == 0, value == 1)


class Somewhere:
    """Memory that begins at a multiple of 16 bytes, or not; a second time, what was given out the first time."""

    def __init__(self, source: random.Random, given: list[Tensor]) -> None:
        self.source, self.given, self.again = source, given, iter(given.copy())

    def __call__(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        begin = self.source.choice((0, 0, 0, 1, 4))
        found = next(self.again, None)
        if found is None:
            found = torch.zeros(n + 16, dtype=dtype)[begin:][:n]
            self.given.append(found)
        return found


def call_somehow(codec: Codec, source: random.Random, given: list[Tensor] | None = None) -> None:
    """Any call, with memory out of `given` where there is some."""
    n, room = source.choice((1, 256, 20_011)), Somewhere(source, [] if given is None else given)
    noise = Noise(
        *(source.choice((0, 1, 2**31, 2**33, 2**63, 2**64 - 1)) for _ in range(2)), 16 * source.choice((0, 1, 8))
    )
    size, world, plan = codec.nbytes(n), source.choice((2, 17)), codec.plan_for(torch.float32)
    wire, floats = room(size, torch.uint8), source.choice((torch.float32, torch.bfloat16))
    arguments: dict[str, Any] = {"seed": noise.seed, "stream": noise.stream, "offset": noise.offset, "out": wire}
    if source.random() < 0.5:
        arguments |= {"residual": room(n), "unit": source.choice((1, 1.0, 3.0, 1024.0))}
    match source.randrange(6):
        case 0:
            codec.encode(room(n, floats), **arguments)
        case 1:
            codec.decode(wire, n, out=room(n, floats), accumulate=source.random() < 0.5)
        case 2:
            stride = size + source.choice((-size % 16, 1, 4))
            rows = room(world * stride, torch.uint8).view(world, stride)[:, :size]
            codec.reduce(rows, n, divide=source.choice((1, 1.0, 4, 4.0)), decoded=room(n, floats), **arguments)
        case 3:
            rows = room(world * size, torch.uint8).view(world, size)
            finish = Finish(source.choice((1, 4, 4.0)), source.choice((1, 0.5)))
            ops.sum_wires(plan, rows, n, room(n), finish)
        case 4:
            per, feedback = source.choice((16, 256)), None
            rows = room(world * codec.nbytes(per), torch.uint8).view(world, -1)
            if source.random() < 0.5:
                feedback = Feedback(room(world * per), 3.0)
            x = room(world * per, torch.float32 if codec.is_identity else floats)
            ops.encode_rows(plan, x, per, rows, noise, feedback)
        case 5:
            per = source.choice((1, 16, 256))
            rows = room(world * codec.nbytes(per), torch.uint8).view(world, -1)
            ops.decode_rows(plan, rows, per, room(world * per, floats))


@pytest.mark.parametrize("spec", SPECS)
def test_no_launch_is_of_another_kind_than_what_was_compiled(spec: str, kernels: list[StubKernel]) -> None:
    """What differs there is silent garbage: Triton reads narrower numbers, or memory that it takes for aligned."""
    source, codec = random.Random(spec), nc.codec(spec)
    for _ in range(2000):
        call_somehow(codec, source)
    compared = 0
    for kernel in kernels:
        for compiled in kernel.compiled:
            wanted = [kind(value, p) for value, p in zip(compiled.first, kernel.params, strict=False)]
            for later in compiled.later:
                found = [kind(value, p) for value, p in zip(later, kernel.params, strict=True)]
                assert found[: len(wanted)] == wanted
                compared += 1
    assert compared > 500


@pytest.mark.parametrize("spec", SPECS)
def test_a_later_launch_gets_the_addresses_and_numbers_of_its_own_call(spec: str, kernels: list[StubKernel]) -> None:
    codec = nc.codec(spec)
    plan, source, kept = codec.plan_for(torch.float32), random.Random(spec), dict[str, Any]()
    for _ in range(300):
        memory: list[Tensor] = []
        state = source.getstate()
        plan.__dict__["_triton_calls"] = kept
        call_somehow(codec, source, memory)
        found = arguments_of_the_last(kernels)
        source.setstate(state)
        launch.forget(plan)
        call_somehow(codec, source, memory)
        assert found == arguments_of_the_last(kernels)


def arguments_of_the_last(kernels: list[StubKernel]) -> list[dict[str, object]]:
    """What each kernel was launched with last, by the names of its parameters; each call has scratch of its own."""
    scratch = {"parts", "sums", "total"} | ({"x"} if kernels[1].last else set())
    return [
        {
            p.name: value.data_ptr() if isinstance(value, Tensor) else value
            for value, p in zip(kernel.last, kernel.params, strict=False)
            if p.name not in scratch
        }
        for kernel in kernels
    ]


def test_who_listens_to_launches_hears_of_them(kernels: list[StubKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler's hooks are called by Triton's own way of launching."""
    codec, x = nc.codec("int8/256"), torch.zeros(512)
    codec.encode(x)
    runtime = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=SimpleNamespace(calls=[]))
    monkeypatch.setattr(start.triton.knobs, "runtime", runtime)
    codec.encode(x)
    (compiled,) = kernels[0].compiled
    assert (len(compiled.later), compiled.watched) == (1, 0)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(runtime, name, SimpleNamespace(calls=[print]))
        codec.encode(x)
        monkeypatch.setattr(runtime, name, None)
    assert (len(compiled.later), compiled.watched) == (1, 2)
