"""Features that people combine with a wire: the updates are near plain ones, and the same bits on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dist.features import ddp, fsdp
from dist.features.common import WIRES, Updates, distance, run
from dist.pool import Pool
from each import each

TABLES = {"ddp": ddp, "fsdp": fsdp}


def trained(group: dist.ProcessGroup, kind: str, name: str, wire: str | None) -> tuple[Updates, list[float]]:
    return run(group, TABLES[kind].FEATURES[name], wire)


def compare(pool: Pool, kind: str, name: str, wires: tuple[str, ...]) -> None:
    plain = pool.run(2, trained, kind, name, None)[0][0]
    assert any(value.any() for value in plain.values()), "nothing was trained"
    for wire in wires:
        (first, steps), (second, _) = pool.run(2, trained, kind, name, wire)
        assert all(count >= 1 for count in steps), "nothing went through the wire"
        assert all(torch.equal(second[key], value) for key, value in first.items()), f"{wire}: ranks differ"
        assert distance(first, plain) <= WIRES[wire], wire


def test_the_tables_are_what_they_say() -> None:
    for table in TABLES.values():
        assert set(table.SPANNING) <= set(table.FEATURES)


@each("kind, name", [(kind, name) for kind, table in TABLES.items() for name in table.SPANNING])
def test_a_dozen_features_that_span_all(pool: Pool, kind: str, name: str) -> None:
    compare(pool, kind, name, ("as-is", "int4/128+ef"))


@pytest.mark.extras
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, table in TABLES.items() for name in table.FEATURES])
def test_every_feature(pool: Pool, kind: str, name: str) -> None:
    compare(pool, kind, name, tuple(WIRES))
