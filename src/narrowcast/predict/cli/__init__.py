"""`narrowcast probe`, `profile`, `predict`, `advise` and `validate`."""

import typer
from narrowcast_research.validation.cli import validate

from narrowcast.cli.options import one_line
from narrowcast.cli.predict import advise, predict
from narrowcast.cli.probe import probe, profile


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (probe, profile, predict, advise, validate):
        app.command()(one_line(command))
