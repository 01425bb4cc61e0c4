"""What people do with DistributedDataParallel."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dist.features.common import STEPS, Attach, Feature, Updates, alternating, moved, together, values
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

INPUTS, WIDE, CLASSES = 32, 160, 8
SGD = partial(torch.optim.SGD, lr=0.05)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seed_and_make() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return seed_and_make


def layers(depth: int = 3) -> nn.Sequential:
    inner = [part for _ in range(depth - 2) for part in (nn.Linear(WIDE, WIDE), nn.ReLU())]
    return nn.Sequential(nn.Linear(INPUTS, WIDE), nn.ReLU(), *inner, nn.Linear(WIDE, CLASSES))


class Branches(nn.Module):
    """One of two layers, in turns."""

    def __init__(self, first: int = 0, both: bool = False) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(INPUTS, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.head, self.calls, self.both = nn.Linear(WIDE, CLASSES), first, both

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.relu(self.stem(x))
        return self.head(self.left(x) if self.both or self.calls % 2 else self.right(x))


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.parts, self.reentrant = layers(4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class Words(nn.Module):
    def __init__(self, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(100, 64, sparse=sparse), nn.Linear(64, 64)
        self.out = nn.Linear(64, 100, bias=False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.inner(self.words(x))))


class Typed(nn.Module):
    """Three types in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(INPUTS, WIDE).bfloat16(), nn.Linear(WIDE, WIDE).double()
        self.c = nn.Linear(WIDE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(F.relu(self.a(x.bfloat16())).double()).float())


class Odd(nn.Module):
    """A transposed parameter, a number, and one without values."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Parameter((torch.randn(WIDE, INPUTS) * 0.05).t())
        self.scale, self.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(WIDE, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.across) * self.scale + self.none.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, 64, 2, batch_first=True), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x.view(-1, 4, 8))[0][:, -1])


def convolutions() -> nn.Module:
    parts = nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 32, 3, padding=1), nn.ReLU())
    parts += nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.Flatten(), nn.Linear(512, CLASSES))
    return parts.to(memory_format=torch.channels_last)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, WIDE), nn.BatchNorm1d(WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES))


def frozen_first() -> nn.Module:
    module = layers()
    module[0].requires_grad_(False)
    return module


def parametrized() -> nn.Module:
    module = layers()
    nn.utils.parametrizations.weight_norm(module[2])
    return module


def batch(attach: Attach, step: int) -> tuple[Tensor, Tensor]:
    noise = attach.noise(step)
    return torch.randn(16, INPUTS, generator=noise), torch.randint(CLASSES, (16,), generator=noise)


def words(attach: Attach, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(100, (16,), generator=attach.noise(step))
    return x, x


def loss_of(model: nn.Module, attach: Attach, step: int, of: Callable[..., Any] = batch) -> Tensor:
    x, y = of(attach, step)
    parameter = next(model.parameters())
    if x.is_floating_point() and parameter.dtype in (torch.float16, torch.float64):
        x = x.to(parameter.dtype)
    return F.cross_entropy(model(x).float(), y)


def trained(
    make: Callable[[], nn.Module] = layers,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    of: Callable[..., Any] = batch,
    steps: int = STEPS,
    clip: float = 0.0,
    keep: bool = False,
    autocast: bool = False,
    attached: dict[str, Any] | None = None,
    **options: Any,
) -> Feature:
    """The plain loop with some options."""

    def feature(attach: Attach) -> Updates:
        model = DDP(seeded(make)(), process_group=attach.group, **options)
        attach(model, **(attached or {}))
        before, of_it = values(model.module), optimizer(model.parameters())
        for step in range(steps):
            of_it.zero_grad(set_to_none=not keep)
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = loss_of(model, attach, step, of)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            of_it.step()
        return moved(model.module, before)

    return feature


Loop = Callable[[Attach, DDP, torch.optim.Optimizer], None]


def looped(loop: Loop, make: Callable[[], nn.Module] = layers, **options: Any) -> Feature:
    """A loop of one's own."""

    def feature(attach: Attach) -> Updates:
        model = DDP(seeded(make)(), process_group=attach.group, **options)
        if loop is not attached_late:
            attach(model)
        before = values(model.module)
        loop(attach, model, SGD(model.parameters()))
        return moved(model.module, before)

    return feature


def one_step(attach: Attach, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, attach, step).backward()
    optimizer.step()


def accumulated(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer, sync: bool = False) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            with model.no_sync() if not sync and micro < 2 else contextlib.nullcontext():
                (loss_of(model, attach, 10 * step + micro) / 3).backward()
        optimizer.step()


def uneven(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer, initial: bool = True) -> None:
    with model.join(divide_by_initial_world_size=initial):
        for step in range(STEPS + 2 * attach.rank):
            one_step(attach, model, optimizer, step)


def attached_late(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2 * STEPS):
        if step == STEPS:
            attach(model)
        one_step(attach, model, optimizer, step)


def frozen_on_the_way(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        model.module[0].requires_grad_(step < 2)
        one_step(attach, model, optimizer, step)


def looked_at_between(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        one_step(attach, model, optimizer, step)
        model.eval()
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                model(batch(attach, step)[0])
        model.train()


def two_forwards(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    for step in alternating(optimizer):
        (loss_of(model, attach, step) + loss_of(model, attach, step + 50)).backward()


def batches_left_out(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad()
        with contextlib.suppress(RuntimeError):
            if step == 1:
                raise RuntimeError("out of memory")
            one_step(attach, model, optimizer, step)


def beside_collectives(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        one_step(attach, model, optimizer, step)
        work = dist.all_reduce(torch.ones(3), group=attach.group, async_op=True)
        work.wait()
        dist.barrier(attach.group)


def stepped_by_hand(attach: Attach, model: DDP, _: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        loss_of(model, attach, step).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.05)
            p.grad = None


def in_parts(attach: Attach, model: DDP, _: torch.optim.Optimizer) -> None:
    """ZeRO's first stage."""
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=attach.group, lr=0.05)
    for step in range(STEPS):
        one_step(attach, model, optimizer, step)


def stateless(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    for step in alternating(optimizer):
        x, y = batch(attach, step)
        F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y).backward()


def under_anomaly_detection(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    with torch.autograd.set_detect_anomaly(True):
        one_step(attach, model, optimizer, 0)


def weights_saved_and_loaded(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    one_step(attach, model, optimizer, 0)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    one_step(attach, model, optimizer, 1)


def compiled(attach: Attach, model: DDP, optimizer: torch.optim.Optimizer) -> None:
    called = torch.compile(model, backend="eager")
    for step in range(2):
        one_step(attach, called, optimizer, step)


def scaled(attach: Attach) -> Updates:
    """A loss scale that grows, and an Inf on one rank."""
    model = DDP(seeded(layers)(), process_group=attach.group)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    attach(model, scaler=scaler)
    before, optimizer = values(model.module), SGD(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, attach, step) * (float("inf") if step == 2 and attach.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return moved(model.module, before)


def two_models(attach: Attach, one_optimizer: bool) -> Updates:
    a, b = (DDP(seeded(make)(), process_group=attach.group) for make in (layers, partial(layers, 4)))
    attach(a)
    attach(b)
    before = values(a.module), values(b.module)
    both = [*a.parameters(), *b.parameters()]
    optimizers = [SGD(both)] if one_optimizer else [SGD(a.parameters()), SGD(b.parameters())]
    for step in alternating(*optimizers):
        x, _ = batch(attach, step)
        F.mse_loss(a(x), b(x + 1)).backward()
    return together(a=(a.module, before[0]), b=(b.module, before[1]))


FEATURES: dict[str, Feature] = {
    "plain": trained(),
    "small tensors as they are": trained(attached={"min_values": 10_000}),
    "strict": trained(attached={"strict": True}),
    "gradients are views": trained(gradient_as_bucket_view=True),
    "gradients are views that are kept": trained(gradient_as_bucket_view=True, keep=True),
    "many buckets": trained(partial(layers, 6), bucket_cap_mb=0.05),
    "unused": trained(Branches, steps=6, find_unused_parameters=True),
    "unused, views, kept": trained(Branches, find_unused_parameters=True, gradient_as_bucket_view=True, keep=True),
    "unused on one rank": looped(
        lambda a, m, o: (setattr(m.module, "calls", a.rank), [one_step(a, m, o, s) for s in range(4)])[0],
        Branches,
        find_unused_parameters=True,
    ),
    "unused are skipped": trained(Branches, find_unused_parameters=True, skip_all_reduce_unused_params=True),
    "static graph": trained(partial(Branches, both=True), steps=5, static_graph=True),
    "static graph, views": trained(partial(Branches, both=True), static_graph=True, gradient_as_bucket_view=True),
    "static graph, two forwards": looped(two_forwards, static_graph=True),
    "join": looped(uneven),
    "join, live ranks": looped(partial(uneven, initial=False)),
    "accumulation": looped(accumulated),
    "accumulation without no_sync": looped(partial(accumulated, sync=True)),
    "frozen before": trained(frozen_first),
    "frozen on the way": looped(frozen_on_the_way, find_unused_parameters=True),
    "sparse embedding": trained(partial(Words, sparse=True), of=words),
    "dense embedding": trained(Words, of=words),
    "tied weights": trained(partial(Words, tied=True), of=words),
    "batch norm": trained(normalised),
    "batch norm, buffers stay": trained(normalised, broadcast_buffers=False),
    "channels last": trained(convolutions),
    "recurrent": trained(Recurrent),
    "odd parameters": trained(Odd),
    "parametrized": trained(parametrized, steps=2),
    "two forwards": looped(two_forwards),
    "checkpointing": trained(partial(Recomputed, False)),
    "checkpointing, reentrant": trained(partial(Recomputed, True)),
    "checkpointing, reentrant, static": trained(partial(Recomputed, True), static_graph=True),
    "clipping": trained(clip=0.1),
    "AdamW": trained(optimizer=partial(torch.optim.AdamW, lr=1e-3)),
    "autocast": trained(autocast=True),
    "bfloat16": trained(lambda: layers().bfloat16(), autocast=True, optimizer=partial(torch.optim.SGD, lr=0.5)),
    "float16": trained(lambda: layers().half(), optimizer=partial(torch.optim.SGD, lr=0.5)),
    "float64": trained(lambda: layers().double()),
    "several types": trained(Typed),
    "loss scaler": scaled,
    "ZeRO": looped(in_parts),
    "steps by hand": looped(stepped_by_hand),
    "attached after steps": looped(attached_late),
    "evaluation between": looped(looked_at_between),
    "batches left out": looped(batches_left_out),
    "other collectives": looped(beside_collectives),
    "functional call": looped(stateless),
    "anomaly detection": looped(under_anomaly_detection),
    "weights saved and loaded": looped(weights_saved_and_loaded),
    "torch.compile outside": looped(compiled),
    "torch.compile inside": trained(lambda: torch.compile(layers(), backend="eager"), steps=2),
    "two models, two optimizers": partial(two_models, one_optimizer=False),
    "two models, one optimizer": partial(two_models, one_optimizer=True),
}

SPANNING = (
    *("gradients are views that are kept", "many buckets", "unused on one rank", "join, live ranks", "accumulation"),
    *("sparse embedding", "checkpointing", "loss scaler"),
)
"""For every test run: one of each kind of thing that can go wrong."""
