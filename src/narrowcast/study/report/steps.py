"""What a step is made of, how it scales with workers, and how fast a collective is by itself."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high

from narrowcast.figures import Axis, Bar, Markup, Plot, bars, keys, pad_range, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding, grouped, one_algorithm, one_each
from narrowcast.study.analysis.findings import Step
from narrowcast.study.analysis.statistics import Interval
from narrowcast.study.report.figure import Context, Figure, Panel

COMPUTE = ("forward", "backward", "update")
PARTS = (*COMPUTE, "encode", "wire", "decode")
"""Compute first, then what compression adds and what the link takes."""


def _part(step: Step, part: str) -> float:
    # communication that overlaps better than compute alone would allow comes out below zero: nothing is added
    return max(0.0, (step.line.get("breakdown_ms") or {}).get(part) or 0.0)


def _share(step: Step, *parts: str) -> float:
    """Of the step, in per cent."""
    return 100 * sum(_part(step, part) for part in parts) / step.time.value


def _bar(context: Context, step: Step) -> Bar:
    parts = [(f"p-{part}", part, _part(step, part)) for part in PARTS]
    return Bar(context.label(step), parts, formatting.significant(step.time.value), step.wire)


def _bars(context: Context, steps: Sequence[Step]) -> Panel:
    ordered = context.by_wire(steps)
    rows = [_bar(context, step) for step in ordered]
    title = context.setting(steps[0], "model", "data", "workers", "hosts", "rate_name")
    hidden = {"data_model": steps[0].model, "data_workers": steps[0].workers}
    return Panel(title, bars(f"Parts of a step: {title}", rows, "milliseconds a step"), hidden, len(ordered))


def _breakdown_sentence(context: Context, steps: Sequence[Step]) -> str:
    """Of the setting whose float32 step waits most for the link."""
    plain = [s for s in steps if s.wire == context.findings.baseline]
    if not plain:
        return f"Cannot tell what {context.findings.baseline} waits for: it was not timed."
    worst = max(plain, key=lambda s: _share(s, "wire"))
    waits = (
        f"{context.where(worst)} spends {_share(worst, 'wire'):.0f} % of a step with {worst.wire} waiting for the link"
    )
    touched = (s for s in steps if s.place == worst.place and not s.untouched)
    narrow = one_each(touched, context.findings.primary)
    if not narrow:
        return f"{waits}."
    link, codec = _share(narrow[0], "wire"), _share(narrow[0], "encode", "decode")
    return f"{waits}; with {narrow[0].wire} {link:.0f} %, and {codec:.1f} % encoding and decoding."


def breakdown(context: Context) -> Figure | str:
    steps = [s for s in context.findings.measured if s.line.get("breakdown_ms")]
    if not steps:
        return "no measured step has its parts"
    places = sorted(grouped(steps, lambda s: s.place).values(), key=lambda same: (same[0].rate_bits, -same[0].workers))
    names = {"wire": "exposed wire"}
    rows = [(s, [formatting.significant(_part(s, part)) for part in PARTS]) for s in steps]
    return Figure(
        _breakdown_sentence(context, steps),
        [_bars(context, same) for same in places],
        "Medians. The exposed wire is what communication adds to the step beyond what compute hides. The number behind "
        "a bar is the median of the whole step, which need not be the sum of the medians of its parts.",
        context.table("Parts of a step, ms", " | ".join(("model | data | wire | link | workers", *PARTS)), rows),
        keys([(f"p-{part}", names.get(part, part)) for part in PARTS], "Parts of a step"),
    )


def effective_workers(step: Step) -> Interval | None:
    """Workers times the share of a step that is compute: what communication leaves of them."""
    parts = step.line.get("breakdown_ms") or {}
    if any(parts.get(name) is None for name in COMPUTE):
        return None
    return step.time.inverse().times(step.workers * sum(parts[name] for name in COMPUTE))


Worth = tuple[Step, Interval]
"""A step, and its workers' worth of work."""


def _line(context: Context, plot: Plot, same: Sequence[Worth]) -> Markup:
    xs, ys = [float(step.workers) for step, _ in same], [worth.value for _, worth in same]
    parts = [plot.polyline(xs, ys, dash=context.palette.dash(same[0][0].wire))]
    for step, worth in same:
        tip = f"{context.label(step)}, {step.workers} workers: {formatting.between(worth)} workers' worth"
        whisker = plot.whisker(step.workers, worth.low, worth.high)
        mark = context.palette.mark(step.wire, plot.x.at(step.workers), plot.y.at(worth.value))
        parts.append(tag("g", tag("title", tip), whisker, mark, data_workers=step.workers))
    return tag("g", *parts)


def _doublings(axis: Axis) -> dict[float, str] | None:
    """Halves and doubles; None where there are too few of them, or too many."""
    ticks = [tick for power in range(-10, 12) if axis.low <= (tick := 2.0**power) <= axis.high]
    named = {tick: f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks}
    return named if 2 < len(ticks) < 9 else None


def _lines(context: Context, place: Sequence[Worth]) -> Panel:
    worths = {id(step): worth for step, worth in place}
    steps = [step for step, _ in place]
    by_label = grouped(context.by_wire(steps), context.label).values()
    series = [[(s, worths[id(s)]) for s in sorted(same, key=lambda s: s.workers)] for same in by_label]
    counts = sorted({step.workers for step in steps})
    ends = [end for worth in worths.values() for end in (worth.low, worth.high)]
    room, height = context.label_room(steps), context.height_for(steps)
    xs, ys = ([float(n) for n in counts], [float(counts[0]), float(counts[-1]), *ends])
    plot = Plot(pad_range(xs, 0.04, log=True), pad_range(ys, 0.04, log=True), log_y=True, right=room, height=height)
    plot.frame("workers", "workers' worth of work", {float(n): str(n) for n in counts}, _doublings(plot.y))
    ideal = [float(counts[0]), float(counts[-1])]
    plot.add(plot.polyline(ideal, ideal, "ideal"))
    last = [same[-1] for same in series]
    labels = context.end_labels(plot, [(s, plot.x.at(s.workers), plot.y.at(worth.value)) for s, worth in last])
    for same, label in zip(series, labels, strict=True):
        plot.add(context.coloured(same[0][0], _line(context, plot, same), label))
    title = context.setting(steps[0], "model", "data", "rate_name")
    picture = plot.markup(f"Scaling with the number of workers: {title}")
    return Panel(title, picture, {"data_model": steps[0].model})


def _scaling_sentence(context: Context, places: Sequence[Sequence[Worth]]) -> str:
    """With the most workers, where compression leaves most of them: how many with and without it."""
    baseline, primary = context.findings.baseline, context.findings.primary
    pairs = []
    for place in places:
        most = max(step.workers for step, _ in place)
        worths = {id(step.line): worth for step, worth in place}
        narrowest = one_each((s for s, _ in place if s.workers == most), primary)
        pairs += [(worths[id(s.base)], worths[id(s.line)], s) for s in narrowest if id(s.base) in worths]
    if not pairs:
        return f"Cannot tell: {primary} and {baseline} were not timed side by side."
    plain, narrow, step = max(pairs, key=lambda pair: pair[1].value / pair[0].value)
    return (
        f"{context.where(step)} does the work of {formatting.between(plain)} workers with "
        f"{baseline} and of {formatting.between(narrow)} with {primary}."
    )


def scaling(context: Context) -> Figure | str:
    known = [(s, worth) for s in context.findings.measured if not s.hosts and (worth := effective_workers(s))]
    same = grouped(
        known, lambda k: (k[0].model, k[0].data, k[0].rate_name, k[0].transport, k[0].parallel, k[0].min_values)
    )
    places = [place for place in same.values() if len({step.workers for step, _ in place}) > 1]
    places = sorted(places, key=lambda place: place[0][0].rate_bits)
    if not places:
        return "needs measured steps with their parts for two numbers of workers"
    heads = "model | data | wire | link | workers | workers' worth (95 %) | efficiency"
    rows = [
        (step, (formatting.between(worth), f"{100 * worth.value / step.workers:.0f} %"))
        for place in places
        for step, worth in place
    ]
    return Figure(
        _scaling_sentence(context, places),
        [_lines(context, place) for place in places],
        "Workers times the share of a step that is forward, backward and update, timed alone in the same run; the "
        "dotted line is ideal. Both axes are logarithmic, whiskers are 95 % intervals. So the figure shows what "
        "communication costs, not what it costs that workers may share cores.",
        context.table("Scaling", heads, rows),
    )


def _size(finding: Finding) -> float:
    return float(finding.line["bytes"])


def _speed(finding: Finding) -> float:
    return float(finding.line["bus_gbps"])


def _bus_panel(context: Context, findings: Sequence[Finding]) -> Panel:
    by_way = grouped(context.by_wire(findings), lambda f: (f.wire, f.algorithm))
    series = [sorted(same, key=_size) for same in by_way.values()]
    sizes = [_size(f) for f in findings]
    ends = pad_range([_speed(f) for f in findings], 0.05, log=True)
    room, height = context.label_room(findings), context.height_for(findings)
    plot = Plot(pad_range(sizes, 0.03, log=True), ends, log_y=True, right=room, height=height)
    ordered = sorted(set(sizes))
    ticks = {size: formatting.byte_size(size) for size in ordered[:: max(1, -(-len(ordered) // 5))]}
    plot.frame("message, float32", "bus bandwidth, GB/s", ticks)
    last = [same[-1] for same in series]
    labels = context.end_labels(plot, [(f, plot.x.at(_size(f)), plot.y.at(_speed(f))) for f in last])
    for same, label in zip(series, labels, strict=True):
        tips = [f"{formatting.byte_size(_size(f))}: {formatting.significant(_speed(f))} GB/s" for f in same]
        places = [(_size(f), _speed(f), f"{context.label(f)}, {tip}") for f, tip in zip(same, tips, strict=True)]
        plot.add(context.coloured(same[0], *context.curve(plot, same[0], places, 2.8), label))
    title = context.setting(findings[0], "transport", "workers", "rate_name")
    picture = plot.markup(f"Bus bandwidth against message size: {title}")
    return Panel(title, picture, {"data_workers": findings[0].workers}, len(ordered))


def _bus_sentence(context: Context, findings: Sequence[Finding]) -> str:
    """At the largest message on the slowest link, and from what size on the wire is ahead there."""
    baseline, primary = context.findings.baseline, context.findings.primary
    slowest = min(findings, key=lambda f: f.rate_bits)
    here = [f for f in findings if f.place == slowest.place]
    by_size = [grouped((f for f in here if f.wire == wire), _size) for wire in (baseline, primary)]
    # of several algorithms for the baseline the fastest counts
    plain = {size: max(map(_speed, same)) for size, same in by_size[0].items()}
    narrow = {size: _speed(one_algorithm(same)) for size, same in by_size[1].items()}
    shared = sorted(set(plain) & set(narrow))
    if not shared:
        return f"Cannot tell: {primary} and {baseline} share no message size."
    last, start = shared[-1], "nowhere"
    behind = max((size for size in shared if narrow[size] <= plain[size]), default=0)
    if behind < last:
        start = f"from {formatting.byte_size(min(size for size in shared if size > behind))} on"
    few, many = (formatting.significant(speeds[last], 2) for speeds in (narrow, plain))
    return (
        f"{formatting.capital(context.link(slowest))}, an all-reduce of {formatting.byte_size(last)} runs at {few} "
        f"GB/s with {primary} and {many} GB/s with {baseline} "
        f"({formatting.ratio(narrow[last] / plain[last])}); it is ahead {start}."
    )


def bus(context: Context) -> Figure | str:
    findings = context.findings.buses
    if not findings:
        return "no collective was timed alone"
    places = grouped(findings, lambda f: (f.rate_name, f.workers, f.transport)).values()
    heads = "wire | algorithm | over | link | workers | size | median ms | bus GB/s"
    rows = []
    for f in findings:
        times = (formatting.significant(number) for number in (median_high(f.line["ms"]), _speed(f)))
        rows.append((f, (formatting.byte_size(_size(f)), *times)))
    return Figure(
        _bus_sentence(context, findings),
        [_bus_panel(context, same) for same in sorted(places, key=lambda same: same[0].rate_bits)],
        "An all-reduce alone, counted in float32 bytes whatever travels: 2 (W−1)/W times the message over the median "
        "time. A wire with fewer bits may exceed the link's own rate. Both axes are logarithmic.",
        context.table("Bus bandwidth", heads, rows),
    )
