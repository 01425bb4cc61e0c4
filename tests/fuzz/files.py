"""Files of the predictor and of studies: what is wrong is told in one line that begins with the file and a line."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from fuzz.base import Kind, broken, one_line, require
from narrowcast_research.validation import table

import narrowcast
from narrowcast import predict, study
from narrowcast.predict import cluster, model
from narrowcast.predict.profile import _from_description
from narrowcast.toml_file import FileError, parse_toml

ROOT = Path(narrowcast.__file__).parent
ONE_IN = 300
"""How many files are read for one whose numbers are used, too: that takes many times as long."""
LONGEST = 40
"""Lines of a file that is broken: a measured cluster has many that are alike."""
MODEL = (
    'format = 1\nname = "mine"\nbatch = 32\nsource = "me"\n\n[[layer]]\nname = "conv1"\ntensors = [9408, 64]\n'
    'macs = 118e6\noutput = 802816\n[[layer]]\nname = "fc"\ntensors = [512000, 1000]\nmacs = 1e6\noutput = 1000\n'
)
MEASURED = (
    'format = 1\nname = "mine"\nmeasured = true\n[device]\nname = "cpu"\nmemory_gbyte = 9.0\n[overlap]\ncompute = 1.2\n'
    '[[level]]\nname = "link"\nbandwidth_gbit = 1.0\nlatency_us = 50.0\n[[level.collective]]\nranks = 2\n'
    'name = "two_shot"\n'
    'points = [\n  [65536, 0.001, 0.0011],\n  [1048576, 0.01, 0.02],\n]\n[[codec]]\nwire = "int8/256"\n'
    "encode = [[16384, 1e-5], [262144, 1e-4]]\ndecode = [[16384, 1e-5]]\nbusy = 1.5\n"
)
STUDY = 'models = ["mlp"]\ndata = ["digits"]\nwires = ["fp32", "int8/256"]\nseeds = 3\nmin_values = 100\n[targets]\n'
CSV = (
    "model,parameters,compute_ms,link,workers,wire,measured_ms,role\nx,1000000,10,l,2,fp32,20,calibrate\n"
    "x,1000000,10,l,4,fp32,30,predict\nresnet50,,10,l,4,int8/256,15,predict\n"
)
PLACE = re.compile(r"mine\.[a-z]+:[0-9]+: ")


@cache
def _texts(pattern: str) -> list[str]:
    texts = [path.read_text() for path in sorted(ROOT.glob(pattern))]
    return [text for text in texts if len(text.split("\n")) <= LONGEST] or texts


def _file(
    name: str, weight: int, texts: Callable[[], list[str]], use: Callable[[str, bool], None], equals: str = "="
) -> Kind:
    def make(random: Random) -> tuple[str, bool]:
        return broken(random.choice(texts()), random, equals), random.randrange(ONE_IN) == 0

    def check(given: tuple[str, bool]) -> None:
        try:
            use(*given)
        except FileError as error:
            require(PLACE.match(str(error)), f"the message does not begin with file and line: {error}")
            one_line(str(error), name)

    return Kind(name, weight, make, check)


def _cell(made: model.Profile, where: cluster.Cluster, world: int) -> None:
    """A prediction is made of numbers; what cannot be predicted is refused."""
    try:
        cell = predict.Sweep(made, where).cell(predict.Setup(world, "int8/256"))
    except FileError:
        raise
    except ValueError as error:
        one_line(str(error), "predict")
        return
    require(cell.step >= 0 and cell.low <= cell.high, f"a step of {cell.step} s, from {cell.low} to {cell.high}")


@cache
def _known() -> tuple[model.Profile, cluster.Cluster]:
    where = predict.load_cluster("8xH100")
    return predict.find_model("resnet50", where).profile, where


@cache
def _profile() -> str:
    few = dataclasses.replace(_known()[0], tensors=_known()[0].tensors[:5])
    return model.dump(few)


def _cluster(text: str, use: bool) -> None:
    made = cluster.parse(text, "mine.toml")
    if use:
        _cell(_known()[0], made, 2)


def _model(text: str, use: bool) -> None:
    document = parse_toml(text, "mine.toml")
    if "layer" not in document.values:
        model.read_profile(document)
        return
    made = model.read_description(document)
    if use:
        try:
            profile = _from_description(made, _known()[1], 0, 0.0, 0.0).profile
        except ValueError as error:
            one_line(str(error), "model")
            return
        _cell(profile, _known()[1], 4)


def _study(text: str, use: bool) -> None:
    made = study.parse(text, "mine.toml")
    if use:
        # the launcher makes no rates, so grids that a lab tells apart may clash here
        study.expand(made, "local")


def _table(text: str, use: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.csv"
        path.write_text(text, encoding="utf-8", errors="replace", newline="")
        try:
            table.validate(path) if use else table.load(path)
        except FileError as error:
            raise FileError(str(error).replace(f"{folder}/", "")) from None


CLUSTERS = _file("clusters", 3, lambda: [MEASURED, *_texts("predict/data/clusters/*.toml")], _cluster)
MODELS = _file("models", 3, lambda: [MODEL, _profile()], _model)
STUDIES = _file("studies", 3, lambda: [STUDY, *_texts("study/builtin/*.toml")], _study)
TABLES = _file("tables", 2, lambda: [CSV], _table, ",")
KINDS = (CLUSTERS, MODELS, STUDIES, TABLES)
