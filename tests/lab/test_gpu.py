"""Labs with GPUs, on a machine without one: nvidia-smi and MPS are scripts that say and note what they are asked."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.helpers import Footprint, wait_until
from typer.testing import CliRunner

from narrowcast.cli.lab import app
from narrowcast.lab import Lab, LabError, check, gpu
from narrowcast.lab.connection import PACKAGE
from narrowcast.lab.gpu import CONTROL, FOLDER, find_gpus

RUNNER = CliRunner()
NUMBERS = itertools.count()
OWNER = str(Path(__file__).with_name("owner.py"))

MPS = """#!/bin/sh
# as the real one: -d starts a daemon, which starts a server; other words come from stdin
note={note}
case "$1" in
-d)
  echo "start $CUDA_MPS_PIPE_DIRECTORY visible=$CUDA_VISIBLE_DEVICES" >>$note
  [ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 3
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
  setsid sleep {seconds} &
  echo $! >"$CUDA_MPS_PIPE_DIRECTORY/daemon"
  {more} ;;
*)
  read word
  echo "$word" >>$note
  [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] || exit 1
  [ $word != quit ] || {quit} ;;
esac
"""


class Machine:
    """A folder of programs, and what MPS was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.note = folder, folder / "note"
        # no other test's
        self.seconds = f"{1000 + os.getpid() % 1000}.{next(NUMBERS)}"

    def program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def gpus(self, count: int) -> None:
        lines = "".join(f"echo 'GPU {k}: NVIDIA H200 (UUID: GPU-{k})'\n" for k in range(count))
        self.program("nvidia-smi", f"#!/bin/sh\n[ $1 = -L ] || exit 1\n{lines}")

    def mps(
        self, more: str = ":", quit: str = "[ $word != quit ] || kill $(cat $CUDA_MPS_PIPE_DIRECTORY/daemon)"
    ) -> None:
        self.program(CONTROL, MPS.format(note=self.note, more=more, quit=quit, seconds=self.seconds))

    @property
    def asked(self) -> list[str]:
        return self.note.read_text().splitlines() if self.note.exists() else []

    def sleeping(self) -> list[str]:
        """Its MPS processes, wherever they are."""
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = file.read_bytes()
            except OSError:
                continue
            found += [str(file)] if words == f"sleep\0{self.seconds}\0".encode() else []
        return found


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = Machine(tmp_path)
    found.gpus(1)
    found.mps()
    return found


def environments(lab: Lab, **options: object) -> list[dict[str, str]]:
    result = lab.run(["env", "-0"], capture=True, **options).check()
    ranks = {line.rank: line.text for line in result.lines}
    return [dict(item.split("=", 1) for item in ranks[rank].split("\0") if item) for rank in sorted(ranks)]


@pytest.mark.usefixtures("needs_lab")
def test_ranks_are_told_of_the_gpu_and_mps_is_there_while_the_lab_is(machine: Machine) -> None:
    with Lab(2, gpu=True) as lab:
        found = environments(lab, ranks_per_host=2)
        script = "ls $CUDA_MPS_PIPE_DIRECTORY; ls -d $CUDA_MPS_LOG_DIRECTORY; ls /sys/class/net"
        seen = lab.run(["sh", "-c", script], capture=True)
    assert [env["NCCL_HOSTID"] for env in found] == ["host0-0", "host0-1", "host1-0", "host1-1"]
    for env in found:
        for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
            assert env[name] == "1"
        assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("eth0", "eth0")
        assert env["CUDA_MPS_PIPE_DIRECTORY"] == f"{FOLDER}/pipe"
        assert "CUDA_VISIBLE_DEVICES" not in env
    expected = ["control", "daemon", f"{FOLDER}/log", "eth0", "lo"]
    assert [seen.text(rank).split() for rank in range(2)] == [expected] * 2
    assert machine.asked == [f"start {FOLDER}/pipe visible=", "get_server_list", "quit"]
    assert not FOLDER.exists()


@pytest.mark.usefixtures("needs_lab")
def test_the_callers_variables_win(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    monkeypatch.setenv("RANK", "7")
    with Lab(2, gpu=True) as lab:
        assert [(env["NCCL_HOSTID"], env["RANK"]) for env in environments(lab)] == [("host0-0", "0"), ("host1-0", "1")]
        assert {env["NCCL_P2P_DISABLE"] for env in environments(lab, env={"NCCL_P2P_DISABLE": "0"})} == {"0"}


@pytest.mark.usefixtures("needs_lab")
def test_without_a_gpu_nothing_of_it_is_set_or_started(machine: Machine) -> None:
    with Lab(2) as lab:
        names = {name for env in environments(lab) for name in env}
    assert not {name for name in names if name.startswith(("CUDA_", "NCCL_"))} - {"NCCL_SOCKET_IFNAME"}
    assert machine.asked == []


def test_several_gpus_go_round(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_devices(per_host: int) -> list[str]:
        envs = [(rank, find_gpus(True).environment(rank, per_host)) for rank in range(4)]
        return [env["CUDA_VISIBLE_DEVICES"].split(",")[rank % per_host] for rank, env in envs]

    machine.gpus(3)
    assert first_devices(1) == ["0", "1", "2", "0"]
    assert first_devices(2) == ["0", "1", "2", "0"]
    assert find_gpus(True).environment(1, 1)["CUDA_VISIBLE_DEVICES"] == "1,2,0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert first_devices(1) == ["2", "1", "2", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert "CUDA_VISIBLE_DEVICES" not in find_gpus(True).environment(1, 1)


@pytest.mark.usefixtures("needs_lab")
def test_mps_sees_all_gpus_and_a_rank_chooses(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice made for MPS too would be counted twice."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    machine.gpus(2)
    with Lab(2, gpu=True) as lab:
        assert {env["CUDA_VISIBLE_DEVICES"] for env in environments(lab)} == {"1"}
    assert machine.asked[0].endswith("visible=")


@pytest.mark.usefixtures("needs_lab")
def test_without_mps_ranks_take_turns_and_a_warning_says_so(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    (machine.folder / CONTROL).unlink()
    with Lab(2, gpu=True, mps=False) as lab:
        found = environments(lab)
    assert [env["NCCL_HOSTID"] for env in found] == ["host0-0", "host1-0"]
    assert not any("CUDA_MPS_PIPE_DIRECTORY" in env for env in found)
    assert "take turns on the GPU, so their times mean nothing" in caplog.text


def test_what_is_missing_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.folder))
    (machine.folder / CONTROL).unlink()
    with pytest.raises(LabError, match=rf"through MPS, and {CONTROL} is not on the path; .*mps=False, --no-mps"):
        find_gpus(True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LabError, match=r"CUDA_VISIBLE_DEVICES='' hides all 1; unset it"):
        find_gpus(True)
    machine.program("nvidia-smi", "#!/bin/sh\necho 'No devices were found'; exit 6\n")
    with pytest.raises(LabError, match=r"needs one of NVIDIA's.*nvidia-smi says: No devices were found"):
        find_gpus(True)
    machine.program("nvidia-smi", "not a program")
    with pytest.raises(LabError, match=r"nvidia-smi -L does not answer: .*see that NVIDIA's driver runs"):
        find_gpus(True)
    (machine.folder / "nvidia-smi").unlink()
    monkeypatch.setattr(gpu, "DEVICES", machine.folder)
    with pytest.raises(LabError, match=r"nvidia-smi is not on the path; or leave gpu out"):
        find_gpus(True)


def test_without_nvidia_smi_devices_are_counted(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that has CUDA and no tools."""
    monkeypatch.setenv("PATH", str(machine.folder))
    (machine.folder / "nvidia-smi").unlink()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (machine.folder / name).touch()
    monkeypatch.setattr(gpu, "DEVICES", machine.folder)
    assert find_gpus(True).names == ("0", "1")


@pytest.mark.usefixtures("needs_lab")
def test_an_mps_that_does_not_start_is_quoted_and_leaves_nothing(machine: Machine) -> None:
    machine.mps(more="echo 'a daemon runs already'; exit 1")
    with pytest.raises(LabError, match="MPS does not start: a daemon runs already"), Lab(2, gpu=True):
        pass
    assert wait_until(lambda: not machine.sleeping())


@pytest.mark.usefixtures("needs_lab")
def test_mpirun_and_gpus_exclude_one_another(machine: Machine) -> None:
    with Lab(2, gpu=True) as lab, pytest.raises(ValueError, match="'mpirun' in a lab with GPUs; take 'env'"):
        lab.run(["true"], launcher="mpirun")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.usefixtures("needs_lab")
@pytest.mark.parametrize("stubborn", [False, True], ids=["it quits", "it does not"])
@pytest.mark.parametrize("victim", ["owner", "guard", "an owner that forked"])
def test_after_kill_9_nothing_of_mps_is_left(machine: Machine, victim: str, stubborn: bool) -> None:
    if stubborn:
        machine.mps(quit=f"exec sleep {machine.seconds}")
    process = subprocess.Popen(
        [sys.executable, OWNER, str(PACKAGE), "fork" if "forked" in victim else "wait", "gpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        guard = int(process.stdout.readline())
        footprint = Footprint.of(guard)
        assert wait_until(lambda: len(machine.sleeping()) == 1), machine.asked
        # guard, PID 1, two ranks with two children each, MPS
        assert (len(footprint.processes), len(footprint.namespaces)) == (10, 3)
        process.stdin.write("go\n")
        process.stdin.flush()
        if "forked" in victim:
            assert wait_until(lambda: process.pid in [os.getpgid(pid) for pid in children(process.pid)])
        os.kill(guard if victim == "guard" else process.pid, signal.SIGKILL)
        assert wait_until(lambda: not footprint.left() and not machine.sleeping()), footprint.left()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not FOLDER.exists()
    # who kills the guard kills PID 1 with it, at once: the kernel alone cleans up
    assert ("quit" in machine.asked) == (victim != "guard")


@pytest.mark.usefixtures("needs_lab")
def test_the_command_line_starts_a_lab_with_gpus(machine: Machine) -> None:
    done = RUNNER.invoke(app, ["run", "--hosts", "2", "--gpu", "--", "sh", "-c", "echo I am $NCCL_HOSTID"])
    assert (done.exit_code, "[host 1 rank 1] I am host1-0" in done.output) == (0, True)
    assert machine.asked[-1] == "quit"
    (machine.folder / CONTROL).unlink()
    done = RUNNER.invoke(app, ["run", "--hosts", "2", "--gpu", "true"])
    assert (done.exit_code, done.output.startswith("narrowcast: ranks share a GPU through MPS")) == (2, True)
    done = RUNNER.invoke(app, ["run", "--hosts", "2", "--gpu", "--no-mps", "true"])
    assert done.exit_code == 0


def test_check_asks_nccl_for_100_mib_five_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    class NoLab:
        def __init__(self, hosts: int, rate: str, gpu: bool, delay: None) -> None:
            asked.update(hosts=hosts, rate=rate, gpu=gpu)

        def __enter__(self) -> NoLab:
            return self

        def __exit__(self, *error: object) -> None: ...
        def check(self) -> NoLab:
            return self

        def run(self, command: list[str], **options: object) -> NoLab:
            asked["words"] = command[3:]
            return self

        def json_lines(self) -> list[tuple[list[float], float]]:
            return [([0.14, 0.13, 0.12, 9.0, 0.01], 0.001)]

    monkeypatch.setattr(check, "Lab", NoLab)
    done = RUNNER.invoke(app, ["check", "--gpu", "--rate", "10gbit", "--hosts", "4", "--json", "-"])
    assert asked == {"hosts": 4, "rate": "10gbit", "gpu": True, "words": [str(26_214_400), "5", "nccl"]}
    expected = 2 * 3 / 4 * 104_857_600 * 8 / 1e10
    assert f'"share": {expected / 0.13}' in done.output
    assert done.exit_code == 0
    done = RUNNER.invoke(app, ["check", "--gpu", "--rate", "40gbit", "--hosts", "4"])
    assert (done.exit_code, "NCCL float32" in done.output, f"{expected / 4 / 0.13:.1%}" in done.output) == (
        1,
        True,
        True,
    )
