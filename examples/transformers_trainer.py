"""Hugging Face's Trainer: a callback sends the gradients through a codec; residuals are in its checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py
    torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py --resume   # goes on from the checkpoint

Needs the extra: pip install narrowcast[transformers]. With --gpu on GPUs, --compile for torch.compile. On one process
(python examples/transformers_trainer.py) nothing travels. Rank 0 prints one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from narrowcast.parallel.integrations.transformers import callback

LENGTH, WORDS = 32, 128


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Numbers that go on by one, two or three."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = (torch.arange(LENGTH) * (1 + index % 3) + index) % WORDS
        return {"input_ids": numbers, "labels": numbers}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="int4/128+ef", help="the wire of the gradients")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "narrowcast-trainer"))
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in the folder")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    return parser.parse_args()


def arguments(args: argparse.Namespace) -> TrainingArguments:
    device: dict[str, Any] = {} if args.gpu else {"use_cpu": True}
    if not args.gpu and "WORLD_SIZE" in os.environ:
        device["ddp_backend"] = "gloo"
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if args.compile else {}
    return TrainingArguments(
        output_dir=args.folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        save_steps=args.steps // 2,
        learning_rate=1e-3,
        bf16=True,
        report_to=[],
        disable_tqdm=True,
        **device,
        **compiled,
    )


def main() -> None:
    args = options()
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64)
    narrow = callback(args.spec, min_values=1000)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments(args), train_dataset=Counting(), callbacks=[narrow])
    result = trainer.train(resume_from_checkpoint=args.resume)
    if trainer.is_world_process_zero():
        totals = narrow.totals
        print(json.dumps({"loss": result.training_loss, "steps": totals["steps"], "ratio": totals["ratio"]}))


if __name__ == "__main__":
    main()
