"""LoRA with peft: only adapters are trained, and only they are saved.

python examples/lora.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/lora.py  # a process each
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--save", default="adapters", help="a folder for the adapters")
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=128,
    use_cache=False,
)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
model = get_peft_model(LlamaForCausalLM(config), lora).train()
tokens = (torch.arange(16)[:, None] * 8 + torch.arange(32)) % 128

pipe = tl.Pipeline(
    model,
    example={"input_ids": tokens[:4], "labels": tokens[:4]},
    microbatches=4,
    ranks=2,
    seed=0,  # the same dropout, however the ranks are started
)
trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
for step in range(options.steps):
    loss = pipe.step(input_ids=tokens, labels=tokens)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.4f}")
pipe.save_pretrained(options.save)  # adapters only; PeftModel.from_pretrained reads them
