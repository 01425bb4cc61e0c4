"""By hand on a machine with a GPU, root and MPS: NCCL ranks of a lab's hosts share the GPU, over links with a rate.

    PYTHONPATH=src:research python3 tests/gpu/check_lab.py

Prints a line for each check and how many passed; ends with 1 where one did not. Takes about a minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for lab.helpers, as pytest has it

from lab.helpers import Footprint, wait_until

from narrowcast.lab import Lab
from narrowcast.lab.check import RateCheck, all_reduce_seconds
from narrowcast.lab.gpu import FOLDER
from narrowcast.lab.topology import parse_rate

RATE, VALUES, ROUNDS = "10gbit", 26_214_400, 5
LEAST, MOST = 0.85, 1.02
Check = tuple[str, bool, str]

RANK = f"""
import json, os, statistics, time, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.full(({VALUES},), float(rank + 1), device="cuda")
dist.all_reduce(x)
right = bool((x == world * (world + 1) / 2).all())
seconds = []
for _ in range({ROUNDS}):
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    seconds.append(time.perf_counter() - begin)
names = ("NCCL_HOSTID", "CUDA_MPS_PIPE_DIRECTORY")
print(json.dumps(dict(right=right, seconds=seconds, told=[os.environ[name] for name in names])), flush=True)
dist.destroy_process_group()
"""
OWNER = """
import sys
from narrowcast.lab import Lab
work = "import torch; x = torch.ones(1 << 20, device='cuda'); print('up', flush=True)\\nwhile True: x.mul_(1)"
with Lab(2, "10gbit", gpu=True) as lab:
    job = lab.start([sys.executable, "-c", work], output=lambda line: print(line.text, flush=True))
    print(lab._connection.guard.pid, flush=True)
    job.wait()
"""


def mps_processes() -> set[str]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"nvidia-cuda-mps" in words[0]:
            found.add(file.parent.name)
    return found


def nccl_over_the_links(hosts: int) -> Iterator[Check]:
    with Lab(hosts, RATE, gpu=True) as lab:
        before = lab.counters()
        result = lab.run([sys.executable, "-c", RANK], capture=True, timeout=60)
        sent = [now.sent - then.sent for now, then in zip(lab.counters(), before, strict=True)]
    title = f"{hosts} hosts"
    if not result.ok:
        yield f"{title}: every rank ends with 0", False, result.summary() + "\n" + result.text()[-3000:]
        return
    said = [line.text for line in result.lines if line.stream == "stdout" and line.text.startswith("{")]
    ranks = [json.loads(text) for text in said]
    yield f"{title}: every rank ends with 0", len(ranks) == hosts, f"{result.seconds:.1f} s"
    yield f"{title}: the sum is right on every rank", all(rank["right"] for rank in ranks), ""
    names = {rank["told"][0] for rank in ranks}
    yield f"{title}: every rank claims a host of its own", len(names) == hosts, " ".join(sorted(names))
    expected = all_reduce_seconds(4 * VALUES, hosts, parse_rate(RATE))
    slowest = tuple(max(rank["seconds"][k] for rank in ranks) for k in range(ROUNDS))
    share = RateCheck(hosts, RATE, 4 * VALUES, expected, slowest, "nccl").share
    yield f"{title}: bus bandwidth is {LEAST:.0%} to {MOST:.0%} of {RATE}", LEAST <= share <= MOST, f"{share:.1%}"
    crossed = sum(sent) / ((ROUNDS + 1) * 2 * (hosts - 1) * 4 * VALUES)  # by ring or tree
    yield f"{title}: the data crossed the links", crossed >= 0.99, f"{crossed:.3f} of the bytes that it takes"


def killed() -> Iterator[Check]:
    """SIGKILL to the lab's process while its ranks compute."""
    before = mps_processes()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    with owner:
        assert owner.stdout is not None
        words = [owner.stdout.readline().strip() for _ in range(3)]
        guard = next((int(word) for word in words if word.isdigit()), 0)
        yield "a lab to kill: its ranks compute", words.count("up") == 2, " ".join(words)
        footprint, mps = Footprint.of(guard), mps_processes() - before
        yield "its MPS runs: a daemon and a server", len(mps) >= 2, f"{len(mps)} processes"
        began = time.monotonic()
        os.kill(owner.pid, signal.SIGKILL)
        wait_until(lambda: not footprint.left() and mps_processes() <= before, 20)
        took = f"{time.monotonic() - began:.1f} s"
    left = footprint.left()
    yield "after kill -9 no process and no namespace is left", not left, "; ".join(left) or took
    yield "after kill -9 no MPS is left", mps_processes() <= before, took
    yield "after kill -9 no pipes are left", not FOLDER.exists(), str(FOLDER)


def works_again() -> Iterator[Check]:
    """What a killed lab leaves in the driver does not hinder the next."""
    work = "import torch; torch.ones(9, device='cuda').sum().item()"
    with Lab(2, RATE, gpu=True) as lab:
        done = lab.run([sys.executable, "-c", work], capture=True, timeout=40)
    yield "the next lab uses the GPU", done.ok, done.summary() if done.ok else done.text()[-2000:]


def checks() -> Iterator[Check]:
    before = mps_processes()
    for hosts in (2, 4):
        yield from nccl_over_the_links(hosts)
        yield f"{hosts} hosts: MPS is gone with the lab", mps_processes() <= before, ""
    yield from killed()
    yield from works_again()


def main() -> int:
    began, passed, count = time.monotonic(), 0, 0
    for what, good, detail in checks():
        print(f"{'ok  ' if good else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)
        passed, count = passed + good, count + 1
    print(f"{passed} of {count} checks passed in {time.monotonic() - began:.0f} s")
    return passed < count


if __name__ == "__main__":
    sys.exit(main())
