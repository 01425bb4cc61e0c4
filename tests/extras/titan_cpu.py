"""A rank of torchrun: the example's config of torchtitan on CPUs, which torchtitan itself does not train on.

titan_cpu.py FOLDER. The folder has the data and a tokenizer; rank 0 prints a line of JSON at the end.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
STEPS, LENGTH = 4, 128

torch._utils._get_available_device_type = lambda: "cpu"
MISSING: dict[str, Any] = {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34, name="cpu"),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "device_count": lambda: 1,
}
for name, stands_in in MISSING.items():
    setattr(torch.cpu, name, stands_in)


def assets(folder: Path) -> None:
    """A tokenizer of bytes, and text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = {word: number for number, word in enumerate([*sorted(alphabet), "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    lines = [json.dumps({"text": f"{n} and {n + 1} are {2 * n + 1}. " * 20}) for n in range(400)]
    (folder / "data").mkdir()
    (folder / "data" / "data.json").write_text("\n".join(lines))


def config_of(folder: Path) -> Any:
    import torchtitan.distributed.utils
    import torchtitan.hf_datasets.text_datasets as texts
    import torchtitan.models.common.attention as attention
    from torch.nn.functional import scaled_dot_product_attention
    from torchtitan_llama import llama3_narrow

    def attend(q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    # compiled flex attention needs a GPU
    attention.FlexAttention.compiled_flex_attn = staticmethod(attend)

    texts.DATASETS["c4_test"].path = str(folder / "data")
    torchtitan.distributed.utils.set_pg_timeouts = lambda *_, **__: None
    config = llama3_narrow()
    config.hf_assets_path = config.dump_folder = str(folder)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, LENGTH, STEPS
    config.parallelism.spmd_backend = "partial_dtensor"
    config.validator.enable = config.checkpoint.enable = False
    return config


def main() -> None:
    folder = Path(sys.argv[1])
    if os.environ["RANK"] == "0":
        assets(folder)
        (folder / "ready").touch()
    while not (folder / "ready").exists():
        pass
    trainer = config_of(folder).build()
    trainer.train()
    (handle,) = trainer.config.model_spec.post_optimizer_build_fn.handles
    if dist.get_rank() == 0:
        print(json.dumps(handle.stats()), flush=True)
    handle.detach()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
