"""Built-in descriptions have the published sizes; profiles of real modules tell when gradients are ready."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowcast.predict import model, profile, zoo
from narrowcast.predict.advice import gradients
from narrowcast.predict.model import Description, Layer
from narrowcast.predict.profile import ModelError, resolve

PUBLISHED = {
    "alexnet": 62_378_344,
    "vgg19": 143_667_240,
    "resnet50": 25_557_032,
    "resnet110": 1_727_962,
    "resnet152": 60_192_808,
    "bn-inception": 11_295_240,
    "bert-large": 336_226_108,
    "gpt2": 124_439_808,
}
"""As the reference implementations count them."""
MACS = {"vgg19": 19.63e9, "resnet50": 4.09e9, "resnet152": 11.51e9, "bn-inception": 2.05e9}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_description_has_the_published_number_of_parameters(name: str) -> None:
    assert zoo.MODELS[name]().numel == PUBLISHED[name]


@pytest.mark.parametrize("name", MACS)
def test_multiply_adds_are_the_published_ones(name: str) -> None:
    # batch norms count here and not there
    assert zoo.MODELS[name]().macs == pytest.approx(MACS[name], rel=0.01)


def test_the_described_transformer_blocks_are_those_of_torch() -> None:
    """An encoder of torch's own with BERT's sizes has as many parameters as the blocks of the description."""
    blocks = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(1024, 16, 4096, device="meta"), 24, enable_nested_tensor=False
    )
    made = zoo.bert_large()
    names = [layer for layer in made.layers if sum(layer.tensors)]
    # two for the embeddings and their norm before, five for the heads after
    described = sum(sum(layer.tensors) for layer in names[2:-5])
    assert described == sum(p.numel() for p in blocks.parameters())


def test_ready_times_go_backwards_through_the_layers() -> None:
    made = Description("two", (Layer("a", (100,), 1.0), Layer("b", (10, 1), 3.0)), batch=1).profile_of(6.0)
    assert (made.forward, made.backward, made.compute) == pytest.approx((2.0, 4.0, 6.0))
    assert [(t.name, t.numel) for t in made.tensors] == [("b.1", 1), ("b.0", 10), ("a.0", 100)]
    assert [t.ready for t in made.tensors] == pytest.approx([3.0, 3.0, 4.0])


def test_a_description_needs_a_speed() -> None:
    with pytest.raises(ValueError, match="--flops or --compute-ms"):
        zoo.resnet50().profile(0.0)


def test_a_profile_of_a_real_model_knows_the_order_of_gradients() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    before = [p.clone() for p in module.parameters()]
    made = profile.profile(module, torch.randn(5, 8), name="m", steps=3)
    assert made.batch == 5
    assert made.numel == sum(p.numel() for p in module.parameters())
    order = [t.name for t in made.tensors]
    assert {*order[:2]} == {"2.weight", "2.bias"}
    assert all(0 <= t.ready <= 2 * made.backward for t in made.tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


def test_a_model_is_found_in_a_file_and_by_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_file.py").write_text("from torch import nn\n\ndef net():\n    return nn.Linear(3, 2)\n")
    made = resolve(f"{tmp_path / 'mine_file.py'}:net", batch=4, steps=2)
    assert (made.profile.numel, made.profile.batch) == (8, 4)
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("mine_file:net", batch=4, steps=2).profile.numel == 8


@pytest.mark.parametrize(
    "text, word",
    [
        ("import no_such_package", "ModuleNotFoundError"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("net = 3", "'int' object is not callable"),
        ("def net(): raise KeyError('x')", "KeyError"),
        ("def net(): return 3", "an nn.Module is wanted"),
        ("other = 1", "has no 'net'"),
        ("from torch import nn\nnet = nn.ReLU()", "say what goes in"),
        ("from torch import nn\nnet = nn.Linear(3, 2, device='meta')", "a training step failed"),
        ("from torch import nn\nnet = nn.Linear(3, 2).requires_grad_(False)", "a training step failed"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_clear_error(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "net_file.py").write_text(text)
    with pytest.raises(ModelError) as caught:
        resolve(f"{tmp_path / 'net_file.py'}:net", steps=1)
    assert word in str(caught.value)


DESCRIBED = """format = 1
name = "mine"
batch = 4
[[layer]]
name = "a"
tensors = [100, 10]
macs = 1e6
[[layer]]
macs = 2e6
tensors = [7]
"""


def test_a_description_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(DESCRIBED)
    made = resolve(str(path), flops=1e9)
    assert (made.profile.numel, made.profile.batch, made.profile.forward) == (117, 4, pytest.approx(4 * 2 * 3e6 / 1e9))
    path.write_text(DESCRIBED.replace("macs = 2e6", "mac = 2e6"))
    with pytest.raises(ValueError, match=r"mine.toml:9: layer.1.mac: unknown"):
        resolve(str(path), flops=1e9)
    path.write_text(DESCRIBED.replace("[7]", "[-7]"))
    with pytest.raises(ValueError, match=r"mine.toml:10: layer.1.tensors: must be"):
        resolve(str(path), flops=1e9)


@pytest.mark.parametrize("wrong", ["inf", "nan", "-1.0"])
def test_a_profile_has_finite_times(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "profile.toml"
    made = model.dump(zoo.resnet50().profile_of(0.1))
    path.write_text(re.sub(r"forward = .*", f"forward = {wrong}", made))
    with pytest.raises(ValueError, match=r"profile.toml:\d+: forward: must be a number from 0"):
        resolve(str(path))


def test_unknown_names_are_errors() -> None:
    for name in ("resnet51", "nosuch.toml", "no_such_module:net", "no_such_file.py:net"):
        with pytest.raises(ModelError, match="model: "):
            resolve(name)


@pytest.mark.parametrize("shape, wanted", [("3x4", (2, 3, 4)), ("int:9:5", (2, 5)), ("", (2, 7))])
def test_example_batches(shape: str, wanted: tuple[int, ...]) -> None:
    assert tuple(profile.example_batch(nn.Linear(7, 1), shape, 2).shape) == wanted


def test_a_bad_shape_is_an_error() -> None:
    with pytest.raises(ModelError, match="--input"):
        profile.example_batch(nn.Linear(7, 1), "3xb", 2)


def test_two_batches_of_words_are_two(tmp_path: Path) -> None:
    """Their gradients differ even where the order of the words does not count."""
    text = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))\n"
    (tmp_path / "words_file.py").write_text(text)
    made = resolve(f"{tmp_path / 'words_file.py'}:net", batch=4, steps=1, shape="int:50:6")
    assert made.module is not None
    assert made.batches is not None
    first, second = (gradients(made.module, batch) for batch in made.batches)
    assert not any(torch.allclose(first[name], second[name]) for name in first)
