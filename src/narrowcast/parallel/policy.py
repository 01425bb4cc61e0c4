"""Which codec for which tensor: by name pattern, size, step, or any function; and policies that learn as they go."""

from __future__ import annotations

import abc
import fnmatch
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowcast.codecs import Codec, refuse_differences, refuse_low_rank
from narrowcast.codecs import codec as codec_named
from narrowcast.kernels import FLOATS

MIN_VALUES = 10_000
"""Tensors with fewer values stay as they are: they are next to nothing on the wire and the most sensitive (QSGD)."""

AS_IS = codec_named("as-is")
GRADIENT, PARAMETER = "gradient", "parameter"
"""Roles of tensors: what may be done with one depends on who has it afterwards."""
ONE_RANK = "one rank: nothing travels, and nothing is rounded"
ASKED_FOR, POLICY_SAYS_SO = "asked for", "the policy says so"
"""Why a tensor stays as it is although it could be compressed: nothing that `strict` objects to."""


@dataclass(frozen=True)
class TensorInfo:
    """What a policy may look at."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str = GRADIENT
    memory: tuple[int, ...] = ()
    """The matrix that a tensor of permuted dimensions is in memory; low rank sends this one."""

    @property
    def sent_shape(self) -> tuple[int, ...]:
        return self.memory or self.shape

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class CodecChoice:
    """The codec of a tensor and, where it stays as it is, why."""

    codec: Codec
    why: str = ""


@dataclass(frozen=True)
class Schedule:
    """Another policy from each given step on."""

    steps: tuple[tuple[int, object], ...]

    def at(self, step: int) -> object:
        return [policy for first, policy in self.steps if first <= step][-1]


Numbers = tuple[float, ...] | Tensor
RANK = " rank"
"""No tensor has this name."""


class Watching(abc.ABC):
    """A policy that looks at gradients and changes its mind: the base of those in `parallel.policies`.

    Each rank looks at its tensors and returns a few numbers; whoever runs the policy adds these over the ranks, in rank
    order, and hands the same sums to `decide` on every rank before the next step begins. So all ranks decide alike.
    """

    looks_at: str = "local"
    """`local`: this rank's gradient before the exchange. `mean`: what came back, the same on every rank."""

    @abc.abstractmethod
    def __call__(self, info: TensorInfo, step: int) -> str | Codec | None:
        """The wire of a tensor at a step; None leaves it as it is."""

    def due(self, step: int) -> bool:
        """Whether to look at all at this step. The same on every rank, so it may depend on decisions alone."""
        return True

    @abc.abstractmethod
    def look(self, info: TensorInfo, gradient: Tensor) -> Numbers:
        """A few numbers about one gradient; always as many. A tensor may stay on its device until they are added."""

    def about_rank(self) -> Numbers:
        """A few numbers about the rank itself, as often as `due`; `decide` finds their sum under RANK."""
        return ()

    @abc.abstractmethod
    def decide(self, step: int, seen: Mapping[str, tuple[float, ...]], world: int) -> None:
        """Draw the conclusions of a step. `seen`: the numbers of each tensor, added over `world` ranks."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What was learnt, for a checkpoint; the same on every rank."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""


Rule = Callable[[TensorInfo, int], "str | Codec | None"]
Policy = object
"""A spec, a codec, a mapping of name patterns to policies, a schedule, or a rule."""


def schedule(steps: Mapping[int, object]) -> Schedule:
    """A policy by step, as in `schedule({0: "as-is", 500: "e4m3+aps"})`."""
    ordered = tuple(sorted(steps.items()))
    if not ordered or ordered[0][0] != 0:
        raise ValueError(f"schedule: the first step must be 0, got {[step for step, _ in ordered]}")
    for _, policy in ordered:
        check(policy, None)  # of whatever role: that is asked where it is used
    return Schedule(ordered)


def _leaves(policy: object) -> Iterator[object]:
    """The innermost parts of a policy, in the order in which it is written down."""
    if isinstance(policy, Schedule):
        for _, inner in policy.steps:
            yield from _leaves(inner)
    elif isinstance(policy, Mapping):
        for inner in policy.values():
            yield from _leaves(inner)
    else:
        yield policy


def check(policy: object, role: str | None = GRADIENT) -> None:
    """Refuse a policy that cannot be right, now rather than in the middle of training."""
    for leaf in _leaves(policy):
        if leaf is not policy and decides_on_steps(leaf):
            raise ValueError(
                "attach: nc.auto and nc.replay decide for all tensors and all steps: give it to attach as it is, not "
                "inside of a mapping or a schedule"
            )
        if isinstance(leaf, (str, Codec)):
            _codec_for(leaf, role)
        elif not callable(leaf):
            raise _no_policy(leaf)


def _no_policy(value: object) -> TypeError:
    return TypeError(
        f"attach: {value!r} is no policy; give a spec, a mapping of name patterns, a schedule or a function"
    )


def _codec_for(spec: str | Codec, role: str | None) -> Codec:
    """Of a tensor in a role; None: in any."""
    codec = codec_named(spec)
    if role == PARAMETER:
        refuse_low_rank(f"attach: {role}s", codec)
    elif role is not None:
        refuse_differences(f"attach: {role}s", codec)
    return codec


def choose(policy: object, info: TensorInfo, step: int, min_values: int = MIN_VALUES) -> CodecChoice:
    """The codec of one tensor at one step."""
    if info.dtype not in FLOATS:
        return CodecChoice(AS_IS, f"is {info.dtype}; codecs take 16- and 32-bit floats")
    if isinstance(policy, Schedule):
        return choose(policy.at(step), info, step, min_values)
    if isinstance(policy, Mapping):
        for pattern, inner in policy.items():
            if fnmatch.fnmatchcase(info.name, pattern):
                return choose(inner, info, step, min_values)
        return CodecChoice(AS_IS, "no pattern matches its name")
    if isinstance(policy, (str, Codec)):
        return _unless_small(_codec_for(policy, info.role), info, min_values)
    if not callable(policy):
        raise _no_policy(policy)
    chosen = policy(info, step)
    if chosen is None:
        return CodecChoice(AS_IS, POLICY_SAYS_SO)
    codec = _codec_for(chosen, info.role)
    if decides_on_steps(policy):
        return CodecChoice(codec, POLICY_SAYS_SO if codec == AS_IS else "") if codec.lossless else _fit(codec, info)
    return _unless_small(codec, info, min_values) if isinstance(policy, Watching) else _fit(codec, info)


def decides_on_steps(policy: object) -> bool:
    """Whether it says how all tensors travel at a step, small ones too, as "auto" and a replay of it do."""
    return bool(getattr(policy, "alone", False))


def spelled(policy: object) -> str:
    """What ranks compare: of a policy that may leave a step to the backend its arguments. All others meet in our own
    calls, each of which is compared.
    """
    return str(getattr(policy, "spelled", "wires"))


def _fit(codec: Codec, info: TensorInfo) -> CodecChoice:
    return CodecChoice(*codec.for_shape(info.sent_shape))


def may_feed_back(policy: object) -> bool:
    """Whether a policy can ask for error feedback at some step; a function may always."""
    return any(codec_named(leaf).feedback if isinstance(leaf, (str, Codec)) else True for leaf in _leaves(policy))


def may_round(policy: object) -> bool:
    """Whether a policy can ask for a codec that rounds at some step; a function may always."""
    return any(not codec_named(leaf).lossless if isinstance(leaf, (str, Codec)) else True for leaf in _leaves(policy))


def unmatched(policy: object, names: Collection[str]) -> list[str]:
    """The patterns, of whatever depth, that match none of these names."""
    if isinstance(policy, Schedule):
        return list(dict.fromkeys(p for _, inner in policy.steps for p in unmatched(inner, names)))
    patterns: list[str] = []
    for pattern, inner in policy.items() if isinstance(policy, Mapping) else ():
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        patterns += unmatched(inner, matching) if matching else [pattern]
    return patterns


def no_match(pattern: str) -> str:
    """What to say of a pattern that matches nothing."""
    return f"the pattern {pattern!r} matches no parameter; names are those of named_parameters()"


def all_watchers(policy: object) -> list[Watching]:
    """Every part of a policy that watches, once each, in the order in which it is written down."""
    return _once(leaf for leaf in _leaves(policy) if isinstance(leaf, Watching))


def watcher_of(policy: object, info: TensorInfo, step: int) -> Watching | None:
    """The part of a policy that decides on this tensor, where that part watches."""
    if isinstance(policy, Schedule):
        return watcher_of(policy.at(step), info, step)
    if isinstance(policy, Mapping):
        inner = (inner for pattern, inner in policy.items() if fnmatch.fnmatchcase(info.name, pattern))
        return watcher_of(next(inner, None), info, step)
    return policy if isinstance(policy, Watching) else None


def _unless_small(codec: Codec, info: TensorInfo, min_values: int) -> CodecChoice:
    if not codec.lossless and info.numel < min_values:
        return CodecChoice(AS_IS, f"has {info.numel} values, under {min_values}")
    fit, why = codec.for_shape(info.sent_shape)
    return CodecChoice(fit, why or (ASKED_FOR if fit.lossless else ""))


Sum = Callable[[Tensor], Tensor]
"""Adds a small float32 vector over the ranks, in rank order: the same bits on every rank."""
Seen = dict[str, tuple[Watching, Numbers]]
"""By tensor: who looked, and what it saw."""


class Watch:
    """Runs the policies that watch, on one rank: collects what they see, adds it over the ranks, lets them decide.

    `look` may be called from any thread; `decide` before the next step's first choice.
    """

    def __init__(self, gradients: object, min_values: int = MIN_VALUES) -> None:
        self._policy, self._min_values = gradients, min_values
        self.active = bool(all_watchers(gradients))
        self._seen: Seen = {}
        self._lock = threading.Lock()

    def look(self, info: TensorInfo, gradient: Tensor, step: int, at: str) -> None:
        """Show a gradient to whoever decides on it, where that one looks at this stage (`local` or `mean`)."""
        watcher = watcher_of(self._policy, info, step)
        if watcher is None or watcher.looks_at != at or not watcher.due(step):
            return
        if info.numel < self._min_values:
            return  # too small to be compressed, so nothing is decided on it
        numbers = watcher.look(info, gradient)
        with self._lock:
            self._seen[info.name] = watcher, numbers

    def decide(self, step: int, add: Sum, world: int) -> None:
        """Let every policy that saw something draw its conclusions from the sums over all ranks. Collective."""
        seen = self.take(step)
        if not seen:
            return
        sums, agreed, first = add(self.flat(seen)).tolist(), dict[str, tuple[float, ...]](), 0
        for name in sorted(seen):
            agreed[name] = tuple(sums[first : first + len(seen[name][1])])
            first += len(agreed[name])
        for watcher in _once(seen[name][0] for name in sorted(seen)):
            own = {RANK if n.startswith(RANK) else n: agreed[n] for n in agreed if seen[n][0] is watcher}
            watcher.decide(step, own, world)

    def take(self, step: int) -> Seen:
        """What was seen since the last time, handed over."""
        seen, self._seen = self._seen, {}
        for number, watcher in enumerate(all_watchers(self._policy)):
            key = f"{RANK}{number}"
            if key not in seen and watcher.due(step) and len(about := watcher.about_rank()):
                seen[key] = watcher, about
        return seen

    def give(self, seen: Seen) -> None:
        self._seen = seen

    @staticmethod
    def flat(seen: Seen) -> Tensor:
        """All numbers in one vector, in the order of the tensors' names."""
        parts = (seen[name][1] for name in sorted(seen))
        return torch.cat([torch.as_tensor(part, dtype=torch.float32).detach().cpu() for part in parts])

    @staticmethod
    def guarded(act: Callable[[], None]) -> BaseException | None:
        """For callers that must not raise: what went wrong in a policy, or None."""
        try:
            act()
        except Exception as error:  # noqa: BLE001  a policy may be anyone's; the error is handed on, not swallowed
            return error
        return None


def _once(watchers: Iterable[Watching]) -> list[Watching]:
    """Each policy object once, where it first stands."""
    return list({id(watcher): watcher for watcher in watchers}.values())
