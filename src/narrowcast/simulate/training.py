"""A whole data-parallel training in one process: micro-batches as workers, gradients exchanged as on a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.codecs import Codec
from narrowcast.parallel import MIN_VALUES, Autopilot, DescribedLink, LocalUpdates, auto
from narrowcast.simulate import settings as arguments
from narrowcast.simulate.exchange import GradientExchange
from narrowcast.simulate.local import LocalWorld, world_seed
from narrowcast.simulate.precision.casts import Quantizer
from narrowcast.simulate.precision.lowering import lower as lower_model
from narrowcast.simulate.run import Run, Saver
from narrowcast.simulate.settings import Augment, Data, Log, MicroBatches, PathLike, Rate
from narrowcast.simulate.world import World

FLUSH_STEPS = 50
"""Losses stay on the device for so many steps: a look at each would make the host wait."""
TEST_BATCH = 1000

LossOf = Callable[[Tensor, Tensor], Tensor]


Hook = Callable[[Run], object]


def train(
    model: nn.Module,
    data: Data,
    *,
    workers: int | World = 8,
    spec: object = None,
    algorithm: str | None = None,
    nodes: int | Sequence[Sequence[int]] | None = None,
    inner: str | Codec | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int = 256,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    lr: Rate = None,
    loss: LossOf = nn.functional.cross_entropy,
    seed: int = 0,
    device: str | torch.device | None = None,
    augment: Augment | None = None,
    log: PathLike | None = None,
    checkpoint: PathLike | None = None,
    checkpoint_every: int | None = None,
    resume: bool = True,
    test_every: int | None = None,
    error_every: int = 0,
    min_values: int = MIN_VALUES,
    bucket_cap_mb: float | None = None,
    time_limit: float | None = None,
    progress: bool = False,
    before_step: Hook | None = None,
    after_step: Hook | None = None,
    lower: dict[str, Any] | None = None,
    link: DescribedLink | Callable[[int], DescribedLink] | None = None,
    local: LocalUpdates | None = None,
) -> Run:
    """Train `model` as DDP with `nc.attach(model, spec)` would on so many workers, bit for bit.

    workers: a number, or a World that says how they add. spec, algorithm, nodes, inner, min_values: as for `attach` (a
    spec, a mapping of names, a schedule, a rule); by default those of the World, with a number "e5m2+aps" and "auto".
    With spec="auto" or `nc.auto()`, link describes the network that it decides for, for all steps or by step.
    batch: examples a step, over all workers. optimizer: a function of the parameters; SGD with momentum 0.9 where none
    is given. lr: a number or a function of the step. augment: a function of a micro-batch and a generator. log: a JSONL
    file. checkpoint: a file; with resume=True a run that finds one goes on from it and ends with the same bits.
    checkpoint_every, test_every: steps; an epoch where nothing is given. error_every: measure what the exchange loses
    every so many steps. time_limit: seconds after which to save and return. lower: arguments for `simulate.lower`,
    which makes the model compute in low precision; its noise is that of `set_step(step, worker)`. local: workers
    exchange now and then, as with `nc.LocalSGD(local=...)`; then `run.model` is the mean of all workers' models,
    which are those of `run.local`.
    """
    noise = seed
    if local is not None:
        refused = {"nodes": nodes, "inner": inner, "link": link, "bucket_cap_mb": bucket_cap_mb, "lower": lower}
        arguments.refuse_beside_local(**refused, error_every=error_every or None, algorithm=algorithm)
        noise = world_seed(seed, workers) if isinstance(workers, int) else seed
    world, spec = arguments.world_of(workers, spec, algorithm, noise, nodes, inner)
    device = arguments.device_of(model, device)
    source = MicroBatches(data, device, batch, world.n, seed, augment)
    model.to(device)
    lowered = None if lower is None else lower_model(model, **lower)
    spec = auto() if isinstance(spec, str) and spec == "auto" else spec
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    total = source.batches.total_steps(epochs, steps)
    parts: dict[str, Any] = {"gradients": None, "lowered": lowered}
    if local is None:
        parts["gradients"] = GradientExchange(model, world, spec, min_values, bucket_cap_mb, link)
        parts["optimizer"] = make(list(model.parameters()))
    else:
        parts["local"] = LocalWorld(
            *(model, world, local, spec, min_values, seed), lambda own: make(list(own.parameters()))
        )
        parts["optimizer"] = parts["local"].optimizers[0]
    run = Run(model, world=world, batches=source.batches, log=Log(log), total_steps=total, **parts)
    if lowered is not None:
        lowered.keep_master(run.optimizer)
    kind = _SimulatedTraining if local is None else _LocalTraining
    training = kind(run, source, loss, lr, error_every, before_step, after_step)
    sizes: dict[str, Any] = {
        "batch": batch,
        "examples": len(data.x_train),
        "min_values": min_values,
        "bucket_cap_mb": bucket_cap_mb,
    }
    sizes["local"] = arguments.of_local(local)
    if link is not None:
        sizes["link"] = "a function of the step" if callable(link) else str(link)
    facts = arguments.settings(model, run.optimizer, world, spec=spec, lr=lr, lower=lower, seed=seed, **sizes)
    saver = Saver(run, checkpoint, facts)
    if not (resume and saver.load(device)):
        run.log.begin()
        saver.log_start()
    per_epoch = source.batches.steps_per_epoch
    shown: Iterable[int] = range(run.step, total)
    if progress:
        from narrowcast.console import progress as bar

        shown = bar(shown, total - run.step, "training")
    until = None if time_limit is None else time.monotonic() + time_limit
    with torch.random.fork_rng([device] if device.type == "cuda" else []), ExitStack() as ending:
        ending.callback(training.flush)  # the log holds every step that was done
        for _ in shown:
            training.step()
            late = until is not None and time.monotonic() >= until
            last = run.finished or run.stop
            if last or run.step % (test_every or per_epoch) == 0:
                training.test()
            if last or late or run.step % (checkpoint_every or per_epoch) == 0:
                training.flush()
                saver.save()
            if run.stop or late:
                break
    return run


@dataclass(frozen=True)
class _SimulatedTraining:
    """One step after another."""

    _run: Run
    _source: MicroBatches
    _loss: LossOf
    _lr: Rate
    _error_every: int
    _before: Hook | None
    _after: Hook | None
    _began: float = field(default_factory=time.monotonic)

    def step(self) -> None:
        run = self._run
        if self._before is not None:
            self._before(run)
        rate = self._set_rate()
        self._advance()
        assert run.loss is not None
        run.pending.append((run.step, run.loss, rate))
        run.step += 1
        if len(run.pending) >= FLUSH_STEPS:
            self.flush()
        if self._after is not None:
            self._after(run)

    def _advance(self) -> None:
        """A step of all workers together."""
        run, exchange = self._run, self._run.exchange
        exchange.begin_step(run.step)
        measure = self._error_every > 0 and run.step % self._error_every == 0
        run.loss = self._gradients()
        if isinstance(exchange.policy, Autopilot):
            # before it decides, as on ranks, which do so in the next step
            exchange.policy.observe(float(run.loss))
        errors = exchange.reduce(run.step, measure)
        if errors:
            # the log has the order of the steps, however often a run was cut
            self.flush()
        for error in errors:
            run.log.write("error", step=run.step, **asdict(error))
        run.optimizer.step()

    def _set_rate(self) -> float:
        if self._lr is not None:
            # a number of numpy or torch would make a checkpoint that cannot be read
            rate = float(self._lr(self._run.step) if callable(self._lr) else self._lr)
            for group in (group for optimizer in self._run.optimizers for group in optimizer.param_groups):
                group["lr"] = rate
        return float(self._run.optimizer.param_groups[0]["lr"])

    def _gradients(self) -> Tensor:
        """Forward and backward of every worker; the mean loss. Buffers end as those of worker 0, as DDP has it."""
        run, model = self._run, self._run.model.train()
        buffers = list(model.buffers())
        before = [b.clone() for b in buffers]
        after: list[Tensor] = []
        losses = []
        for worker in range(run.world.n):
            if worker:
                _copy(before, buffers)
            with run.exchange.rebuild_when_ready() if run.step == 0 and worker == 0 else nullcontext():
                losses.append(self._one_worker(worker))
            if worker == 0:
                after = [b.clone() for b in buffers]
        _copy(after, buffers)
        return torch.stack(losses).mean()

    def _one_worker(self, worker: int) -> Tensor:
        loss = self._pass(self._run.model, worker)
        self._run.exchange.take(worker)
        return loss

    def _pass(self, model: nn.Module, worker: int) -> Tensor:
        """Forward and backward of one worker."""
        run = self._run
        x, y = self._source.of(run.step, worker)
        torch.manual_seed(self._source.seed(run.step, worker))
        _set_worker(run, model, worker)
        for parameter in model.parameters():
            parameter.grad = None
        loss = self._loss(model(x), y)
        loss.backward()
        return loss.detach()

    def test(self) -> None:
        """Loss and accuracy on the test set, into the log."""
        run, source = self._run, self._source
        self.flush()
        self._settle()
        run.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=source.x_test.device)
        with torch.no_grad():
            for x, y in zip(source.x_test.split(TEST_BATCH), source.y_test.split(TEST_BATCH), strict=True):
                scores = run.model(x)
                sums[0] += self._loss(scores, y).double() * len(y)
                sums[1] += (scores.argmax(dim=1) == y).sum()
        test_loss, right = (sums / len(source.y_test)).tolist()
        run.test_loss, run.accuracy = test_loss, right
        seconds = round(time.monotonic() - self._began, 3)
        run.log.write("test", step=run.step, epoch=run.epoch, loss=test_loss, accuracy=right, seconds=seconds)

    def _settle(self) -> None:
        """Make `run.model` what the training has come to."""

    def flush(self) -> None:
        """Write the losses that wait on the device."""
        pending, self._run.pending = self._run.pending, []
        if not pending:
            return
        losses = torch.stack([loss for _, loss, _ in pending]).tolist()
        for (step, _, rate), loss in zip(pending, losses, strict=True):
            self._run.log.write("step", step=step, loss=loss, lr=rate)


@dataclass(frozen=True)
class _LocalTraining(_SimulatedTraining):
    """Each worker steps by itself; they exchange when it is time."""

    def _advance(self) -> None:
        run, local = self._run, self._run.local
        assert local is not None
        losses = []
        for worker, (model, optimizer) in enumerate(zip(local.models, local.optimizers, strict=True)):
            losses.append(self._pass(model.train(), worker))
            optimizer.step()
            # of one worker at a time: there may be a thousand
            optimizer.zero_grad()
        run.loss, looked = torch.stack(losses).mean(), local.looks
        local.step()
        if local.looks > looked:
            self.flush()
            run.log.write("variance", step=run.step, variance=local.variance)

    def _settle(self) -> None:
        assert self._run.local is not None
        self._run.local.mean_into(self._run.model)


def _set_worker(run: Run, model: nn.Module, worker: int) -> None:
    """Whose noise is drawn from now on."""
    if run.lowered is not None:
        # each worker's calls are its first of this step, as they are on ranks
        run.lowered.set_step(run.step, worker)
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.worker = worker


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    for there, here in zip(target, source, strict=True):
        there.copy_(here)
