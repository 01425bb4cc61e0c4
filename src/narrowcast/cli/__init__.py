"""The command line: a module for each group of commands, joined here with those of plugins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

try:
    import rich as rich
    import typer
except ImportError as missing:
    sys.exit(f"narrowcast: the command line needs typer and rich ({missing}); run: pip install 'narrowcast[cli]'")

from narrowcast import plugins
from narrowcast.cli import bench, data, lab, listings, predict, probe, study
from narrowcast.cli.options import BAD_INPUT
from narrowcast.cli.options import one_line as one_line
from narrowcast.cli.options import out_file as out_file
from narrowcast.cli.options import workers_of as workers_of
from narrowcast.data import DataError
from narrowcast.lab import LabError

app = typer.Typer(
    help="Fewer bits on the wire when deep networks train on many devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
GROUPS = {"bench": bench.app, "lab": lab.app, "data": data.app, "study": study.app}

COMMANDS: tuple[Callable[..., None], ...] = (
    *(probe.probe, predict.profile, predict.predict, predict.advise),
    *(study.report, listings.formats, listings.codecs, listings.doctor),
)

for _command in COMMANDS:
    app.command()(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


@cache
def assemble() -> typer.Typer:
    """The commands of this package and of plugins; one of narrowcast-research that is missing says how to get it."""
    for words, reference in plugins.loaded().commands.items():
        _add(words, plugins.resolve(reference))
    for words in plugins.RESEARCH_COMMANDS:
        if words not in plugins.loaded().commands:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            _add(words, _refusal(words), hidden=True, add_help_option=False, context_settings=anything)
    return app


def _add(words: str, command: Callable[..., None], **options: Any) -> None:
    group, _, name = words.rpartition(" ")
    if group and group not in GROUPS:
        raise plugins.PluginError(f"plugin: no group for the command {words!r}; there are {', '.join(GROUPS)}")
    (GROUPS[group] if group else app).command(name, **options)(command)


def _refusal(words: str) -> Callable[[], None]:
    def refuse() -> None:
        raise plugins.research_needed(words)

    return refuse


def main() -> None:
    """Entry point: an error that we raised on purpose is one line and status 2, without a traceback."""
    try:
        assemble()()
    except (ValueError, TypeError, NotImplementedError, LabError, DataError) as error:
        print(f"narrowcast: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
