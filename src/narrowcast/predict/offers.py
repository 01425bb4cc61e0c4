"""`narrowcast advise --clusters ... --html`: buy or compress, with what each cluster costs and where it breaks even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast import figures
from narrowcast.figures import Bar, Look, Markup, tag
from narrowcast.predict.advice import HALF, setup_of
from narrowcast.predict.decision import Decision, Offer
from narrowcast.predict.pages import (
    DECADES,
    NamedLine,
    Proof,
    at_one,
    bar,
    below,
    curves,
    gbit,
    legend,
    linked,
    ms,
    rate,
    told_apart,
    whole,
)
from narrowcast.predict.step import BANDWIDTHS, Prediction
from narrowcast.predict.sweep import Sweep

KINDS = {"compress": "yes", "keep": "yes", "buy": "depends", "cannot": "unknown"}
"""By the first word of the answer."""


@dataclass(frozen=True)
class _Place:
    """A cluster on its page: what it offers, with its wire and in 16 bits."""

    sweep: Sweep
    offer: Offer
    own: Prediction
    half: Prediction
    look: Look

    @property
    def name(self) -> str:
        return self.offer.cluster

    @property
    def bandwidth(self) -> float:
        cluster = self.sweep.cluster
        return cluster.levels[cluster.level_of(self.own.workers)].bandwidth_gbit


def _places(sweeps: Sequence[Sweep], decision: Decision) -> list[_Place]:
    places = []
    for slot, (sweep, offer) in enumerate(zip(sweeps, decision.offers, strict=True)):
        own, half = (sweep.cell(setup_of(sweep, decision.workers, wire)) for wire in (offer.wire, HALF))
        places.append(_Place(sweep, offer, own, half, Look(slot)))
    return places


def _named(place: _Place) -> tuple[str, str]:
    """With its wire and in 16 bits."""
    return f"{place.name} · {place.offer.wire}", f"{place.name} · 16 bits"


def _money(value: float | None) -> str:
    return "" if value is None else f"${value:,.2f}"


def _samples(decision: Decision) -> str:
    return f"{decision.samples:,} samples"


def _steps(places: Sequence[_Place], decision: Decision) -> Proof:
    quickest = min(places, key=lambda place: place.offer.step)
    cells = [cell for place in places for cell in (place.own, place.half)]
    names = [name for place in places for name in _named(place)]
    rows = [
        (
            place.name,
            one.wire,
            *ms(one.step),
            "–".join(ms(one.low, one.high)),
            *ms(one.half_step),
            f"{one.half_step / one.step:.2f}×",
        )
        for place in places
        for one in [place.offer]
    ]
    title = f"Parts of a step with {decision.workers} workers"
    return Proof(
        "steps",
        "Steps",
        f"{quickest.name} with {quickest.offer.wire} is the quickest: {ms(quickest.offer.step)[0]} ms a step.",
        title,
        figures.bars(title, [bar(name, cell) for name, cell in zip(names, cells, strict=True)], "milliseconds a step"),
        "Each cluster with the wire that is quickest on it, and in 16 bits.",
        below(title, "cluster | wire | step ms | 5–95 % | in 16 bits, ms | gain", rows, "l2"),
        legend(cells),
    )


def _dollars(places: Sequence[_Place], decision: Decision) -> Proof:
    costs = [
        (name, cost)
        for place in places
        for name, cost in zip(_named(place), (place.offer.dollars, place.offer.half_dollars), strict=True)
    ]
    bars = [Bar(name, [("p-wire", "dollars", cost or 0.0)], _money(cost)) for name, cost in costs]
    cheapest = min(places, key=lambda place: place.offer.dollars or 0.0)
    rows = [
        (
            place.name,
            one.wire,
            _money(one.price_per_hour),
            _money(one.dollars),
            _money(one.half_dollars),
            _money(one.break_even_price),
        )
        for place in places
        for one in [place.offer]
    ]
    title = f"Dollars for {_samples(decision)}"
    return Proof(
        "dollars",
        "Dollars",
        f"{cheapest.name} with {cheapest.offer.wire} is the cheapest: {_money(cheapest.offer.dollars)} for "
        f"{_samples(decision)}.",
        title,
        figures.bars(title, bars, f"dollars for {_samples(decision)}"),
        "The break-even price of a cluster is what a node and an hour of it may cost to be as cheap as the best of the "
        "others.",
        below(title, "cluster | wire | price now | with the wire | in 16 bits | break-even price", rows, "l2"),
    )


def _break_even(places: Sequence[_Place]) -> Proof:
    gains = []
    for place in places:
        half, own = (
            place.sweep.tuned_steps(setup_of(place.sweep, place.own.workers, wire)) for wire in (HALF, place.offer.wire)
        )
        gains.append([float(gain) for gain in half / own])
    kept = told_apart(gains, [place.bandwidth for place in places])
    xs = [float(b) for b in BANDWIDTHS[kept]]
    lines = [NamedLine(p.name, p.look, xs, ys[kept], marked=False) for p, ys in zip(places, gains, strict=True)]
    here = [place.offer.half_step / place.offer.step for place in places]
    plot = curves(lines, "Gb/s of the link", "times 16 bits", [1.0, *here], DECADES)
    plot.add(at_one(plot))
    for place, gain in zip(places, here, strict=True):
        tip = tag("title", f"{place.name}: {gain:.2f}× at its own {rate(place.bandwidth)}")
        mark = place.look.mark(plot.x.at(place.bandwidth), plot.y.at(gain), 5.0)
        plot.add(tag("g", tip, mark, class_=place.look.colour))
    rows = [
        (
            place.name,
            place.offer.wire,
            place.offer.verdict,
            f"{rate(place.bandwidth)}",
            gbit(place.offer.break_even_gbit),
            f"{gain:.2f}×",
        )
        for place, gain in zip(places, here, strict=True)
    ]
    title = "Speed over 16 bits by bandwidth"
    told = "; ".join(f"{place.name} with {place.offer.wire}: {gbit(place.offer.break_even_gbit)}" for place in places)
    return Proof(
        "break-even",
        "Break-even bandwidths",
        f"Below it the wire pays: {told}.",
        title,
        plot.markup(f"{title}, for each cluster with its wire"),
        "The mark on a line is the cluster's own bandwidth. Lines differ, since devices and codecs of clusters do.",
        below(title, "cluster | wire | advice | own bandwidth | pays below | gain there", rows, "l3"),
    )


def _costs(place: _Place) -> tuple[str, str]:
    """Dollars where there are prices, else steps: with its wire and in 16 bits."""
    one = place.offer
    if one.dollars is not None:
        return _money(one.dollars), _money(one.half_dollars)
    own, half = ms(one.step, one.half_step)
    return f"{own} ms", f"{half} ms"


def _opening(title: str, places: Sequence[_Place], decision: Decision) -> Markup:
    first, *rest = decision.text.replace("`", "").split("\n")
    answer, _, words = first.partition(": ")
    answer, words = (part[:1].upper() + part[1:] for part in (answer, words))
    sure = [tag("li", line[:1].upper() + line[1:] + ".") for line in rest]
    tiles = [
        figures.tile(cost, place.name, f"with {place.offer.wire}; {plain} in 16 bits")
        for place in places
        for cost, plain in [_costs(place)]
    ]
    profile = places[0].sweep.profile
    box = {"Model": f"{profile.name}, batch {profile.batch} ({profile.source})", "Workers": str(decision.workers)}
    for place in places:
        about = linked(place.sweep.cluster)
        box[place.name] = "; ".join(value for key, value in about.items() if value and key != "Cluster")
    both = figures.beside("Each by itself", [tag("ul", *sure)], figures.facts("Set-up", box))
    numbers = tag("ul", *tiles, class_="tiles")
    return figures.opening(title, KINDS[first.partition(" ")[0].strip(",:")], answer, f"{words}.", numbers, both)


def page(sweeps: Sequence[Sweep], decision: Decision) -> str:
    """The whole file; the sweeps are those that `decide` was asked about."""
    places = _places(sweeps, decision)
    title = f"narrowcast advise · {places[0].sweep.profile.name}: buy or compress?"
    priced = all(place.offer.dollars is not None for place in places)
    sections = [_steps(places, decision), *([_dollars(places, decision)] if priced else []), _break_even(places)]
    return whole(title, _opening(title, places, decision), sections, decision.as_dict())
