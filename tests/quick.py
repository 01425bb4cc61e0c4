"""`make quick`: the tests of what changed since a commit, and a few that span all, in about 90 seconds on two cores."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPANNING = (
    *("tests/golden", "tests/test_layers.py", "tests/test_import_is_free.py"),
    *(f"tests/laws/test_codec_laws.py::test_laws[{spec}]" for spec in ("int8/256", "e4m3fn/128")),
)
"""Golden hashes are every codec's wire, sums in one process and of four, DDP steps and predictions."""
AREAS = {
    "src/narrowcast/formats": ("tests/formats", "tests/codecs/test_specs.py"),
    "src/narrowcast/kernels": ("tests/kernels/test_native_equals_reference.py", "tests/kernels/test_fused.py"),
    "csrc": ("tests/kernels/test_native_equals_reference.py", "tests/kernels/test_matmul.py"),
    "src/narrowcast/codecs": ("tests/codecs",),
    "src/narrowcast/collectives": ("tests/dist/test_all_reduce.py", "tests/dist/test_agreement.py"),
    "src/narrowcast/parallel": ("tests/parallel", "tests/dist/test_residuals.py", "tests/dist/test_explain.py"),
    "src/narrowcast/simulate": ("tests/simulate/test_world.py", "tests/simulate/test_training.py"),
    "src/narrowcast/measure": ("tests/predict/test_files.py",),
    "src/narrowcast/predict": (
        "tests/predict/test_costs.py",
        "tests/predict/test_timeline.py",
        "tests/predict/test_cli.py",
    ),
    "src/narrowcast/study": (
        "tests/study/test_file.py",
        "tests/study/test_cases.py",
        "tests/study/report/test_verdict.py",
    ),
    "src/narrowcast/data": ("tests/data",),
    "src/narrowcast/lab": ("tests/lab/test_links.py", "tests/lab/test_cli.py"),
    "src/narrowcast/bench": ("tests/bench",),
    "src/narrowcast/cli": ("tests/test_cli.py", "tests/test_plugins.py"),
    "src/narrowcast/plugins.py": ("tests/test_plugins.py",),
    "research": ("tests/research/test_validate_command.py", "tests/research/test_insights.py", "tests/test_plugins.py"),
    "docs": ("tests/test_generated_docs.py",),
}
"""What changed, and the tests that notice most of it soonest. `make test` has all of them."""


def changed(base: str) -> list[str]:
    """Files that differ from the last common commit with `base`, those that git does not know yet among them."""
    common = git("merge-base", base, "HEAD") or ["HEAD"]
    return [*git("diff", "--name-only", common[0]), *git("ls-files", "--others", "--exclude-standard")]


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[:-1]


def is_a_test(path: str) -> bool:
    """gpu/ and extras/ need what a laptop has not."""
    where, name = Path(path).parts[:-1], Path(path).name
    return path.startswith("tests/") and name.startswith("test_") and not {"gpu", "extras"} & set(where)


def chosen(paths: list[str], root: Path = ROOT) -> list[str]:
    """Tests that changed themselves, those of areas that changed, and those that span all; each once."""
    own = [path for path in paths if is_a_test(path)]
    areas = [test for area, tests in AREAS.items() if any(p.startswith(area) for p in paths) for test in tests]
    found = [*own, *areas, *SPANNING]
    there = [path for path in found if (root / path.partition("::")[0]).exists()]
    folders = {path for path in there if (root / path).is_dir()}
    return [path for path in dict.fromkeys(there) if not {str(p) for p in Path(path).parents} & folders]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="main")
    parser.add_argument("--workers", default="2")
    arguments, more = parser.parse_known_args()
    tests = chosen(changed(arguments.base))
    print("== pytest", *tests, sep="\n   ", flush=True)
    return subprocess.call([sys.executable, "-m", "pytest", "-q", "-n", arguments.workers, *tests, *more], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
