"""Buy or compress: by hand on links whose answer is known, and on the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from narrowcast.cli import assemble
from narrowcast.predict import cluster, devices, profile
from narrowcast.predict.advice import GradientError, advise
from narrowcast.predict.cluster import Cluster, CodecSpeed, CollectiveTimings, Device, Level, Loop, Overlap
from narrowcast.predict.costs import Costs
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


def test_a_faster_network_never_comes_out_slower() -> None:
    have = cluster.load("10gbe-tcp")
    found = []
    for gbit in (8.0, 9.4, 10.5, 12.0, 15.0, 25.0):
        made = have.with_bandwidth(gbit)
        (source,) = [profile.resolve("vgg19", made)]
        found.append(decide([Sweep(source.profile, made)], 8).offers[0])
    assert [one.step for one in found] == sorted((one.step for one in found), reverse=True)
    # where nobody could tell the wire from 16 bits, it still is what is compared
    assert ("int8/256", "16-bit") in {(one.wire, one.verdict) for one in found}


def test_what_is_not_known_of_two_links_does_not_cancel() -> None:
    """Within a cluster all wires see the same link, another cluster sees another."""
    have = cluster.load("10gbe-tcp")
    other = replace(have.with_bandwidth(1.3 * have.levels[-1].bandwidth_gbit), name="other")
    mine, again, theirs = (Costs(one).levels[0].factor_D for one in (have, have, replace(have, name="other")))
    assert mine.equal(again)
    assert not mine.equal(theirs)
    assert mine.sort().values.equal(theirs.sort().values)
    made = decide([Sweep(profile.resolve("vgg19", one).profile, one) for one in (have, other)], 8)
    assert (made.best, made.sure) == ("other", False)
    assert made.text.startswith("cannot tell: other with `int8/256` looks quickest, but not surely by 3 %")


def test_a_gain_that_is_worth_nothing_is_not_sure() -> None:
    assert not decide(sweeps(place(1.0, 2.0), place(1.0, 2.05)), 4).sure
    assert decide(sweeps(place(1.0, 2.0), place(1.0, 2.07)), 4).sure


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


def test_another_device_takes_none_of_the_old_ones_timings() -> None:
    timed = CollectiveTimings("all_reduce", 4, ((1024.0, 1e-3), (4096.0, 2e-3)))
    link = Level("link", 0, 10.0, 50.0, tables=(timed,), timed_gbit=10.0)
    speeds = (CodecSpeed("int8/256", ((1024.0, 1e-6),), ((1024.0, 2e-6),)),)
    old = Cluster("old", (link,), Device("cpu: x"), Overlap(2.0, 3.0, 4.0), speeds, True, "a probe", loop=Loop(5.0))
    made = devices.with_device(old, "h100")
    assert (made.overlap, made.loop, made.codecs, made.measured) == (Overlap(), Loop(), (), False)
    assert made.levels == (Level("link", 0, 10.0, 50.0),)
    assert made.source == "a probe; h100 in place of cpu: x, of whose timings only bandwidth and latency were kept"
    # calls between GPUs are still calls between GPUs
    assert devices.with_device(replace(old, device=Device("H200")), "h100").levels == (link,)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(assemble(), list(words), catch_exceptions=False)
    return done.exit_code, done.stdout + done.stderr


def test_the_command_answers_in_words_and_as_json() -> None:
    line = "advise --model vgg19 --clusters 10gbe-tcp,25gbe-tcp --price 10gbe-tcp=2,25gbe-tcp=4 --workers 16"
    words = line.split()
    code, out = run(*words)
    assert (code, "keep 10gbe-tcp with `int8/256`" in out, "V100 at 10.1 Tflop/s" in out) == (0, True, True)
    code, out = run(*words, "--json", "-")
    assert [one["cluster"] for one in json.loads(out)["offers"]] == ["10gbe-tcp", "25gbe-tcp"]


def test_no_infinity_in_json_and_words_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweep, "_break_even", lambda self, setup: math.inf)
    made = decide(sweeps(place(1.0), place(2.0)), 4)
    assert "the wire pays at every bandwidth tried" in made.text
    json.dumps(made.as_dict(), allow_nan=False)


def test_presets_of_which_some_have_a_price_are_compared_in_seconds() -> None:
    code, out = run("advise", "--model", "vgg19", "--clusters", "p3.16xlarge,25gbe-tcp", "--workers", "16")
    assert (code, "the quickest" in out or "looks quickest" in out, "$" in out) == (0, True, False)
    assert "no dollars: there is no price of 25gbe-tcp" in " ".join(out.split())


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--cluster 10gbe-tcp,25gbe-tcp", "10gbe-tcp,25gbe-tcp is no file and no preset"),
        ("--cluster 10gbe-tcp --price 10gbe-tcp=2", "--price goes with --clusters"),
        ("--clusters 10gbe-tcp,25gbe-tcp --price 10gbe-tcp=2", "--price: none for 25gbe-tcp"),
    ],
)
def test_one_cluster_is_one_and_prices_need_several(words: str, problem: str) -> None:
    code, out = run("advise", "--model", "vgg19", "--workers", "4", *words.split())
    assert (code, problem in out.replace("\n", " ")) == (2, True)


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
