"""What people do with `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from dist.features.common import STEPS, Attach, Feature, Updates, moved, together, values
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

WIDE, WORDS = 96, 64
SGD = partial(torch.optim.SGD, lr=0.2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 2, tied: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDE), nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.out = nn.LayerNorm(WIDE), nn.Linear(WIDE, WORDS, bias=False)
        self.reentrant = reentrant
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(self.norm(x))

    def loss(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self(x).float().flatten(0, 1), x.flatten())


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def mesh_of(attach: Attach) -> DeviceMesh:
    return DeviceMesh.from_group(attach.group, "cpu")


def sharded(attach: Attach, model: Net, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(attach), **options)
    return fully_shard(model, mesh=mesh_of(attach), **options)


def numbers(attach: Attach, step: int) -> Tensor:
    return torch.randint(WORDS, (8, 12), generator=attach.noise(step))


def loss_of(call: Callable[[Tensor], Tensor], attach: Attach, step: int) -> Tensor:
    x = numbers(attach, step)
    return F.cross_entropy(call(x).float().flatten(0, 1), x.flatten())


def one_step(attach: Attach, call: Any, optimizer: torch.optim.Optimizer, step: int, clip: float = 0.0) -> None:
    optimizer.zero_grad()
    loss_of(call, attach, step).backward()
    if clip:
        nn.utils.clip_grad_norm_(call.parameters(), clip)
    optimizer.step()


def trained(
    change: Callable[[Any], Any] = lambda model: model,
    shard: Callable[..., Any] = sharded,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    clip: float = 0.0,
    attached: dict[str, Any] | None = None,
    made_by: Callable[[], Net] = made,
    after: Callable[[Any], Any] = lambda model: model,
    **options: Any,
) -> Feature:
    """The plain loop with some options. change: before it is sharded; after: what is called is this of the model."""

    def feature(attach: Attach) -> Updates:
        model = made_by()
        change(model)
        model = shard(attach, model, **options)
        changed = after(model)
        called = model if changed is None else changed
        attach(called, **(attached or {}))
        before = values(model)
        of_it = optimizer([p for p in model.parameters() if p.requires_grad])
        for step in range(STEPS):
            one_step(attach, called, of_it, step, clip)
        return moved(model, before)

    return feature


def frozen(model: Net) -> None:
    model.blocks[0].requires_grad_(False)
    model.words.requires_grad_(False)


def compiled_blocks(model: Net) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def prefetching(model: Any) -> None:
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])


def root_only(attach: Attach, model: Net) -> Any:
    return fully_shard(model, mesh=mesh_of(attach))


def nested(attach: Attach, model: Net) -> Any:
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh_of(attach))
        fully_shard(block.down, mesh=mesh_of(attach))
    return sharded(attach, model)


def grouped(attach: Attach, model: Net) -> Any:
    fully_shard(list(model.blocks), mesh=mesh_of(attach))
    fully_shard([model.norm, model.out], mesh=mesh_of(attach))
    return fully_shard(model, mesh=mesh_of(attach))


def from_meta() -> Net:
    with torch.device("meta"):
        return Net()


def filled(model: Any) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def accumulated(attach: Attach, synced: bool) -> Updates:
    model = sharded(attach, made())
    attach(model)
    before, optimizer = values(model), SGD(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            model.set_requires_gradient_sync(synced or micro == 2)
            model.set_is_last_backward(micro == 2)
            (loss_of(model, attach, 10 * step + micro) / 3).backward()
        optimizer.step()
    return moved(model, before)


def thawed(attach: Attach, at_first: bool) -> Updates:
    """A block that is trained for half of the time."""
    model = made()
    model.blocks[1].requires_grad_(at_first)
    sharded(attach, model)
    attach(model)
    before = values(model)
    for step in range(4):
        model.blocks[1].requires_grad_(at_first == (step < 2))
        one_step(attach, model, SGD([p for p in model.parameters() if p.requires_grad]), step)
    return moved(model, before)


def looked_at_between(attach: Attach) -> Updates:
    model = sharded(attach, made())
    attach(model)
    before, optimizer = values(model), SGD(model.parameters())
    for step in range(STEPS):
        one_step(attach, model, optimizer, step)
        model.eval()
        with torch.no_grad():
            model(numbers(attach, step))
        model.train()
    return moved(model, before)


def two_forwards(attach: Attach) -> Updates:
    model = sharded(attach, made())
    attach(model)
    before, optimizer = values(model), SGD(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, attach, step) + loss_of(model, attach, step + 50)).backward()
        optimizer.step()
    return moved(model, before)


def forward_method(attach: Attach) -> Updates:
    model = sharded(attach, made())
    register_fsdp_forward_method(model, "loss")
    attach(model)
    before, optimizer = values(model), SGD(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model.loss(numbers(attach, step)).backward()
        optimizer.step()
    return moved(model, before)


def optimizers_in_backward(attach: Attach) -> Updates:
    model = sharded(attach, made())
    attach(model)
    before, own = values(model), {p: SGD([p]) for p in model.parameters()}

    def step_at_once(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step_at_once)
    for step in range(STEPS):
        loss_of(model, attach, step).backward()
    return moved(model, before)


def scaled(attach: Attach) -> Updates:
    model, scaler = sharded(attach, made()), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    attach(model, scaler=scaler)
    before, optimizer = values(model), SGD(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, attach, step) * (float("inf") if step == 2 and attach.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return moved(model, before)


def two_models(attach: Attach) -> Updates:
    a, b = sharded(attach, made()), sharded(attach, made(blocks=3))
    attach(a)
    attach(b)
    before, optimizer = (values(a), values(b)), SGD([*a.parameters(), *b.parameters()])
    for step in range(STEPS):
        optimizer.zero_grad()
        x = numbers(attach, step)
        F.mse_loss(a(x), b(x)).backward()
        optimizer.step()
    return together(a=(a, before[0]), b=(b, before[1]))


def precision(reduce: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)


FEATURES: dict[str, Feature] = {
    "plain": trained(),
    "clipping": trained(clip=0.1),
    "AdamW": trained(optimizer=partial(torch.optim.AdamW, lr=1e-3, foreach=True)),
    "stays gathered": trained(reshard_after_forward=False),
    "root alone": trained(shard=root_only),
    "nested": trained(shard=nested),
    "groups of modules": trained(shard=grouped),
    "bfloat16, sums in float32": trained(mp_policy=precision(torch.float32)),
    "bfloat16": trained(mp_policy=precision(torch.bfloat16)),
    "offload to the host": trained(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "from the meta device": trained(made_by=from_meta, after=filled),
    "frozen": trained(frozen),
    "frozen later": partial(thawed, at_first=True),
    "thawed later": partial(thawed, at_first=False),
    "tied weights": trained(made_by=partial(made, tied=True)),
    "checkpointing": trained(made_by=partial(made, reentrant=False)),
    "checkpointing, reentrant": trained(made_by=partial(made, reentrant=True)),
    "accumulation": partial(accumulated, synced=False),
    "accumulation, each summed": partial(accumulated, synced=True),
    "prefetching": trained(after=prefetching),
    "torch.compile of blocks": trained(compiled_blocks),
    "torch.compile of all": trained(after=partial(torch.compile, backend="eager")),
    "evaluation between": looked_at_between,
    "two forwards": two_forwards,
    "a forward method": forward_method,
    "optimizers in backward": optimizers_in_backward,
    "loss scaler": scaled,
    "two models": two_models,
}
SPANNING = ("nested", "bfloat16, sums in float32", "tied weights", "accumulation")
