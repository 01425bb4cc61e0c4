"""What `--model` names: a built-in description, a file, or a module, which a few steps on this machine profile."""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast.measure import DeviceClock, mean
from narrowcast.parallel import buckets as ddp
from narrowcast.predict import zoo
from narrowcast.predict.cluster import Cluster
from narrowcast.predict.model import Description, Profile, TensorTime, read_description, read_profile
from narrowcast.toml_file import parse_toml, read_text

STEPS, WARM_UP = 16, 6
DEFAULT_BATCH = 16
"""Samples of a real model, where nobody says how many."""

_Run = tuple[float, float, float, dict[str, float]]
"""Seconds of forward, backward and update, and when each gradient was ready."""


class ModelError(ValueError):
    """A model that cannot be found, imported or run."""


def find(target: str) -> Any:
    """What `package.module:name` or `path/to/file.py:name` names."""
    module_name, colon, name = target.rpartition(":")
    if not colon:
        raise ModelError(f"model: got {target!r}; a module is needed: give package.module:name or file.py:name")
    try:
        module = _from_file(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise ModelError(f"model: importing {module_name} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ModelError(f"model: {module_name} has no {name!r}") from None


def _from_file(path: str) -> Any:
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(target: str) -> nn.Module:
    """The module itself: an instance, a class, or a function that makes one."""
    named = find(target)
    if isinstance(named, nn.Module):
        return named
    try:
        made = named()
    except Exception as error:
        raise ModelError(f"model: {target}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ModelError(f"model: {target} gives a {type(made).__name__}; an nn.Module is wanted")
    return made


def example_batch(module: nn.Module, shape: str, batch: int, seed: int = 0) -> Tensor:
    """A random batch: "3x224x224" of floats, or "int:1000:128", 128 numbers below 1000."""
    generator = torch.Generator().manual_seed(seed)
    if not shape:
        first = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
        if first is None:
            raise ModelError("model: say what goes in, with --input 3x224x224 or --input int:VOCABULARY:LENGTH")
        shape = str(first.in_features)
    words = shape.split(":")
    try:
        if words[0] == "int":
            sizes = [int(part) for part in words[2].split("x")]
            return torch.randint(int(words[1]), (batch, *sizes), generator=generator)
        return torch.randn(batch, *(int(part) for part in shape.split("x")), generator=generator)
    except (ValueError, IndexError):
        raise ModelError(f"model: --input {shape!r} is neither like 3x224x224 nor like int:1000:128") from None


def default_loss(output: Any) -> Tensor:
    """The mean square of all that comes out: its gradient reaches every parameter that the output depends on."""
    tensors = [output] if isinstance(output, Tensor) else list(getattr(output, "values", lambda: output)())
    return torch.stack([t.float().square().mean() for t in tensors if isinstance(t, Tensor)]).sum()


class Profiler:
    """Steps of a model, one at a time and between other things; then what they were like. Parameters do not change."""

    def __init__(
        self,
        module: nn.Module,
        batch: Tensor,
        loss: Callable[[Any], Tensor] = default_loss,
        optimizer: torch.optim.Optimizer | None = None,
        bf16: bool = False,
    ) -> None:
        """optimizer: whose updates take their time, with a learning rate of 0. bf16: the forward pass by autocast."""
        self._module, self._batch, self._loss = module, batch, loss
        self._optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.0)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._clock = DeviceClock(device)
        self._autocast = torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()
        self._runs: list[_Run] = []
        self._ready: dict[str, Any] = {}
        """When each gradient of this step was ready."""
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(partial(self._mark, name)) for name, p in parameters]

    def _mark(self, name: str, _: Tensor) -> None:
        self._ready[name] = self._clock.mark()

    def step(self) -> None:
        try:
            self._runs.append(self._timed_step())
        except Exception as error:
            raise ModelError(f"model: a training step failed: {type(error).__name__}: {error}") from error

    def _timed_step(self) -> _Run:
        mark, seconds = self._clock.mark, self._clock.seconds
        self._ready = {}
        self._optimizer.zero_grad()
        begin = mark()
        with self._autocast:
            value = self._loss(self._module(self._batch))
        forward = mark()
        value.backward()
        backward = mark()
        self._optimizer.step()
        update = mark()
        self._clock.wait()
        since = {name: seconds(forward, at) for name, at in self._ready.items()}
        return seconds(begin, forward), seconds(forward, backward), seconds(backward, update), since

    def result(self, name: str, warm_up: int = WARM_UP) -> Profile:
        """The mean of the middle half of the steps after the first ones."""
        # as low rank sends them
        named = self._module.named_parameters()
        runs, shapes = self._runs[warm_up:], {key: ddp.memory_shape(p) or tuple(p.shape) for key, p in named}
        got = [key for key in runs[0][3] if all(key in run[3] for run in runs)]
        if not got:
            raise ModelError("model: no parameter got a gradient in a training step")
        ready = {key: _middle([run[3][key] for run in runs]) for key in got}
        forward, backward, update = (_middle(list(part)) for part in zip(*(run[:3] for run in runs), strict=True))
        totals = [sum(run[:3]) for run in runs]
        return Profile(
            *(name, len(self._batch), forward, backward, update),
            tensors=tuple(
                TensorTime(key, math.prod(shapes[key]), ready[key], shapes[key])
                for key in sorted(got, key=lambda k: ready[k])
            ),
            spread=min(0.5, statistics.pstdev(totals) / statistics.fmean(totals) / len(totals) ** 0.5),
            source=f"{len(runs)} steps, torch {torch.__version__}, {torch.get_num_threads()} thread(s)",
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def profile(
    module: nn.Module,
    batch: Tensor,
    loss: Callable[[Any], Tensor] = default_loss,
    name: str = "model",
    steps: int = STEPS,
    before_step: Callable[[], object] = lambda: None,
) -> Profile:
    """Run a few real steps and take the mean of the middle half. The parameters do not change: the learning rate is 0.

    before_step: called before each step, such as a barrier that lets several ranks begin together.
    """
    with closing(Profiler(module, batch, loss)) as profiler:
        for _ in range(WARM_UP + steps):
            before_step()
            profiler.step()
    return profiler.result(name)


def profile_together(module: nn.Module, batch: Tensor, name: str, steps: int = STEPS) -> Profile:
    """Collective: all ranks step at the same time without communication; each gets the mean over them."""
    return mean_over_ranks(profile(module, batch, name=name, steps=steps, before_step=dist.barrier))


def mean_over_ranks(own: Profile) -> Profile:
    """Collective: the mean of all ranks' profiles of the same model."""
    world = dist.get_world_size()
    order = sorted(own.tensors, key=lambda t: t.name)
    forward, backward, update, *ready = mean([own.forward, own.backward, own.update, *(t.ready for t in order)])
    tensors = sorted((replace(t, ready=r) for t, r in zip(order, ready, strict=True)), key=lambda t: t.ready)
    return replace(own, forward=forward, backward=backward, update=update, tensors=tuple(tensors), ranks=world)


def _middle(values: list[float]) -> float:
    """The mean of the middle half: no outlier counts, and it does not jump between two peaks as a median does."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


@dataclass(frozen=True)
class ModelSource:
    """A profile, and what it came from."""

    profile: Profile
    description: Description | None = None
    module: nn.Module | None = None
    batches: tuple[Tensor, Tensor] | None = None
    samples: int = 0


def resolve(
    name: str,
    cluster: Cluster | None = None,
    *,
    batch: int = 0,
    shape: str = "",
    flops: float = 0.0,
    compute_ms: float = 0.0,
    steps: int = STEPS,
    parameters: float = 0.0,
) -> ModelSource:
    """Find a model by whatever a person may have given. parameters: their number, where nothing else is known."""
    check_numbers(batch=batch, flops=flops, compute_ms=compute_ms, steps=steps)
    if parameters:
        return _from_description(zoo.of_size(parameters), cluster, batch, flops, compute_ms)
    if name in zoo.MODELS:
        return _from_description(zoo.MODELS[name](), cluster, batch, flops, compute_ms)
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ModelError(f"model: no file {name}")
        document = parse_toml(read_text(name), name)
        if "layer" in document.values:
            return _from_description(read_description(document), cluster, batch, flops, compute_ms)
        return ModelSource(read_profile(document))
    if ":" in name:
        module = build(name)
        first, second = (example_batch(module, shape, batch or DEFAULT_BATCH, seed) for seed in (0, 1))
        if torch.cuda.is_available():
            module, first, second = module.cuda(), first.cuda(), second.cuda()
        made = profile(module, first, name=name, steps=steps)
        return ModelSource(made, module=module, batches=(first, second))
    raise ModelError(
        f"model: unknown {name!r}; take {', '.join(zoo.MODELS)}, a profile or description (.toml), package.module:name "
        "or file.py:name"
    )


def check_numbers(*, batch: int, flops: float, compute_ms: float, steps: int) -> None:
    """0 stands for the default, but for steps, of which there must be some."""
    for option, value in (("--batch", batch), ("--flops", flops), ("--compute-ms", compute_ms), ("--steps", steps)):
        if not 0 <= value < math.inf or (option == "--steps" and not value):
            raise ModelError(f"model: {option}: must be above 0, got {value:g}")


def _from_description(
    made: Description, cluster: Cluster | None, batch: int, flops: float, compute_ms: float
) -> ModelSource:
    size = batch or made.batch
    if compute_ms:
        return ModelSource(made.profile_of(compute_ms / 1e3, size), made, samples=made.samples)
    device = cluster.device if cluster else None
    speed = flops or (device.flops if device else 0.0)
    memory = device.memory_gbyte if device else 0.0
    return ModelSource(made.profile(speed, memory, size, spread=0.2 if not flops else 0.1), made, samples=made.samples)
