"""torchtitan: its debug model, with gradients and parameters of FSDP2 in few bits. A module of configs, as its own are.

    torchrun --standalone --nproc-per-node 2 -m torchtitan.train --module torchtitan_llama --config llama3_narrow

from a checkout of torchtitan (its configs name data and a tokenizer there), with examples/ on PYTHONPATH, on GPUs.
Needs the extra: pip install narrowcast[torchtitan].
"""

from __future__ import annotations

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from narrowcast.parallel.integrations.torchtitan import with_wires


def llama3_narrow() -> Trainer.Config:
    config = llama3_debugmodel()
    config.model_spec = with_wires(config.model_spec, "int4/128+ef", parameters="e4m3fn/128")
    return config
