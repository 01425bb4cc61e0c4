"""`narrowcast probe`, `profile`, `predict`, `advise` and `validate`."""

import typer

from narrowcast.predict.cli.answer import advise, predict
from narrowcast.predict.cli.judge import validate
from narrowcast.predict.cli.measure import probe, profile
from narrowcast.predict.cli.options import one_line


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (probe, profile, predict, advise, validate):
        app.command()(one_line(command))
