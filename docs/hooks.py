"""What mkdocs asks while it builds the site: the nav's folders become their pages, the first page lists the nav."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

PAGES = "<!-- pages: the nav of mkdocs.yml, written here when the site is built -->"


def _with_folders(item: Any, docs: Path) -> Any:
    """A nav item, in which `design/` stands for all pages of docs/design in the order of their names."""
    match item:
        case list():
            return [_with_folders(one, docs) for one in item]
        case dict():
            return {title: _with_folders(one, docs) for title, one in item.items()}
        case str() if item.endswith("/"):
            pages = sorted((docs / item).glob("*.md"))
            if not pages:
                raise FileNotFoundError(f"mkdocs.yml names the folder {item}, and docs/{item} has no page")
            return [str(page.relative_to(docs)) for page in pages]
        case _:
            return item


def _lines(nav: list[Any], docs: Path) -> Iterator[str]:
    """A heading and a list of links for each part of the nav."""
    for part in nav:
        ((title, pages),) = part.items()
        yield f"\n**{title}**\n"
        for page in pages:
            name, file = next(iter(page.items())) if isinstance(page, dict) else (_heading(docs / page), page)
            yield f"- [{name}]({file})"


def _heading(page: Path) -> str:
    return page.read_text().split("\n", 1)[0].removeprefix("# ")


def on_config(config: MkDocsConfig) -> None:
    """Before the nav is read."""
    config.nav = _with_folders(config.nav, Path(config.docs_dir))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Before a page becomes HTML."""
    if page.file.src_uri != "index.md":
        return markdown
    if PAGES not in markdown or config.nav is None:
        raise ValueError(f"docs/index.md needs the line {PAGES}, and mkdocs.yml a nav")
    return markdown.replace(PAGES, "\n".join(_lines(config.nav, Path(config.docs_dir))))
