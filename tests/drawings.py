"""What stands where in a drawing, read from its SVG: labels as boxes, data as points."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from xml.etree import ElementTree

from narrowcast.figures import Box, text_box, text_width

SLACK = 0.2
"""Coordinates and widths are written to a tenth of a pixel each."""
SIZES = {"t": 11.0}
DATA = {"s", "e", "m", "o", "x", "up", "down"}
"""Classes of what stands for a number."""

Element = ElementTree.Element


def drawings(page: str) -> list[Element]:
    """Every drawing of a page, not the keys of legends."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg [^>]*role="img".*?</svg>', page, re.DOTALL)]


def _classes(element: Element) -> list[str]:
    return (element.get("class") or "").split()


def _label(element: Element) -> Box:
    classes, words = _classes(element), "".join(element.itertext())
    anchor = "start" if "b" in classes else "end" if "z" in classes else element.get("text-anchor", "middle")
    size = SIZES.get(classes[0] if classes else "", 11.5)
    x, y, width = float(element.get("x", 0)), float(element.get("y", 0)), text_width(words, size)
    if turned := re.match(r"rotate\(-90 (\S+) (\S+)\)", element.get("transform", "")):
        # from bottom to top, around its own place
        assert float(turned[1]) == x
        return Box(x - 9, y - width / 2, x + 3, y + width / 2)
    return text_box(x, y, width, anchor)


def labels(svg: Element) -> list[tuple[str, Box]]:
    return [("".join(text.itertext()), _label(text)) for text in svg.iter("text")]


def covered(svg: Element) -> list[tuple[str, str]]:
    """Pairs of labels of which one covers the other."""
    return [(a, b) for (a, first), (b, second) in combinations(labels(svg), 2) if first.overlaps(second)]


def frame_of(svg: Element) -> Box | None:
    found = svg.get("data-frame")
    return Box(*map(float, found.split())) if found else None


def outer(svg: Element) -> Box:
    _, _, width, height = map(float, svg.get("viewBox", "").split())
    return Box(0, 0, width, height)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)]


def _places(element: Element) -> Iterator[tuple[float, float]]:
    match element.tag:
        case "polyline":
            numbers = _numbers(element.get("points", ""))
            yield from zip(numbers[::2], numbers[1::2], strict=True)
        case "polygon":
            numbers = _numbers(element.get("points", ""))
            xs, ys = numbers[::2], numbers[1::2]
            yield (min(xs) + max(xs)) / 2, (min(ys) + max(ys)) / 2
        case "circle":
            yield float(element.get("cx", "nan")), float(element.get("cy", "nan"))
        case "line":
            yield float(element.get("x1", "nan")), float(element.get("y1", "nan"))
            yield float(element.get("x2", "nan")), float(element.get("y2", "nan"))
        case "rect":
            x, y, width, height = (float(element.get(name, "nan")) for name in ("x", "y", "width", "height"))
            if "m" in _classes(element):
                yield x + width / 2, y + height / 2
            else:
                yield from ((x, y), (x + width, y + height))
        case "path":
            x, y, width, *_ = _numbers(element.get("d", ""))
            yield x + width / 2, y + width / 2


def outside(svg: Element) -> list[tuple[float, float]]:
    """Data beyond the axes; a number that is none counts as beyond."""
    frame = frame_of(svg)
    assert frame is not None, "the drawing does not say where its data are"
    left, top, right, bottom = frame
    wanted = (e for e in svg.iter() if DATA & set(_classes(e)) or any(c.startswith("p-") for c in _classes(e)))
    every = (place for element in wanted for place in _places(element))
    return [(x, y) for x, y in every if not (left - SLACK <= x <= right + SLACK and top - SLACK <= y <= bottom + SLACK)]


def sticking_out(svg: Element) -> list[str]:
    """Labels that are not wholly in the drawing."""
    return [words for words, box in labels(svg) if not box.inside(outer(svg))]
