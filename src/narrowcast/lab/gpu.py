"""GPUs in a lab: which there are, what a rank is told of them, and MPS, through which ranks of all hosts share them.

Nothing here opens a GPU: only ranks and MPS do.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from narrowcast.lab import syscalls
from narrowcast.lab.connection import LabError
from narrowcast.lab.topology import host_name

log = logging.getLogger("narrowcast")

CONTROL = "nvidia-cuda-mps-control"
# In the lab's own /dev/shm: the kernel removes it with the lab.
FOLDER = Path("/dev/shm/narrowcast-mps")
MPS = {"CUDA_MPS_PIPE_DIRECTORY": f"{FOLDER}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{FOLDER}/log"}
DEVICES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"
# What would bring a rank's data to another one past the links.
SHORTCUTS = ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
# nvidia-smi may have to wake the driver up.
ASK_SECONDS, START_SECONDS, QUIT_SECONDS = 60, 20, 2


@dataclass(frozen=True)
class Gpus:
    """What ranks share: GPUs, as CUDA_VISIBLE_DEVICES names them, and the program that starts MPS, or none."""

    names: tuple[str, ...]
    control: str | None

    def environment(self, rank: int, per_host: int) -> dict[str, str]:
        """What a rank is told. NCCL refuses two ranks of one host on one GPU, so each claims a host of its own.

        Several GPUs go round: device LOCAL_RANK of each host is the one after that of the rank before.
        """
        host, local = divmod(rank, per_host)
        first = host * per_host % len(self.names)
        in_turn = {VISIBLE: ",".join(self.names[first:] + self.names[:first])} if len(self.names) > 1 else {}
        mps = MPS if self.control else {}
        return {**dict.fromkeys(SHORTCUTS, "1"), **mps, **in_turn, "NCCL_HOSTID": f"{host_name(host)}-{local}"}


def find_gpus(mps: bool) -> Gpus:
    """What this machine has. Raise LabError where something is missing, and say what to do."""
    names = _visible(_count())
    if not mps:
        log.warning("a lab without MPS: ranks take turns on the GPU, so their times mean nothing")
        return Gpus(names, None)
    control = shutil.which(CONTROL)
    if control is None:
        raise LabError(
            f"ranks share a GPU through MPS, and {CONTROL} is not on the path; it comes with NVIDIA's driver (Debian: "
            f"nvidia-cuda-mps); or do without it (mps=False, --no-mps): ranks then take turns, and times mean nothing"
        )
    return Gpus(names, control)


def _count() -> int:
    """nvidia-smi knows, and wakes the driver up; a container may have CUDA without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        said, count = "is not on the path", len(list(DEVICES.glob("nvidia[0-9]*")))
    else:
        try:
            done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise LabError(f"nvidia-smi -L does not answer: {error}; see that NVIDIA's driver runs") from None
        said = f"says: {(done.stdout + done.stderr).strip() or 'nothing'}"
        count = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    if not count:
        raise LabError(f"a lab with GPUs needs one of NVIDIA's, and its driver; nvidia-smi {said}; or leave gpu out")
    return count


def _visible(count: int) -> tuple[str, ...]:
    """The GPUs that the caller may use."""
    chosen = os.environ.get(VISIBLE)
    if chosen is None:
        return tuple(map(str, range(count)))
    names = tuple(name.strip() for name in chosen.split(",") if name.strip())
    if not names or "-1" in names:
        raise LabError(f"a lab with GPUs needs one, and {VISIBLE}={chosen!r} hides all {count}; unset it")
    return names


def start_mps(control: str) -> None:
    """Start MPS's daemon, as PID 1 of a lab; it starts its server when the first rank comes."""
    for folder in MPS.values():
        Path(folder).mkdir(parents=True)
    # its output to a file: a daemon would hold a pipe open
    with (FOLDER / "output").open("wb") as output:
        done = subprocess.run(
            [control, "-d"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            timeout=START_SECONDS,
            check=False,
        )
    until = time.monotonic() + START_SECONDS
    while done.returncode or not _tell(control, "get_server_list"):
        if done.returncode or time.monotonic() > until:
            raise OSError(f"MPS does not start: {_last_words()}")
        time.sleep(0.1)


def end_mps(control: str) -> None:
    """Let MPS end by itself, once its ranks are gone; what does not is killed with the lab."""
    until = time.monotonic() + QUIT_SECONDS
    _tell(control, "quit")
    while time.monotonic() < until and any(pid != 1 and syscalls.started(pid) for pid in syscalls.processes()):
        time.sleep(0.02)


def _environment() -> dict[str, str]:
    """MPS serves every GPU, and a rank chooses: a choice made in both would count twice."""
    return {**{name: value for name, value in os.environ.items() if name != VISIBLE}, **MPS}


def _tell(control: str, words: str) -> bool:
    try:
        done = subprocess.run(
            [control],
            input=f"{words}\n".encode(),
            capture_output=True,
            env=_environment(),
            timeout=QUIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _last_words() -> str:
    files = [FOLDER / "output", *sorted(FOLDER.glob("log/*.log"))]
    return " ".join(line for file in files for line in file.read_text(errors="replace").splitlines()[-5:]) or "no word"
