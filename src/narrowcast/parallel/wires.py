"""A place of a model where tensors travel: its specs, its noise and its counters.

Gradients have `attach`. Activations cross at many places of a model, forward and backward, so each place has its own
`Wires`: a spec for each direction, random bits that no other place or call shares, and a count of what was sent.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from narrowcast.codecs import Codec, refuse_differences, refuse_low_rank
from narrowcast.codecs import codec as codec_named
from narrowcast.collectives import Work
from narrowcast.parallel.seeds import key_of, made_before, seed_of

Spec = str | Codec


class Direction(enum.Enum):
    """Which way a tensor goes: activations forward, their gradients backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass
class Traffic:
    """What this rank sent in one direction."""

    calls: int = 0
    values: int = 0
    sent_bytes: int = 0
    plain_bytes: int = 0
    """What the same call would have sent with the tensor's own type."""
    seconds: float = 0.0
    """How long this rank waited: the codec's time and the link's, less what computation hid."""

    @property
    def ratio(self) -> float:
        """How many times fewer bytes."""
        return self.plain_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def count(self, sent: int, plain: int, values: int, seconds: float = 0.0) -> None:
        self.calls += 1
        self.sent_bytes += sent
        self.plain_bytes += plain
        self.values += values
        self.seconds += seconds


@dataclass(frozen=True)
class Turn:
    """One call: its codec, and where stochastic rounding takes its bits."""

    codec: Codec
    seed: int
    step: int


Start = Callable[[Turn], Work | None]


@dataclass
class Sending:
    """A collective under way. It is counted when it has been waited for, so that counters are never behind."""

    work: Work
    traffic: Traffic
    values: int
    plain_bytes: int
    counted: bool = False

    def wait(self) -> None:
        began = time.perf_counter()
        self.work.wait()
        if not self.counted:
            self.counted = True
            self.traffic.count(self.work.sent_bytes, self.plain_bytes, self.values, time.perf_counter() - began)


def activation_codecs(what: str, forward: Spec, backward: Spec | None) -> tuple[Codec, Codec]:
    """The codecs of both directions; backward=None: as forward. Raises where one cannot be used for activations."""
    there, back = (codec_named(spec) for spec in (forward, forward if backward is None else backward))
    for direction, codec in (("forward", there), ("backward", back)):
        refuse_low_rank(f"{what}: {direction}", codec)
        refuse_differences(f"{what}: {direction}", codec)
        if codec.feedback:
            raise ValueError(
                f"{what}: {direction}={codec}; activations differ from call to call, so there is nothing to feed back: "
                "leave out +ef"
            )
    return there, back


@dataclass(eq=False)
class Route:
    """A place's codecs, noise and counters, without a group: what pipelines and collectives share."""

    forward: Codec
    backward: Codec
    key: str
    """Tells this place from all others, for noise."""
    name: str = ""
    traffic: dict[Direction, Traffic] = field(default_factory=lambda: {d: Traffic() for d in Direction})
    notes: list[str] = field(default_factory=list)
    """What travelled as it is, and why."""
    _steps: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))

    def codec(self, direction: Direction) -> Codec:
        return self.forward if direction is Direction.FORWARD else self.backward

    def turn(self, direction: Direction) -> Turn:
        """The next call in a direction: every call, so every microbatch, has noise of its own."""
        step = self._steps[direction]
        self._steps[direction] = step + 1
        return Turn(self.codec(direction), seed_of(f"{self.key} {direction.value}"), step)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def stats(self) -> dict[str, float]:
        """Counters of both directions, flat."""
        counters: dict[str, float] = {}
        for direction, traffic in self.traffic.items():
            counters |= {f"{direction.value}_{key}": value for key, value in vars(traffic).items()}
            counters[f"{direction.value}_ratio"] = traffic.ratio
        return counters


class Wires(Route):
    """Specs for activations and for their gradients between the ranks of a group.

    All ranks of the group make theirs in the same order: the number is part of the noise's key, as are `seed`, the
    group's name and its ranks, so that no two places of a model and no two groups share random bits.
    """

    def __init__(
        self,
        forward: Spec = "as-is",
        backward: Spec | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        name: str = "",
        seed: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("Wires: no process group; call torch.distributed.init_process_group first")
        chosen = group or dist.group.WORLD
        if not isinstance(chosen, dist.ProcessGroup):
            raise ValueError("Wires: this rank is no member of the group; only its members make wires")
        super().__init__(*activation_codecs("Wires", forward, backward), _key(chosen, seed), name)
        self.group = chosen
        self.rank, self.world = dist.get_rank(chosen), dist.get_world_size(chosen)

    def start(self, direction: Direction, call: Start, values: int, plain_bytes: int) -> Sending:
        """Start a collective in its turn."""
        work = call(self.turn(direction))
        assert work is not None
        return Sending(work, self.traffic[direction], values, plain_bytes)

    def run(self, direction: Direction, call: Start, values: int, plain_bytes: int) -> None:
        self.start(direction, call, values, plain_bytes).wait()


def _key(group: dist.ProcessGroup, seed: int) -> str:
    key = key_of("wires", seed, group)
    return f"{key} {made_before(key)}"


_ATTRIBUTE = "_narrowcast_routes"


def remember(module: torch.nn.Module, route: Route) -> None:
    """Let `routes` find it; not a part of the module's state."""
    object.__setattr__(module, _ATTRIBUTE, [*getattr(module, _ATTRIBUTE, []), route])


def forget(module: torch.nn.Module, route: Route) -> None:
    object.__setattr__(module, _ATTRIBUTE, [r for r in getattr(module, _ATTRIBUTE, []) if r is not route])


def routes(model: torch.nn.Module) -> dict[str, Route]:
    """Every place of a model where tensors travel, by the name of its module."""
    every = {}
    for path, module in model.named_modules():
        for route in getattr(module, _ATTRIBUTE, []):
            every[".".join(part for part in (path, route.name) if part)] = route
    return every


def stats(model: torch.nn.Module) -> dict[str, float]:
    """Bytes, values and seconds of this rank, summed over all places of a model, by direction."""
    total = Route(codec_named("as-is"), codec_named("as-is"), "")
    for route in routes(model).values():
        for direction, traffic in route.traffic.items():
            for key, value in vars(traffic).items():
                setattr(total.traffic[direction], key, getattr(total.traffic[direction], key) + value)
    return total.stats()


def explain(model: torch.nn.Module) -> str:
    """A table of all places: specs, calls, bytes, and what travelled as it is."""
    every = routes(model)
    width = max([len(name) for name in every] + [5])
    lines = [f"{'place':{width}}  {'direction':9}  {'wire':14}  {'calls':>7}  {'sent bytes':>12}  {'fewer':>6}"]
    for name, route in every.items():
        for direction, traffic in route.traffic.items():
            counted = f"{traffic.calls:>7}  {traffic.sent_bytes:>12}  {traffic.ratio:>5.2f}x"
            lines.append(f"{name:{width}}  {direction.value:9}  {route.codec(direction)!s:14}  {counted}")
        lines += [f"{name}: {note}" for note in route.notes]
    return "\n".join(lines)
