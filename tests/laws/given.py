"""Every public entry point that takes a tensor, given every kind of tensor: the right result, or an error with advice.

A program, so that it can be run with `python -O`: prints each pair that breaks the law. Its own errors are no asserts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import narrowcast as nc
from narrowcast.codecs import ErrorFeedback, error_report
from narrowcast.kernels.matmul import matmul

Call = Callable[[Tensor], object]

CODEC = nc.codec("int8/64")
ONE_SCALE = nc.codec("int8")
VALUES = torch.linspace(-1.5, 1.0, 64)
WIRE = CODEC.encode(VALUES)


class Trivial(Tensor):
    """Plain memory under another name."""


class Wrapper(Tensor):
    """A tensor that has no memory."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        return NotImplemented


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def fake(x: Tensor) -> Tensor:
    return FakeTensorMode().from_tensor(x)


def sharded(x: Tensor) -> Tensor:
    return distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.clone(),
    "Parameter": lambda x: nn.Parameter(x.clone(), requires_grad=False),
    "Buffer": lambda x: nn.Buffer(x.clone()),
    "trivial subclass": lambda x: x.clone().as_subclass(Trivial),
    "view": lambda x: torch.cat([x, x])[len(x) :],
}
NOT_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "DTensor": sharded,
    "jagged": lambda x: torch.nested.nested_tensor([x[:3], x[3:]], layout=torch.jagged),
    "nested": lambda x: torch.nested.nested_tensor([x[:3], x[3:]]),
    "FakeTensor": fake,
    "wrapper subclass": Wrapper,
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.view(1, -1).to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "meta": lambda x: x.to("meta"),
    "MaskedTensor": lambda x: torch.masked.masked_tensor(x, x == x),
    "zero tensor": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "functional": torch._to_functional_tensor,
    "freed": freed,
    "double": lambda x: x.double(),
    "list": lambda x: x.tolist(),
}
TRANSFORMS: dict[str, Callable[[Call, Tensor], object]] = {
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "func.grad": lambda call, x: torch.func.grad(call)(x),
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
}

# each takes the tensor that it is about, and gives what can be compared
ON_VALUES: dict[str, Call] = {
    "round_to": lambda x: nc.round_to(x, "e5m2"),
    "round_to up": lambda x: nc.round_to(x, "e5m2", rounding="up"),
    "round_to(out=)": lambda x: nc.round_to(VALUES, "e5m2", out=x),
    "encode": CODEC.encode,
    "encode cast": lambda x: nc.codec("bf16").encode(x),
    "encode(residual=)": lambda x: CODEC.encode(VALUES, residual=x),
    "decode(out=)": lambda x: CODEC.decode(WIRE, 64, out=x),
    "decode(accumulate)": lambda x: CODEC.decode(WIRE, 64, out=x, accumulate=True),
    "reduce(decoded=)": lambda x: CODEC.reduce([WIRE, WIRE], 64, decoded=x),
    "reduce(residual=)": lambda x: CODEC.reduce([WIRE, WIRE], 64, residual=x),
    "ErrorFeedback": lambda x: ErrorFeedback(CODEC).encode(x),
    "error_report": lambda x: error_report(x, CODEC),
    "simulate.cast": lambda x: nc.simulate.cast(x, "e5m2"),
    "simulate.cast codec": lambda x: nc.simulate.cast(x, "int8/64"),
    "matmul a": lambda x: matmul(x, VALUES, "bf16"),
    "matmul b": lambda x: matmul(VALUES, x, "bf16"),
    "matmul torch's": lambda x: matmul(x, VALUES, "fp32"),
    "matmul(out=)": lambda x: matmul(VALUES[:, None], VALUES[:1], "bf16", out=x),
    "all_reduce": lambda x: nc.all_reduce(x, CODEC),
    "all_reduce of a list": lambda x: nc.all_reduce([VALUES.clone(), x], CODEC),
    "reduce_scatter output": lambda x: nc.reduce_scatter(x, VALUES, CODEC),
    "reduce_scatter input": lambda x: nc.reduce_scatter(VALUES.clone(), x, CODEC),
    "all_gather output": lambda x: nc.all_gather(x, VALUES, CODEC),
    "all_gather input": lambda x: nc.all_gather(VALUES.clone(), x, CODEC),
    "all_to_all output": lambda x: nc.all_to_all(x, VALUES, CODEC),
    "all_to_all input": lambda x: nc.all_to_all(VALUES.clone(), x, CODEC),
    "broadcast": lambda x: nc.broadcast(x, CODEC, src=0),
}
ONLY_REFUSED: dict[str, Call] = {
    # alone in a group there is nobody to send to
    "send": lambda x: nc.send(x, CODEC, dst=0),
    "recv": lambda x: nc.recv(x, CODEC, src=0),
}
ON_WIRES: dict[str, Call] = {
    "decode": lambda wire: CODEC.decode(wire, 64),
    "encode(out=)": lambda wire: CODEC.encode(VALUES, out=wire),
    "reduce of a list": lambda wire: CODEC.reduce([WIRE, wire], 64),
    "reduce(out=)": lambda wire: CODEC.reduce([WIRE, WIRE], 64, out=wire),
}

ON_ROWS: dict[str, Call] = {"reduce of rows": lambda wires: CODEC.reduce(wires, 64)}
ON_SCALES: dict[str, Call] = {"encode(scale=)": lambda scale: ONE_SCALE.encode(VALUES, scale=scale)}
EVERY = (
    *((ON_VALUES, VALUES), (ON_WIRES, WIRE)),
    *((ON_ROWS, torch.stack([WIRE, WIRE, WIRE, WIRE])), (ON_SCALES, torch.tensor([0.1]))),
)


def fault(call: Call, make: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    """What is wrong when a plain tensor of another make is given."""
    plain, given = x.clone(), make(x)
    expected, got = call(plain), call(given)
    same = str(got) == str(expected) if not isinstance(got, Tensor) else torch.equal(got.view(-1), expected.view(-1))
    return None if same and torch.equal(plain, given) else f"gave {got} instead of {expected}"


ADVICE = ("; ", "give", "must be", "takes a", "must have")
"""What is to be given instead is said by one of these."""


def refusal_fault(run: Callable[[], object]) -> str | None:
    """What is wrong with how a tensor that is not plain is refused."""
    try:
        got = run()
    except (TypeError, NotImplementedError, ValueError) as error:
        return None if any(word in str(error) for word in ADVICE) else f"no advice: {error}"
    except Exception as error:  # noqa: BLE001  whatever else comes out is a fault
        return f"{type(error).__name__}: {error}"
    return f"gave {got}"


WRITES = (
    *("round_to(out=)", "encode(residual=)", "decode(out=)", "decode(accumulate)", "reduce(decoded=)"),
    *("reduce(residual=)", "matmul(out=)", "encode(out=)", "reduce(out=)"),
)
WRITES_BY_NAME = (
    *("all_reduce", "all_reduce of a list", "reduce_scatter output", "all_gather output", "all_to_all output"),
    "broadcast",
)
"""These take leaves, as torch.distributed does."""


def complaint(run: Callable[[], object], kind: type[Exception]) -> str:
    """What is said against a call; nothing where it is served."""
    try:
        run()
    except kind as error:
        return str(error)
    return ""


def version_fault(call: Call, x: Tensor) -> str | None:
    """Autograd must see that a tensor was written, through a view too."""
    for given in (x.clone(), torch.cat([x, x])[len(x) :]):
        before = given._version
        call(given)
        if given._version == before:
            return "autograd was not told"
    return None


def leaf_fault(call: Call, x: Tensor) -> str | None:
    """A tensor that requires grad is written under no_grad only."""
    leaf = x.clone().requires_grad_()
    for given in (leaf, leaf * 1, leaf.view(-1)):
        said = complaint(lambda given=given: call(given), RuntimeError)
        if "no_grad" not in said:
            return f"wrote into a tensor that requires grad, or no advice: {said}"
    with torch.no_grad():
        call(leaf)
    return None


def write_faults() -> dict[tuple[str, str], str | None]:
    found: dict[tuple[str, str], str | None] = {}
    for calls, x in EVERY:
        for name, call in calls.items():
            if name in WRITES + WRITES_BY_NAME:
                found[name, "version"] = version_fault(call, x)
            if name in WRITES and x.is_floating_point():
                found[name, "leaf"] = leaf_fault(call, x)
    residuals = nc.collectives.Residuals.zeros(64)
    nc.all_reduce(VALUES.clone(), "int8/64+ef", residuals=residuals)
    found["all_reduce(residuals=)", "version"] = None if residuals.first._version else "autograd was not told"
    return found


def shared() -> tuple[Tensor, Tensor]:
    """Memory, and the same as bytes."""
    values = torch.cat([VALUES, VALUES, VALUES, VALUES])
    return values, values.view(torch.uint8)


def overlapping() -> dict[str, Callable[[], object]]:
    """Calls that write where they read, or the same place twice."""
    v, b = shared()
    twice = torch.zeros(32).expand(2, 32)
    inside = torch.zeros(2).as_strided((8, 8), (0, 0))
    rows = torch.stack([WIRE, WIRE])
    picture = v[:240].view(2, 5, 4, 6)
    return {
        "round_to ahead": lambda: nc.round_to(v[:64], "e5m2", out=v[1:65]),
        "round_to behind": lambda: nc.round_to(v[1:65], "e5m2", out=v[:64]),
        "round_to as it lies": lambda: nc.round_to(
            v[:120].view(5, 4, 6).permute(1, 2, 0), "e5m2", out=v[6:126].view(5, 4, 6).permute(1, 2, 0)
        ),
        "round_to in parts": lambda: nc.round_to(picture[0], "e5m2", out=v[1:121].view(5, 4, 6)),
        "round_to into expanded": lambda: nc.round_to(VALUES.view(2, 32), "e5m2", out=twice),
        "encode over x": lambda: CODEC.encode(v[:64], out=b[:68]),
        "encode over scale": lambda: ONE_SCALE.encode(VALUES, scale=v[:1], out=b[:68]),
        "residual is x": lambda: CODEC.encode(v[:64], residual=v[:64]),
        "residual beside x": lambda: CODEC.encode(v[:64], residual=v[3:67]),
        "residual over wire": lambda: CODEC.encode(VALUES, residual=v[:64], out=b[8:76]),
        "decode over wire": lambda: CODEC.decode(b[4:72], 64, out=v[:64]),
        "add over wire": lambda: CODEC.decode(b[4:72], 64, out=v[:64], accumulate=True),
        "decode into expanded": lambda: CODEC.decode(WIRE, 64, out=twice),
        "decode into one place": lambda: CODEC.decode(WIRE, 64, out=inside),
        "reduce over a wire": lambda: CODEC.reduce(rows, 64, out=rows[1]),
        "reduce a list over a wire": lambda: CODEC.reduce([WIRE, rows[0]], 64, out=rows[0]),
        "reduce over decoded": lambda: CODEC.reduce(rows, 64, out=b[:68], decoded=v[:64]),
        "reduce, residual over decoded": lambda: CODEC.reduce(rows, 64, residual=v[:64], decoded=v[63:127]),
        "reduce, decoded over a wire": lambda: CODEC.reduce([WIRE, b[:68]], 64, decoded=v[:64]),
        "reduce into expanded": lambda: CODEC.reduce(rows, 64, decoded=twice),
        "all_reduce of expanded": lambda: nc.all_reduce(twice, CODEC),
    }


def side_by_side() -> dict[str, Callable[[], bool]]:
    """Calls whose memory interleaves or is the same, and that must be right nevertheless."""
    rounded = nc.round_to(VALUES, "e5m2")

    def in_place(make: Callable[[Tensor], Tensor]) -> bool:
        x = make(VALUES.clone())
        expected = nc.round_to(x.clone(), "e5m2")
        return nc.round_to(x, "e5m2", out=x) is x and torch.equal(x, expected)

    def transposed() -> bool:
        x = VALUES.clone().view(8, 8)
        nc.round_to(x, "e5m2", out=x.t())
        return torch.equal(x, rounded.view(8, 8).t())

    def interleaved() -> bool:
        x = VALUES.repeat_interleave(2)
        nc.round_to(x[::2], "e5m2", out=x[1::2])
        return torch.equal(x[1::2], rounded) and torch.equal(x[::2], VALUES)

    return {
        "round_to in place": lambda: in_place(lambda x: x),
        "round_to in place, columns": lambda: in_place(lambda x: x.view(8, 8).t()),
        "round_to in place, gaps": lambda: in_place(lambda x: x[::3]),
        "round_to into the transpose": transposed,
        "round_to beside": interleaved,
    }


def overlap_faults() -> dict[tuple[str, str], str | None]:
    found: dict[tuple[str, str], str | None] = {}
    for name, run in overlapping().items():
        said = complaint(run, ValueError)
        found[name, "overlap"] = None if "give" in said else f"no advice: {said}"
    for name, check in side_by_side().items():
        found[name, "overlap"] = None if check() else "wrong"
    return found


def made(make: Callable[[Tensor], Tensor], x: Tensor) -> Tensor | None:
    """None where torch has no such tensor of this type."""
    try:
        return make(x)
    except (RuntimeError, TypeError, NotImplementedError, AssertionError):
        return None


def faults() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str | None] = {}
    for calls, x in EVERY:
        for name, call in calls.items():
            for kind, make in PLAIN.items():
                found[name, kind] = fault(call, make, x)
    for calls, x in (*EVERY, (ONLY_REFUSED, VALUES)):
        for name, call in calls.items():
            for kind, make in NOT_PLAIN.items():
                given = made(make, x)
                if given is not None:
                    found[name, kind] = refusal_fault(lambda call=call, given=given: call(given))
            for kind, transform in TRANSFORMS.items():
                if x.is_floating_point() or kind != "func.grad":
                    found[name, kind] = refusal_fault(lambda call=call, t=transform, x=x: t(call, x.clone()))
    found |= write_faults() | overlap_faults()
    return {pair: what for pair, what in found.items() if what is not None}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    broken = faults()
    for (name, kind), what in broken.items():
        print(f"{name} of {kind}: {what[:200]}")
    sys.exit(1 if broken else 0)
