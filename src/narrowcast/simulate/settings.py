"""The arguments of a run (how workers exchange, what each sees at each step, what makes it another run) and its files.

Examples and random numbers are functions of the seed, so a run can go on. It writes a log, one JSON object a line, and
checkpoints.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as codec_named
from narrowcast.kernels import derive
from narrowcast.parallel import LocalUpdates, Schedule, inner_codec, list_nodes
from narrowcast.simulate.world import World

SPEC, ALGORITHM = "e5m2+aps", "auto"
"""Where neither an argument nor a World says otherwise."""
DATA = ("x_train", "y_train", "x_test", "y_test")
PathLike = str | os.PathLike[str]
Rate = float | Callable[[int], float] | None


def world_of(
    workers: int | World,
    spec: object,
    algorithm: str | None,
    seed: int,
    nodes: int | Sequence[Sequence[int]] | None = None,
    inner: str | Codec | None = None,
) -> tuple[World, object]:
    """The world of a run, and what its gradients travel by. What a World says is not said again."""
    if not isinstance(workers, World):
        levels: dict[str, Any] = {"nodes": list_nodes("train", nodes, workers)}
        levels["inner"] = inner_codec("train", nodes, inner)
        return World(workers, algorithm or ALGORITHM, seed=seed, **levels), SPEC if spec is None else spec
    if nodes is not None or inner is not None:
        raise ValueError(f"train: workers={workers!r} and nodes= or inner=; give them to the World alone")
    if algorithm not in (None, workers.algorithm):
        both = f"workers={workers!r} and algorithm={algorithm!r}"
        raise ValueError(f"train: {both} differ; give the algorithm to the World alone")
    if spec is None:
        return workers, workers.codec
    # as-is is what a World has without a spec
    same = isinstance(spec, str | Codec) and codec_named(spec) == workers.codec
    if str(workers.codec) != "as-is" and not same:
        raise ValueError(f"train: workers={workers!r} and spec={spec!r} differ; give the spec in one place")
    return workers, spec


def refuse_beside_local(**given: object) -> None:
    """What has no meaning where workers exchange no gradients."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"train: {name}= with local=; workers that train by themselves exchange what they moved, by "
                f"nc.LocalSGD's own ways: leave {name}= out"
            )


def _check_data(data: object) -> None:
    missing = [name for name in DATA if not isinstance(getattr(data, name, None), torch.Tensor)]
    if missing:
        problem = f"the data ({type(data).__name__}) has no tensor {missing[0]}"
        raise TypeError(f"train: {problem}; give one of narrowcast.data, or any object with {', '.join(DATA)}")


def device_of(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Where to train; the model's own place where nothing is said."""
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError(f"train: the model ({type(model).__name__}) has no parameters; there is nothing to train")
    return first.device if device is None else torch.device(device)


def _plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python: checkpoints and logs hold those alone."""
    return value.item() if hasattr(value, "item") else value


def settings(
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    spec: object,
    lr: Rate,
    lower: Mapping[str, Any] | None,
    **facts: Any,
) -> dict[str, Any]:
    """What makes a run another run, in plain values; checkpoints are compared by it."""
    of_world = {"order": world.order, "nodes": world.nodes, "inner": str(world.inner), "seed": world.seed}
    of_world |= {"accumulate": "low" if world.low else str(world.sums.format or "fp32"), "kahan": world.sums.kahan}
    return {
        "workers": world.n,
        "algorithm": world.algorithm,
        "spec": spell(spec),
        **{name: _plain(value) for name, value in facts.items()},
        "lr": "a function of the step" if callable(lr) else _plain(lr),
        "lower": None if lower is None else _texts(lower),
        **{f"world {key}": value for key, value in of_world.items()},
        "optimizer": _of_optimizer(optimizer),
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in sorted(values.items())}


def of_local(updates: LocalUpdates | None) -> dict[str, Any] | None:
    """When and with whom workers exchange, where they train by themselves."""
    if updates is None:
        return None
    return {key: spell(value) if key == "outer" else value for key, value in vars(updates).items()}


def _of_optimizer(optimizer: Optimizer) -> list[dict[str, str]]:
    """Of each group of parameters: what steps it, and how."""
    precision = getattr(optimizer, "precision", {})
    groups = ({key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups)
    return [{"class": type(optimizer).__qualname__, **_texts({**precision, **group})} for group in groups]


def spell(spec: object) -> Any:
    """A policy as text that is the same in another process; of a rule, its name."""
    if isinstance(spec, (str, Codec)):
        return str(spec)
    if isinstance(spec, Schedule):
        return [[step, spell(inner)] for step, inner in spec.steps]
    if isinstance(spec, Mapping):
        return {str(pattern): spell(inner) for pattern, inner in spec.items()}
    name = getattr(spec, "__qualname__", type(spec).__qualname__)
    return getattr(spec, "spelled", name)


USES = ("noise", "order", "augment")
Augment = Callable[[Tensor, torch.Generator], Tensor]


@lru_cache(maxsize=2)
def _shuffle(examples: int, seed: int, epoch: int, device: torch.device | None) -> Tensor:
    """Drawn on the CPU, so that all devices see the same order; copied once an epoch."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch, 0, "order"))
    return torch.randperm(examples, generator=generator).to(device)


def seed_of(seed: int, step: int, worker: int, use: str = "noise") -> int:
    """A seed for torch's generators that no other step, worker or use has."""
    return derive(seed, step, worker, USES.index(use))


@dataclass(frozen=True)
class Batches:
    """Every epoch the examples in a new order, cut into batches, each cut into one micro-batch a worker.

    Examples that do not fill a batch are left out of that epoch. A real run that takes its examples from here sees what
    the simulated one sees.
    """

    examples: int
    batch: int
    workers: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch % self.workers or self.batch < self.workers:
            raise ValueError(f"batch={self.batch} does not divide among {self.workers} workers; take a multiple")
        if self.examples < self.batch:
            raise ValueError(f"batch={self.batch} is more than the {self.examples} training examples; take less")

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.batch

    def total_steps(self, epochs: float | None, steps: int | None) -> int:
        """Of a run that is so many epochs or so many steps long."""
        if (epochs is None) == (steps is None):
            raise ValueError("train: give either epochs= or steps=")
        total = steps if steps is not None else round(float(epochs or 0) * self.steps_per_epoch)
        if total < 1:
            length = f"steps={steps}" if steps is not None else f"epochs={epochs} of {self.steps_per_epoch} steps each"
            raise ValueError(f"train: {length} leave nothing to do; a run has one step at least")
        return total

    def indices(self, step: int, worker: int, device: torch.device | None = None) -> Tensor:
        """The examples of one worker at one step."""
        epoch, at = divmod(step, self.steps_per_epoch)
        size = self.batch // self.workers
        first = at * self.batch + worker * size
        return _shuffle(self.examples, self.seed, epoch, device)[first : first + size]


class Data(Protocol):
    """`narrowcast.data` gives such objects; any other with these four tensors will do."""

    @property
    def x_train(self) -> Tensor: ...
    @property
    def y_train(self) -> Tensor: ...
    @property
    def x_test(self) -> Tensor: ...
    @property
    def y_test(self) -> Tensor: ...


class MicroBatches:
    """The data on the device, and the micro-batch of each worker."""

    def __init__(
        self, data: Data, device: torch.device, batch: int, workers: int, seed: int, augment: Augment | None
    ) -> None:
        _check_data(data)
        batches = Batches(len(data.x_train), batch, workers, seed)
        if not data.x_train.is_floating_point():
            raise TypeError(f"train: x_train is {data.x_train.dtype}; give floats, for example data.normalised()")
        self.x, self.y = data.x_train.to(device), data.y_train.to(device)
        self.x_test, self.y_test = data.x_test.to(device), data.y_test.to(device)
        self.batches, self._augment, self._device = batches, augment, device

    def of(self, step: int, worker: int) -> tuple[Tensor, Tensor]:
        indices = self.batches.indices(step, worker, self._device)
        x, y = self.x[indices], self.y[indices]
        if self._augment is not None:
            generator = torch.Generator(self._device).manual_seed(self.seed(step, worker, "augment"))
            x = self._augment(x, generator)
        return x, y

    def seed(self, step: int, worker: int, use: str = "noise") -> int:
        return seed_of(self.batches.seed, step, worker, use)


VERSION = 2
"""Of checkpoints."""
Record = dict[str, Any]


class Log:
    """Records in memory and, where a path is given, in a file.

    Kinds: "start" (the settings and the wire of every tensor), "step" (loss, lr), "error" (a layer), "test" (loss and
    accuracy after so many steps), "end".
    """

    def __init__(self, path: PathLike | None = None) -> None:
        self._path = Path(path) if path is not None else None
        self.records: list[Record] = []

    def write(self, kind: str, **facts: Any) -> None:
        record = {"kind": kind, **{key: _finite(value) for key, value in facts.items()}}
        self.records.append(record)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record["kind"] == kind]

    def begin(self, records: Sequence[Record] = ()) -> None:
        """Start with the records of a checkpoint, or none: whatever was written after it never happened."""
        self.records = list(records)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read_log(path: PathLike) -> list[Record]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor Infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_checkpoint(path: PathLike, state: Mapping[str, Any]) -> None:
    """Written under another name, which then becomes `path`, so that there is always a whole one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load_checkpoint(path: PathLike, device: torch.device, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of a run with the same settings; None where there is no file yet."""
    if not Path(path).exists():
        return None
    state = _read_checkpoint(path, device)
    if state.get("version") != VERSION:
        raise ValueError(f"train: {path} is no checkpoint of this version; give another path or resume=False")
    other = {key: (state["run"].get(key), value) for key, value in run.items() if state["run"].get(key) != value}
    if other:
        differences = ", ".join(f"{key} was {was!r} and is {now!r}" for key, (was, now) in other.items())
        raise ValueError(f"train: {path} is of another run: {differences}; give another path or resume=False")
    return state


def _read_checkpoint(path: PathLike, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # whatever a file that is something else makes of torch
        problem = f"train: {path} is no checkpoint, or a broken one ({type(error).__name__}: {str(error)[:200]})"
        raise ValueError(f"{problem}; give another path or resume=False") from error
    return state if isinstance(state, dict) else {}
