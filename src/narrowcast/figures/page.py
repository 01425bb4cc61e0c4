"""One HTML file that asks for nothing: its head, its look, its script, and the data inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files

from narrowcast.figures.svg import Markup, lone, tag


def _resource(name: str) -> Markup:
    return Markup((files("narrowcast.figures") / name).read_text(encoding="utf-8"))


def document(title: str, body: Sequence[Markup], data: object) -> str:
    """`data`: what the page says, for programs."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    head = [
        lone("meta", charset="utf-8"),
        lone("meta", name="viewport", content="width=device-width, initial-scale=1"),
        lone("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", _resource("page.css")),
    ]
    scripts = [
        # a closing tag inside of a string would end the script
        tag("script", Markup(text.replace("<", "\\u003c")), type="application/json", id="data"),
        tag("script", _resource("page.js")),
    ]
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", *body, *scripts), lang="en") + "\n"


def navigation(places: Sequence[tuple[str, str]]) -> Markup:
    """Links to sections, given as keys and titles, and the switch between light and dark."""
    links = [tag("li", tag("a", title, href=f"#{key}")) for key, title in places]
    toggle = tag("button", "Light or dark", type="button", id="theme", hidden=True)
    return tag("nav", tag("ul", *links), toggle, aria_label="Contents")


def tile(number: str, what: str, small: str) -> Markup:
    """A number of the first screen."""
    return tag("li", tag("strong", number), tag("span", what), tag("small", small))


def beside(title: str, parts: Sequence[Markup], box: Markup) -> Markup:
    """How sure an answer is, and what it rests on."""
    return tag("div", tag("div", tag("h2", title), *parts, class_="sure"), box, class_="two")


def opening(kicker: str, kind: str, answer: str, rest: str, *more: Markup) -> Markup:
    """The first screen: the answer first. kind: yes, no, depends or unknown."""
    badge = tag("span", f"{answer}.", class_=f"answer {kind}")
    return tag("header", tag("p", kicker, class_="kicker"), tag("h1", badge, " ", rest), *more)


def facts(title: str, pairs: dict[str, str]) -> Markup:
    """What the answer rests on, in a box."""
    listed = [part for key, value in pairs.items() if value for part in (tag("dt", key), tag("dd", value))]
    return tag("aside", tag("h2", title), tag("dl", *listed), class_="setup", aria_label=title)


def table(caption: str, columns: Sequence[str], body: Sequence[Markup], class_: str = "l1", name: str = "") -> Markup:
    """In a part of the page that scrolls, which must be reachable by keyboard and have a name.

    class_: `l2 t1` has words in the first two columns and in the last; numbers stand at the right.
    """
    heads = tag("tr", *(tag("th", head, scope="col") for head in columns))
    inner = (tag("caption", caption), tag("thead", heads), tag("tbody", *body))
    made = tag("table", *inner, class_=class_)
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=name or caption)


def row(cells: Sequence[object], **attributes: object) -> Markup:
    """Of a table; the first cell names it."""
    return tag("tr", tag("th", cells[0], scope="row"), *(tag("td", cell) for cell in cells[1:]), **attributes)


def figure(key: str, number: int, title: str, *parts: Markup) -> Markup:
    """number: 0 for what is not drawn."""
    counted = [tag("span", f"Figure {number}", class_="number"), " "] if number else []
    head = tag("h3", *counted, title, id=f"{key}-title")
    return tag("section", head, *parts, class_="figure", id=key, aria_labelledby=f"{key}-title")


def panel(title: str, drawing: Markup, **attributes: object) -> Markup:
    return tag("div", tag("p", title, class_="panel-title"), drawing, class_="panel", **attributes)


def numbers(below: Markup, rows: int) -> Markup:
    """A table behind a click."""
    return tag("details", tag("summary", f"The numbers ({rows} rows)"), below, class_="numbers")
