"""Commands in the lab: what a rank is started with, what it writes, how it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from lab.helpers import running, wait_until

from narrowcast.lab import Lab, LabError, Line

pytestmark = pytest.mark.usefixtures("needs_lab")


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


@pytest.fixture
def lab(needs_lab: None) -> Lab:
    with Lab(2) as lab:
        yield lab


def environments(lab: Lab, **options: object) -> list[dict[str, str]]:
    result = lab.run(["env", "-0"], capture=True, **options).check()
    ranks = {line.rank: line for line in result.lines}
    assert sorted(ranks) == list(range(len(result.codes)))
    return [dict(item.split("=", 1) for item in ranks[rank].text.split("\0") if item) for rank in sorted(ranks)]


def test_each_rank_has_torchruns_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for rank, env in enumerate(environments(lab, ranks_per_host=2)):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank % 2,
            "GROUP_RANK": rank // 2,
            "WORLD_SIZE": 4,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_WORLD_SIZE": 2,
            "MASTER_ADDR": lab.address(0),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": 1,
        }
        assert {name: env[name] for name in expected} == {name: str(value) for name, value in expected.items()}
        assert env["MASTER_PORT"].isdigit()
        assert env["PATH"] == os.environ["PATH"]


def test_the_callers_variables_win(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [env["OMP_NUM_THREADS"] for env in environments(lab)] == ["3", "3"]
    changed = environments(lab, env={"OMP_NUM_THREADS": "2", "MASTER_PORT": "1234", "COLOUR": "blue"})
    assert {(env["OMP_NUM_THREADS"], env["MASTER_PORT"], env["COLOUR"]) for env in changed} == {("2", "1234", "blue")}


def test_hosts_have_a_name_and_shared_memory_of_their_own(lab: Lab, tmp_path: Path) -> None:
    script = "uname -n; pwd; touch /dev/shm/from-$RANK; sleep 0.2; ls /dev/shm | grep from"
    result = lab.run(sh(script), capture=True, cwd=tmp_path).check()
    for rank in range(2):
        assert result.text(rank).split() == [f"host{rank}", str(tmp_path), f"from-{rank}"]
    assert not list(Path("/dev/shm").glob("from-*"))


def test_output_is_shown_line_by_line_behind_its_host_and_rank(lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    lab.run(sh("echo one; echo two >&2; printf 'no end'"), ranks_per_host=2)
    out, err = capfd.readouterr()
    wanted = [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert sorted(out.splitlines()) == sorted(
        f"[host {host} rank {rank}] {text}" for host, rank in wanted for text in ("one", "no end")
    )
    assert sorted(err.splitlines()) == [f"[host {host} rank {rank}] two" for host, rank in wanted]


def test_output_comes_while_the_rank_runs(lab: Lab) -> None:
    lines: list[Line] = []
    job = lab.start([sys.executable, "-c", "print('now'); import time; time.sleep(600)"], output=lines.append)
    assert wait_until(lambda: len(lines) == 2)
    assert job.running
    assert {(line.host, line.rank, line.stream, line.text) for line in lines} == {
        (0, 0, "stdout", "now"),
        (1, 1, "stdout", "now"),
    }
    job.kill()
    assert job.wait(60).codes == (-9, -9)


def test_an_output_function_that_raises_ends_the_job(lab: Lab) -> None:
    def refuse(line: Line) -> None:
        raise ZeroDivisionError(line.text)

    with pytest.raises(ZeroDivisionError, match="hello"):
        lab.run(sh("echo hello; sleep 60"), output=refuse)


def test_every_rank_has_its_exit_code_and_the_first_failure_names_the_jobs(lab: Lab, tmp_path: Path) -> None:
    script = "until [ -e $RANK ]; do sleep 0.01; done; exit $((RANK * 10))"
    job = lab.start(sh(script), ranks_per_host=2, grace=60, capture=True, cwd=tmp_path)
    for process in reversed(job.processes):
        (tmp_path / str(process.rank)).touch()
        assert wait_until(lambda process=process: process.code is not None)
    result = job.wait(60)
    assert result.codes == (0, 10, 20, 30)
    assert (result.failed, result.ended, result.ok, result.code) == ((3, 2, 1), (), False, 30)
    with pytest.raises(LabError, match=r"failed: rank 3 with 30, rank 2 with 20"):
        result.check()


def test_when_a_rank_fails_the_others_are_ended_after_the_grace(lab: Lab) -> None:
    began = time.monotonic()
    result = lab.run(sh("[ $RANK = 1 ] && exit 3; sleep 600"), grace=0.5, capture=True)
    assert 0.5 < time.monotonic() - began < 60
    assert (result.codes, result.failed, result.ended, result.code) == ((-signal.SIGTERM, 3), (1,), (0,), 3)


def test_a_rank_that_ignores_sigterm_is_killed(lab: Lab, tmp_path: Path) -> None:
    fails = "until [ -e deaf ]; do sleep 0.01; done; exit 3"
    script = f"[ $RANK = 0 ] || {{ {fails}; }}; trap '' TERM; touch deaf; while :; do sleep 1; done"
    result = lab.run(sh(script), grace=0.1, capture=True, cwd=tmp_path)
    assert (result.codes, result.ended) == ((-signal.SIGKILL, 3), (0,))


def test_the_others_can_be_kept(lab: Lab) -> None:
    result = lab.run(sh("[ $RANK = 1 ] && exit 3; sleep 1; echo done"), grace=0, keep=True, capture=True)
    assert (result.codes, result.text(0)) == ((0, 3), "done")


def test_when_time_is_up_all_ranks_are_ended(lab: Lab) -> None:
    result = lab.run(sh("[ $RANK = 0 ] && exit 0; sleep 60"), timeout=1.5, capture=True)
    assert (result.codes, result.timed_out, result.ended, result.code) == ((0, -signal.SIGTERM), True, (1,), 124)


def test_a_killed_host_loses_all_its_processes_and_no_other_does(lab: Lab) -> None:
    up: list[Line] = []
    job = lab.start(sh("setsid sleep 600 & echo up; wait"), ranks_per_host=2, keep=True, output=up.append)
    assert wait_until(lambda: len(up) == 4 and running(lab, "sleep 600") == 4)
    lab.kill(1)
    assert wait_until(lambda: [process.code for process in job.processes] == [None, None, -9, -9])
    assert running(lab, "sleep 600") == 2
    job.kill()
    result = job.wait(60)
    assert (result.codes, set(result.failed)) == ((-9,) * 4, {0, 1, 2, 3})


def test_a_rank_killed_from_outside_is_seen(lab: Lab) -> None:
    result = lab.run(sh("[ $RANK = 1 ] && kill -9 $$; sleep 60"), grace=0, capture=True)
    assert (result.codes, result.failed, result.code) == ((-signal.SIGTERM, -9), (1,), 128 + 9)


def test_what_a_rank_leaves_running_ends_with_the_job(lab: Lab) -> None:
    began = time.monotonic()
    assert lab.run(sh("setsid sleep 600 & echo bye"), capture=True).text(0) == "bye"
    assert time.monotonic() - began < 60
    assert running(lab, "sleep 600") == 0


def test_what_is_still_starting_when_a_job_ends_ends_too(lab: Lab) -> None:
    """Between fork and exec a process shows no environment, by which a job's own are known."""
    for _ in range(60):
        lab.run(sh("setsid sleep 61 & setsid sleep 61 & echo bye"), capture=True)
    assert running(lab, "sleep 61") == 0


def test_where_one_rank_cannot_start_none_does(lab: Lab, tmp_path: Path) -> None:
    own = "/dev/shm/only-on-0"
    lab.run(sh(f"[ $RANK = 1 ] || cp $(command -v sleep) {own}")).check()
    with pytest.raises(LabError, match=r"cannot start '/dev/shm/only-on-0'.*No such file"):
        lab.run([own, "60"])
    assert running(lab, own) == 0


def test_a_single_rank_can_be_signalled(lab: Lab) -> None:
    job = lab.start(sh("sleep 60"), keep=True)
    with pytest.raises(ValueError, match="rank: got 2"):
        job.kill(rank=2)
    job.kill(rank=1)
    assert wait_until(lambda: [process.code for process in job.processes] == [None, -9])
    assert job.running


def test_waiting_has_an_end(lab: Lab) -> None:
    job = lab.start(sh("sleep 60"))
    with pytest.raises(TimeoutError, match="still runs"):
        job.wait(0.1)


def test_a_command_that_cannot_start_says_so(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"cannot start 'no-such-command'.*No such file"):
        lab.run(["no-such-command"])
    with pytest.raises(ValueError, match="give a list of words"):
        lab.run("echo hello")
    with pytest.raises(ValueError, match="launcher: got 'slurm'"):
        lab.run(["true"], launcher="slurm")
    with pytest.raises(ValueError, match="ranks_per_host: got 0"):
        lab.run(["true"], ranks_per_host=0)


def test_a_lab_that_is_not_up_says_so() -> None:
    lab = Lab(2)
    with pytest.raises(LabError, match="not up"):
        lab.run(["true"])
    with lab, pytest.raises(LabError, match="up already"):
        lab.__enter__()


@pytest.mark.parametrize("below", range(94, 106))
def test_an_owner_with_many_open_files_has_a_lab_too(needs_lab: None, below: int) -> None:
    """The socket to the supervisor then has one of the numbers at which the supervisor keeps its hosts."""
    files = [os.open(os.devnull, os.O_RDONLY)]
    while files[-1] < below:
        files.append(os.open(os.devnull, os.O_RDONLY))
    try:
        with Lab(2) as lab:
            assert len(environments(lab)) == 2
    finally:
        for fd in files:
            os.close(fd)
