"""Arithmetic of other papers, which ours must reproduce."""

from __future__ import annotations

from narrowcast.codecs import codec as codec_named
from narrowcast.predict import Cluster, Device, Fsdp, Level, Setup, costs, zoo
from narrowcast_research.validation.metrics import Cell, Result, figures, line

APS_FP16 = ((2_097_152, 1243e-6), (4_718_592, 2402e-6), (2_097_152, 1242e-6), (8_912_896, 3733e-6))
"""Figure 11: bytes and seconds of the fp16 all-reduce on 32 V100: three layers of ResNet-50, and all of them in one."""


def aps_fit() -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes a second of the single layers, as the facts fit them."""
    start, slope = line([n for n, _ in APS_FP16[:3]], [t for _, t in APS_FP16[:3]])
    return start, 1 / slope


def aps_seconds(values: int, latency: float, bandwidth: float, max_phase: float) -> float:
    """T = T_max + a + L / B against a + 2 L / B for 16 bits."""
    return max_phase + latency + values / bandwidth


def one_bit_adam_ratio(warm_up: float) -> float:
    """How many times fewer bytes than 16-bit Adam, with the share of steps before compression begins."""
    return 1 / (warm_up + (1 - warm_up) / 16)


def sharded_volume(ranks: int) -> float:
    """Bytes that a rank sends in a step of `--parallel fsdp`, of the model's bytes: all of it in 16 bits."""
    place = Cluster("any", (Level("link", 0, 1.0, 0.0),), Device(memory_gbyte=1.0))
    profile = zoo.gpt2().profile_of(1.0)
    return Fsdp(profile, costs.Costs(place, draws=0)).predict(Setup(ranks, "bf16")).bytes_sent / (2 * profile.numel)


def outside_share(ranks: int, nodes: int) -> float:
    """The share of a ring's traffic that leaves the node."""
    return (nodes - 1) / (ranks - 1)


def gather_crossover(ratio: float) -> float:
    """From more ranks than this on, an all-gather of compressed gradients sends more than a float32 ring: P > 2 r."""
    return 2 * ratio


def effective_ratio(spec: str) -> float:
    return 32 / codec_named(spec).bits_per_value


def _crossing_ranks(ratio: int) -> int:
    """Found by counting bytes, not by the formula."""
    ranks = 2
    while costs.volume("one_shot", ranks) / ratio <= costs.volume("all_reduce", ranks) + 1e-12:
        ranks += 1
    return ranks - 1


def validate() -> Result:
    latency, bandwidth = aps_fit()
    pairs = [
        (("APS: steps of a ring of 256", "paper"), 510, costs.steps("all_reduce", 256)),
        (("APS: fp16 latency, us", "facts' fit"), 316, 1e6 * latency),
        (("APS: fp16 bandwidth, GB/s", "facts' fit"), 2.26, bandwidth / 1e9),
        (("1-bit Adam: ratio after 15 % warm-up", "paper: about 5"), 4.9, one_bit_adam_ratio(0.15)),
        (("ZeRO-3 volume, of the model, on 1024 ranks", "paper"), 3.0, sharded_volume(1024)),
        (("traffic outside, 32 ranks on 4 nodes", "ml-engineering"), 0.097, outside_share(32, 4)),
        (("nccl-tests: all-reduce factor of 8", "nccl-tests"), 1.75, costs.volume("all_reduce", 8)),
        (("nccl-tests: all-gather factor of 8", "nccl-tests"), 0.875, costs.volume("all_gather", 8)),
        (("nccl-tests: reduce-scatter factor of 8", "nccl-tests"), 0.875, costs.volume("reduce_scatter", 8)),
        (("nccl-tests: all-to-all factor of 8", "nccl-tests"), 0.875, costs.volume("all_to_all", 8)),
        (("nccl-tests: broadcast factor of 8", "nccl-tests"), 1.0, costs.volume("broadcast", 8)),
        (("all-gather crossover at r = 4, ranks", "P > 2 r"), gather_crossover(4), _crossing_ranks(4)),
        (("all-gather crossover at r = 32, ranks", "P > 2 r"), gather_crossover(32), _crossing_ranks(32)),
        (("ratio of int8 with a scale for 512", "facts"), 3.97, effective_ratio("int8/512")),
        (("ratio of MX 8 bit", "facts"), 3.88, effective_ratio("mxfp8")),
    ]
    cells = [Cell(key, float(wanted), float(got)) for key, wanted, got in pairs]
    return Result(
        name="formulas",
        title="Published arithmetic: steps, volumes and factors",
        fitted="nothing, but for APS's two numbers, which are a line through the figure's three layers",
        columns=("what", "source"),
        cells=cells,
        figures=figures(cells),
        targets={"largest": ("<=", 1.0)},
        notes=[
            f"APS merged: {1e6 * (latency + APS_FP16[3][0] / bandwidth):.0f} us by that line, 3733 us measured",
        ],
        unit="",
    )
