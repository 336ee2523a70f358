"""The texts of messages: descriptions of values, introductions, errors, the control plane."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from random import Random
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import taktline as tl
from taktline.checks import read
from taktline.meta import Signature, flatten
from taktline.runtime.introduction import INTRODUCTION, misfit
from taktline.transport import exchange
from taktline.transport import news as control
from taktline.transport.codec import decode, encode
from taktline.transport.news import Cause, Verdict
from tests.fuzz.mutate import spoil_bytes, spoil_json, spoil_text


@tl.register_container
class Pair(NamedTuple):
    left: Any
    right: Any


VALUES: list[Any] = [
    [torch.zeros(2, 3), torch.ones(4, dtype=torch.int64), 7, -0.0, "größer\n", None, True],
    [{"a": torch.zeros(1), "b": [torch.zeros(2, requires_grad=True), (1, {"c": 2.5})]}],
    [Pair(torch.zeros(1), Pair(1, "x")), OrderedDict(b=1, a=torch.zeros(0, 2))],
    [defaultdict(list, {"a": [torch.zeros(3)]}), deque([1, 2], maxlen=3), torch.Size([1, 2])],
    [torch.zeros(3, 2).max(0), {1: 2, None: 3, 1.5: 4, (1, "a"): 5}],
]
SAID: dict[str, Any] = {
    **dict.fromkeys(("options", "model"), 0),
    "stages": [0],
    **dict.fromkeys(("shards", "reduces", "in_company"), False),
    "ties": [{"tie": {"uses": [(0, "a"), (1, "b")]}, "stage": 0, "kind": "x", "identity": "y"}],
    "number": 1,
}

VERDICT = Verdict(Cause.RAISED, 3, "no", "in 1F0")
CONTROL: list[tuple[str, Any]] = [
    ("hello", ("::1", 1, "token", "")),
    ("ask", (1, 7)),
    ("gone", (3, "is lost")),
    ("left", (VERDICT, ["here"])),
    ("state", control.State(1, 2, 0.5, "größer", True)),
    ("came", (0, "here", ("::1", 1, "token", ""))),
]


def draw(random: Random) -> tuple[str, bytes]:
    """What the text is meant to be, and the text."""
    kind = random.choice(["values", "values", "values", "introduction", "error", "control"])
    if kind == "values":
        text = encode(Signature.of(*flatten(random.choice(VALUES)))).decode()
    elif kind == "introduction":
        text = json.dumps(SAID)
    elif kind == "control":
        what, body = random.choice(CONTROL)
        text = control.encode(what, *body)[4:].decode()
    else:
        error = tl.StageError(rank=1, stage=2, microbatch=0, action="2F0", reason="no")
        text = json.dumps([type(error).__name__, str(error), vars(error)])
    match random.randrange(3):
        case 0:
            return kind, spoil_bytes(random, text.encode())
        case 1:
            text = spoil_json(random, json.loads(text))
        case _:
            text = spoil_text(random, text)
    return kind, text.encode("utf-8", "surrogatepass")


def try_(input: tuple[str, bytes]) -> None:
    """Read the text, and use what comes out as a rank does."""
    kind, text = input
    if kind == "values":
        signature = decode(text)
        encode(signature)
        str(signature)
        if signature.spec is not None:
            pytree.tree_unflatten([None] * len(signature.leaves), signature.spec)
    elif kind == "introduction":
        said = read(text.decode("utf-8", "replace"), INTRODUCTION, what="an introduction")
        misfit([said, SAID], [0, 1])
    elif kind == "control":
        what, body = control.decode(b"    " + text)
        control.encode(what, *body)
    else:
        str(exchange.restored(text.decode("utf-8", "replace"), 1))
