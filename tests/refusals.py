"""What the public entry points say to bad input, and the bytes of good input, as JSON; run with and without -O.

Under -O every `assert` is gone, this file's own among them, so it has none: it reports, and the test compares.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast import predict, simulate, study
from narrowcast.codecs import all_specs
from narrowcast.formats.codebooks import dynamic_map
from narrowcast.kernels import native
from narrowcast.parallel.policy import Schedule, TensorInfo, choose
from narrowcast.study.analysis.statistics import Interval

Action = Callable[[], object]
X = torch.linspace(-3, 3, 4096)
PICTURE, KERNEL = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
INT8 = nc.codec("int8/64")


def rounding() -> dict[str, Action]:
    return {
        "no tensor": lambda: nc.round_to([1.0], "e5m2"),
        "whole numbers": lambda: nc.round_to(X.int(), "e5m2"),
        "no device": lambda: nc.round_to(X.to("meta"), "e5m2"),
        "unknown format": lambda: nc.round_to(X, "e5m99"),
        "unknown rounding": lambda: nc.round_to(X, "e5m2", rounding="odd"),
        "no seed": lambda: nc.round_to(X, "e5m2", rounding="stochastic"),
        "unknown rules": lambda: nc.round_to(X, "e5m2", rules="none"),
        "cpd of whole numbers": lambda: nc.round_to(X, "int8", rules="cpd"),
        "overflow": lambda: nc.round_to(X, "int8", overflow="infinity"),
        "out of another size": lambda: nc.round_to(X, "e5m2", out=torch.empty(3)),
        "out of another type": lambda: nc.round_to(X, "e5m2", out=torch.empty(4096, dtype=torch.float16)),
        "table": lambda: nc.Codebook([1.0, 1.0]),
        "dynamic map": lambda: dynamic_map(True, 3, 8),
    }


def codecs() -> dict[str, Action]:
    wire = INT8.encode(X)
    return {
        "spec": lambda: nc.codec("int8/7"),
        "spec of another kind": lambda: nc.codec(8),
        "no tensor": lambda: INT8.encode("abc"),
        "whole numbers": lambda: INT8.encode(X.long()),
        "offset": lambda: nc.codec("int8/64+sr").encode(X, offset=3),
        "out too small": lambda: INT8.encode(X, out=torch.empty(3, dtype=torch.uint8)),
        "wire too short": lambda: INT8.decode(wire[:-1], X.numel()),
        "wire of another type": lambda: INT8.decode(wire.float(), X.numel()),
        "negative count": lambda: INT8.decode(wire, -1),
        "decode into another size": lambda: INT8.decode(wire, X.numel(), out=torch.empty(7)),
        "residual of another size": lambda: INT8.encode(X, residual=torch.zeros(3)),
        "refused by the library": lambda: native.check_status(-1, "nc_encode", "a plan"),
        "native rules": lambda: native.round_to(X, nc.format("e5m2"), "nearest", "ieee", "cpd", 0, X.clone()),
    }


def simulator() -> dict[str, Action]:
    conv = {"accumulate": "bf16"}
    return {
        "cast": lambda: simulate.cast("abc", "bf16"),
        "cast to a number": lambda: simulate.cast(X, 3),
        "matmul sizes": lambda: simulate.matmul(torch.ones(3, 4), torch.ones(5, 4), "bf16"),
        "matmul types": lambda: simulate.matmul(torch.ones(3, 4).long(), torch.ones(4, 4).long(), "bf16"),
        "conv padding": lambda: simulate.conv2d(PICTURE, KERNEL, padding="full", **conv),
        "conv1d padding": lambda: simulate.conv1d(PICTURE[0], KERNEL[0], padding="full", **conv),
        "conv dimensions": lambda: simulate.conv2d(PICTURE[0, 0], KERNEL, **conv),
        "conv1d dimensions": lambda: simulate.conv1d(PICTURE, KERNEL[0], **conv),
        "lower nothing": lambda: simulate.lower("model", weights="e5m2"),
        "lower without seed": lambda: simulate.lower(nn.Linear(2, 2), weights="e5m2+sr"),
        "no worker": lambda: simulate.World(0),
        "hierarchical without nodes": lambda: simulate.World(4, "hierarchical", "int8/64"),
        "nodes": lambda: simulate.World(4, "hierarchical", "int8/64", groups=3),
        "order": lambda: simulate.World(4, order=[0, 1, 2, 2]),
        "other number of workers": lambda: simulate.World(4).all_reduce([X, X]),
        "train without data": lambda: simulate.train(nn.Linear(2, 2), None, workers=2, steps=1, lr=0.1),
        "optimizer": lambda: simulate.optim.SGD([nn.Parameter(X)], lr=0.1, weights=3),
    }


def distributed() -> dict[str, Action]:
    info = TensorInfo("w", X.shape, X.dtype)
    model = DistributedDataParallel(nn.Linear(4, 4))
    return {
        "no tensor": lambda: nc.all_reduce("abc", "int8/64"),
        "whole numbers": lambda: nc.all_reduce(X.long(), "int8/64"),
        "spec": lambda: nc.all_reduce(X.clone(), "int8/7"),
        "algorithm": lambda: nc.all_reduce(X.clone(), "int8/64", algorithm="star"),
        "native": lambda: nc.all_reduce(X.clone(), "int8/64", algorithm="native"),
        "operation": lambda: nc.all_reduce(X.clone(), "int8/64", dist.ReduceOp.MAX),
        "group": lambda: nc.all_reduce(X.clone(), "int8/64", group="world"),
        "both ranks": lambda: nc.broadcast(X.clone(), "int8/64", src=0, group_src=0),
        "rank": lambda: nc.broadcast(X.clone(), "int8/64", group_src=7),
        "policy": lambda: nc.attach(model, 5),
        "strict": lambda: nc.attach(nn.Linear(4, 4), {"no": "int8/64"}, strict=True),
        "schedule": lambda: nc.schedule({3: "int8/64"}),
        "schedule of numbers": lambda: choose(Schedule(((0, 5),)), info, 0),
        "every": lambda: nc.LocalSGD(nn.Linear(4, 4), every=0, spec="int8/64"),
    }


def studies() -> dict[str, Action]:
    return {
        "study file": lambda: study.parse("this is no = = toml", "study.toml"),
        "missing study": lambda: study.load("/nowhere/study.toml"),
        "missing cluster": lambda: predict.load_cluster("/nowhere/cluster.toml"),
        "unknown model": lambda: predict.find_model("nothing-like-it"),
        "interval": lambda: Interval(1.0, 0.5, 2.0).times(-1),
    }


AREAS: dict[str, Callable[[], dict[str, Action]]] = {
    "rounding": rounding,
    "codecs": codecs,
    "simulator": simulator,
    "distributed": distributed,
    "studies": studies,
}


def answer(action: Action) -> list[str]:
    try:
        action()
    except Exception as error:  # noqa: BLE001  (what kind it is is the question)
        return [type(error).__name__, str(error)]
    return ["accepted", ""]


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def results() -> dict[str, str]:
    """What good input gives: the bytes of every codec, and a step of a lowered model."""
    found = {f"encode {spec}": digest(nc.codec(spec).encode(X, seed=3)) for spec in all_specs()}
    layer = nn.Linear(64, 64, bias=False)
    nn.init.eye_(layer.weight)
    simulate.lower(layer, weights="e4m3", activations="e4m3+sr", gradients="e5m2", accumulate="bf16", seed=1)
    layer(X.view(64, 64)).square().sum().backward()
    return found | {"lowered": digest(layer.weight.grad)}


def main() -> None:
    store = dist.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.set_num_threads(1)
    told = {f"{area}: {name}": answer(action) for area, make in AREAS.items() for name, action in make().items()}
    print(json.dumps({"optimized": not __debug__, "told": told, "results": results()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
