"""The autopilot while a link's rate falls and rises again: step times and bits by tensor over time, with a figure.

python -m narrowcast_research.bench.rates --out rates.json --svg rates.svg        (root: it builds a lab)
A training on hosts of a lab; every so many steps all links get another rate, in the middle of it.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from narrowcast.bench import auto, ddp, ranks
from narrowcast.codecs import codec as codec_named
from narrowcast.figures import Markup, Series, charts
from narrowcast.lab import Lab
from narrowcast.measure import run_rank
from narrowcast.parallel import lines as history_lines

RATES = ("1gbit", "100mbit", "1gbit")
STEPS = 60
"""With each rate."""
LONGEST = 1800.0


def measure(model: str, wire: str, steps: int) -> Iterator[dict[str, Any]]:
    """On a rank: the seconds of each step as it is done, then the history."""
    import torch

    trainer = ddp.make_trainer(auto.TASKS[model], wire, torch.device("cpu"), None)
    trainer.go()
    last = time.perf_counter()
    for step in range(steps):
        trainer.step()
        now = time.perf_counter()
        yield {"step": step, "seconds": now - last}
        last = now
    handle = trainer.handle
    if handle is not None:
        sizes = {row.name: row.numel for row in handle.rows()}
        yield {"history": handle.history(), "values": sizes, "stats": handle.stats()}
    trainer.close()


def run(model: str, wire: str, hosts: int, rates: Sequence[str], steps: int) -> dict[str, Any]:
    """All rates, one after another."""
    arguments = json.dumps({"model": model, "wire": wire, "steps": steps * len(rates)})
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    found: dict[str, Any] = {"model": model, "wire": wire, "hosts": hosts, "rates": list(rates), "every": steps}
    found["seconds"] = []
    with Lab(hosts, rates[0]) as lab:
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--rank", arguments]
        job = lab.start(command, env=ddp.KEEP_MEMORY, timeout=LONGEST, output=heard.put)
        for line in ranks.lines_of(job, heard):
            if line.rank != 0 or line.stream != "stdout" or not line.text.startswith("{"):
                continue
            told = json.loads(line.text)
            if "step" not in told:
                found |= told
                continue
            found["seconds"].append(told["seconds"])
            done = told["step"] + 1
            if done % steps == 0 and done < steps * len(rates):
                for host in range(hosts):
                    lab.set_rate(host, rates[done // steps])
        job.wait().check()
    return found


def settled(found: Mapping[str, Any]) -> list[int]:
    """After each change of the rate: how many steps until the last decision before the next one."""
    every, steps = found["every"], [entry["step"] for entry in found.get("history", ())]
    begins = [every * number for number in range(1, len(found["rates"]))]
    return [max((s - begin for s in steps if begin <= s < begin + every), default=0) for begin in begins]


def bits_over_time(history: Sequence[Mapping[str, Any]], values: Mapping[str, int], steps: int) -> list[Series]:
    """Of each large tensor, the bits of a value at each step."""
    largest = sorted(values, key=lambda name: -values[name])[:6]
    return [Series(name, range(steps), [_bits(history, name, step) for step in range(steps)]) for name in largest]


def _bits(history: Sequence[Mapping[str, Any]], name: str, step: int) -> float:
    now = [entry for entry in history if entry["step"] <= step]
    if not now or now[-1]["road"] == "plain":
        return 32.0
    wire = now[-1]["wires"].get(name, "bf16" if now[-1]["road"] == "half" else "as-is")
    return min(32.0, codec_named(wire).bits_per_value) if wire != "as-is" else 32.0


def figures(found: Mapping[str, Any]) -> tuple[Markup, Markup]:
    """Step times, and bits."""
    seconds = found["seconds"]
    said = f"Rates {', '.join(found['rates'])}, each for {found['every']} steps"
    times = Series("step", range(len(seconds)), [1e3 * s for s in seconds])
    first = charts.lines("Time of a step", said, [times], "step", "ms", log_x=False)
    series = bits_over_time(found.get("history", ()), found.get("values", {}), len(seconds))
    return first, charts.lines("Bits by tensor", said, series, "step", "bits a value", log_x=False)


STYLE = (
    "svg{background:#fff;font-family:sans-serif;font-size:12px}.grid{stroke:#e7e7e1}text{fill:#1c1d1f}"
    "@media(prefers-color-scheme:dark){svg{background:#15171a}.grid{stroke:#2a2e33}text{fill:#e8e8e4}}"
)


def alone(figure: Markup) -> str:
    """A figure that is a file by itself: with its name space and its own style."""
    return (
        str(figure)
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace("</title>", f"</title><style>{STYLE}</style>", 1)
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="The JSON file to write.")
    parser.add_argument("--svg", type=Path, help="Where the figures go: NAME-steps.svg and NAME-bits.svg.")
    parser.add_argument("--history", type=Path, help="A file for nc.replay.")
    parser.add_argument("--model", default="small", choices=auto.TASKS)
    parser.add_argument("--wire", default="auto")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--steps", type=int, default=STEPS, help="With each rate.")
    chosen = parser.parse_args(words)
    if chosen.rank:
        run_rank(lambda: measure(**json.loads(chosen.rank)))
        return
    found = run(chosen.model, chosen.wire, chosen.hosts, chosen.rates, chosen.steps)
    found["settled"] = settled(found)
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.history:
        chosen.history.write_text(history_lines(found["history"]))
    for figure, name in zip(figures(found), ("steps", "bits"), strict=True):
        if chosen.svg:
            chosen.svg.with_name(f"{chosen.svg.stem}-{name}.svg").write_text(alone(figure))
    sys.stdout.write(f"settled after {found['settled']} steps\n")


if __name__ == "__main__":
    main()
