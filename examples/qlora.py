"""QLoRA on two unequal cards: a base in 4 bits, adapters in bfloat16, a stage on each card.

    torchrun --nproc-per-node 2 examples/qlora.py --model NAME --ranks 14GiB,22GiB

Needs `pip install 'taktline[transformers,clients]' bitsandbytes`. Without --model a tiny model with
random weights is made; on the CPU, or without bitsandbytes, its base is not quantised.

    python examples/qlora.py                       # two ranks in this process
    torchrun --nproc-per-node 2 examples/qlora.py  # a process each
"""

import argparse
import importlib.util

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a name or folder of transformers")
parser.add_argument("--ranks", default="1GiB,2GiB", help="the memory of each rank for training")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--length", type=int, default=32, help="tokens of a text")
parser.add_argument("--save", default="adapters", help="a folder for the adapters")
options = parser.parse_args()

torch.manual_seed(0)
if options.model is not None:
    quantised = None
    if torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes"):
        quantised = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    base = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, quantization_config=quantised, device_map={"": "cpu"}
    )
else:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=128,
    )
    base = LlamaForCausalLM(config)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
model = get_peft_model(base, lora).train()
tokens = (torch.arange(16)[:, None] * 8 + torch.arange(options.length)) % 128

pipe = tl.Pipeline(
    model,
    example={"input_ids": tokens[:2], "labels": tokens[:2]},
    microbatches=8,
    ranks=[{"memory": memory} for memory in options.ranks.split(",")],
)
if pipe.is_first:
    print(pipe)  # what each rank holds, and what is left
trained = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
for step in range(options.steps):
    loss = pipe.step(input_ids=tokens, labels=tokens)
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.4f}")
pipe.save_pretrained(options.save)  # PeftModel.from_pretrained(base, options.save) reads it
