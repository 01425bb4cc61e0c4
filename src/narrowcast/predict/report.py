"""`narrowcast predict --html`: the verdict, what it rests on, and figures with a table under each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrowcast import figures
from narrowcast.codecs import codec as codec_named
from narrowcast.figures import Look, Markup, tag
from narrowcast.parallel import overlap
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
    own_bandwidth,
    rate,
    told_apart,
    whole,
)
from narrowcast.predict.step import BANDWIDTHS, Prediction, Setup
from narrowcast.predict.sweep import Sweep, half_precision


@dataclass(frozen=True)
class Shown:
    """A prediction, what was asked for, and what the line is called that it lies on."""

    name: str
    setup: Setup
    cell: Prediction

    @property
    def narrow(self) -> bool:
        return codec_named(self.setup.wire).bits_per_value < 16

    @property
    def interval(self) -> str:
        return f"{self.cell.over_16bit:.2f}× ({self.cell.over_16bit_low:.2f}–{self.cell.over_16bit_high:.2f})"


def _verdict(shown: Sequence[Shown]) -> tuple[str, str, str, Shown | None]:
    """Kind, answer and words; and the wire that they are about. As sure as `advise` wants to be."""
    narrow = [one for one in shown if one.narrow and one.setup.world > 1]
    if not narrow:
        words = "No wire with fewer than 16 bits was asked for on two workers or more."
        return "unknown", "Nothing to compare", words, None
    best = max(narrow, key=lambda one: one.cell.over_16bit)
    cell = best.cell
    words = f"{best.name} is predicted {best.interval} as fast as 16 bits with {cell.workers} workers"
    gain, low, high = cell.over_16bit, cell.over_16bit_low, cell.over_16bit_high
    if cell.over_fp32 < 1:
        return "no", "Leave it off", f"{words}, and {cell.over_fp32:.2f}× as fast as float32.", best
    if gain >= 1 + overlap.SURE and low > 1:
        return "yes", "Compress", f"{words}, and {cell.over_fp32:.2f}× as fast as float32.", best
    if high < 1 + overlap.SURE:
        return "no", "Leave it off", f"The quickest, {words}: not worth it.", best
    return "unknown", "Cannot tell", f"{words}: the interval does not decide it.", best


def verdict(cells: Sequence[Prediction], setups: Sequence[Setup]) -> str:
    """The page's verdict in a sentence, for whoever reads no page."""
    shown = [Shown(setup.wire, setup, cell) for setup, cell in zip(setups, cells, strict=True)]
    _, answer, words, _ = _verdict(shown)
    return f"{answer}. {words}"


def _break_even_tile(cell: Prediction) -> Markup:
    value = cell.break_even_gbit
    if value is None or value == float("inf"):
        return figures.tile("always" if value else "never", "the wire pays", "over 16 bits, at every bandwidth tried")
    return figures.tile(rate(value), "below it the wire pays", "over 16 bits, on the outermost link")


def _tiles(best: Shown) -> Markup:
    cell = best.cell
    step, low, high = ms(cell.step, cell.low, cell.high)
    made = [
        figures.tile(f"{step} ms", "a step", f"{best.name}, 5 to 95 %: {low}–{high} ms"),
        figures.tile(f"{cell.over_16bit:.2f}×", "over 16 bits", f"{cell.over_fp32:.2f}× over float32"),
        _break_even_tile(cell),
    ]
    if cell.dollars_per_epoch is not None:
        made.append(figures.tile(f"${cell.dollars_per_epoch:.2f}", "an epoch", f"with {cell.workers} workers"))
    return tag("ul", *made, class_="tiles")


def _scaling(shown: Sequence[Shown], looks: dict[str, Look]) -> Proof:
    lines = []
    for name, look in looks.items():
        cells = [one.cell for one in shown if one.name == name]
        low = [c.speedup * c.step / c.high for c in cells]
        high = [c.speedup * c.step / c.low for c in cells]
        lines.append(NamedLine(name, look, [float(c.workers) for c in cells], [c.speedup for c in cells], low, high))
    counts = sorted({float(one.cell.workers) for one in shown})
    plot = curves(lines, "workers", "times one device", counts, {n: f"{n:.0f}" for n in counts})
    plot.add(plot.polyline(counts, counts, "ideal"))
    best = max(shown, key=lambda one: one.cell.speedup)
    title = "Samples a second over one device"
    return Proof(
        "scaling",
        "Scaling with the number of workers",
        f"{best.name} reaches {best.cell.speedup:.1f} times one device with {best.cell.workers} workers.",
        title,
        plot.markup(f"{title} against the number of workers"),
        "The dotted line is ideal, bands are 5 to 95 % intervals. Both axes are logarithmic.",
        _cells(shown),
    )


CELLS = (
    "wire | algorithm | workers | step ms | 5–95 % | speedup | over float32 | over 16 bits | exposed ms | codec ms | "
    "limit | $ an epoch"
)


def _cells(shown: Sequence[Shown]) -> Markup:
    rows = []
    for one in shown:
        c = one.cell
        dollars = "" if c.dollars_per_epoch is None else f"{c.dollars_per_epoch:.2f}"
        times = (*ms(c.step), "–".join(ms(c.low, c.high)), f"{c.speedup:.2f}", f"{c.over_fp32:.2f}", one.interval)
        rows.append((one.setup.wire, c.algorithm, c.workers, *times, *ms(c.exposed, c.codec), c.bottleneck, dollars))
    return below("Every prediction", CELLS, rows, "l2")


def _parts(shown: Sequence[Shown]) -> Proof:
    cells = [one.cell for one in shown]
    worst = max(shown, key=lambda one: one.cell.exposed / one.cell.step)
    share = 100 * worst.cell.exposed / worst.cell.step
    heads = "wire | compute ms | exposed ms | communication ms | codec ms | limit"
    rows = [
        (one.name, *ms(one.cell.compute, one.cell.exposed, one.cell.communication, one.cell.codec), one.cell.bottleneck)
        for one in shown
    ]
    title = f"Parts of a step with {cells[0].workers} workers"
    return Proof(
        "parts",
        "What a step is made of",
        f"With {worst.name}, {share:.0f} % of a step on {worst.cell.workers} workers is "
        "communication that compute does not hide.",
        title,
        figures.bars(title, [bar(one.name, one.cell) for one in shown], "milliseconds a step"),
        "The number behind a bar is the whole step.",
        below(title, heads, rows, "l1 t1") if len({one.setup.world for one in shown}) > 1 else _cells(shown),
        legend(cells),
    )


def _bandwidth(sweep: Sweep, shown: Sequence[Shown], looks: dict[str, Look]) -> Proof:
    most = shown[0].setup.world
    level = sweep.cluster.levels[sweep.cluster.level_of(most)]
    base = sweep.tuned_steps(half_precision(sweep.cluster, most))
    gains = [[float(g) for g in base / sweep.tuned_steps(one.setup)] for one in shown]
    kept = told_apart(gains, [level.bandwidth_gbit])
    xs = [float(b) for b in BANDWIDTHS[kept]]
    lines = [
        NamedLine(one.name, looks[one.name], xs, ys[kept], marked=False) for one, ys in zip(shown, gains, strict=True)
    ]
    plot = curves(lines, "Gb/s of the link", "times 16 bits", [1.0], DECADES)
    plot.add(at_one(plot), own_bandwidth(plot, level.bandwidth_gbit, f"this cluster: {rate(level.bandwidth_gbit)}"))
    told = "; ".join(f"{one.name} pays below: {gbit(one.cell.break_even_gbit)}" for one in shown if one.narrow)
    rows = [(one.name, one.cell.algorithm, gbit(one.cell.break_even_gbit), gbit(one.cell.hide_gbit)) for one in shown]
    title = f"Speed over 16 bits with {most} workers"
    return Proof(
        "bandwidth",
        "Where a wire stops paying",
        f"{told}." if told else "Nothing here has fewer than 16 bits.",
        title,
        plot.markup(f"{title} against the bandwidth of the link"),
        f"The link is {level.name}, the outermost in use; the upright line is its own bandwidth. Above 1 a wire is "
        "quicker than 16 bits.",
        below("Break-even bandwidths", "wire | algorithm | pays below | hidden from", rows, "l2"),
    )


def _comparison(shown: Sequence[Shown]) -> Markup:
    rows = [
        (one.name, *ms(one.cell.step), one.interval, f"{one.cell.over_fp32:.2f}×", gbit(one.cell.break_even_gbit))
        for one in shown
    ]
    heads = "wire | step ms | over 16 bits (5–95 %) | over float32 | pays below"
    made = [figures.row(cells) for cells in rows]
    return figures.table(f"With {shown[0].cell.workers} workers", heads.split(" | "), made)


def page(sweep: Sweep, cells: Sequence[Prediction], setups: Sequence[Setup] = ()) -> str:
    """The whole file. setups: what was asked for, one for each cell; default each cell's wire by "auto"."""
    setups = setups or [Setup(cell.workers, cell.wire) for cell in cells]
    # a line for each wire; where several algorithms were asked for, for each of both
    several = len({setup.algorithm for setup in setups}) > 1
    names = [f"{setup.wire} {setup.algorithm}" if several else setup.wire for setup in setups]
    shown = [Shown(*one) for one in zip(names, setups, cells, strict=True)]
    looks = {name: Look(slot) for slot, name in enumerate(dict.fromkeys(names))}
    most = max(one.setup.world for one in shown)
    last = [one for one in shown if one.setup.world == most]
    profile, cluster = sweep.profile, sweep.cluster
    size = f"{profile.numel:,} parameters, batch {profile.batch}, {1e3 * profile.compute:.2f} ms ({profile.source})"
    set_up = {"Model": f"{profile.name}: {size}", "Parallel": sweep.mode, **linked(cluster)}
    title = f"narrowcast predict · {profile.name} on {cluster.name}"
    kind, answer, words, best = _verdict(last)
    both = figures.beside("The wires", [_comparison(last)], figures.facts("Set-up", set_up))
    top = figures.opening(title, kind, answer, words, _tiles(best) if best else Markup(""), both)
    sections = [_scaling(shown, looks)] if len({one.setup.world for one in shown}) > 1 else []
    sections += [_parts(last), *([_bandwidth(sweep, last, looks)] if most > 1 else [])]
    return whole(title, top, sections, [cell.as_dict() for cell in cells])
