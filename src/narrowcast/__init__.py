"""narrowcast: fewer bits on the wire when deep networks train on many devices.

Names are imported at their first use: what needs no torch, as `narrowcast --help`, does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.lazy import homes_of, lazy_front

if TYPE_CHECKING:
    from narrowcast import codecs as codecs
    from narrowcast import collectives as collectives
    from narrowcast import formats as formats
    from narrowcast import kernels as kernels
    from narrowcast import lab as lab
    from narrowcast import parallel as parallel
    from narrowcast import predict as predict
    from narrowcast import simulate as simulate
    from narrowcast import study as study
    from narrowcast.codecs import Codec as Codec
    from narrowcast.codecs import ErrorFeedback as ErrorFeedback
    from narrowcast.codecs import ErrorReport as ErrorReport
    from narrowcast.codecs import codec as codec
    from narrowcast.codecs import error_report as error_report
    from narrowcast.collectives import all_gather as all_gather
    from narrowcast.collectives import all_reduce as all_reduce
    from narrowcast.collectives import all_to_all as all_to_all
    from narrowcast.collectives import broadcast as broadcast
    from narrowcast.collectives import recv as recv
    from narrowcast.collectives import reduce_scatter as reduce_scatter
    from narrowcast.collectives import send as send
    from narrowcast.formats import Codebook as Codebook
    from narrowcast.formats import Format as Format
    from narrowcast.formats import format as format
    from narrowcast.kernels import round_to as round_to
    from narrowcast.parallel import DDPState as DDPState
    from narrowcast.parallel import LocalSGD as LocalSGD
    from narrowcast.parallel import attach as attach
    from narrowcast.parallel import auto as auto
    from narrowcast.parallel import ddp_hook as ddp_hook
    from narrowcast.parallel import replay as replay
    from narrowcast.parallel import schedule as schedule

HOMES = homes_of(
    {
        "codecs": "Codec ErrorFeedback ErrorReport codec error_report",
        "collectives": "all_gather all_reduce all_to_all broadcast recv reduce_scatter send",
        "formats": "Codebook Format format",
        "kernels": "round_to",
        "parallel": "DDPState LocalSGD attach auto ddp_hook replay schedule",
    }
)
"""Every public name and the package that holds it."""
LAYERS = ("codecs", "collectives", "formats", "kernels", "lab", "parallel", "predict", "simulate", "study")
"""Packages underneath: they can be reached, and are not all shown."""

__getattr__, *_ = lazy_front(__name__, HOMES | {layer: f"{layer}:" for layer in LAYERS})

__version__ = "0.2.0"

__all__ = [
    "Codebook",
    "Codec",
    "DDPState",
    "ErrorFeedback",
    "LocalSGD",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attach",
    "auto",
    "broadcast",
    "codec",
    "ddp_hook",
    "error_report",
    "format",
    "lab",
    "predict",
    "recv",
    "reduce_scatter",
    "replay",
    "round_to",
    "schedule",
    "send",
    "simulate",
    "study",
]


def __dir__() -> list[str]:
    """The public names; the layers underneath can be imported but are not shown."""
    return [*__all__, "__version__"]
