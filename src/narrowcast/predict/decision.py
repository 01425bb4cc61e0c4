"""Buy or compress: several clusters beside one another, each with its quickest wire, in steps and in dollars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from narrowcast.parallel import overlap
from narrowcast.predict.advice import HALF, Advice, GradientError, advise, setup_of
from narrowcast.predict.step import PLAIN, Prediction, finite
from narrowcast.predict.sweep import Sweep

MILLION = 1_000_000


@dataclass(frozen=True)
class Offer:
    """One cluster with the wire that is quickest on it."""

    cluster: str
    device: str
    flops: float
    price_per_hour: float
    """Dollars for a node; 0: not known."""
    wire: str
    verdict: str
    """Of `advise` for this cluster by itself, where a wire must surely gain."""
    step: float
    low: float
    high: float
    half_step: float
    """In 16 bits, as without compression."""
    dollars: float | None
    half_dollars: float | None
    break_even_gbit: float | None
    """Below it the wire pays over 16 bits."""
    break_even_price: float | None = None
    """Dollars an hour at which it costs as much as the cheapest of the others."""


@dataclass(frozen=True)
class Decision:
    """Which offer is cheapest, or quickest where there are no prices, and how sure that is."""

    best: str
    sure: bool
    text: str
    workers: int
    samples: int
    offers: tuple[Offer, ...]

    def as_dict(self) -> dict[str, Any]:
        offers = [{key: finite(value) for key, value in asdict(offer).items()} for offer in self.offers]
        return asdict(self) | {"offers": offers}


@dataclass(frozen=True)
class _Choice:
    sweep: Sweep
    advice: Advice
    cell: Prediction
    half: Prediction
    cost_D: Tensor
    """Dollars, or seconds where there are no prices, in every version."""


def decide(
    sweeps: Sequence[Sweep],
    world: int,
    wires: Sequence[str] | None = None,
    errors: Sequence[GradientError] = (),
) -> Decision:
    """Compare clusters for one model. The first one is what somebody has; the others are to buy."""
    prices = [sweep.cluster.price_per_hour for sweep in sweeps]
    if any(prices) and not all(prices):
        missing = [s.cluster.name for s, price in zip(sweeps, prices, strict=True) if not price]
        raise ValueError(f"--price: none for {', '.join(missing)}; give all of them a price, or none")
    chosen = [_choice(sweep, advise(sweep, world, wires, errors), world) for sweep in sweeps]
    best = min(chosen, key=lambda one: float(one.cost_D[0]))
    others = [one for one in chosen if one is not best]
    sure = all(_surely_less(best.cost_D, one.cost_D) for one in others)
    offers = tuple(_offer(one, [other for other in chosen if other is not one]) for one in chosen)
    samples = sweeps[0].samples
    return Decision(
        best.sweep.cluster.name, sure, _words(offers, chosen.index(best), sure, world, samples), world, samples, offers
    )


def _surely_less(cost_D: Tensor, other_D: Tensor) -> bool:
    """As sure as `advise` wants to be of a wire: a gain that is worth something, in the whole interval."""
    gains = other_D / cost_D
    return float(gains[0]) >= 1 + overlap.SURE and overlap.interval(gains)[0] > 1


def _choice(sweep: Sweep, made: Advice, world: int) -> _Choice:
    # not the wire that is advised: that falls back to 16 bits where it cannot tell, and a faster link would cost more
    own, half = (setup_of(sweep, world, wire) for wire in (made.quickest, HALF))
    cost_D = sweep.steps.steps(own) * (sweep.price(world) or 1.0)
    return _Choice(sweep, made, sweep.cell(own), sweep.cell(half), cost_D)


def _offer(one: _Choice, others: Sequence[_Choice]) -> Offer:
    made, place = one.cell, one.sweep.cluster
    price, rival = place.price_per_hour, min((float(other.cost_D[0]) for other in others), default=0.0)
    return Offer(
        cluster=place.name,
        device=place.device.name,
        flops=place.device.flops,
        price_per_hour=price,
        wire=one.advice.quickest,
        verdict=one.advice.verdict,
        step=made.step,
        low=made.low,
        high=made.high,
        half_step=one.half.step,
        dollars=made.dollars_per_epoch,
        half_dollars=one.half.dollars_per_epoch,
        break_even_gbit=made.break_even_gbit,
        break_even_price=price * rival / float(one.cost_D[0]) if price and rival else None,
    )


def _words(offers: Sequence[Offer], best: int, sure: bool, world: int, samples: int) -> str:
    lines = [_line(offer, samples) for offer in offers]
    winner, have = offers[best], offers[0]
    measure = "cheapest" if winner.dollars is not None else "quickest"
    how = f"`{winner.wire}`" if winner.wire != PLAIN else "nothing compressed"
    does = "keep" if best == 0 else "buy"
    if best == 0 and winner.verdict == "compress":
        does = "compress, do not buy: keep"
    head = f"{does} {winner.cluster} with {how}: the {measure} for {world} workers"
    if not sure:
        head = (
            f"cannot tell: {winner.cluster} with {how} looks {measure}, but not surely by {100 * overlap.SURE:.0f} %; "
            "probe the clusters"
        )
    gain = have.half_step / have.step
    lines.append(f"compression alone makes {have.cluster} {gain:.2f}x as quick as 16 bits there")
    return "\n".join([head, *lines])


def _line(offer: Offer, samples: int) -> str:
    speed = f"{offer.device} at {offer.flops / 1e12:.3g} Tflop/s" if offer.flops else offer.device
    parts = [f"{offer.cluster} ({speed}): `{offer.wire}` (advice: {offer.verdict})"]
    interval = f"{1e3 * offer.low:.1f}-{1e3 * offer.high:.1f}"
    parts.append(f"{1e3 * offer.step:.1f} ms a step ({interval}), {1e3 * offer.half_step:.1f} in 16 bits")
    if offer.dollars is not None and offer.half_dollars is not None:
        what = "a million samples" if samples == MILLION else f"{samples:,} samples"
        paid = f"${offer.dollars:.2f} for {what} at ${offer.price_per_hour:g} an hour and node"
        parts.append(f"{paid}, ${offer.half_dollars:.2f} in 16 bits")
    if offer.break_even_price is not None:
        parts.append(f"as cheap as the best of the others at ${offer.break_even_price:.2f} an hour")
    if offer.break_even_gbit is not None:
        below = f"below {offer.break_even_gbit:.3g} Gb/s"
        parts.append(f"the wire pays {'at every bandwidth tried' if math.isinf(offer.break_even_gbit) else below}")
    return "; ".join(parts)
