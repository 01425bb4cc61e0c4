"""`python -m narrowcast_research.reproductions NAME`: as `narrowcast simulate`, for machines without its libraries."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from narrowcast_research import reproductions
from narrowcast_research.reproductions.base import CHOICES, Options
from narrowcast_research.reproductions.engine import share


def main(arguments: list[str] | None = None) -> None:
    """Run one reproduction and write its table."""
    parser = argparse.ArgumentParser(prog="python -m narrowcast_research.reproductions", description=__doc__)
    parser.add_argument("name", choices=list(reproductions.HOMES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", type=float)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--jobs", type=int, default=1, help="so many processes share the cells")
    for key in CHOICES:
        parser.add_argument(f"--{key}")
    given = parser.parse_args(arguments)
    choose = {key: value for key in CHOICES if (value := getattr(given, key)) is not None}
    options = Options(given.quick, given.device, given.seeds, given.budget, given.root, given.out, choose)

    def show(finished: int, total: int, cell: dict[str, object]) -> None:
        sys.stderr.write(f"{finished} of {total} finished; next: {', '.join(map(str, cell.values()))}\n")
        sys.stderr.flush()

    report = share(reproductions.named(given.name), options, given.jobs, show)
    if given.json:
        Path(given.json).write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    sys.stdout.write(report.text() + "\n")


if __name__ == "__main__":
    main()
