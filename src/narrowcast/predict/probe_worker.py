"""One rank of `narrowcast probe`; rank 0 prints the file. Started by torchrun or the lab.

python probe_worker.py SECONDS NAME WIRE...
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from narrowcast.predict import cluster
from narrowcast.predict.probe import probe

MARK = "# narrowcast cluster"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = probe(sys.argv[3:], float(sys.argv[1]), sys.argv[2])
    if dist.get_rank() == 0:
        print(MARK)
        print(cluster.dump(made), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
