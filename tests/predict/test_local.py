"""Local updates: rounds by hand, what must hold whatever the numbers, links with round trips, and the commands."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from each import each
from typer.testing import CliRunner

from narrowcast.cli import assemble
from narrowcast.codecs import codec as codec_named
from narrowcast.predict import Cluster, Costs, Device, Level, Profile, cluster, costs, zoo
from narrowcast.predict.local import AIM, LocalPredictor
from narrowcast.predict.local_advice import advise_local
from narrowcast.predict.model import TensorTime
from narrowcast.predict.rounds import LocalSetup, fragments_of, round_seconds
from narrowcast.toml_file import FileError

GPU = Device("H100", memory_gbyte=2000.0)
LINE = Level("line", 0, 1.0, 0.0, rtt_ms=50.0)
FLAT = Cluster("flat", (LINE,), GPU)
SITES = Cluster("sites", (Level("inside", 4, 800.0, 3.0), replace(LINE, ranks=8)), GPU)
THREE = Cluster("three", (Level("node", 4, 800.0, 3.0), Level("rack", 2, 100.0, 10.0), replace(LINE, ranks=4)), GPU)
MODEL = zoo.of_size(64e6).profile_of(1.0, spread=0.05)
WIRES = ("fp32", "int8/256", "int4/128+ef", "int2/4096+top64+ef95")


def exactly(place: Cluster, profile: Profile = MODEL) -> LocalPredictor:
    return LocalPredictor(profile, place, draws=0)


def share(place: Cluster, setup: LocalSetup) -> float:
    it = exactly(place)
    return float(it.share(setup, it.compute(setup), it.exchanges(setup).seconds_DP)[0])


def by_steps(work: float, exchange: list[float], every: int, delay: int, slow: float) -> float:
    """Rounds as they are defined, in small pieces of time, one step after the other."""
    count, now, free, rounds = len(exchange), 0.0, 0.0, 60
    due: dict[int, list[float]] = {}
    ends = []
    for step in range(1, rounds * every + 1):
        left = work
        if now < free:
            beside = min(left, (free - now) / slow)
            now, left = now + beside * slow, left - beside
        now += left
        for done in due.pop(step, []):
            now = max(now, done)
        for p in range(count):
            if (p + 1) * every // count % every == step % every:
                free = max(now, free) + exchange[p]
                if delay:
                    due.setdefault(step + delay, []).append(free)
                else:
                    now = max(now, free)
        if step % every == 0:
            ends.append(now)
    return ends[-1] - ends[-2]


@each("every, count, delay, slow", itertools.product((6, 8, 25), (1, 2, 3, 5), (0, 1, 4, 5), (1.0, 1.5)))
def test_a_round_takes_as_long_as_step_by_step(every: int, count: int, delay: int, slow: float) -> None:
    generator = torch.Generator().manual_seed(every * count + delay)
    for scale in (0.1, 3.0, 30.0):
        exchange = scale * torch.rand(1, count, generator=generator, dtype=torch.float64)
        made = float(round_seconds(torch.ones(1, dtype=torch.float64), exchange, every, delay, slow)[0])
        assert made == pytest.approx(by_steps(1.0, exchange[0].tolist(), every, delay, slow), rel=1e-9)


@each("count", (1, 2, 5))
def test_without_a_delay_all_wait_for_every_exchange(count: int) -> None:
    exchange = torch.arange(1.0, count + 1, dtype=torch.float64)[None] / 7
    made = float(round_seconds(torch.full((1,), 0.5, dtype=torch.float64), exchange, 10, 0)[0])
    assert made == pytest.approx(5.0 + float(exchange.sum()), rel=1e-12)


def test_an_exchange_that_fits_under_its_delay_costs_nothing_and_one_that_does_not_its_rest() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert float(round_seconds(one, one[None] * 2.9, 10, 3)[0]) == pytest.approx(10.0)
    assert float(round_seconds(one, one[None] * 4.5, 10, 3)[0]) == pytest.approx(11.5)


@each("wire, mixing", itertools.product(WIRES, ("all", "ring", "exponential", "pairs")))
def test_what_must_hold_whatever_the_wire(wire: str, mixing: str) -> None:
    base = LocalSetup(8, wire, 64, mixing=mixing)
    predicted = LocalPredictor(MODEL, FLAT, draws=8).predict(replace(base, fragments=4, delay=2))
    for one, (low, high) in (
        (predicted.share, predicted.share_interval),
        (predicted.step, predicted.step_interval),
        (predicted.exchange, predicted.exchange_interval),
        (predicted.bytes_a_day, predicted.day_interval),
        (predicted.needed_gbit, predicted.needed_interval),
    ):
        assert low <= one <= high
    assert 0 < predicted.share_interval[0] <= predicted.share_interval[1] <= 1
    shares = [share(FLAT, replace(base, every=every)) for every in (10, 100, 1000, 100_000)]
    assert shares == sorted(shares)
    assert shares[-1] > 0.999
    # an exchange that overlaps is never worse than one that all wait for
    for fragments in (1, 4):
        delays = [share(FLAT, replace(base, fragments=fragments, delay=delay)) for delay in (0, 1, 4, 16)]
        assert delays == sorted(delays)
    peaks = [float(exactly(FLAT).exchanges(replace(base, fragments=f)).bytes_P.max()) for f in (1, 2, 4, 8, 16, 32)]
    assert all(more <= fewer for fewer, more in itertools.pairwise(peaks))
    assert peaks[-1] < peaks[0] / 16


def test_share_grows_with_bandwidth_and_is_95_percent_at_the_one_that_is_needed() -> None:
    for setup in (LocalSetup(8, "int8/256", 100), LocalSetup(8, "fp32", 100, 4, 3)):
        it = exactly(FLAT)
        compute_D = it.compute(setup)
        needed = float(it.needed_gbit(setup, compute_D)[0])
        links = [replace(LINE, bandwidth_gbit=factor * needed) for factor in (0.25, 0.99, 1.01, 4.0)]
        shares = [share(replace(FLAT, levels=(link,)), setup) for link in links]
        assert shares == sorted(shares)
        assert shares[1] < AIM < shares[2]
        every = it.needed_every(setup, compute_D, it.exchanges(setup).seconds_DP)
        assert share(FLAT, replace(setup, every=every)) >= AIM
        assert share(FLAT, replace(setup, every=every - 1)) < AIM


BETTER: dict[str, list[float]] = {
    "bandwidth_gbit": [10 ** (k / 5 - 2) for k in range(21)],
    "window_mb": [0.06, 0.25, 1, 4, 16],
    "streams": [1, 2, 4, 8],
    "rtt_ms": [300, 100, 30, 10, 3, 1],
}
"""Of a link, the better the further right."""


@each("what, mixing, wire", itertools.product(BETTER, ("all", "ring"), ("fp32", "int4/128+ef", WIRES[-1])))
def test_no_better_link_is_slower(what: str, mixing: str, wire: str) -> None:
    profile, setup = zoo.of_size(14e6).profile_of(1.0), LocalSetup(8, wire, 10, 2, 1, mixing)
    others = {key: values for key, values in BETTER.items() if key != what}
    for number in range(4):
        rest = {key: values[(number + 1) % len(values)] for key, values in others.items()}
        links = [replace(LINE, **rest, **{what: value}) for value in BETTER[what]]
        took = [exactly(replace(FLAT, levels=(link,)), profile).exchanges(setup).seconds_DP.sum() for link in links]
        assert all(better <= worse * (1 + 1e-9) for worse, better in itertools.pairwise(took)), rest


def test_no_bandwidth_makes_up_for_latency() -> None:
    far = replace(FLAT, levels=(replace(LINE, rtt_ms=10_000.0),))
    made = LocalPredictor(MODEL, far, draws=4).predict(LocalSetup(8, "int4/128+ef", 20))
    assert math.isinf(made.needed_gbit)
    assert made.as_dict()["needed_gbit"] == "inf"
    assert made.limit == "latency"


def test_a_round_trip_by_hand() -> None:
    """int8/256 of 8 workers: two trips, 2 x 7/8 of the bytes; a stream begins with ten packets and doubles them."""
    place = replace(FLAT, device=replace(GPU, name="cpu", memory_gbyte=1e9, launch_us=0.0))
    setup, wire = LocalSetup(8, "int8/256", 10), codec_named("int8/256").nbytes(64_000_000)
    made = exactly(place).exchanges(setup)
    assert float(made.bytes_P[0]) == pytest.approx(2 * 7 / 8 * wire, rel=1e-3)
    ramp = 0.05 * (math.log2(1 + 1e9 / 8 * 0.05 / (7 * 14_480)) - 1)
    wanted = 2 * 7 / 8 * wire * 8 / 1e9 + 2 * 0.025 + ramp
    assert float(made.seconds_DP[0, 0]) == pytest.approx(wanted, rel=1e-3)


@each("streams, window, reached", ((1, 0.5, 0.56), (2, 0.5, 1.0), (1, 0.25, 0.28), (1, 0.0, 1.0)))
def test_a_window_in_each_round_trip_is_all_that_a_stream_carries(streams: int, window: float, reached: float) -> None:
    """0.5 MB in 50 ms are 80 Mb/s, to each of seven peers; two streams have twice that, up to what the link has."""
    level = replace(LINE, window_mb=window, streams=streams)
    place = replace(FLAT, levels=(level,), device=replace(GPU, name="cpu"))
    link = Costs(place, draws=0).levels[0]
    stage = costs.plan("two_shot", place, 8).stages[0]
    assert stage.peers == 7
    assert float(link.reached_D(stage.peers)[0]) == pytest.approx(reached)
    got, plain = (Costs(p, draws=0) for p in (place, replace(place, levels=(LINE,))))
    size = torch.tensor([5e8], dtype=torch.float64)
    slower = [made.wire_seconds(costs.plan("two_shot", place, 8), "fp32", size) for made in (got, plain)]
    assert float(slower[0] / slower[1]) == pytest.approx(1 / reached, rel=0.01)


def test_one_neighbour_at_a_time_is_held_up_by_one_window() -> None:
    place = replace(FLAT, levels=(replace(LINE, window_mb=0.25),))
    alone, wide = (share(p, LocalSetup(8, "int8/256", 50, mixing="pairs")) for p in (place, FLAT))
    assert alone < wide
    made = LocalPredictor(MODEL, place, draws=0).predict(LocalSetup(8, "int8/256", 50, mixing="pairs"))
    assert made.limit == "window"


@each("mixing, peers", (("ring", 2), ("exponential", 1), ("pairs", 1)))
def test_neighbours_get_a_wire_each(mixing: str, peers: int) -> None:
    sent = exactly(FLAT).exchanges(LocalSetup(8, "int4/128+ef", 50, mixing=mixing)).bytes_P
    assert float(sent.sum()) == peers * codec_named("int4/128+ef").nbytes(64_000_000)
    two = exactly(FLAT).exchanges(LocalSetup(2, "int4/128+ef", 50, mixing=mixing)).bytes_P
    assert float(two.sum()) == codec_named("int4/128+ef").nbytes(64_000_000)


@each("place, world, workers", ((FLAT, 8, 8), (SITES, 32, 8), (SITES, 9, 3), (THREE, 32, 4), (THREE, 12, 2)))
def test_a_worker_is_what_the_outermost_link_joins(place: Cluster, world: int, workers: int) -> None:
    made = exactly(place).predict(LocalSetup(world, "int4/128", 50))
    assert (made.devices, made.workers) == (world, workers)


def test_a_site_sends_its_model_once_where_it_is_sharded_and_once_a_device_where_it_is_not() -> None:
    one = exactly(replace(FLAT, levels=(replace(LINE, ranks=8),))).exchanges(LocalSetup(8, "int8/256", 50)).bytes_P
    for place, devices, copies in ((SITES, 4, {"fsdp": 1, "hsdp": 1, "data": 4}), (THREE, 8, {"fsdp": 1, "hsdp": 2})):
        world = devices * place.levels[-1].ranks
        whole = one if place is SITES else one * (3 / 4) / (7 / 8)
        for inside, many in copies.items():
            sent = exactly(place).exchanges(LocalSetup(world, "int8/256", 50, inside=inside)).bytes_P
            assert float(sent.sum()) == pytest.approx(many * float(whole.sum()), rel=1e-3), inside


def test_low_rank_sums_factors_of_whole_matrices() -> None:
    profile = zoo.resnet50().profile_of(0.5)
    for wire, often in (("bf16+rank4+ef", 1.0), ("bf16+acp4+ef", 0.5)):
        sent = float(exactly(FLAT, profile).exchanges(LocalSetup(2, wire, 50)).bytes_P.sum())
        small = 4 * sum(t.numel for t in profile.tensors if t.numel < 10_000)
        assert sent > small
        factors = sum(4 * sum((t.shape[0], t.numel // t.shape[0])) for t in profile.tensors if t.numel >= 10_000)
        assert sent - small == pytest.approx(often * 2 * factors, rel=0.05)
    with pytest.raises(ValueError, match="hold parts of a matrix"):
        exactly(SITES, profile).predict(LocalSetup(32, "bf16+rank4+ef", 50))
    with pytest.raises(ValueError, match="this model has none"):
        exactly(FLAT).predict(LocalSetup(8, "bf16+rank4+ef", 50))


@each(
    "setup, floats",
    [
        (LocalSetup(8, "int8/256", 50), 2),
        (LocalSetup(8, "int4/128+ef", 50), 4),
        (LocalSetup(8, "int4/128+ef", 50, 5, 3), 4.2),
        (LocalSetup(8, "int4/128+ef", 50, mixing="ring"), 6),
        (LocalSetup(8, "int4/128", 50, mixing="pairs"), 9),
        (LocalSetup(8, "fp32", 50, mixing="exponential"), 2),
    ],
)
def test_memory_has_what_local_updates_keep(setup: LocalSetup, floats: float) -> None:
    """As the table of docs/local-sgd.md has it, beside what the model and its optimizer need."""
    made = exactly(FLAT)
    alone = made.predict(LocalSetup(8, "fp32", 50)).memory_bytes - 8 * made.profile.numel
    assert made.predict(setup).memory_bytes - alone == pytest.approx(4 * floats * made.profile.numel)


def test_fragments_are_layers_and_nearly_alike() -> None:
    tensors = [TensorTime(f"h.{n}.{part}", size, 0.0) for n in range(6) for part, size in (("w", 90), ("b", 10))]
    parts = fragments_of([*tensors, TensorTime("head.weight", 150, 0.0)], 3)
    assert sorted(sum(t.numel for t in part) for part in parts) == [200, 250, 300]
    for part in parts:
        blocks = {t.name.rpartition(".")[0] for t in part}
        assert len(part) == sum(2 if block.startswith("h.") else 1 for block in blocks)
    with pytest.raises(ValueError, match="7 layers that train; take fewer"):
        fragments_of([*tensors, TensorTime("head.weight", 150, 0.0)], 8)


@each(
    "setup, match",
    (
        ({"every": 0}, "every=0; give 1 or more"),
        ({"fragments": 11}, "take as many steps as fragments"),
        ({"delay": 10}, "take a delay under every"),
        ({"mixing": "star"}, "take all, ring, exponential, pairs"),
        ({"inside": "pipeline"}, "take fsdp, data, hsdp"),
        ({"wire": "bf16+rank4+ef", "mixing": "ring"}, "low rank sums over all"),
        ({"wire": "int4/128+diff"}, "leave it out"),
    ),
)
def test_what_means_nothing_is_refused(setup: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LocalSetup(**{"world": 8, "wire": "int8/256", "every": 10, **setup})  # type: ignore[arg-type]


def test_one_worker_has_nobody_to_exchange_with() -> None:
    with pytest.raises(ValueError, match="take more than 4"):
        exactly(SITES).predict(LocalSetup(4, "int8/256", 10))


def test_a_link_is_read_and_written() -> None:
    place = cluster.load("8-sites-1gbit-50ms")
    assert cluster.parse(cluster.dump(place)) == place
    assert (place.levels[-1].rtt_ms, place.levels[-1].stream_gbit) == (50.0, 0.64)
    text = cluster.dump(FLAT)
    for line, wrong, match in (
        ("rtt_ms = 50.0", "rtt_ms = -1.0", "0 or more"),
        ("streams = 1", "streams = 0", "whole number, 1 or more"),
        ("window_mb = 0.0", 'window_mb = "big"', "must be a number"),
    ):
        with pytest.raises(FileError, match=match):
            cluster.parse(text.replace(line, wrong))


def test_advice_takes_the_wire_with_the_most_bits_that_is_surely_enough() -> None:
    predictor, setup = LocalPredictor(MODEL, FLAT), LocalSetup(8, "fp32", 40)
    made = advise_local(predictor, setup, WIRES)
    sure = {one.wire for one in made.predictions if one.share_interval[0] >= AIM}
    assert (made.verdict, made.wire) == ("use", next(wire for wire in WIRES if wire in sure))
    assert made.wire != "fp32"
    assert all(f"`{wire}`" in made.text for wire in WIRES)
    slow = advise_local(predictor, replace(setup, every=2), WIRES)
    assert (slow.verdict, "what would do" in slow.text) == ("too-slow", True)
    assert max(one.share for one in slow.predictions) < AIM
    verdicts = {advise_local(predictor, replace(setup, every=n), ["int4/128+ef"]).verdict for n in (2, 25, 400)}
    assert verdicts == {"too-slow", "cannot-tell", "use"}


SAID = ["--parallel", "local", "--parameters", "64e6", "--compute-ms", "1000", "--workers", "8"]
SAID += ["--cluster", "1gbe-tcp", "--device", "h100"]


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(assemble(), list(words), catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_predict_shows_what_was_asked_for_beside_the_exchange_that_all_wait_for() -> None:
    words = [
        "predict",
        *SAID,
        "--rtt",
        "50ms",
        "--streams",
        "2",
        "--window",
        "4MB",
        "--every",
        "100",
        "--wires",
        "fp32",
    ]
    code, out, _ = run(*words, "--fragments", "8", "--delay-steps", "3", "--json", "-")
    rows = json.loads(out)
    assert code == 0
    assert [(row["every"], row["fragments"], row["delay"]) for row in rows] == [(100, 8, 3), (100, 1, 0)]
    assert rows[0]["share"] > rows[1]["share"]
    code, out, _ = run(*words)
    assert (code, "NOT measured" in out, "50 ms there and back, 2 stream(s) of 4 MB" in " ".join(out.split())) == (
        0,
        True,
        True,
    )
    near = json.loads(run("predict", *SAID, "--every", "100", "--wires", "fp32", "--json", "-")[1])
    assert near[0]["exchange"] < rows[1]["exchange"]


def test_advise_answers_in_words_and_in_json() -> None:
    words = ["advise", *SAID, "--rtt", "50ms", "--every", "100", "--wires", "fp32,int4/128+ef"]
    code, out, _ = run(*words)
    assert (code, out.startswith("use `int4/128+ef`, every 100 steps, waited for: 8 workers compute")) == (0, True)
    data = json.loads(run(*words, "--json", "-")[1])
    assert (data["verdict"], data["wire"], len(data["predictions"])) == ("use", "int4/128+ef", 2)


@each(
    "words, match",
    (
        ("predict --parallel data --model gpt2 --cluster 1gbe-tcp --every 10", "--every: is for --parallel local"),
        ("predict --parallel local --model gpt2 --parameters 1e9 --cluster 1gbe-tcp", "or --parameters for a model"),
        ("predict --parallel local --parameters 1e9 --cluster 1gbe-tcp --rtt 50", "--rtt: give a number and a unit"),
        ("predict --parallel local --parameters 1e9 --cluster 1gbe-tcp --window 4MB", "as --rtt 50ms"),
        ("predict --parallel local --parameters 1e9 --cluster 1gbe-tcp --html a.html", "--html has no meaning"),
        ("predict --parallel local --parameters -1 --cluster 1gbe-tcp", "--parameters: give their number"),
        ("advise --parallel fsdp --parameters 1e9 --cluster 1gbe-tcp --workers 4", "take data or local"),
        ("advise --parallel local --parameters 1e9 --clusters 1gbe-tcp,10gbe-tcp", "--clusters has no meaning"),
        ("advise --parallel local --parameters 1e9 --cluster 1gbe-tcp --workers 1", "nobody to exchange"),
    ),
)
def test_bad_input_ends_in_one_line(words: str, match: str) -> None:
    code, _, error = run(*words.split())
    assert (code, match in " ".join(error.split())) == (2, True), error


def test_a_model_by_its_size_has_it() -> None:
    for size in (1, 50_000, 64e6, 10e9):
        made = zoo.of_size(size)
        assert (made.numel, made.macs) == (int(size), size)
    code, out, _ = run("predict", "--parameters", "1e9", "--cluster", "8xH100", "--workers", "8", "--wires", "bf16")
    assert (code, "1 B parameters" in out) == (0, True)
