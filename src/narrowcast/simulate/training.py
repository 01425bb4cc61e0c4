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
from narrowcast.parallel import MIN_VALUES
from narrowcast.simulate import settings as arguments
from narrowcast.simulate.exchange import GradientExchange
from narrowcast.simulate.precision.casts import Quantizer
from narrowcast.simulate.precision.lowering import Lowered
from narrowcast.simulate.precision.lowering import lower as lower_model
from narrowcast.simulate.settings import Augment, Batches, Data, Log, MicroBatches, PathLike, Rate, Record
from narrowcast.simulate.world import World

FLUSH_STEPS = 50
"""Losses stay on the device for so many steps: a look at each would make the host wait."""
TEST_BATCH = 1000

LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Run:
    """A training under way: what hooks get to see, and what `train` returns."""

    model: nn.Module
    optimizer: Optimizer
    world: World
    exchange: GradientExchange
    batches: Batches
    log: Log
    total_steps: int
    lowered: Lowered | None = None
    """What makes the model compute in low precision, where asked for."""
    step: int = 0
    """Steps done."""
    stop: bool = False
    """A hook that sets this ends the run after its step."""
    loss: Tensor | None = None
    """Of the last step: the mean over all workers."""
    accuracy: float | None = None
    """On the test set, at the last look."""
    test_loss: float | None = None
    pending: list[tuple[int, Tensor, float]] = field(default_factory=list)

    @property
    def epoch(self) -> float:
        return self.step / self.batches.steps_per_epoch

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    @property
    def history(self) -> list[Record]:
        """Loss and accuracy on the test set, each time it was looked at."""
        return self.log.of_kind("test")


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
) -> Run:
    """Train `model` as DDP with `nc.attach(model, spec)` would on so many workers, bit for bit.

    workers: a number, or a World that says how they add. spec, algorithm, nodes, inner, min_values: as for `attach` (a
    spec, a mapping of names, a schedule, a rule); by default those of the World, with a number "e5m2+aps" and "auto".
    batch:
    examples a step, over all workers. optimizer: a function of the parameters; SGD with momentum 0.9 where none is
    given. lr: a number or a function of the step. augment: a function of a micro-batch and a generator. log: a JSONL
    file. checkpoint: a file; with resume=True a run that finds one goes on from it and ends with the same bits.
    checkpoint_every, test_every: steps; an epoch where nothing is given. error_every: measure what the exchange loses
    every so many steps. time_limit: seconds after which to save and return. lower: arguments for `simulate.lower`,
    which makes the model compute in low precision; its noise is that of `set_step(step, worker)`.
    """
    world, spec = arguments.world_of(workers, spec, algorithm, seed, nodes, inner)
    device = arguments.device_of(model, device)
    source = MicroBatches(data, device, batch, world.n, seed, augment)
    model.to(device)
    lowered = None if lower is None else lower_model(model, **lower)
    exchange = GradientExchange(model, world, spec, min_values, bucket_cap_mb)
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    total = source.batches.total_steps(epochs, steps)
    run = Run(model, make(list(model.parameters())), world, exchange, source.batches, Log(log), total, lowered)
    if lowered is not None:
        lowered.keep_master(run.optimizer)
    training = _SimulatedTraining(run, source, loss, lr, error_every, before_step, after_step)
    sizes = {"batch": batch, "examples": len(data.x_train), "min_values": min_values, "bucket_cap_mb": bucket_cap_mb}
    facts = arguments.settings(model, run.optimizer, world, spec=spec, lr=lr, lower=lower, seed=seed, **sizes)
    saver = _Saver(run, checkpoint, facts)
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
        run, exchange = self._run, self._run.exchange
        if self._before is not None:
            self._before(run)
        rate = self._set_rate()
        exchange.begin_step(run.step)
        measure = self._error_every > 0 and run.step % self._error_every == 0
        run.loss = self._gradients()
        errors = exchange.reduce(run.step, measure)
        if errors:
            # the log has the order of the steps, however often a run was cut
            self.flush()
        for error in errors:
            run.log.write("error", step=run.step, **asdict(error))
        run.optimizer.step()
        run.pending.append((run.step, run.loss, rate))
        run.step += 1
        if len(run.pending) >= FLUSH_STEPS:
            self.flush()
        if self._after is not None:
            self._after(run)

    def _set_rate(self) -> float:
        if self._lr is not None:
            # a number of numpy or torch would make a checkpoint that cannot be read
            rate = float(self._lr(self._run.step) if callable(self._lr) else self._lr)
            for group in self._run.optimizer.param_groups:
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
        run = self._run
        x, y = self._source.of(run.step, worker)
        torch.manual_seed(self._source.seed(run.step, worker))
        _set_worker(run, worker)
        for parameter in run.exchange.parameters.values():
            parameter.grad = None
        loss = self._loss(run.model(x), y)
        loss.backward()
        run.exchange.take(worker)
        return loss.detach()

    def test(self) -> None:
        """Loss and accuracy on the test set, into the log."""
        run, source = self._run, self._source
        self.flush()
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

    def flush(self) -> None:
        """Write the losses that wait on the device."""
        pending, self._run.pending = self._run.pending, []
        if not pending:
            return
        losses = torch.stack([loss for _, loss, _ in pending]).tolist()
        for (step, _, rate), loss in zip(pending, losses, strict=True):
            self._run.log.write("step", step=step, loss=loss, lr=rate)


def _set_worker(run: Run, worker: int) -> None:
    """Whose noise is drawn from now on."""
    if run.lowered is not None:
        # each worker's calls are its first of this step, as they are on ranks
        run.lowered.set_step(run.step, worker)
    for module in run.model.modules():
        if isinstance(module, Quantizer):
            module.worker = worker


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    for there, here in zip(target, source, strict=True):
        there.copy_(here)


@dataclass(frozen=True)
class _Saver:
    """Checkpoints of a run, and the way back."""

    _run: Run
    _path: PathLike | None
    settings: dict[str, Any]

    def log_start(self) -> None:
        """The settings, and the wire of every tensor or why it stays as it is."""
        rows = self._run.exchange.rows()
        wires = [{"name": row.name, "values": row.numel, "wire": row.wire, "why": row.why} for row in rows]
        facts = {key: value for key, value in self.settings.items() if key != "parameters"}
        self._run.log.write("start", **facts, steps=self._run.total_steps, tensors=wires)

    def save(self) -> None:
        if self._path is None:
            return
        run = self._run
        state: dict[str, Any] = {
            "run": self.settings,
            "step": run.step,
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "residuals": run.world.residuals.exact(),
            "factors": run.world.factors.state_dict(),
            "ready": run.exchange.ready,
            "policy": run.exchange.watch.state_dict(),
            "log": run.log.records,
            "test": [run.accuracy, run.test_loss],
        }
        arguments.save_checkpoint(self._path, state)

    def load(self, device: torch.device) -> bool:
        """Whether there was something to go on from."""
        state = arguments.load_checkpoint(self._path, device, self.settings) if self._path is not None else None
        if state is None:
            return False
        run = self._run
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.world.residuals.load_exact(state["residuals"])
        run.world.factors.load(state.get("factors", {}))
        if state["ready"]:
            run.exchange.rebuild(state["ready"])
        run.exchange.watch.load_state_dict(state["policy"])
        run.step, (run.accuracy, run.test_loss) = state["step"], state["test"]
        run.log.begin(state["log"])
        return True
