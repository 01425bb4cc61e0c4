"""A SLURM script for a study: one step for each number of workers, then what needs no ranks."""

from __future__ import annotations

import shlex
from pathlib import Path

from narrowcast.study.file import StudyFile

HEAD = """\
#!/bin/bash
#SBATCH --job-name=narrowcast-{name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --output=narrowcast-{name}-%j.log
# Add what your cluster asks for: --time, --partition, --account, and --gpus-per-node for transport nccl.

set -euo pipefail
failed=0
port=29500
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
"""

STEP = """\

# {workers} workers: {hosts} node(s) with {per_host} rank(s) each
srun --nodes={hosts} --ntasks={hosts} --ntasks-per-node=1 torchrun --nnodes={hosts} --nproc-per-node={per_host} \\
  --rdzv-id="$SLURM_JOB_ID-{workers}-{per_host}" --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --no-python \\
  {command} --launcher torchrun --only time,bus || failed=1
"""

MPI = """\

# left out: cases over mpi. torchrun starts no ranks of MPI; mpirun does (docs/study.md)
"""

TAIL = """\

# trainings in the simulator, predictions, and the report
{command} --only accuracy,predicted || failed=1
exit $failed
"""


def script(study: StudyFile, name: str, out: Path) -> str:
    """The script's text. `name`: as the study was named on the command line."""
    command = shlex.join(["narrowcast", "study", "run", name, "--out", str(out)])
    measured = [grid for grid in study.grids if grid.kind in ("time", "bus")]
    every = {layout for grid in measured if set(grid.transport) - {"mpi"} for layout in grid.workers}
    layouts = sorted(every, key=lambda layout: (layout.workers, layout.per_host))
    nodes = max([layout.hosts for layout in layouts], default=1)
    steps = [STEP.format(workers=layout.workers, **vars(layout), command=command) for layout in layouts]
    left_out = [MPI] * any("mpi" in grid.transport for grid in measured)
    return "".join([HEAD.format(name=study.name, nodes=nodes), *steps, *left_out, TAIL.format(command=command)])
