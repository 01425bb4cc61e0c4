"""`narrowcast doctor`."""

from __future__ import annotations

import importlib.util
import platform
from typing import Any

import torch
import typer
from rich.table import Table

import narrowcast
from narrowcast.bench import check
from narrowcast.bench import cuda as bench_cuda
from narrowcast.codecs import all_specs
from narrowcast.codecs import codec as codec_named
from narrowcast.console import JsonPath, emit, new_table
from narrowcast.kernels import explain, native, triton_loader
from narrowcast.measure import cpu_name

EXTRAS = ("typer", "rich", "numpy", "ml_dtypes", "gfloat", "bitsandbytes", "torchao", "qtorch", "softposit")


def _slow_codecs() -> dict[str, str]:
    """Codecs that do not run on the fastest path, and why."""
    slow = {}
    for spec in all_specs():
        reasons = {choice.why for choice in codec_named(spec).explain() if choice.why}
        if reasons:
            slow[spec] = "; ".join(sorted(reasons))
    return slow


def _cuda_devices() -> list[str]:
    return [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]


def _failures() -> dict[str, str]:
    """What differs from the reference: every codec on the CPU; on a GPU, which compiles first, one of each kind."""
    checks = {spec: check.failure(codec_named(spec)) for spec in all_specs()}
    if torch.cuda.is_available():
        checks |= {
            f"{spec} on cuda": check.failure(codec_named(spec), torch.device("cuda")) for spec in bench_cuda.TARGETS
        }
    return {what: why for what, why in checks.items() if why}


def doctor(json_path: JsonPath = None) -> None:
    """What runs on this machine, what does not, and why. Ends with 1 where a kernel fails its check."""
    library, where = native.load()
    failures = _failures()
    facts: dict[str, Any] = {
        "narrowcast": narrowcast.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "native": library is not None,
        "native_where": where,
        "isa": native.isa() if library is not None else None,
        "cuda": _cuda_devices(),
        "triton": triton_loader.load()[1],
        "ops": [vars(choice) for choice in explain()],
        "slow": _slow_codecs(),
        "failed_checks": failures,
        "extras": {name: importlib.util.find_spec(name) is not None for name in EXTRAS},
    }
    emit(facts, _doctor_table(facts), json_path)
    if failures:
        raise typer.Exit(1)


def _doctor_table(facts: dict[str, Any]) -> Table:
    shown = new_table("narrowcast doctor", "what", "finding")
    shown.columns[1].justify = "left"
    for key in ("narrowcast", "torch", "python", "cpu", "threads"):
        shown.add_row(key, str(facts[key]))
    state = f"yes, {facts['isa']}" if facts["native"] else f"NO: {facts['native_where']}"
    shown.add_row("native CPU kernels", state)
    shown.add_row("CUDA devices", ", ".join(facts["cuda"]) or "none here")
    shown.add_row(
        "Triton kernels", facts["triton"] if facts["cuda"] else f"{facts['triton']}; no CUDA device uses them"
    )
    for choice in facts["ops"]:
        shown.add_row(
            f"{choice['op']} on {choice['device']}", " ".join(filter(None, [choice["implementation"], choice["why"]]))
        )
    for spec, why in facts["slow"].items() if facts["native"] else ():
        shown.add_row(f"slow: {spec}", why)
    for spec, why in facts["failed_checks"].items():
        shown.add_row(f"FAILED: {spec}", why)
    here, absent = ([name for name, found in facts["extras"].items() if found is state] for state in (True, False))
    shown.add_row("optional packages", f"here: {', '.join(here)}; not here: {', '.join(absent) or 'none'}")
    return shown
