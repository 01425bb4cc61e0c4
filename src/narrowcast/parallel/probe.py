"""Will it pay? A short measurement at attach: a plain sum, and where the link is fast, the codecs themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from narrowcast.codecs import Codec
from narrowcast.collectives import Channel, Exchange
from narrowcast.measure import DeviceClock, MatrixSum, WireSum
from narrowcast.parallel.seeds import made_before, seed_of

SMALL_VALUES, LARGE_VALUES = 1 << 18, 1 << 22
SEED = seed_of("probe")
SLOW_SECONDS = 0.03
"""Where the small sum takes this long, bytes are what costs, and arithmetic tells the rest."""
ROUNDS = 3
WORTH_IT = 0.95
"""Below this share of the plain time, compression is said to pay."""


@dataclass(frozen=True)
class Probe:
    """Seconds for one value as it is, and through each codec, on this link and machine."""

    plain: float
    codecs: dict[Codec, float] = field(default_factory=dict)
    """Measured on fast links only."""

    def ours(self, codec: Codec) -> float:
        return self.codecs.get(codec, self.plain * codec.bits_per_value / 32)

    def note(self, codec: Codec, values: int) -> str | None:
        """A warning where compression is likely to lose, or None."""
        if self.ours(codec) < WORTH_IT * self.plain:
            return None
        plain, ours = (1e3 * values * seconds for seconds in (self.plain, self.ours(codec)))
        return (
            f"likely to lose: this link is so fast that {values} values take about {plain:.0f} ms as they are "
            f"and {ours:.0f} ms with {codec}; compression pays on slower links"
        )

    def verdict(self, values: Mapping[Codec, int]) -> str:
        """Whether it pays on this link, by what was measured; values: those of each codec that rounds."""
        if not values:
            return ""
        plain = 1e3 * self.plain * sum(values.values())
        ours = 1e3 * sum(count * self.ours(codec) for codec, count in values.items())
        words = "few bits pay on this link" if ours < WORTH_IT * plain else "this link is too fast for few bits to pay"
        return f"{words}: about {plain:.3g} ms a step as they are, {ours:.3g} so"


def probe(channel: Channel, codecs: Iterable[Codec], device: torch.device) -> Probe:
    """Collective, with values on `device`. All ranks take the slowest rank's time, so that they decide alike."""
    plain: list[float] = []
    used = [torch.empty(0, dtype=torch.float32, device=device)]
    channel.submit({"version": "1", "call": "probe"}, lambda exchange: _plain(exchange, plain), used).wait()
    if len(plain) == 1:
        return Probe(plain[0])
    measured = {codec: _through_codec(channel, codec, device) for codec in codecs}
    return Probe(min(plain[1:]), measured)


def _plain(exchange: Exchange, seconds: list[float]) -> None:
    """Append seconds a value: of a small sum, and of larger ones where the small one was quick."""
    small = _sum_seconds(exchange, SMALL_VALUES)
    seconds.append(small / SMALL_VALUES)
    if small < SLOW_SECONDS:
        seconds += [_sum_seconds(exchange, LARGE_VALUES) / LARGE_VALUES for _ in range(ROUNDS)]


def _sum_seconds(exchange: Exchange, values: int) -> float:
    x = torch.ones(values, dtype=torch.float32, device=exchange.stream.device)
    spent = DeviceClock(x.device).timed(lambda: exchange.all_sum_(x))
    microseconds = torch.tensor([int(1e6 * spent)], dtype=torch.int32)
    exchange.transport.max_(microseconds)
    return int(microseconds) / 1e6


def _through_codec(channel: Channel, codec: Codec, device: torch.device) -> float:
    x = torch.linspace(-1, 1, LARGE_VALUES, dtype=torch.float32, device=device)
    # by low rank: of a matrix of so many values, products included
    add = (MatrixSum if codec.rank else WireSum)(x, codec, seed=SEED, algorithm="two_shot", channel=channel)
    # nobody uses what comes back, but its noise is nobody else's either
    spent = [DeviceClock(device).timed(lambda: add((made_before("probe"), dist.get_rank()))) for _ in range(ROUNDS)]
    return min(spent) / LARGE_VALUES
