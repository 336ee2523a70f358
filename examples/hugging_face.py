"""A GPT-2 of transformers, whose embedding is also its head.

python examples/hugging_face.py                       # two ranks in this process
torchrun --nproc-per-node 2 examples/hugging_face.py  # a process each
"""

import argparse

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import taktline as tl

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--save", help="a file for the trained weights")
options = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(
    n_layer=options.layers, n_embd=64, n_head=4, vocab_size=128, n_positions=32, use_cache=False
)
model = GPT2LMHeadModel(config)
model.train()


def loss_fn(output, labels: torch.Tensor) -> torch.Tensor:
    """Each place predicts the next one; -100 is padding, and counts for nothing."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# Every rank reads the same batches: from a generator of their own, which nothing else moves on.
generator = torch.Generator().manual_seed(0)


def batch(samples: int = 16, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that count up, of different lengths."""
    starts = torch.randint(64, (samples, 1), generator=generator)
    ends = torch.randint(length // 2, length, (samples, 1), generator=generator)
    tokens = (starts + torch.arange(length)) % 128
    return tokens, tokens.where(torch.arange(length) < ends, -100)


pipe = tl.Pipeline(
    model,
    example=((), {"input_ids": batch(4)[0]}),
    schedule="1f1b",
    microbatches=4,
    loss_fn=loss_fn,
    ranks=2,
    seed=0,  # the same dropout, however the ranks are started
)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
if pipe.is_first:
    print(pipe)
for step in range(options.steps):
    tokens, labels = batch()
    loss = pipe.step(
        input_ids=tokens, target=labels, loss_weights=lambda part: (part[:, 1:] != -100).sum()
    )
    norm = pipe.clip_grad_norm_(1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.3f}, norm {norm:.2f}")

state = pipe.state_dict(gathered=True)  # the model's own names, on the first rank
if state:
    model.load_state_dict(state)  # and back into the plain model
    if options.save:
        torch.save(state, options.save)
    print(f"{len(state)} entries, among them {', '.join(name for name in state if 'wte' in name)}")
