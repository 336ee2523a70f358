"""The command that says which part of a model each rank would hold, from its config alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from taktline.cli.options import Json, complete_name, echo_json
from taktline.errors import ArgumentError
from taktline.plan import find
from taktline.plan.estimate import PARTS, RankLimit, estimate, memory_table
from taktline.text import table


def fit(
    config: Annotated[Path, typer.Argument(help="A config.json of transformers, or its folder.")],
    ranks: Annotated[
        str, typer.Option("--ranks", "-r", help="The memory of each rank, such as 16GiB,24GiB.")
    ],
    schedule: Annotated[
        str, typer.Option(help="NAME of a schedule.", autocompletion=complete_name)
    ] = "1f1b",
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-m", help="Number of micro-batches.")
    ] = 8,
    stages_per_rank: Annotated[
        int | None, typer.Option("--stages-per-rank", "-s", help="Stages per rank.")
    ] = None,
    stream: Annotated[
        bool, typer.Option(help="Let frozen weights come from the host: stream_weights=True.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Texts in a micro-batch.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 2048,
    lora: Annotated[
        int | None, typer.Option(help="Train adapters of this rank, on all linear layers.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="A class of torch.optim.")] = "AdamW",
    json: Json = False,
) -> None:
    """Say which model fits on which ranks: cut a causal language model without its weights.

    The table has what each rank would hold in training, and what is left of its memory: leave 1 to
    2 GiB of a GPU.

    Example: `taktline fit config.json --ranks 16GiB,24GiB --lora 16`
    """
    import torch

    from taktline.split import by_names
    from taktline.train.moments import measure_alone
    from taktline.train.rank_limits import cuts_within, stage_bytes
    from taktline.train.stage_table import measure
    from taktline.train.trial import training_loss
    from taktline.train.weights import require_streams

    own_loss = training_loss(None, has_target=False)

    limits = RankLimit.read([{"memory": text} for text in ranks.split(",")])
    make: Any = getattr(torch.optim, optimizer, None)
    if torch.optim.Optimizer not in getattr(make, "__mro__", ()):
        raise ArgumentError(f"torch.optim has no optimizer {optimizer!r}")
    plan = find(schedule).build(len(limits), microbatches, stages_per_rank)
    if stream:
        require_streams(plan)
    model = _model(config, lora)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    example: Any = (), {"input_ids": ids, "labels": ids}
    names = cuts_within(model, plan, example, limits, None, make, streams=stream)
    stages = by_names(model, names, example=example) if names else [model]
    needs = measure(stages, example) or []
    moments = [
        measure_alone(module, stage, need.given, own_loss if stage == len(stages) - 1 else None)
        for stage, (module, need) in enumerate(zip(stages, needs, strict=False))
    ]
    found = estimate(plan, stage_bytes(stages, needs, make, moments, streams=stream))
    if json:
        ends = zip(found, limits, strict=True)
        each = [
            {part: getattr(rank, part) for part in (*PARTS, "total")} | {"memory": limit.memory}
            for rank, limit in ends
        ]
        echo_json({"starts": names, "ranks": each})
        return
    lines = [["stage", "rank", "from", "parameters"]]
    for stage, (module, start) in enumerate(zip(stages, ["the input", *names], strict=True)):
        count = sum(parameter.numel() for parameter in module.parameters())
        lines.append([f"{stage}", f"{plan.placement.rank_of[stage]}", start, f"{count:,}"])
    typer.echo(
        f"{type(model).__name__}, {plan.name}, {microbatches} micro-batches of {rows} × {length} "
        f"tokens, {optimizer}\n{table(lines, left=['from'])}\n\n{memory_table(found, limits)}"
    )


def _model(config: Path, lora: int | None) -> Any:
    """The model of a config without data; with adapters, if a rank for them is given."""
    if not config.exists():
        raise ArgumentError(f"there is no {config}")
    from taktline.checkpoint import pretrained

    try:
        from transformers import AutoConfig

        model, _ = pretrained.build(AutoConfig.from_pretrained(config))
        if lora is None:
            return model
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        extra = "clients" if error.name == "peft" else "transformers"
        text = f"{error.name} is missing: pip install 'taktline[{extra}]'"
        raise ArgumentError(text) from None
    with warnings.catch_warnings():  # peft asks transformers for what will have another name
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(model, LoraConfig(r=lora, target_modules="all-linear"))  # pyright: ignore
