"""The one error of the lab: what went wrong, what was found, what to do."""

from __future__ import annotations


class LabError(RuntimeError):
    """The lab cannot be set up, or a command in it failed."""
