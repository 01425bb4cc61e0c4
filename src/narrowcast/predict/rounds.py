"""Rounds of local updates: what travels after which step, and when a round is over.

Shapes: D versions of the measurements, P fragments of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowcast.codecs import codec as codec_named
from narrowcast.codecs import refuse_differences
from narrowcast.parallel import MIN_VALUES, local_sgd
from narrowcast.predict.model import TensorTime

LOCAL = "local"
"""As a way to share the work is called on the command line."""
MIXINGS = ("all", "ring", "exponential", "pairs")
"""With whom a worker exchanges: all, both neighbours, or one other in turn."""
INSIDE = ("fsdp", "data", "hsdp")
"""How the devices of a worker share its work."""
ROUNDS = 4
"""Simulated, of which the last one counts: the first of them begin with links that are free."""


@dataclass(frozen=True)
class LocalSetup:
    """One case: how many devices in all, through which wire, how often and with whom."""

    world: int
    wire: str
    every: int
    """Steps from one exchange of a parameter to its next."""
    fragments: int = 1
    """Parts of the model that are exchanged in turn, one every H/F steps."""
    delay: int = 0
    """Steps that go on while an exchange is under way; 0: all wait for it."""
    mixing: str = "all"
    min_values: int = MIN_VALUES
    inside: str = "fsdp"
    inside_wire: str = "bf16"

    def __post_init__(self) -> None:
        """Nothing is predicted that `LocalSGD` refuses."""
        codec = codec_named(self.wire)
        refuse_differences("predict: outer gradients", codec)
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"local updates: {name}={getattr(self, name)}; give {least} or more")
        if self.fragments > self.every:
            raise ValueError(
                f"local updates: fragments={self.fragments} with every={self.every}; one is exchanged at a step, so "
                "take as many steps as fragments, or more"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"local updates: delay={self.delay} with every={self.every}; an exchange ends before the next of the "
                "same parameters begins: take a delay under every"
            )
        for name, taken in (("mixing", MIXINGS), ("inside", INSIDE)):
            if getattr(self, name) not in taken:
                raise ValueError(f"local updates: {name}={getattr(self, name)!r}; take {', '.join(taken)}")
        if codec.rank and self.mixing != "all":
            raise ValueError(
                f"local updates: mixing={self.mixing!r} with {codec}: low rank sums over all workers; take mixing "
                f"'all', or {codec.factors}"
            )

    @property
    def blocking(self) -> LocalSetup:
        """The same with one exchange of the whole model that all wait for."""
        return replace(self, fragments=1, delay=0)

    @property
    def neighbours(self) -> int:
        """To how many others a worker sends its wire; 0: all sum together."""
        return {"all": 0, "ring": 2}.get(self.mixing, 1)


def layer_of(name: str) -> str:
    """What stays together: a numbered block of a real model, a layer of a description."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return ".".join(parts[:-1] if number is None else parts[: number + 1]) or name


def fragments_of(tensors: Sequence[TensorTime], count: int) -> list[list[TensorTime]]:
    """Layers, dealt out as `LocalSGD` does it; `tensors` have its order turned round, as backward has them ready."""
    layers: dict[str, list[TensorTime]] = {}
    for tensor in reversed(tensors):
        layers.setdefault(layer_of(tensor.name), []).append(tensor)
    sizes = {layer: sum(tensor.numel for tensor in members) for layer, members in layers.items()}
    return [[t for layer in part for t in layers[layer]] for part in local_sgd.deal("local updates", sizes, count)]


def round_seconds(work_D: Tensor, exchange_DP: Tensor, every: int, delay: int, slow: float = 1.0) -> Tensor:
    """How long `every` steps of `work_D` take with an exchange of each fragment, [D], once it goes on as it did before.

    Fragment p of P travels after step (p + 1) H / P of a round, one at a time, and is waited for `delay` steps later.
    slow: how many times longer steps take while one travels.
    """
    turns, count = range(ROUNDS), exchange_DP.shape[1]
    sends = [(turn * every + (p + 1) * every // count, p) for turn in turns for p in range(count)]
    # what is due is waited for before the next one leaves; without a delay it is the one that leaves
    waits = [(at + delay, 0 if delay else 2, p) for at, p in sends]
    events = [(at, 1, p) for at, p in sends] + waits + [((turn + 1) * every, 3, -1) for turn in turns]
    now_D = free_D = torch.zeros_like(work_D)
    steps, done, ends = 0, dict[int, Tensor](), list[Tensor]()
    for at, what, p in sorted(events):
        now_D, steps = _advance(now_D, (at - steps) * work_D, free_D, slow), at
        if what == 1:
            done[p] = free_D = torch.maximum(now_D, free_D) + exchange_DP[:, p]
        elif what == 3:
            ends.append(now_D)
        else:
            now_D = torch.maximum(now_D, done[p])
    # a link that is never free sets the pace, however many rounds go by until all wait for it
    return (ends[-1] - ends[-2]).maximum(exchange_DP.sum(1))


def _advance(now_D: Tensor, work_D: Tensor, busy_until_D: Tensor, slow: float) -> Tensor:
    """When so much work is done, of which what is done before `busy_until_D` takes longer."""
    beside_D = ((busy_until_D - now_D).clamp_min(0) / slow).minimum(work_D)
    return now_D + work_D + (slow - 1) * beside_D
