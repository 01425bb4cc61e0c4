"""What proves narrowcast: papers reproduced, predictions validated, studies of their size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowcast.plugins import Plugins


def register(plugins: Plugins) -> None:
    """The entry point: what this distribution adds to narrowcast."""
    here = __name__
    plugins.commands |= {
        "validate": f"{here}.validation.cli:validate",
        "simulate": f"{here}.reproductions.cli:simulate",
        "bench matmul": f"{here}.bench.cli:matmul_command",
        "bench simulate": f"{here}.bench.cli:simulate_command",
        "bench fsdp-curves": f"{here}.bench.cli:fsdp_curves_command",
    }
    plugins.tables |= {
        "dettmers2016": f"{here}.bench.cli:dettmers_table",
        "nonfinite": f"{here}.bench.cli:nonfinite_table",
    }
    plugins.studies.append(Path(__file__).with_name("studies"))
    plugins.statements.append(f"{here}.insights:GRUBIC")
    plugins.published.append(f"{here}.validation.qsgd:PUBLISHED")
    plugins.trainers["model"] = f"{here}.trainers:ModelParallel"
