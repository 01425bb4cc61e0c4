"""The autopilot beside wires that stay: DDP steps in turn in the same run, with the noise of the same wire twice.

A turn is a few steps of one candidate, as many as the autopilot takes between two looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from narrowcast.bench import ddp, ranks, training
from narrowcast.bench.ranks import Ranks, Row
from narrowcast.bench.training import WireTrainer
from narrowcast.measure import DeviceClock, rank_device, tell_progress, until_all_done
from narrowcast.parallel import Autopilot

AGAIN = "plain again"
WIRES = ("bf16", "int8/256", "int4/128+ef", "int4/128+rot+ef", "bf16+rank4+ef")
TASKS = {"small": training.MLP, "conv": training.CONV, "text": training.TEXT, "gpt2": training.GPT2}
MODELS = {False: ("small", "conv", "text"), True: ("gpt2", "small")}
"""By default on processors, and on GPUs."""
SETTLES = 100
"""Steps that the autopilot has before it is timed: where little is gained it compares in turns first."""
TURN = 5
ROUNDS = 7
NOISE = 0.015
"""Above it a cell is measured again, and at last shown without being counted."""
TRIES = 3


def run(at: Ranks, model: str, wires: Sequence[str] = WIRES, rounds: int = ROUNDS, tries: int = TRIES) -> Iterator[Row]:
    """The machine, then a row for each wire of a cell, and one that judges it; again where it was too noisy."""
    for wire in wires:
        ddp.check_wire(wire, at.gpu)
    options = {"wires": list(wires), "model": model, "rounds": rounds}
    for number in range(tries):
        found = list(ranks.rows(at, __name__, measure, options, ddp.KEEP_MEMORY))
        rows = [row for row in found if "machine" not in row]
        verdict = judged(rows)
        if verdict["counted"] or number + 1 == tries:
            yield from (row for row in found if "machine" in row)
            yield from ({**at.as_dict(), "model": model, **row} for row in (*rows, verdict))
            return


def measure(wires: Sequence[str], model: str, rounds: int, gpu: bool) -> Iterator[Row]:
    """On a rank."""
    task, device = TASKS[model], rank_device(gpu)
    names = [ddp.PLAIN, AGAIN, ddp.HALF, *wires, ddp.AUTO]
    trainers: dict[str, WireTrainer] = {}
    for name in names:
        own = ddp.PLAIN if name == AGAIN else name
        trainer = trainers[name] = ddp.make_trainer(task, own, device, trainers.get(ddp.PLAIN))
        training.warm_up(name, trainer)
    pilot = trainers[ddp.AUTO]
    tell_progress(f"auto: {SETTLES} steps to settle")
    for _ in range(SETTLES):
        pilot.step()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    clock = DeviceClock(device)
    for number in range(rounds):
        # the other way round every second time, so that nobody always comes after the same one
        for name in names if number % 2 == 0 else names[::-1]:
            seconds[name].append(until_all_done(trainers[name].step, clock, TURN))
        tell_progress(f"round {number + 1} of {rounds}")
    for name, trainer in trainers.items():
        row = {"wire": name, "step": median(seconds[name]), "seconds": seconds[name], "allowed": True}
        if trainer.handle is not None:
            row |= {"ratio": trainer.handle.stats()["ratio"], "history": trainer.handle.history()}
            row["watch_share"] = trainer.handle.stats().get("watch_share")
        if name in wires:
            row["allowed"] = _is_allowed(pilot, name)
        yield row
    for trainer in trainers.values():
        trainer.close()


def _is_allowed(pilot: WireTrainer, wire: str) -> bool | None:
    """Whether one wire for all has an error below the bound, by what the autopilot saw; None: not looked at."""
    policy = getattr(pilot.handle, "_pilot", None)
    if not isinstance(policy, Autopilot):
        return None
    return policy.allows(wire)


def judged(rows: Sequence[Row]) -> Row:
    """How far the autopilot is behind the best wire that loses as little, and behind doing nothing or 16 bits: medians
    over the rounds, each of which has a turn of every wire, so that a machine that drifts does so for all.
    """
    seconds = {row["wire"]: row["seconds"] for row in rows}

    def behind(wire: str, other: str) -> float:
        return median(mine / its for mine, its in zip(seconds[wire], seconds[other], strict=True)) - 1

    noise = abs(behind(AGAIN, ddp.PLAIN))
    allowed = {row["wire"]: row["step"] for row in rows if row["allowed"] and row["wire"] not in (ddp.AUTO, AGAIN)}
    best = min(allowed, key=lambda wire: allowed[wire])
    verdict = {"noise": noise, "counted": noise <= NOISE, "best": best, "behind_best": behind(ddp.AUTO, best)}
    over_plain = max(behind(ddp.AUTO, ddp.PLAIN), behind(ddp.AUTO, ddp.HALF))
    return {"wire": "", **verdict, "behind_plain_or_half": over_plain}


if __name__ == "__main__":
    ranks.main(measure)
