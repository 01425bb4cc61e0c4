"""One worker: its parameters, where it started, its outer optimizer. Who talks to others is another's business, so that
`LocalSGD` and the simulator compute the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowcast.codecs import Codec
from narrowcast.kernels import FLOATS
from narrowcast.parallel import policy
from narrowcast.parallel.autopilot import Autopilot
from narrowcast.parallel.local_sgd.fragments import Clock, Fragment, float_buffers, fragments_of
from narrowcast.parallel.local_sgd.graph import ALL
from narrowcast.parallel.local_sgd.settings import LocalUpdates
from narrowcast.parallel.policy import CodecChoice
from narrowcast.parallel.ranks import local_part
from narrowcast.parallel.stats import TensorRow

ROLE = "outer gradient"
Values = dict[str, Tensor]
SAMPLE = 4096
"""Values of a model by which the variance between workers is estimated."""


@dataclass(frozen=True)
class WirePlan:
    """What travels how: a policy, for the tensors of a model."""

    spec: object
    min_values: int
    updates: LocalUpdates

    def check(self) -> None:
        """Refuse what cannot be, before anything is made."""
        policy.check(self.spec)
        is_auto = isinstance(self.spec, Autopilot)
        if policy.all_watchers(self.spec) and not is_auto:
            raise ValueError(
                "LocalSGD: spec= is a policy that learns from gradients, of which it sees none; give a fixed one"
            )
        if is_auto and not self.updates.blocks:
            raise ValueError(
                'LocalSGD: spec="auto" weighs the time of whole exchanges, which all wait for; with fragments=, delay= '
                "or mixing= nobody may wait at all: name a wire, such as 'int4/128+ef'"
            )

    def choice(self, name: str, parameter: Tensor, round_: int) -> CodecChoice:
        """The wire of a parameter in a round."""
        info = policy.TensorInfo(name, tuple(parameter.shape), torch.float32, ROLE)
        choice = policy.choose(self.spec, info, round_, self.min_values)
        if self.updates.kind_at(round_) != ALL:
            return _for_neighbours(name, choice)
        if choice.codec.rank and local_part(parameter).shape != parameter.shape:
            raise ValueError(
                f"LocalSGD with {choice.codec}: {name} is sharded, and low rank sums whole matrices; take "
                f"{choice.codec.factors}, or shard nothing"
            )
        return choice


def _for_neighbours(name: str, choice: CodecChoice) -> CodecChoice:
    """What a message left out is in the next one, since that is a difference to what was seen: there is no residual."""
    if choice.codec.rank:
        raise ValueError(
            f"LocalSGD with {choice.codec}: {name} would travel by low rank, whose factors are a sum over all workers, "
            f"and mixing= averages with a few; take {choice.codec.factors}, or mixing='all'"
        )
    return CodecChoice(replace(choice.codec, feedback=False, kept_percent=100), choice.why)


class Replica:
    """A worker's part in an exchange: what it moved, and what it makes of the result."""

    def __init__(self, model: nn.Module, updates: LocalUpdates, wires: WirePlan) -> None:
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.updates, self.wires = updates, wires
        self.parameters = trainable(self.model)
        buffers = float_buffers(self.model)
        self.fragments = fragments_of(self.parameters, buffers, updates.fragments)
        # float32, whatever the model's type: an outer step is small beside the value
        self.anchors = {name: local_part(p).float().clone() for name, p in self.parameters.items()}
        self.outer = updates.outer(list(self.anchors.values()))

    def names_in(self, fragments: Collection[int]) -> list[str]:
        """In the order of the model."""
        chosen = {name for number in fragments for name in self.fragments[number].names}
        return [name for name in self.parameters if name in chosen]

    def buffers_in(self, fragments: Collection[int]) -> Values:
        """Those that go with these fragments; what the model got later goes with the last."""
        chosen = [self.fragments[number] for number in fragments]
        return {name: b for name, b in float_buffers(self.model).items() if self._fragment_of(name) in chosen}

    def _fragment_of(self, buffer: str) -> Fragment:
        return next((one for one in self.fragments if one.holds(buffer)), self.fragments[-1])

    def by_codec(self, names: Iterable[str], clock: Clock) -> dict[Codec, tuple[str, ...]]:
        """Parameters that travel together."""
        found: dict[Codec, tuple[str, ...]] = {}
        for name in names:
            codec = self.choice(name, clock).codec
            found[codec] = (*found.get(codec, ()), name)
        return found

    def choice(self, name: str, clock: Clock) -> CodecChoice:
        """The wire of a parameter, the next time that it travels."""
        number = next(n for n, fragment in enumerate(self.fragments) if name in fragment.names)
        return self.wires.choice(name, self.parameters[name], clock.rounds[number])

    def rows(self, clock: Clock) -> list[TensorRow]:
        """Every parameter: its wire, or why it stays as it is."""
        return [
            TensorRow.of(name, p.numel(), self.choice(name, clock), torch.float32, ROLE, p.shape)
            for name, p in self.parameters.items()
        ]

    def moved(self, names: Iterable[str]) -> Values:
        """The outer gradients: where this worker's rounds began less where it is."""
        check_complete(self.model, self.parameters)
        return {name: self._moved(name) for name in names}

    def _moved(self, name: str) -> Tensor:
        own = local_part(self.parameters[name])
        return start_of(own, self.anchors[name]) - own.float()

    def positions(self, moved: Mapping[str, Tensor]) -> Values:
        """Where this worker is, with what its anchors hold below the parameters' type."""
        return {name: self.anchors[name] - movement for name, movement in moved.items()}

    def land(self, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor], kept: float) -> None:
        """Take an outer step with the gradients that came, and merge: `kept` of its own stays."""
        for name, gradient in gradients.items():
            self.anchors[name].grad = gradient
        self.outer.step()
        self.outer.zero_grad()
        self.merge(gradients, buffers, kept)

    def merge(self, names: Iterable[str], buffers: Mapping[str, Tensor], kept: float) -> None:
        """Parameters of what the anchors are now and of what they are themselves; running statistics likewise."""
        for name in names:
            _merge(local_part(self.parameters[name]), self.anchors[name], kept)
        ours = float_buffers(self.model) if buffers else {}
        for name, mean in buffers.items():
            _merge(ours[name], mean, kept)

    def settle(self, positions: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Be there, without an outer step."""
        for name, anchor in self.anchors.items():
            anchor.copy_(positions[name])
        self.merge(positions, buffers, 0.0)

    def sample(self) -> list[Tensor]:
        """A few values of each parameter, the same ones on each worker."""
        share = max(1, SAMPLE // len(self.parameters))
        return [_spread(local_part(p).reshape(-1), share) for p in self.parameters.values()]


def start_of(parameter: Tensor, anchor: Tensor) -> Tensor:
    """What a worker had when its round began: the anchor in the parameter's type, of which 16 bits keep a part."""
    return anchor.to(parameter.dtype).float()


def _merge(own: Tensor, new: Tensor, kept: float) -> None:
    if kept == 0.0:
        own.copy_(new)
    elif own.dtype == new.dtype == torch.float32:  # the same sum, in place: it is in every step's way
        own.sub_(new).mul_(kept).add_(new)
    else:
        own.copy_(new + kept * (own.float() - new.float()))


def _spread(values: Tensor, count: int) -> Tensor:
    """As many values, evenly apart."""
    count = min(count, values.numel())
    at = torch.arange(count, device=values.device) * values.numel() // max(count, 1)
    return values[at].float()


def variance(samples: Sequence[Tensor], lengths: Sequence[int]) -> float:
    """The variance between workers over the mean square, of each parameter, and of these the mean. samples: by worker,
    all parameters one after another.
    """
    found = []
    for rows in torch.stack([sample.double() for sample in samples]).split(list(lengths), dim=1):
        power = float(rows.square().sum())
        found.append(float((rows - rows.mean(dim=0)).square().sum()) / power if power else 0.0)
    return sum(found) / len(found)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are exchanged, by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("LocalSGD: the model has no parameter that is trained")
    for name, parameter in trained.items():
        if parameter.dtype not in FLOATS:
            raise TypeError(f"LocalSGD: {name} is {parameter.dtype}; it takes 16- and 32-bit floats")
    return trained


def check_complete(model: nn.Module, ours: Mapping[str, nn.Parameter]) -> None:
    """Whatever is trained and not exchanged drifts apart."""
    known = {id(p) for p in ours.values()}
    if all(
        id(p) in known or not p.requires_grad for m in model.modules() for p in m._parameters.values() if p is not None
    ):
        return  # without names, which take longer
    more = sorted(name for name, p in model.named_parameters() if p.requires_grad and name not in ours)
    if more:
        raise RuntimeError(
            f"LocalSGD: {more[0]} is trained now and was not when LocalSGD was made; close() it and make a new one "
            "while all workers have the same values"
        )
