"""Buy or compress: by hand on links whose answer is known, and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from narrowcast.cli import app
from narrowcast.predict import cluster, devices
from narrowcast.predict.advice import GradientError, advise
from narrowcast.predict.cluster import Cluster, Device, Level
from narrowcast.predict.decision import decide
from narrowcast.predict.model import Profile, TensorTime
from narrowcast.predict.sweep import Sweep

PROFILE = Profile("p", 8, 0.01, 0.02, 0.0, tuple(TensorTime(f"t{i}", 10**6, 0.002 * (i + 1)) for i in range(10)))


def place(gbit: float, price: float = 0.0) -> Cluster:
    device = Device("H100", flops=4e14, memory_gbyte=2000.0)
    return Cluster(f"{gbit:g}", (Level("link", 0, gbit, 10.0),), device, price_per_hour=price, measured=True)


def sweeps(*places: Cluster) -> list[Sweep]:
    return [Sweep(PROFILE, one, samples=8000) for one in places]


def test_the_cheapest_is_taken_and_the_break_even_price_makes_it_equal() -> None:
    made = decide(sweeps(place(1.0, 2.0), place(100.0, 50.0)), 4)
    have, better = made.offers
    assert (made.best, made.sure, have.wire) == ("1", True, "int8/256")
    assert made.text.startswith("compress, do not buy: keep 1 with `int8/256`: the cheapest for 4 workers")
    assert have.dollars == pytest.approx(2.0 * 4 * 250 * have.step / 3600)
    again = decide(sweeps(place(1.0, 2.0), place(100.0, better.break_even_price)), 4)
    assert again.offers[0].dollars == pytest.approx(again.offers[1].dollars)
    assert not again.sure
    assert again.text.startswith("cannot tell")


def test_a_faster_network_is_bought_where_it_is_cheaper() -> None:
    made = decide(sweeps(place(1.0, 2.0), place(100.0, 2.1)), 4)
    assert made.text.startswith("buy 100 with ")
    assert "H100 at 400 Tflop/s" in made.text


def test_without_prices_the_quickest_counts_and_half_of_them_are_refused() -> None:
    made = decide(sweeps(place(1.0), place(100.0)), 4)
    assert (made.best, made.offers[0].dollars, made.offers[1].break_even_price) == ("100", None, None)
    assert "the quickest" in made.text
    with pytest.raises(ValueError, match="--price: none for 100; give all of them"):
        decide(sweeps(place(1.0, 2.0), place(100.0)), 4)


def test_fewer_than_8_bits_need_a_known_risk_or_a_wish() -> None:
    (made,) = sweeps(place(0.1))
    unknown = advise(made, 4)
    assert unknown.wire == "int8/256"
    assert "8 bits at the least while the accuracy risk is unknown: int4/128+ef not considered" in unknown.text
    known = [GradientError(wire, 30.0, 0.001, "t0", 25.0) for wire in ("int8/256", "int4/128+ef")]
    assert advise(made, 4, errors=known).wire == "int4/128+ef"
    assert advise(made, 4, ("int4/128+ef",)).wire == "int4/128+ef"


def test_a_device_goes_with_any_links() -> None:
    made = devices.with_device(cluster.load("10gbe-tcp"), "h100")
    assert made.levels == cluster.load("10gbe-tcp").levels
    assert made.device.flops == pytest.approx(0.4 * 989e12)
    assert {"rtx4090", "rtx5090", "l40s", "a100", "h100", "h200", "b200"} == {*devices.devices()}
    with pytest.raises(ValueError, match="unknown 'h300'; take rtx4090"):
        devices.with_device(made, "h300")
    assert cluster.load("400gbe-roce").device == replace(devices.devices()["h100"], flops=3.956e14, memory_gbyte=2847.0)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    return done.exit_code, done.stdout + done.stderr


def test_the_command_answers_in_words_and_as_json() -> None:
    line = "advise --model vgg19 --clusters 10gbe-tcp,25gbe-tcp --price 10gbe-tcp=2,25gbe-tcp=4 --workers 16"
    words = line.split()
    code, out = run(*words)
    assert (code, "keep 10gbe-tcp with `int8/256`" in out, "V100 at 10.1 Tflop/s" in out) == (0, True, True)
    code, out = run(*words, "--json", "-")
    assert [one["cluster"] for one in json.loads(out)["offers"]] == ["10gbe-tcp", "25gbe-tcp"]


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--price 10gbe-tcp", "give NAME=DOLLARS"),
        ("--price 1gbe-tcp=2", "is not among the clusters"),
        ("--price 10gbe-tcp=-1", "must be a number above 0"),
        ("--cluster 10gbe-tcp", "either --cluster or --clusters"),
    ],
)
def test_wrong_words_end_in_one_line(words: str, problem: str) -> None:
    given = ["advise", "--model", "vgg19", "--clusters", "10gbe-tcp,25gbe-tcp", "--workers", "4", *words.split()]
    code, out = run(*given)
    assert (code, problem in out.replace("\n", " ")) == (2, True)
