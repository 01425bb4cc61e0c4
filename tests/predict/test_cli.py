"""The commands: tables, JSON and pages on good input; one line and exit code 2 on bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowcast.cli import assemble
from narrowcast.predict import Sweep, advise, codec_systems, find_model, load_cluster

WIRES = "fp32,bf16,int8/256,int4/128"


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(assemble(), list(words), catch_exceptions=False)
    return done.exit_code, done.stdout, done.stderr


def test_predict_on_a_fresh_clone(tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    words = ["predict", "--model", "resnet50", "--cluster", "p2.16xlarge", "--workers", "1,2,4,8,16", "--wires", WIRES]
    code, out, _ = run(*words, "--html", str(page), "--json", str(data))
    assert code == 0
    assert "NOT measured" in out
    rows = json.loads(data.read_text())
    wanted = [(world, wire) for world in (1, 2, 4, 8, 16) for wire in WIRES.split(",")]
    assert [(row["workers"], row["wire"]) for row in rows] == wanted
    assert page.read_text().startswith("<!doctype html>")


def test_predict_as_json_prints_nothing_else() -> None:
    words = "predict --model gpt2 --cluster 8xH100 --workers 4096 --json - --parallel fsdp"
    code, out, _ = run(*words.split())
    assert (code, len(json.loads(out))) == (0, 4)


def test_by_default_there_are_as_many_workers_as_the_cluster_joins() -> None:
    code, out, _ = run("predict", "--model", "resnet50", "--cluster", "pcie3", "--wires", "fp32", "--json", "-")
    assert (code, [row["workers"] for row in json.loads(out)]) == (0, [1, 2, 4, 8])


def test_the_built_in_names_are_listed() -> None:
    code, out, _ = run("predict", "--list", "--json", "-")
    found = json.loads(out)
    assert code == 0
    models = "alexnet vgg19 resnet50 resnet110 resnet152 bn-inception lstm bert-large gpt2"
    clusters = "1gbe-tcp 10gbe-tcp 25gbe-tcp 100gbe-tcp 100gb-ib pcie3 dgx-1 p2.16xlarge p3.16xlarge 8xH100"
    assert {*models.split()} <= {*found["models"]}
    assert {*clusters.split()} <= {*found["clusters"]}


def test_the_page_has_a_line_for_each_wire_and_algorithm(tmp_path: Path) -> None:
    """One point for each number of workers, and by its own algorithm at every bandwidth."""
    page = tmp_path / "page.html"
    words = "predict --model vgg19 --cluster p3.16xlarge --workers 1,8,16 --wires fp32,int8/256 --algorithms auto,ring"
    assert run(*words.split(), "--html", str(page))[0] == 0
    found = re.findall(r"<g class=\"w\d\"><title>([^<]*)</title><polyline points=\"([^\"]*)\"", page.read_text())
    lines = [(points, name) for name, points in found]
    named = [f"{wire} {way}" for way in ("auto", "ring") for wire in ("fp32", "int8/256")]
    assert [name for _, name in lines] == [*named, *named]
    for points, _ in lines:
        places = [point.partition(",")[0] for point in points.split()]
        assert len(places) == len(set(places))
    over_bandwidth = {name: points for points, name in lines[len(named) :]}
    assert over_bandwidth["int8/256 auto"] != over_bandwidth["int8/256 ring"]


@pytest.mark.parametrize("wrong", ["inf", "nan", "0"])
def test_timings_are_finite(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "cluster.toml"
    level = "format = 1\n[[level]]\nbandwidth_gbit = 1\nlatency_us = 5\n"
    path.write_text(f'{level}[[codec]]\nwire = "bf16"\nencode = [[9, {wrong}]]\ndecode = [[9, 1]]\n')
    code, _, err = run("predict", "--model", "resnet50", "--cluster", str(path))
    assert (code, err.count("\n")) == (2, 1)
    assert "cluster.toml:7: codec.0.encode.0: must be [size, seconds, ...]" in err


def test_what_a_cluster_file_needs(tmp_path: Path) -> None:
    """As the guide says: a level, and how fast codecs are, since all is compared with 16 bits."""
    path = tmp_path / "cluster.toml"
    words = ["predict", "--model", "resnet50", "--cluster", str(path), "--compute-ms", "100", "--wires", "fp32"]
    least = "format = 1\n[[level]]\nbandwidth_gbit = 9.4\nlatency_us = 60\n"
    path.write_text(least)
    code, _, err = run(*words)
    assert (code, err.count("\n")) == (2, 1)
    assert "neither [[codec]] nor device.memory_gbyte says how fast bf16 is" in err
    path.write_text(least + "[device]\nmemory_gbyte = 20\n")
    assert run(*words)[0] == 0


def test_advise_in_words_and_as_json() -> None:
    code, out, _ = run("advise", "--model", "vgg19", "--cluster", "10gbe-tcp", "--workers", "16")
    assert code == 0
    assert out.startswith("use `")
    code, out, _ = run("advise", "--model", "resnet50", "--cluster", "8xH100", "--workers", "8", "--json", "-")
    assert json.loads(out)["verdict"] in ("leave-off", "cannot-tell")


@pytest.mark.parametrize(
    "words, problem",
    [
        ("--model gpt2", "got 'gpt2'; a module is needed: give package.module:name or file.py:name"),
        ("--model nowhere:net", "importing nowhere failed"),
        ("--input 784", "--input: goes with --model"),
    ],
)
def test_probe_names_a_wrong_model_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, words: str, problem: str
) -> None:
    def started(*_: object) -> str:
        raise AssertionError

    monkeypatch.setattr("narrowcast.cli.probe._probe_local", started)
    code, _, err = run("probe", "--local", "2", *words.split())
    assert (code, problem in err) == (2, True)


def test_a_codec_system_has_its_own_wires() -> None:
    line = "predict --model resnet50 --cluster 10gbe-tcp --workers 4 --codec-system grace-topk"
    words = line.split()
    code, out, _ = run(*words, "--algorithms", "one_shot", "--json", "-")
    assert (code, [cell["wire"] for cell in json.loads(out)]) == (0, ["fp32", "bf16", "fp32/4096+top41"])
    code, _, err = run(*words, "--wires", "int8/256")
    assert (code, "grace-topk: does not say how fast int8/256 is" in err) == (2, True)
    place = codec_systems.with_codec_system(load_cluster("10gbe-tcp"), "grace-topk")
    assert advise(Sweep(find_model("resnet50", place).profile, place), 4).quickest in ("fp32", "bf16")


def test_a_system_is_advised_by_its_own_wire_and_algorithm() -> None:
    words = ["advise", "--model", "resnet50", "--workers", "8", "--json", "-"]
    found = {}
    for name in ("grace-8bit", "dettmers-8bit"):
        code, out, _ = run(*words, "--cluster", "1gbe-tcp", "--codec-system", name)
        assert code == 0
        made = json.loads(out)["prediction"]
        found[name] = (made["wire"], made["algorithm"])
    assert found == {"grace-8bit": ("bf16", "native"), "dettmers-8bit": ("int8/256", "two_shot")}
    code, out, _ = run(*words, "--clusters", "1gbe-tcp,10gbe-tcp", "--codec-system", "grace-8bit")
    assert (code, "1gbe-tcp with codecs of grace-8bit" in out) == (0, True)
    code, _, err = run(*words, "--cluster", "10gbe-tcp", "--codec-system", "grace-topk", "--wires", "int8/256")
    assert (code, "grace-topk: does not say how fast int8/256 is" in err) == (2, True)


def test_answers_say_where_nobody_named_the_device(tmp_path: Path) -> None:
    head = "format = 1\n[device]\nmemory_gbyte = 10.0\n"
    link = "[[level]]\nbandwidth_gbit = 1.0\nlatency_us = 50.0\n"
    for name, said in (("", True), ('name = "H100"\n', False)):
        file = tmp_path / "cluster.toml"
        file.write_text(f"{head}{name}{link}")
        words = ("--model", "resnet50", "--cluster", str(file), "--workers", "4", "--compute-ms", "50")
        for command in ("predict", "advise"):
            code, out, _ = run(command, *words)
            assert (code, "NO DEVICE IS NAMED" in out) == (0, said), command


def test_profile_writes_what_predict_reads(tmp_path: Path) -> None:
    text = "from torch import nn\nnet = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 5))\n"
    (tmp_path / "net.py").write_text(text)
    profile = str(tmp_path / "model.toml")
    code, out, _ = run("profile", f"{tmp_path / 'net.py'}:net", "--batch", "4", "--steps", "2", "--out", profile)
    assert (code, "backward" in out) == (0, True)
    code, out, _ = run("predict", "--model", profile, "--cluster", "1gbe-tcp", "--workers", "4", "--json", "-")
    assert (code, json.loads(out)[0]["workers"]) == (0, 4)


def test_advise_looks_at_the_gradients_of_a_real_model(tmp_path: Path) -> None:
    text = "from torch import nn\nnet = nn.Sequential(nn.Linear(200, 3000), nn.Linear(3000, 50))\n"
    (tmp_path / "net2.py").write_text(text)
    words = "--cluster 1gbe-tcp --workers 8 --bandwidth 0.01 --json -"
    code, out, _ = run("advise", "--model", f"{tmp_path / 'net2.py'}:net", *words.split())
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, "compress")
    assert "gradient SNR" in found["text"]
    assert {error["wire"] for error in found["gradient_errors"]} == {"int8/256", "int4/128+ef"}


BAD = {
    "negative bandwidth": ("bandwidth_gbit = -1.0\n", "cluster.toml:5: level.0.bandwidth_gbit: must be more than 0"),
    "missing bandwidth": ("", "cluster.toml:3: level.0.bandwidth_gbit: is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_cluster_file_is_one_line_and_exit_code_2(tmp_path: Path, case: str) -> None:
    row, word = BAD[case]
    path = tmp_path / "cluster.toml"
    path.write_text(f'format = 1\nname = "x"\n[[level]]\nname = "l"\n{row}latency_us = 5.0\n')
    code, out, err = run("predict", "--model", "resnet50", "--cluster", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert word in err


@pytest.mark.parametrize(
    "words, word",
    [
        ("predict --model resnet51 --cluster pcie3", "model: unknown 'resnet51'"),
        ("predict --model resnet50 --cluster pcie4", "no file and no preset"),
        ("predict --model resnet50 --cluster pcie3 --workers 0", "--workers: must be 1 or more, got 0"),
        ("predict --model resnet50 --cluster pcie3 --workers two", "--workers: give numbers"),
        ("predict --model resnet50 --cluster pcie3 --wires int9", "int9"),
        ("predict --model resnet50 --cluster pcie3 --algorithms rings", "unknown 'rings'"),
        ("predict --model resnet50 --cluster pcie3 --algorithms shared_scale --wires int4/128", "takes int8/BLOCK"),
        ("advise --model resnet50 --cluster pcie3 --workers 8 --wires int4/128+diff", "+diff"),
        ("predict --model no_such_module:net --cluster pcie3", "importing no_such_module failed: ModuleNotFoundError"),
        ("predict --cluster pcie3", "give --model and --cluster"),
        ("advise --model resnet50 --cluster pcie3", "--workers: must be 2 or more"),
        ("profile no_such_file.py:net", "importing no_such_file.py failed"),
        ("profile resnet50 --out unused.toml", "needs the device's speed"),
        ("probe", "start it with torchrun"),
        ("predict --model resnet50 --cluster pcie3 --batch -3", "--batch: must be above 0, got -3"),
        ("predict --model resnet50 --cluster pcie3 --compute-ms -3", "--compute-ms: must be above 0, got -3"),
        ("predict --model resnet50 --cluster pcie3 --flops nan", "--flops: must be above 0, got nan"),
        ("predict --model resnet50 --cluster pcie3 --bandwidth nan", "--bandwidth: must be a number above 0, got nan"),
        ("predict --model resnet50 --cluster pcie3 --samples -1", "--samples: must be a number above 0, got -1"),
        ("predict --model resnet50 --cluster pcie3 --html no/such/page.html", "--html: there is no folder no/such"),
        ("predict --model resnet50 --cluster pcie3 --html .", "--html: . is a folder"),
        ("advise --model resnet50 --cluster pcie3 --workers 4 --html a.html", "take `predict --html a.html`"),
        (
            "predict --model resnet50 --cluster pcie3 --algorithms native",
            "native' takes as-is, fp32, bf16 or fp16, got",
        ),
        ("advise --model resnet50 --cluster pcie3 --workers 4 --batch -3", "--batch: must be above 0, got -3"),
        ("profile torch.nn:Identity --steps 0", "--steps: must be above 0, got 0"),
        ("profile torch.nn:Identity --batch -2", "--batch: must be above 0, got -2"),
        ("profile torch.nn:Identity --out no/such.toml", "--out: there is no folder no"),
        ("probe --local 2 --out no/such.toml", "--out: there is no folder no"),
        ("probe --local 2 --seconds -1", "--seconds: must be above 0"),
        ("probe --local 1", "communication begins with two"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: str, word: str) -> None:
    code, _, err = run(*words.split())
    assert (code, err.count("\n")) == (2, 1)
    assert word in err
