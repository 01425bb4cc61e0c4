"""What other packages add: commands, studies, statements for reports, published runs, trainers.

A package gives a function `register(plugins)`, as an entry point of the group `narrowcast.plugins`. Of a tree that is
not installed the environment variable NARROWCAST_PLUGINS names the modules, separated by commas.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

GROUP = "narrowcast.plugins"
VARIABLE = "NARROWCAST_PLUGINS"

RESEARCH = "narrowcast-research"
RESEARCH_COMMANDS = ("validate", "simulate", "bench matmul", "bench simulate", "bench fsdp-curves")
RESEARCH_TABLES = ("dettmers2016", "nonfinite")
RESEARCH_STUDIES = ("accuracy", "edbt18", "formats8")
"""What our own second distribution adds: where it is missing, whoever asks for one of these is told how to get it."""


class PluginError(ValueError):
    """A plugin that cannot be loaded, or that is needed and not installed."""


def research_needed(what: str) -> PluginError:
    """For whoever asks for something of narrowcast-research without having it."""
    get = f"pip install {RESEARCH}, or in a clone pip install -e research"
    return PluginError(f"{what} needs {RESEARCH}, which is not installed; {get}")


@dataclass
class Plugins:
    """What was registered. References are written "module:name" and imported at their first use."""

    commands: dict[str, str] = field(default_factory=dict)
    """By words, as "validate" or "bench matmul": functions with typer's options."""
    tables: dict[str, str] = field(default_factory=dict)
    """Of `codecs --table NAME`: functions of the path for JSON."""
    studies: list[Path] = field(default_factory=list)
    """Folders of study files; clusters/CLUSTER-TRANSPORT.toml below says how a primitive sees a machine."""
    statements: list[str] = field(default_factory=list)
    """Which a report holds against its data: `narrowcast.study.report.sections.Statements`."""
    published: list[str] = field(default_factory=list)
    """Batches and computing times of papers: `narrowcast.study.execution.predicted.Published`."""
    trainers: dict[str, str] = field(default_factory=dict)
    """By a study's `parallel`: functions (model, examples, wire, algorithm) that give a trainer."""


def resolve(reference: str) -> Any:
    """What "module:name" stands for."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:
        raise PluginError(f"{reference} cannot be loaded ({type(error).__name__}: {error})") from error


@cache
def loaded() -> Plugins:
    """All plugins of this environment, registered once in a process."""
    plugins = Plugins()
    modules = filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(",")))
    # each register function, and what named it: the variable, or the package
    origins = {f"{module}:register": f"{VARIABLE}={module}" for module in modules}
    origins |= {point.value: f"plugin {point.name}" for point in metadata.entry_points(group=GROUP)}
    for reference, origin in origins.items():
        try:
            resolve(reference)(plugins)
        except Exception as error:
            raise PluginError(f"{origin}: {error}; repair it or take it out") from error
    return plugins


def trainer(parallel: str) -> Callable[..., Any]:
    """What makes a trainer for a study's `parallel`."""
    if parallel not in loaded().trainers:
        raise research_needed(f'parallel = "{parallel}"')
    return resolve(loaded().trainers[parallel])
