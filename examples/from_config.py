"""A run from a file in the style of torchtitan, with its names for parallelism and training.

python examples/from_config.py                       # four ranks in this process
torchrun --nproc-per-node 4 examples/from_config.py  # a process each
python examples/from_config.py --parallelism.pipeline_parallel_schedule=ZBVZeroBubble
"""

import argparse
import json
import tomllib
from pathlib import Path

import torch
from torch import nn

import taktline as tl

CONFIG = """
[model]
layers = 8
width = 32

[training]
local_batch_size = 16
steps = 5
max_norm = 1.0

[optimizer]
lr = 1e-2

[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
# pipeline_parallel_schedule_csv = "plan.csv"   # of your own, instead
# module_fqns_per_model_part = [["layers.0"], …]  # the stages; by default they cost the same
"""


def read() -> dict[str, dict]:
    """The file, and what was said on the command line in its place: --section.name=value."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, help="a TOML file instead of the one in here")
    options, others = parser.parse_known_args()
    config = tomllib.loads(options.config.read_text() if options.config else CONFIG)
    for word in others:
        key, _, value = word.removeprefix("--").partition("=")
        section, _, name = key.partition(".")
        if section not in config:
            parser.error(f"there is no section {section!r}, only {', '.join(config)}")
        config[section][name] = value if value[:1].isalpha() else json.loads(value)
    return config


class Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


config = read()
training, parallelism = config["training"], config["parallelism"]
schedule = parallelism["pipeline_parallel_schedule"]  # any usual name of it
stages = parallelism.get("module_fqns_per_model_part", [])
rows, part = training["local_batch_size"], parallelism["pipeline_parallel_microbatch_size"]

torch.manual_seed(0)
model = Model(**config["model"])
x = torch.randn(rows, config["model"]["width"])
pipe = tl.Pipeline(
    model,
    example=(x[:part],),
    schedule=parallelism.get("pipeline_parallel_schedule_csv") or schedule,
    microbatches=rows // part,
    cuts=[names[0] for names in stages[1:]] or None,
    ranks=parallelism["pipeline_parallel_degree"],
    loss_fn=nn.functional.mse_loss,
)
optimizer = torch.optim.AdamW(pipe.parameters(), **config["optimizer"])
for step in range(training["steps"]):
    loss = pipe.step(x, target=torch.zeros_like(x))
    pipe.clip_grad_norm_(training["max_norm"])
    optimizer.step()
    optimizer.zero_grad()
    if pipe.is_first:
        print(f"step {step + 1}: loss {loss:.4f}")
