"""The parts of a model that are exchanged in turn, and the steps at which each is.

Fragment p of F travels after the steps t with t mod H = floor((p + 1) H / F) mod H: one every H/F steps, the last at
the multiples of H. In the first round fragment p so has trained (p + 1) H / F steps only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from narrowcast.kernels import FLOATS
from narrowcast.parallel.local_sgd.settings import LocalUpdates


def layer_of(name: str) -> str:
    """The layer of a parameter or buffer: its name up to the first number ("h.3" of "h.3.attn.weight"), else its
    module, else itself.
    """
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return ".".join(parts[:-1]) or name


@dataclass(frozen=True)
class Fragment:
    """Layers that travel together."""

    layers: tuple[str, ...]
    names: tuple[str, ...]
    """Of parameters, in the order of the model."""
    values: int

    def holds(self, name: str) -> bool:
        """Whether a buffer goes with it."""
        return layer_of(name) in self.layers


def fragments_of(parameters: Mapping[str, Tensor], buffers: Iterable[str], count: int) -> tuple[Fragment, ...]:
    """Layers, dealt out. The same on all ranks, since the sizes are those of whole parameters."""
    sizes: dict[str, int] = {}
    for name, parameter in parameters.items():
        sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + parameter.numel()
    layers = deal("LocalSGD", sizes, count)
    loads = [sum(sizes[layer] for layer in mine) for mine in layers]
    # layers without parameters go with the last
    layers[-1] += [layer for layer in dict.fromkeys(map(layer_of, buffers)) if layer not in sizes]
    names = [tuple(name for name in parameters if layer_of(name) in mine) for mine in layers]
    return tuple(Fragment(tuple(mine), of, load) for mine, of, load in zip(layers, names, loads, strict=True))


def deal(who: str, sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Layers one after another, each into the part that has the fewest values so far: with layers of one size that is
    every F-th layer, the strided pattern of Streaming DiLoCo. A layer of more than half a part's share comes first.
    """
    if count > len(sizes):
        raise ValueError(f"{who}: fragments={count}, and the model has {len(sizes)} layers that train; take fewer")
    share = sum(sizes.values()) / count
    parts, loads = [list[str]() for _ in range(count)], [0] * count
    # sorted keeps the order of the model among equals
    for layer in sorted(sizes, key=lambda layer: -sizes[layer] if sizes[layer] > share / 2 else 0):
        least = min(range(count), key=lambda number: (loads[number], len(parts[number])))
        parts[least].append(layer)
        loads[least] += sizes[layer]
    return parts


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Running statistics; counters stay each worker's own."""
    return {name: b for name, b in model.named_buffers() if b.dtype in FLOATS and b.numel()}


@dataclass
class Clock:
    """Where a training is: steps, and the rounds of each fragment."""

    updates: LocalUpdates
    steps: int = 0
    begun: int = 0
    """Exchanges that were started, of whatever fragments: their numbers."""
    exchanges: int = 0
    """Those whose result has come."""
    rounds: list[int] = field(default_factory=list)
    """How often each fragment has travelled."""

    def __post_init__(self) -> None:
        self.rounds = self.rounds or [0] * self.updates.fragments

    def due(self) -> list[int]:
        """The fragments to be sent after this step."""
        every, count = self.updates.every, self.updates.fragments
        at = self.steps % every
        return [p for p in range(count) if (p + 1) * every // count % every == at]

    def begin(self, fragments: Iterable[int]) -> int:
        """One more exchange of these; its number."""
        for number in fragments:
            self.rounds[number] += 1
        self.begun += 1
        return self.begun - 1

    def load(self, counters: Mapping[str, int], rounds: list[int]) -> None:
        """Go on from a checkpoint. rounds: of another number of fragments, the largest counts."""
        self.steps, self.exchanges = int(counters["steps"]), int(counters["exchanges"])
        self.begun = int(counters.get("begun", self.exchanges))
        rounds = rounds or [self.exchanges]
        same = len(rounds) == self.updates.fragments
        self.rounds = list(rounds) if same else [max(rounds)] * self.updates.fragments
