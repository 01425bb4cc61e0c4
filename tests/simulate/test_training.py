"""simulate.train: resumed runs repeat bit for bit, workers are kept apart, the log says what happened."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast import data
from narrowcast.simulate import Batches, World, settings, train
from narrowcast.simulate.precision import optim
from narrowcast.simulate.settings import read_log, seed_of

FEEDBACK = "int4/128+sr+ef"


def examples() -> SimpleNamespace:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(240, 1, 8, 8, generator=made)
    y = (x.flatten(1) @ torch.randn(64, 10, generator=made)).argmax(dim=1)
    return SimpleNamespace(x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])


def net() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        conv = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
        return nn.Sequential(*conv, nn.Linear(384, 32), nn.ReLU(), nn.Linear(32, 10))


def run_of(**options: Any) -> Any:
    chosen: dict[str, Any] = {"workers": 4, "spec": FEEDBACK, "steps": 12, "batch": 40, "min_values": 50, **options}
    return train(chosen.pop("model", None) or net(), chosen.pop("data", None) or examples(), **chosen)


def bits(model: nn.Module) -> dict[str, bytes]:
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in model.state_dict().items()}


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


# ---- resuming --------------------------------------------------------------------------------------------------------


class Crash(Exception):
    pass


def crash_at(step: int) -> Callable[[Any], None]:
    def hook(run: Any) -> None:
        if run.step == step:
            raise Crash

    return hook


@pytest.mark.parametrize("crash", [1, 3, 7, 11])
@pytest.mark.parametrize("spec", ["e5m2+aps", FEEDBACK])
def test_an_interrupted_run_that_goes_on_ends_with_the_same_bits_and_the_same_log(
    tmp_path: Path, spec: str, crash: int
) -> None:
    options = {"spec": spec, "checkpoint_every": 2, "test_every": 4, "error_every": 3}
    whole = run_of(log=tmp_path / "whole.jsonl", **options)
    files = {"log": tmp_path / "log.jsonl", "checkpoint": tmp_path / "run.pt"}
    with pytest.raises(Crash):
        run_of(after_step=crash_at(crash), **files, **options)
    resumed = run_of(**files, **options)
    assert bits(resumed.model) == bits(whole.model)
    assert resumed.accuracy == whole.accuracy
    assert without_seconds(read_log(files["log"])) == without_seconds(read_log(tmp_path / "whole.jsonl"))
    # a run that is done is not done again
    again = run_of(before_step=crash_at(12), **files, **options)
    assert bits(again.model) == bits(whole.model)
    assert again.accuracy == whole.accuracy


def test_a_run_in_pieces_of_limited_time_ends_with_the_same_bits(tmp_path: Path) -> None:
    pieces = 0
    while True:
        run = run_of(checkpoint=tmp_path / "run.pt", time_limit=0.0)
        pieces += 1
        if run.finished:
            break
        assert run.step == pieces
    assert pieces == 12
    assert bits(run.model) == bits(run_of().model)


def test_the_log_has_the_order_of_the_steps_however_often_a_run_is_cut(tmp_path: Path) -> None:
    options = {"steps": 5, "error_every": 2, "test_every": 3}
    whole, run = run_of(**options), None
    while run is None or not run.finished:
        run = run_of(checkpoint=tmp_path / "run.pt", time_limit=0.0, **options)
    assert without_seconds(run.log.records) == without_seconds(whole.log.records)
    steps = [r["step"] for r in whole.log.records if r["kind"] in ("error", "step")]
    assert steps == sorted(steps)


def test_a_run_that_breaks_leaves_the_losses_of_all_its_steps(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run_of(log=tmp_path / "log", after_step=crash_at(7))
    assert [r["step"] for r in read_log(tmp_path / "log") if r["kind"] == "step"] == list(range(7))


def test_with_resume_off_a_run_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    run_of(steps=3, checkpoint=path, log=tmp_path / "log")
    run = run_of(steps=2, checkpoint=path, log=tmp_path / "log", resume=False)
    assert run.step == 2
    assert [r["step"] for r in read_log(tmp_path / "log") if r["kind"] == "step"] == [0, 1]


@pytest.mark.parametrize(
    "change, word",
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"workers": 2}, "workers was 4 and is 2"),
        ({"spec": "int8/64"}, "spec was"),
        ({"lower": {"weights": "e4m3"}}, "lower was None and is {'weights': "),
        ({"lr": 0.5}, "lr was None and is 0.5"),
        ({"min_values": 51}, "min_values was 50 and is 51"),
        ({"bucket_cap_mb": 0.1}, "bucket_cap_mb was None and is 0.1"),
        ({"optimizer": torch.optim.Adam}, "optimizer was [{'class': 'SGD', "),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8)}, "'momentum': '0.8'"),
        ({"workers": World(4, "auto", order="reversed")}, "world order was 'cluster' and is 'reversed'"),
        ({"workers": World(4, "auto", accumulate="e5m2", kahan=True)}, "world kahan was False and is True"),
        ({"workers": World(4, "auto", seed=9)}, "world seed was 0 and is 9"),
        ({"workers": World(4, "auto", inner="bf16")}, "world inner was 'as-is' and is 'bf16'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    run_of(steps=2, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match=f"of another run: .*{re.escape(word)}"):
        run_of(checkpoint=tmp_path / "run.pt", **change)


def test_an_optimizers_own_precision_makes_another_run(tmp_path: Path) -> None:
    def options(**precision: Any) -> dict[str, Any]:
        return {"optimizer": lambda p: optim.SGD(p, lr=0.1, **precision), "checkpoint": tmp_path / "run.pt"}

    run_of(steps=2, **options(weights="bf16"))
    with pytest.raises(ValueError, match=r"of another run: optimizer was .*kahan"):
        run_of(**options(weights="bf16", update="kahan"))
    assert run_of(**options(weights="bf16")).finished


@pytest.mark.parametrize("content", [b"", b"xx", b"hello", b"PK\x03\x04 half of a file"])
def test_a_broken_checkpoint_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"run\.pt is no checkpoint, or a broken one .*resume=False"):
        run_of(checkpoint=tmp_path / "run.pt")


@pytest.mark.parametrize(
    "lr",
    [np.float32(0.1), torch.tensor(0.1), lambda step: np.interp(step, [0, 10], [0.1, 0.0])],
    ids=["numpy", "torch", "function"],
)
def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path, lr: Any) -> None:
    given = {"lr": lr, "min_values": np.int64(4), "log": tmp_path / "log", "checkpoint": tmp_path / "run.pt"}
    run_of(steps=1, **given)
    assert run_of(steps=2, **given).step == 2


def test_a_checkpoint_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    settings.save_checkpoint(path, {"run": {}, "step": 1})

    def broken(state: object, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        settings.save_checkpoint(path, {"run": {}, "step": 2})
    monkeypatch.undo()
    assert settings.load_checkpoint(path, torch.device("cpu"), {})["step"] == 1
    assert os.listdir(tmp_path) == ["run.pt"]


# ---- what a worker is ------------------------------------------------------------------------------------------------


def by_hand(world: int, steps: int) -> nn.Module:
    """Full precision, written out: gradients added in rank order and divided, buffers of worker 0."""
    model, found, batches = net(), examples(), Batches(200, 40, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.random.fork_rng([]):
        for step in range(steps):
            gradients, kept = [], {}
            before = {name: b.clone() for name, b in model.named_buffers()}
            for worker in range(world):
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
                indices = batches.indices(step, worker)
                torch.manual_seed(seed_of(0, step, worker))
                optimizer.zero_grad()
                F.cross_entropy(model(found.x_train[indices]), found.y_train[indices]).backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
                if worker == 0:
                    kept = {name: b.clone() for name, b in model.named_buffers()}
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
            for number, parameter in enumerate(model.parameters()):
                total = gradients[0][number]
                for rows in gradients[1:]:
                    total = total + rows[number]
                parameter.grad = total / world if world > 1 else total
            optimizer.step()
    return model


@pytest.mark.parametrize("world", [1, 2, 5])
def test_as_is_it_is_plain_data_parallel_training(world: int) -> None:
    assert bits(run_of(workers=world, spec="as-is", steps=6).model) == bits(by_hand(world, 6))


def test_the_random_numbers_of_the_caller_are_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    run_of(steps=2)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seeds_differ_by_step_worker_and_use() -> None:
    low = {
        seed_of(s, k, w, use) % 2**32
        for s in range(3)
        for k in range(40)
        for w in range(8)
        for use in ("noise", "augment")
    }
    assert len(low) == 3 * 40 * 8 * 2


def test_every_epoch_shows_every_example_once_in_another_order() -> None:
    batches = Batches(200, 40, 4, seed=1)
    epochs = [torch.cat([batches.indices(5 * e + s, w) for s in range(5) for w in range(4)]) for e in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(200)) for epoch in epochs)
    assert not torch.equal(*epochs)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x.flatten(1))


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    before = bits(Unused())
    after = bits(
        run_of(model=Unused(), spec="int8/64", optimizer=lambda p: torch.optim.SGD(p, 0.1, weight_decay=1)).model
    )
    assert {name for name in before if before[name] == after[name]} == {"unused.weight", "unused.bias"}


def test_augmentation_is_for_each_worker_and_step() -> None:
    seen = []

    def note(x: Tensor, made: torch.Generator) -> Tensor:
        seen.append(int(torch.randint(0, 2**31, (), generator=made)))
        return x

    run_of(augment=note, steps=3)
    assert len(set(seen)) == 12
    first = list(seen)
    seen.clear()
    run_of(augment=note, steps=3)
    assert seen == first


# ---- policies, schedules, hooks --------------------------------------------------------------------------------------


def test_lr_follows_a_function_and_is_logged(tmp_path: Path) -> None:
    run_of(lr=lambda step: 0.1 / (1 + step), steps=4, log=tmp_path / "log")
    assert [r["lr"] for r in read_log(tmp_path / "log") if r["kind"] == "step"] == [0.1 / (1 + k) for k in range(4)]


def test_hooks_see_the_run_and_may_stop_it() -> None:
    seen = []

    def before(run: Any) -> None:
        seen.append(run.step)

    def after(run: Any) -> None:
        assert float(run.loss) > 0
        assert all(p.grad is not None for p in run.model.parameters())
        run.stop = run.step == 3

    run = run_of(before_step=before, after_step=after)
    assert seen == [0, 1, 2]
    assert (run.step, run.finished) == (3, False)
    assert run.accuracy is not None


def test_small_tensors_stay_as_they_are_and_the_log_says_so(tmp_path: Path) -> None:
    run_of(spec={"5.*": "int8/64"}, steps=1, log=tmp_path / "log")
    (start, *_) = read_log(tmp_path / "log")
    why = {tensor["name"]: (tensor["wire"], tensor["why"]) for tensor in start["tensors"]}
    assert why["5.weight"] == ("int8/64", "")
    assert why["5.bias"] == ("as-is", "has 32 values, under 50")
    assert why["0.weight"] == ("as-is", "no pattern matches its name")


def test_a_schedule_changes_the_wire() -> None:
    """Until its first change a run is the one without it."""
    scheduled = [run_of(spec=nc.schedule({0: "int8/64", 3: "int2/64"}), steps=n) for n in (3, 4)]
    plain = [run_of(spec="int8/64", steps=n) for n in (3, 4)]
    assert bits(scheduled[0].model) == bits(plain[0].model)
    assert bits(scheduled[1].model) != bits(plain[1].model)


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_exchange(tmp_path: Path) -> None:
    run_of(spec="e5m2+aps", steps=3, error_every=2, log=tmp_path / "log")
    errors = [r for r in read_log(tmp_path / "log") if r["kind"] == "error"]
    assert {r["step"] for r in errors} == {0, 2}
    assert {r["name"] for r in errors} == {"0.weight", "5.weight", "7.weight"}
    for record in errors:
        assert 5 < record["snr_db"] < 40
        assert abs(record["bias"]) < 0.2
        assert record["saturated"] == 0
        assert 0 <= record["flushed"] < 0.5


def test_a_bare_cast_of_small_gradients_is_seen_to_flush_and_of_large_ones_to_saturate(tmp_path: Path) -> None:
    def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda scores, y: factor * F.cross_entropy(scores, y)

    for factor, share in [(1e-6, "flushed"), (1e6, "saturated")]:
        run_of(spec="e4m3@1", loss=scaled(factor), lr=0.0, steps=1, error_every=1, log=tmp_path / "log")
        errors = {r["name"]: r for r in read_log(tmp_path / "log") if r["kind"] == "error"}
        assert errors["7.weight"][share] > 0.5


def test_the_world_may_be_given(tmp_path: Path) -> None:
    world = World(4, "ring", accumulate="e5m2", kahan=True)
    run_of(workers=world, spec="e5m2+aps", steps=2, log=tmp_path / "log")
    assert read_log(tmp_path / "log")[0]["algorithm"] == "ring"
    assert bits(run_of(workers=world, spec="e5m2+aps").model) != bits(run_of(spec="e5m2+aps").model)


def test_a_world_brings_its_own_spec_and_algorithm(tmp_path: Path) -> None:
    run = run_of(workers=World(4, "ring", "int8/64"), spec=None, steps=2, log=tmp_path / "log")
    start = read_log(tmp_path / "log")[0]
    assert (start["spec"], start["algorithm"]) == ("int8/64", "ring")
    assert bits(run.model) == bits(run_of(spec="int8/64", algorithm="ring", steps=2).model)
    assert bits(run_of(workers=World(4, "ring", "int8/64"), spec="int8/64", steps=2).model) == bits(run.model)
    for options, message in [
        ({"workers": World(4, "ring", "int8/64"), "spec": "e5m2+aps"}, "'int8/64'.* and spec='e5m2.aps' differ"),
        ({"workers": World(4, "ring", "int8/64"), "spec": {"*": "int8/64"}}, "give the spec in one place"),
        ({"workers": World(4), "algorithm": "ring"}, "'two_shot'.* and algorithm='ring' differ"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_of(**options)


def test_without_a_world_the_defaults_are_those_of_attach(tmp_path: Path) -> None:
    run_of(spec=None, steps=1, log=tmp_path / "log")
    start = read_log(tmp_path / "log")[0]
    assert (start["spec"], start["algorithm"]) == ("e5m2+aps", "auto")


def test_what_cannot_be_is_refused() -> None:
    for options, message in [
        ({"steps": None}, "either epochs= or steps="),
        ({"steps": -1}, "steps=-1 leave nothing to do"),
        ({"steps": None, "epochs": 0.001}, "epochs=0.001 of 5 steps each leave nothing to do"),
        ({"model": nn.Flatten()}, r"the model \(Flatten\) has no parameters"),
        ({"batch": 42}, "batch=42 does not divide among 4 workers"),
        ({"batch": 400}, "more than the 200 training examples"),
        ({"spec": "int4/64+ef", "algorithm": "ring"}, "error feedback goes with two_shot, one_shot"),
        ({"workers": 5, "batch": 50, "algorithm": "tree", "spec": "int8/64"}, "power-of-two world"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_of(**options)
    with pytest.raises(TypeError, match=r"is torch\.float64; codecs take"):
        run_of(model=net().double())


# ---- lowered modules -------------------------------------------------------------------------------------------------

LOWER: dict[str, Any] = {"weights": "e4m3", "activations": "e5m2+sr", "gradients": "e5m2+sr", "accumulate": "bf16+sr"}


def digits_run(lower: dict[str, Any] | None, **options: Any) -> Any:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    digits = data.load("digits").normalised()
    return train(model, digits, workers=2, spec="int8/256", min_values=1, batch=128, lr=0.1, lower=lower, **options)


def test_digits_are_learnt_by_a_lowered_model_and_its_noise_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Random bits of casts and sums are those of the step, whatever ran in the same process before."""
    lower = {**LOWER, "seed": 3}
    options = {"epochs": 4, "checkpoint_every": 7}
    whole = digits_run(lower, **options)
    assert whole.accuracy > 0.8
    with pytest.raises(Crash):
        digits_run(lower, checkpoint=tmp_path / "run.pt", after_step=crash_at(17), **options)
    resumed = digits_run(lower, checkpoint=tmp_path / "run.pt", **options)
    assert bits(resumed.model) == bits(whole.model)
    assert resumed.accuracy == whole.accuracy


def test_lowering_changes_the_run_and_so_does_the_seed_of_its_noise() -> None:
    runs = [digits_run(lower, steps=2) for lower in (None, {**LOWER, "seed": 3}, {**LOWER, "seed": 4})]
    plain, one, other = (bits(run.model) for run in runs)
    assert plain.keys() == one.keys()
    assert len({model["1.weight"] for model in (plain, one, other)}) == 3
    told = [row.precision for row in runs[1].lowered.explain() if row.kind == "Linear"]
    assert told == [", ".join(f"{role} {name}" for role, name in LOWER.items())] * 2
    assert runs[0].lowered is None


# ---- real data -------------------------------------------------------------------------------------------------------


def test_digits_are_learnt_as_well_with_eight_workers_and_aps_as_in_full_precision() -> None:
    digits, found = data.load("digits").normalised(), {}
    for spec in ("as-is", "e5m2+aps"):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        run = train(model, digits, workers=8, spec=spec, min_values=1, epochs=8, batch=128, lr=0.1)
        found[spec] = run.accuracy
        assert [record["step"] for record in run.history] == [11 * k for k in range(1, 9)]
    assert found["as-is"] > 0.88
    assert found["e5m2+aps"] > found["as-is"] - 0.02
