"""A causal language model, with the data and the arguments of transformers' Trainer.

python examples/trainer.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/trainer.py  # a process each
"""

import argparse
import itertools
from typing import Any

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    TrainingArguments,
    get_scheduler,
)
from transformers import default_data_collator as collate

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
args = TrainingArguments(
    output_dir="llama",
    per_device_train_batch_size=16,
    max_steps=parser.parse_args().steps,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    use_cpu=True,
)

# Your model and your dataset: these ones are small, and count upwards.
torch.manual_seed(args.seed)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=128,
    use_cache=False,
)
model = AutoModelForCausalLM.from_config(config).train()
rows = [(start + torch.arange(32)) % 128 for start in range(128)]
dataset: Any = [{"input_ids": row, "labels": row} for row in rows]

# What Trainer does, in 20 lines.
size = args.per_device_train_batch_size
loader = DataLoader(dataset, size, shuffle=True, collate_fn=collate)
part = collate(dataset[: size // 4])  # a micro-batch
pipe = tl.Pipeline(model, example=part, microbatches=4, ranks=2)  # the loss is the model's own
optimizer = AdamW(pipe.parameters(), args.learning_rate, weight_decay=args.weight_decay)
warmup = args.get_warmup_steps(args.max_steps)
rate = get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps)
step = 0
while step < args.max_steps:
    for batch in pipe.loader(itertools.islice(loader, args.max_steps - step)):
        loss = pipe.step(**batch)
        pipe.clip_grad_norm_(args.max_grad_norm)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        step += 1
        if pipe.is_first:
            print(f"step {step}: loss {loss:.4f}")
pipe.save_pretrained(args.output_dir or "llama")  # for from_pretrained, each rank its part
