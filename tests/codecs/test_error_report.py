"""error_report, on cases small enough to compute by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import narrowcast as nc
from narrowcast.codecs import low_rank_specs


def test_every_number_of_a_small_case() -> None:
    x = torch.tensor([1.0, 2.5, -3.5, 200.0, 0.0, 0.25])
    #    comes back as 1    2    -4    127    0    0
    report = nc.error_report(x, "int8@1")
    signal = 1 + 6.25 + 12.25 + 40_000 + 0 + 0.0625
    noise = 0 + 0.25 + 0.25 + 73**2 + 0 + 0.0625
    assert report.codec == "int8@1"
    assert (report.values, report.nbytes) == (6, 6)
    assert report.bias == pytest.approx((-0.5 - 0.5 - 73 - 0.25) / 6 / math.sqrt(signal / 6))
    assert report.snr_db == pytest.approx(10 * math.log10(signal / noise))
    assert report.relative_error == pytest.approx(math.sqrt(noise / signal))
    assert report.mean_absolute_error == pytest.approx((0.5 + 0.5 + 73 + 0.25) / 6)
    assert report.mean_squared_error == pytest.approx(noise / 6)
    assert report.mean_relative_error == pytest.approx((0.5 / 2.5 + 0.5 / 3.5 + 73 / 200 + 1) / 5)
    assert report.flushed == 1 / 6
    assert report.saturated == 1 / 6
    assert (report.nonfinite_in, report.nonfinite_out) == (0.0, 0.0)


def test_values_that_are_not_finite_are_counted_and_left_out_of_the_errors() -> None:
    x = torch.tensor([1.0, math.nan, math.inf, 1.0625])
    report = nc.error_report(x, "e4m3@1")
    assert (report.nonfinite_in, report.nonfinite_out) == (0.5, 0.5)
    assert report.mean_absolute_error == 0.0625 / 2
    whole_block_lost = nc.error_report(torch.tensor([1.0, math.nan] + [0.5] * 126), "int8/64")
    assert (whole_block_lost.nonfinite_in, whole_block_lost.nonfinite_out) == (1 / 128, 0.5)
    assert whole_block_lost.mean_absolute_error == pytest.approx(0, abs=1e-7)


def test_a_codec_without_loss_has_an_infinite_ratio() -> None:
    report = nc.error_report(torch.randn(100), "fp32")
    assert report.snr_db == math.inf
    assert report.bias == report.relative_error == report.mean_absolute_error == report.flushed == report.saturated == 0


def test_zeros_and_nothing_at_all_are_reported() -> None:
    for x in (torch.zeros(10), torch.zeros(0)):
        report = nc.error_report(x, "int8/64")
        assert report.values == len(x)
        assert report.snr_db == math.inf
        assert report.relative_error == report.bias == report.mean_relative_error == 0


def test_what_is_lost_entirely_has_no_signal() -> None:
    report = nc.error_report(torch.full((8,), 1e-3), "int8@1")
    assert report.flushed == 1.0
    assert report.snr_db == 0.0
    assert report.relative_error == 1.0


@pytest.mark.parametrize(
    "spec", ["int8/64", "e4m3fn/64", "int4/64", "e5m2", "mxfp8+rceil", "uint8/64", "dtree8", "nf4/64"]
)
def test_nothing_saturates_where_the_scale_is_made_of_the_largest_value(spec: str) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert nc.error_report(x, spec).saturated == 0.0


def test_the_floor_rule_of_mx_saturates_what_lies_above_the_largest_element() -> None:
    # scale 1: 6 is the largest, 7 saturates, and so does -6.5
    x = torch.tensor([7.0, -6.5, 6.0, 1.0] + [0.0] * 28)
    assert nc.error_report(x, "mxfp4").saturated == 2 / 32


def test_the_shape_and_type_of_the_tensor_do_not_matter() -> None:
    x = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert nc.error_report(x, "int8/64") == nc.error_report(x.reshape(-1), "int8/64")
    assert nc.error_report(x, nc.codec("int8/64")) == nc.error_report(x, "int8/64")


def test_the_text_and_the_dictionary_say_the_same() -> None:
    report = nc.error_report(torch.randn(1000), "int4/64")
    assert str(report).startswith("int4/64: 4.5")
    assert f"SNR {report.snr_db:.1f} dB" in str(report)
    assert report.as_dict()["snr_db"] == report.snr_db


def test_a_bit_more_is_six_decibels_more() -> None:
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    ratios = [nc.error_report(x, f"int{bits}/4096").snr_db for bits in range(3, 9)]
    for fewer, more in itertools.pairwise(ratios):
        assert more - fewer == pytest.approx(20 * math.log10(2), abs=1.5)


@pytest.mark.parametrize("spec", low_rank_specs())
def test_low_rank_is_reported_as_others_are(spec: str) -> None:
    codec, draw = nc.codec(spec), torch.Generator().manual_seed(0)
    near = torch.randn(64, codec.rank, generator=draw) @ torch.randn(codec.rank, 5 * 16, generator=draw)
    x = (near + 0.01 * torch.randn(64, 80, generator=draw)).view(64, 5, 16)
    report = nc.error_report(x, spec)
    assert (report.codec, report.values) == (spec, x.numel())
    assert 8 * report.nbytes / x.numel() == pytest.approx(codec.bits_for(x.shape), rel=0.1)
    assert report.relative_error < 0.05  # one call alone, from a random factor, brings a third of that signal
    assert report == nc.error_report(x, spec), "the same bits each time"
    bad = x.clone()
    bad[3, 2, 1] = math.inf
    assert nc.error_report(bad, spec).nonfinite_out == 1.0
    zeros = nc.error_report(torch.zeros(20, 30), spec)
    assert (zeros.snr_db, zeros.relative_error) == (math.inf, 0.0)


@pytest.mark.parametrize(
    "shape, why",
    [((100,), "is no matrix"), ((), "is no matrix"), ((0, 3), "is no matrix"), ((1, 1000), "rank 4 saves too little")],
)
def test_low_rank_of_what_travels_otherwise_says_so(shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=rf"low rank is for matrices, .* {why}; take bf16\+ef, as attach does"):
        nc.error_report(torch.zeros(shape), "bf16+rank4+ef")
