"""Reads Megatron's layouts: a text that says which layers each stage has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from taktline.errors import PartitionError
from taktline.text import counted

_MOST = 100_000
"""The most letters that repeats may make."""


def stages_of(layout: str) -> list[str]:
    """The letters of each stage: E for the embedding, t for a layer, L for the output.

    ``|`` ends a stage, ``*3`` repeats a letter or a group in parentheses, commas mean nothing.

    >>> stages_of("Et*3|(tt|)*2,L")
    ['Ettt', 'tt', 'tt', 'L']
    """
    text = re.sub(r"[\s,]", "", layout)
    while found := re.search(r"(?:\(([EtL|]*)\)|([EtL|]))\*(\d{1,6})|\(([EtL|]*)\)", text):
        group, letter, times, plain = found.groups()
        again = plain if times is None else (letter or group) * int(times)
        if len(again) > _MOST:
            raise PartitionError(f"the layout {layout!r} has more than {_MOST:,} letters")
        text = text[: found.start()] + again + text[found.end() :]
    if not re.fullmatch(r"E?[t|]*L?", text) or "" in text.split("|"):
        raise PartitionError(
            f"{layout!r} is not a layout: it has E (embedding) first, t (layer), L (output) last, "
            '| between stages, none of them empty, and *n for repeats, as in "Et*3|(tt|)*2L"'
        )
    return text.split("|")


def cuts_of(layout: str, model: nn.Module) -> list[str]:
    """The names of the submodules at which the stages of a layout begin.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.Tanh() for _ in range(4))})
    >>> model["head"] = nn.Linear(2, 2)
    >>> cuts_of("Et*2|tt|L", model)
    ['layers.2', 'head']
    """
    stages = stages_of(layout)
    layers = sum(stage.count("t") for stage in stages)
    layers_name = _list_of(model, layers, layout)
    cuts: list[str] = []
    done = stages[0].count("t")
    for stage in stages[1:]:
        cuts.append(f"{layers_name}.{done}" if stage[0] == "t" else _head(model, layers_name))
        done += stage.count("t")
    return cuts


def _list_of(model: nn.Module, layers: int, layout: str) -> str:
    """The name of the list that has so many layers."""
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and name
    }
    found = [name for name, length in lists.items() if length == layers]
    if len(found) > 1:
        found = [name for name in found if name in _parts(model)] or found
    if len(found) != 1:
        listed = ", ".join(f"{name} ({length})" for name, length in list(lists.items())[:4])
        raise PartitionError(
            f"the layout {layout!r} has {counted(layers, 'layer')}, and the model has "
            f"{'several lists' if found else 'no list'} of that length: {listed or 'none'}; "
            "pass the names of the submodules at which stages begin"
        )
    return found[0]


def _parts(model: nn.Module) -> Mapping[str, object]:
    """The modules that transformers names for pipelines; empty for other models."""
    plan = getattr(model, "_pp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _head(model: nn.Module, layers: str) -> str:
    """The module of the output: the last one that transformers names, or the last one."""
    names = [name for name, _ in model.named_children() if not f"{layers}.".startswith(f"{name}.")]
    names = [name for name in names if name in _parts(model)] or names
    if not names:
        raise PartitionError("the model has no module after its layers for the L of the layout")
    return names[-1]
