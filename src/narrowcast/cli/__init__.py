"""The command line: a module for each group of commands, imported when one of them runs, and those of plugins."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import rich as rich
    import typer
except ImportError as missing:
    sys.exit(f"narrowcast: the command line needs typer and rich ({missing}); run: pip install 'narrowcast[cli]'")

import narrowcast
from narrowcast import plugins
from narrowcast.cli.table import BAD_INPUT, COMMANDS, GROUPS
from narrowcast.lazy import homes_of, lazy_front

if TYPE_CHECKING:
    from narrowcast.cli.options import one_line as one_line
    from narrowcast.cli.options import out_file as out_file
    from narrowcast.cli.options import workers_of as workers_of

HELP = "Fewer bits on the wire when deep networks train on many devices."
HELP_WORDS = ("-h", "--help")
SETTINGS = {"help_option_names": list(HELP_WORDS)}
RESEARCH_MODULE = plugins.RESEARCH.replace("-", "_")


__getattr__, *_ = lazy_front(__name__, homes_of({"options": "one_line out_file workers_of"}))
"""For commands of plugins."""


def _new_app(**options: Any) -> typer.Typer:
    return typer.Typer(
        help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=SETTINGS, **options
    )


def _there(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


@cache
def assemble() -> typer.Typer:
    """The commands of this package and of plugins; one of narrowcast-research that is missing says how to get it."""
    app, groups = _new_app(), {name: _there(where) for name, (where, _) in GROUPS.items()}
    for name, (where, _) in COMMANDS.items():
        app.command(name)(_there(where))
    for name, group in groups.items():
        app.add_typer(group, name=name)
    places = {"": app, **groups}
    for words, reference in plugins.loaded().commands.items():
        _add(places, words, plugins.resolve(reference))
    for words in plugins.RESEARCH_COMMANDS:
        if words not in plugins.loaded().commands:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            _add(places, words, _refusal(words), hidden=True, add_help_option=False, context_settings=anything)
    return app


def overview() -> typer.Typer:
    """The commands with their lines and without what they do: for `--help`, which imports none of them."""
    app = _new_app(epilog=_epilog())
    app.callback()(_version_option)
    for name, (_, line) in {**COMMANDS, **GROUPS}.items():
        app.command(name, help=line)(_nothing)
    return app


def _nothing() -> None:
    pass


def _version_option(version: bool = typer.Option(False, "--version", help="Show the version.")) -> None:
    """Shown in the help alone: `main` answers it."""


def _epilog() -> str:
    if importlib.util.find_spec(RESEARCH_MODULE) is None:
        return f"More commands come with {plugins.RESEARCH}: {', '.join(plugins.RESEARCH_COMMANDS)}."
    return f"From {plugins.RESEARCH}: {', '.join(plugins.RESEARCH_COMMANDS)}."


def _one(name: str) -> typer.Typer:
    """One command alone, with its own module and no other."""
    app = _new_app()
    app.command(name)(_there(COMMANDS[name][0]))
    app.callback()(_nothing)  # so that its name is still asked for
    return app


def command_of(app: typer.Typer) -> Any:
    """What runs; flags show no type, since they take no value."""
    command = typer.main.get_command(app)
    pending = [command]
    while pending:
        one: Any = pending.pop()
        pending += getattr(one, "commands", {}).values()
        names = one.context_settings.setdefault("help_option_names", list(HELP_WORDS))
        help_option = one.get_help_option(typer.Context(one, help_option_names=names))
        for param in filter(None, [*one.params, help_option]):
            if getattr(param, "is_bool_flag", False):
                param.metavar = ""
    return command


def _add(places: dict[str, typer.Typer], words: str, command: Callable[..., None], **options: Any) -> None:
    group, _, name = words.rpartition(" ")
    if group not in places:
        raise plugins.PluginError(f"plugin: no group for the command {words!r}; there are {', '.join(GROUPS)}")
    places[group].command(name, **options)(command)


def _refusal(words: str) -> Callable[[], None]:
    def refuse() -> None:
        raise plugins.research_needed(words)

    return refuse


def _errors() -> tuple[type[BaseException], ...]:
    """Those that we raise on purpose; asked when something was raised, so that nothing waits for their modules."""
    from narrowcast.data import DataError
    from narrowcast.lab import LabError

    return ValueError, TypeError, NotImplementedError, LabError, DataError


def main() -> None:
    """Entry point: an error that we raised on purpose is one line and status 2, without a traceback."""
    words = sys.argv[1:]
    first = words[0] if words else HELP_WORDS[0]
    if first == "--version":
        print(f"narrowcast {narrowcast.__version__}")
        return
    try:
        app = overview() if first in HELP_WORDS else _one(first) if first in COMMANDS else assemble()
        command_of(app)(words or [HELP_WORDS[0]])
    except Exception as error:
        if not isinstance(error, _errors()):
            raise
        print(f"narrowcast: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
