"""Fixtures for every test: poisoned memory where kernels are tested, and one way of running hypothesis."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# No deadline: a slow machine is no fault. Where CI runs, the same examples every time: a red run can be repeated.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# pytest-xdist uses the cores, and two pools of threads get in each other's way.
torch.set_num_threads(1)

# Virtual machines may name AMX and not run it: torch's products of bfloat16 then end the process (illegal instruction).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Started in the background (`nohup make test &`) this process ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where narrowcast-research is not installed (a tree on the path alone), the variable names it.
if not metadata.entry_points(group="narrowcast.plugins"):
    os.environ.setdefault("NARROWCAST_PLUGINS", "narrowcast_research")

TESTS = Path(__file__).parent
TOGETHER = {
    "links": ("lab/test_links.py", "lab/test_bench.py", "study/test_lab.py", "study/test_run.py", "study/test_cli.py"),
    "lab": ("lab/test_jobs.py", "lab/test_gpu.py", "lab/test_nothing_is_left.py", "lab/test_mpi.py", "lab/test_cli.py"),
    "report": (
        "study/report/test_browser.py",
        "study/report/test_report.py",
        "study/report/test_command.py",
        "test_site.py",
    ),
    "text": ("research/test_text.py",),
    "sanitize": ("sanitize/test_sanitize.py",),
}
"""Files whose tests one worker takes one after another (`--dist loadgroup`), since side by side they would disturb each
other: links that hold a rate and studies that measure one, labs with many processes, pages in a browser; or since what
they begin with takes long: trainings, a library that is built."""
GROUP_OF = {TESTS / file: group for group, files in TOGETHER.items() for file in files}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file: the marker `xdist_group` of pytest-xdist 3.8 does nothing with pytest 9.2, and says nothing."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByGroup(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return GROUP_OF.get(config.rootpath / nodeid.partition("::")[0]) or super()._split_scope(nodeid)

    return ByGroup(config, log)


@pytest.fixture(autouse=True)
def _one_worker_for_a_group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    group, worker = GROUP_OF.get(request.path), os.environ.get("PYTEST_XDIST_WORKER")
    if group and worker and request.config.getoption("loadgroup", False):
        with (tmp_path_factory.getbasetemp().parent / f"group-{group}").open("a+") as file:
            file.write(f"{worker}\n")
            file.seek(0)
            assert {line.strip() for line in file} == {worker}, f"several workers take tests of the group {group!r}"


POISONED = ("kernels", "codecs", "laws", "gpu")


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill fresh memory with what nobody would take for a result: NaN, or 0xA5 in bytes."""
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    if x.dtype is torch.bool:
        return x.fill_(True)
    return x.fill_(0xA5 if x.dtype is torch.uint8 else torch.iinfo(x.dtype).min)


def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(allocate(*args, **kwargs))

    return allocate_poisoned


@pytest.fixture(scope="session")
def dynamo_has_its_tables() -> None:
    """Dynamo lists torch's functions once for the life of the process: it must see the real ones."""
    torch.compile(torch.neg, backend="eager")(torch.ones(1))


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests of kernels and codecs an element that nobody wrote shows itself."""
    if request.path.relative_to(TESTS).parts[0] not in POISONED:
        return
    request.getfixturevalue("dynamo_has_its_tables")
    for owner, name in [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ]:
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
