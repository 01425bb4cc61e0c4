"""Private parts of torch: whichever is missing, attach says so in one sentence before anything is sent."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.models import batch, error_of, in_bf16, mlp, wrapped
from dist.pool import Pool
from dist.shards import full, loss, mesh_of, replicated_mesh, sharded
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import narrowcast as nc
from narrowcast.collectives.runtime import channel
from narrowcast.parallel import private
from narrowcast.parallel.ddp import torch_parts as ddp_parts
from narrowcast.parallel.fsdp import comm as fsdp_comm
from narrowcast.parallel.fsdp import torch_parts as fsdp_parts

SENTENCE = re.compile(
    r"RuntimeError: attach: this torch \(\S+\) keeps (.+)'s (\S+) elsewhere than 2\.11 to 2\.\d+ do; "
    r"use one of those, or report it"
)


class Without:
    """An object that lacks one attribute."""

    def __init__(self, whole: Any, name: str) -> None:
        self._whole, self._name = whole, name

    @property
    def __class__(self) -> type:
        return type(self._whole)

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


@contextlib.contextmanager
def without(root: Any, part: str) -> Iterator[None]:
    """In this block `root` lacks the part, a dotted name, wherever it gets it from."""
    with contextlib.ExitStack() as undo:
        for name in part.split("|"):
            path, _, leaf = name.rpartition(".")
            owner = attrgetter(path)(root) if path else root
            above, _, last = path.rpartition(".")
            if path:
                holder = attrgetter(above)(root) if above else root
                put(holder, last, Without(owner, leaf), undo)
            else:
                take(owner, leaf, undo)
        yield


def put(owner: Any, name: str, value: object, undo: contextlib.ExitStack) -> None:
    """As it is: nn.Module and frozen dataclasses have a __setattr__ of their own."""
    given = type.__setattr__ if isinstance(owner, type) else object.__setattr__
    undo.callback(given, owner, name, getattr(owner, name))
    given(owner, name, value)


def take(owner: Any, name: str, undo: contextlib.ExitStack) -> None:
    """Off the object, and off whichever of its classes has it, too."""
    for place in (owner, *(owner if isinstance(owner, type) else type(owner)).__mro__):
        if name in vars(place):
            undo.callback(setattr, place, name, vars(place)[name])
            delattr(place, name)


def attempts(root: Any, parts: tuple[str, ...], attach: Callable[[], object]) -> list[tuple[str, str, int]]:
    """Of each part: its name, what attach says where it is missing, and the channels that were opened for that."""
    found = []
    for part in parts:
        before = set(channel._OPEN)
        with without(root, part):
            error = error_of(attach)
        found.append((part.partition("|")[0], error, len(set(channel._OPEN) - before)))
    return found


def sharded_parts(group: dist.ProcessGroup) -> list[tuple[str, str, int]]:
    model = sharded(mesh_of(group))

    def attach() -> None:
        nc.attach(model, "int8/256")

    state = model._get_fsdp_state()
    raw = fsdp_parts._param_groups(model[0])[0]
    parameter = raw.fsdp_params[0]
    newer = fsdp_parts.GRADIENT_TYPE if fsdp_parts._has_gradient_type(parameter) else ()
    found = attempts(torch, fsdp_parts.TORCH, attach)
    found += attempts(model, fsdp_parts.MODULE, attach)
    found += attempts(state, fsdp_parts.STATE[1:], attach)
    either = [name for name in fsdp_parts.STATE[0].split("|") if hasattr(state, name)]
    found += [(fsdp_parts.STATE[0].partition("|")[0], *rest) for _, *rest in attempts(state, (either[0],), attach)]
    found += attempts(raw, (*fsdp_parts.GROUP, *fsdp_parts.SHARDED), attach)
    found += attempts(parameter, (*fsdp_parts.PARAMETER, *newer), attach)
    found += attempts(type(parameter), fsdp_parts.LATER, attach)
    nc.attach(model, "int8/256").detach()
    return found


def test_each_part_of_fsdp2_that_is_missing_is_named_before_anything_is_sent(pool: Pool) -> None:
    for found in pool.run(2, sharded_parts):
        check(found)
        listed = (fsdp_parts.GROUP, fsdp_parts.SHARDED, fsdp_parts.PARAMETER, fsdp_parts.STATE, fsdp_parts.LATER)
        assert len(found) >= sum(map(len, listed))


def check(found: list[tuple[str, str, int]]) -> None:
    for part, error, opened in found:
        said = SENTENCE.fullmatch(error)
        assert said, error
        assert said[2] == part, (part, error)
        assert opened == 0, part


def replicated_parts(group: dist.ProcessGroup) -> list[tuple[str, str, int]]:
    model = sharded(replicated_mesh(2, 4))
    raw = fsdp_parts._param_groups(model[0])[0]
    return attempts(raw, fsdp_parts.REPLICATED, lambda: nc.attach(model, "int8/256"))


def test_each_part_of_hsdp_that_is_missing_is_named_before_anything_is_sent(pool: Pool) -> None:
    for found in pool.run(8, replicated_parts):
        check(found)


def missing_ddp_parts(group: dist.ProcessGroup) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
    plain, loose, mixed = wrapped(group), wrapped(group, find_unused_parameters=True), in_bf16(group)
    found = attempts(torch, private.AUTOGRAD, lambda: nc.attach(plain, "int8/256"))
    found += attempts(plain, (*ddp_parts.JOIN, *ddp_parts.HOOKS), lambda: nc.attach(plain, "int8/256"))
    found += attempts(loose, ddp_parts.UNUSED[:1], lambda: nc.attach(loose, "int8/256"))
    found += attempts(mixed, ddp_parts.MIXED, lambda: nc.attach(mixed, "int8/256"))
    (_, state), *_ = mixed._comm_hooks
    found += attempts(state, ddp_parts.MIXED_STATE, lambda: nc.attach(mixed, "int8/256"))
    for model in (plain, mixed):
        nc.attach(model, "int8/256").detach()
    return found, attempts(plain, ddp_parts.JOIN, lambda: nc.DDPState(plain, "int8/256"))


def test_each_part_of_ddp_that_is_missing_is_named_before_anything_is_sent(pool: Pool) -> None:
    for attached, by_hand in pool.run(2, missing_ddp_parts):
        check(attached)
        check(by_hand)


def test_what_join_brings_is_looked_for_in_join() -> None:
    in_join = SimpleNamespace(_join_config=SimpleNamespace(enable=True))
    for part in ddp_parts.JOINED:
        check([(part, error_of(lambda: ddp_parts.divides_by_live_ranks(in_join)), 0)])


CLASSES = {
    "_fsdp_api": ("AllGather", "ReduceScatter"),
    "_fsdp_collectives": ("DefaultAllGather", "DefaultReduceScatter", "_get_gradient_divide_factors"),
    "_fsdp_common": ("DDPMeshInfo", "FSDPMeshInfo", "HSDPMeshInfo"),
}


@pytest.mark.parametrize("module, name", [(module, name) for module, names in CLASSES.items() for name in names])
def test_a_class_of_fsdp2_that_is_missing_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"torch.distributed.fsdp._fully_shard.{module}.{name}")
    spec = importlib.util.spec_from_file_location("fresh", fsdp_parts.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(RuntimeError, match=f"keeps FSDP2's classes .*{name}.* elsewhere than 2.11 to"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


ROOT = Path(__file__).parents[2]


def named(constraints: str) -> str:
    """The version of torch in a file, without its last number."""
    return re.search(r"^torch==(.+)\.\d+$", (ROOT / constraints).read_text(), re.M)[1]


def test_the_versions_of_torch_are_the_same_everywhere() -> None:
    oldest, own, newest = map(named, ("constraints-oldest.txt", "constraints.txt", "constraints-newest.txt"))
    assert f"{oldest} to {newest}" == private.KNOWN
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"tested: {oldest}, {own} and {newest}" in (ROOT / "README.md").read_text()


PARALLEL = Path(private.__file__).parent
LISTED = {
    name
    for parts in (
        *(private.AUTOGRAD, private.PROFILER, private.RECORD),
        *(getattr(fsdp_parts, kind) for kind in ("TORCH", "MODULE", "STATE", "GROUP", "PARAMETER", "GRADIENT_TYPE")),
        *(getattr(ddp_parts, kind) for kind in ("JOIN", "JOINED", "HOOKS", "UNUSED", "MIXED")),
        *(getattr(ddp_parts, kind) for kind in ("MIXED_STATE", "BUCKETS")),
    )
    for part in parts
    for name in re.split(r"[.|]", part)
}
KNOWN_ELSEWHERE = {"_per_optimizer_states", "_local_tensor", "_subclasses"}
"""A scaler's, looked for where one is given; a DTensor's, as torch's parallel styles use it; fake tensors."""


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file of ours gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def reached_for(tree: ast.AST) -> Iterator[str]:
    """The private names that it reads from something else than itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from node.module.split(".")


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_whatever_private_part_of_torch_is_used_is_on_a_list() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PARALLEL.rglob("*.py")}
    ours = {name for path in PARALLEL.parent.rglob("*.py") for name in defined(ast.parse(path.read_text()))}
    for path, tree in trees.items():
        fine = LISTED | KNOWN_ELSEWHERE | ours
        if path.name == "torch_parts.py":
            fine |= {"_fully_shard", *CLASSES}
        assert {name for name in reached_for(tree) if is_private(name)} <= fine, path.name


POLICIES = [
    (model, param, reduce)
    for model in (torch.float32, torch.bfloat16)
    for param in (None, torch.bfloat16)
    for reduce in (None, torch.float32, torch.bfloat16)
]


def types(group: dist.ProcessGroup) -> list[tuple[set[torch.dtype], set[torch.dtype]]]:
    """Of each policy of mixed precision: what the units say, before the first step, and what really travels."""
    found = []
    for kind, param, reduce in POLICIES:
        mixed = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        model = sharded(mesh_of(group), mlp().to(kind), mp_policy=mixed)
        handle = nc.attach(model, "int8/64", parameters="int8/64", min_values=1)
        units, seen = handle._state.units, set()
        said = {unit.reduce_dtype for unit in units}
        whole = fsdp_comm.Gradients._reduce

        def reduced(self: Any, total: Tensor, x: Tensor, op: Any, seen: set = seen, whole: Any = whole) -> None:
            seen.add(x.dtype)
            whole(self, total, x, op)

        fsdp_comm.Gradients._reduce = reduced
        try:
            model(batch(0, 0).to(kind)).float().square().mean().backward()
        finally:
            fsdp_comm.Gradients._reduce = whole
        found.append((said, seen))
        handle.detach()
    return found


def test_the_type_in_which_gradients_travel_is_known_before_they_do(pool: Pool) -> None:
    for (said, seen), case in zip(pool.run(2, types)[0], POLICIES, strict=True):
        assert said == seen, case


def mixed_order(group: dist.ProcessGroup) -> None:
    """Parameters whose gradients have several types lie in another order in a reduce-scatter (torch 2.15)."""
    rank, grads = dist.get_rank(group), []
    for wire in (None, "as-is"):
        module = mlp()
        for name, parameter in module.named_parameters():
            parameter.grad_dtype = torch.bfloat16 if name.endswith("weight") else torch.float32
        model = fully_shard(module, mesh=mesh_of(group))
        handle = nc.attach(model, wire, min_values=1) if wire else None
        loss(model, rank, 0).backward()
        grads.append(full(model))
        if handle is not None:
            (unit,) = handle._state.units
            world = dist.get_world_size(group)
            names = [t.name for t in unit.tensors_in(world * sum(t.part(world) for t in unit.tensors), world)]
            assert names == sorted(names, key=lambda name: not name.endswith("weight"))
            handle.detach()
    for plain, ours in zip(*grads, strict=True):
        assert plain.dtype == ours.dtype
        assert torch.allclose(plain, ours, rtol=1e-2, atol=1e-6)


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15 reduces them as they stand"
)
def test_the_order_of_a_reduce_scatter_is_that_of_fsdp2(pool: Pool) -> None:
    pool.run(2, mixed_order)


def by_hand(group: dist.ProcessGroup) -> list[int]:
    rank, steps, grads = dist.get_rank(group), [], []
    for wire in (None, "as-is"):
        torch.manual_seed(0)
        model = sharded(mesh_of(group))
        model.set_manual_backward_finalization(True)
        handle = nc.attach(model, wire, min_values=1) if wire else None
        for step in range(3):
            model.zero_grad()
            loss(model, rank, step).backward()
            model.finalize_backward()
            if handle is not None:
                steps.append(handle.step)
        grads.append(full(model))
        if handle is not None:
            handle.detach()
    assert all(torch.allclose(plain, ours, rtol=1e-5, atol=1e-7) for plain, ours in zip(*grads, strict=True))
    return steps


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15 ends a pass by itself"
)
def test_a_pass_that_the_caller_ends_is_one_step(pool: Pool) -> None:
    assert pool.run(2, by_hand) == [[1, 2, 3]] * 2
