"""Members that die and join: three real processes under torchft, one killed in an exchange, one that comes later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]
WORKER = str(Path(__file__).parent / "elastic_worker.py")
EXCHANGES, DIES_AT, COMES_AT = 12, 4, 8


class Member:
    def __init__(self, lighthouse: str, number: int, folder: Path, dies_at: int = 0, waits_at: int = COMES_AT) -> None:
        self.file = folder / f"{number}.jsonl"
        with self.file.open("w") as out, (folder / f"{number}.err").open("w") as err:
            numbers = map(str, (number, EXCHANGES, dies_at, waits_at))
            words = [sys.executable, WORKER, lighthouse, str(folder / "comes"), *numbers]
            self.process = subprocess.Popen(words, stdout=out, stderr=err, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def lines(self) -> list[dict[str, Any]]:
        whole = [line for line in self.file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole if line.startswith("{")]

    def told(self) -> str:
        return self.file.with_suffix(".err").read_text()[-3000:]


def until(members: list[Member], exchange: int, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while any(not any(line.get("exchange", 0) >= exchange for line in member.lines()) for member in members):
        assert time.monotonic() < end, [member.told() for member in members]
        time.sleep(0.1)


def test_one_dies_in_an_exchange_and_one_comes(tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10000, heartbeat_timeout_ms=1000)
    members = [Member(lighthouse.address(), n, tmp_path, DIES_AT if n == 2 else 0) for n in range(3)]
    try:
        until(members[:2], COMES_AT - 1)
        members.append(Member(lighthouse.address(), 3, tmp_path, waits_at=0))
        for member in members:
            member.process.wait(60)
    finally:
        for member in members:
            member.process.kill()
        lighthouse.shutdown()
    codes = [member.process.returncode for member in members]
    assert codes == [0, 0, -9, 0], [codes, *(member.told() for member in members)]
    rows = [{line["exchange"]: line for line in member.lines() if "exchange" in line} for member in members]
    # everyone who made an exchange had its result, to the bit; who comes goes on from the others' state
    for exchange in range(1, EXCHANGES + 1):
        assert len({row[exchange]["anchors"] for row in rows if exchange in row}) == 1, exchange
    assert max(rows[2]) == DIES_AT - 1
    assert members[3].lines()[0]["joined"] >= COMES_AT
    assert {row[EXCHANGES]["members"] for row in rows if EXCHANGES in row} == {3}
    for survivor in rows[:2]:
        there = survivor[DIES_AT]
        assert (there["members"], there["left"], survivor[EXCHANGES]["repeated"]) == (2, 1, 1)
        # the second attempt began with the residuals of the first
        assert len(there["begun"]) == 2
        assert len(set(there["begun"])) == 1
        assert there["owes"] > 0
