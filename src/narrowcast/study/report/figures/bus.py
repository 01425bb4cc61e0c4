"""Bus bandwidth against the size of the message."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.figures import Plot, pad_range, tag
from narrowcast.study.analysis import formatting
from narrowcast.study.analysis.finding import Finding, grouped, one_algorithm
from narrowcast.study.report.context import Context
from narrowcast.study.report.markup import Absent, Figure, Panel, Table, TableRow


def _size(finding: Finding) -> float:
    return float(finding.line["bytes"])


def _speed(finding: Finding) -> float:
    return float(finding.line["bus_gbps"])


def _ticks(sizes: Sequence[float]) -> dict[float, str]:
    ordered = sorted(set(sizes))
    every = max(1, -(-len(ordered) // 5))
    return {size: formatting.byte_size(size) for size in ordered[::every]}


def _panel(context: Context, findings: Sequence[Finding]) -> Panel:
    lines = [sorted(same, key=_size) for same in grouped(context.by_wire(findings), _series).values()]
    sizes, speeds = [_size(f) for f in findings], [_speed(f) for f in findings]
    plot = Plot(
        pad_range(sizes, 0.03, log=True),
        pad_range(speeds, 0.05, log=True),
        log_x=True,
        log_y=True,
        right=context.label_room(findings),
    )
    plot.frame("message, float32", "bus bandwidth, GB/s", _ticks(sizes))
    labels = context.end_labels(plot, [(same[-1], plot.y.at(_speed(same[-1]))) for same in lines])
    for same, label in zip(lines, labels, strict=True):
        wire = same[0].wire
        parts = [plot.polyline([_size(f) for f in same], [_speed(f) for f in same], dash=context.palette.dash(wire))]
        for f in same:
            tip = tag(
                "title",
                f"{context.label(f)}, {formatting.byte_size(_size(f))}: {formatting.significant(_speed(f))} GB/s",
            )
            parts.append(tag("g", tip, context.palette.mark(wire, plot.x.at(_size(f)), plot.y.at(_speed(f)), 2.8)))
        plot.add(context.coloured(same[0], *parts, label))
    title = context.setting(findings[0], "transport", "workers", "rate_name")
    drawing = plot.markup(f"Bus bandwidth against message size: {title}")
    return Panel(title, drawing, {"data_workers": findings[0].workers})


def _series(finding: Finding) -> tuple[str, str]:
    return finding.wire, finding.algorithm


def _plain(same: Sequence[Finding], baseline: str) -> dict[float, float]:
    """Speed by size; of several algorithms for the baseline the fastest counts."""
    sizes = grouped((f for f in same if f.wire == baseline), _size)
    return {size: max(map(_speed, those)) for size, those in sizes.items()}


def _narrow(same: Sequence[Finding], wire: str) -> dict[float, float]:
    """Speed by size, with the algorithm that counts."""
    sizes = grouped((f for f in same if f.wire == wire), _size)
    return {size: _speed(one_algorithm(those)) for size, those in sizes.items()}


def _sentence(context: Context, findings: Sequence[Finding]) -> str:
    """At the largest message on the slowest link, and from what size on the wire is ahead there."""
    slowest = min(findings, key=lambda f: f.rate_bits)
    same = [f for f in findings if f.place == slowest.place]
    plain, narrow = _plain(same, context.findings.baseline), _narrow(same, context.findings.primary)
    shared = sorted(set(plain) & set(narrow))
    if not shared:
        return f"Cannot tell: {context.findings.primary} and {context.findings.baseline} share no message size."
    last = shared[-1]
    ahead = [size for size in shared if narrow[size] > plain[size]]
    behind = [size for size in shared if narrow[size] <= plain[size]]
    start = (
        f"from {formatting.byte_size(min(s for s in ahead if s > max(behind, default=0)))} on"
        if ahead and last in ahead
        else "nowhere"
    )
    few, many = (formatting.significant(speeds[last], 2) for speeds in (narrow, plain))
    return (
        f"{formatting.capital(context.link(slowest))}, an all-reduce of {formatting.byte_size(last)} runs at {few} "
        f"GB/s with {context.findings.primary} and {many} GB/s with {context.findings.baseline} "
        f"({formatting.ratio(narrow[last] / plain[last])}); it is ahead {start}."
    )


def _table(context: Context, findings: Sequence[Finding]) -> Table:
    rows = [
        TableRow(
            (
                *(context.label(f), f.algorithm, f.transport, formatting.rate(f.rate_name), f.workers),
                *(formatting.byte_size(_size(f)), formatting.significant(sorted(f.line["ms"])[len(f.line["ms"]) // 2])),
                formatting.significant(_speed(f)),
            ),
            f,
        )
        for f in findings
    ]
    heads = ("wire", "algorithm", "over", "link", "workers", "size", "median ms", "bus GB/s")
    return Table("Bus bandwidth", heads, rows, left=4)


def bus(context: Context) -> Figure | Absent:
    key, title = "bus", "Bus bandwidth against message size"
    findings = context.findings.buses
    if not findings:
        return Absent(key, title, "no collective was timed alone")
    places = sorted(
        grouped(findings, lambda f: (f.rate_name, f.workers, f.transport)).values(), key=lambda s: s[0].rate_bits
    )
    return Figure(
        key,
        title,
        _sentence(context, findings),
        [_panel(context, same) for same in places],
        "An all-reduce alone, counted in float32 bytes whatever travels: 2 (W−1)/W times the message over the median "
        "time. A wire with fewer bits may exceed the link's own rate. Both axes are logarithmic.",
        _table(context, findings),
    )
