"""Ways to spoil what is valid: texts by characters and tokens, JSON by its structure."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 10**700, -(10**30)),
    *(0.0, -0.0, 0.5, 1e308, -1.5, math.nan, math.inf, -math.inf),
]
TEXTS = ["", "0", "F", "0F0", "0B0", "null", "\0", "\ud800", "ü", "a" * 300, "9" * 5000, "(0F0;"]
_TOKENS = re.compile(r"\d+|[A-Za-z_]+|\s+|.", re.DOTALL)


def a_value(random: Random, depth: int = 3) -> Any:
    """Anything that JSON can hold, and a little more."""
    kind = random.randrange(8 if depth else 6)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind < 4:
        return random.choice(TEXTS)
    if kind < 6:
        return random.choice([None, True, False])
    values = [a_value(random, depth - 1) for _ in range(random.randrange(4))]
    return values if kind == 6 else {str(random.choice(TEXTS)): value for value in values}


def spoil_text(random: Random, text: str) -> str:
    """Change some tokens: drop, double, swap, replace."""
    tokens = _TOKENS.findall(text)
    for _ in range(random.choice([1, 1, 1, 2, 3, 8])):
        if not tokens:
            break
        at, other = random.randrange(len(tokens)), random.randrange(len(tokens))
        match random.randrange(6):
            case 0:
                del tokens[at : at + random.choice([1, 1, 3, 10])]
            case 1:
                tokens[at:at] = tokens[other : other + random.choice([1, 3])]
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens[at] = random.choice([*TEXTS, "NaN", "[", "]", "{", "}", '"', ",", "\n"])
            case 4:
                tokens[at] = str(random.choice(NUMBERS[:-3]))
            case _:
                tokens[at] = (tokens[at] * random.choice([2, 30]))[:20_000]
    return "".join(tokens)


def spoil_bytes(random: Random, data: bytes) -> bytes:
    """Change some bytes."""
    spoilt = bytearray(data)
    for _ in range(random.choice([1, 1, 2, 5])):
        at = random.randrange(len(spoilt) + 1)
        match random.randrange(3):
            case 0:
                spoilt[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del spoilt[at : at + random.randrange(20)]
            case _:
                spoilt[at:at] = random.randbytes(random.randrange(4))
    return bytes(spoilt)


def spoil_json(random: Random, value: Any) -> str:
    """Change some of a JSON value's parts, and write it as text."""
    value = deepcopy(value)
    for _ in range(random.choice([1, 1, 2, 4])):
        place, key = a_place(random, value)
        if place is None:
            value = a_value(random)
        elif isinstance(place, list) and random.random() < 0.3:
            place.insert(key, deepcopy(place[key]))
        elif random.random() < 0.2:
            del place[key]
        else:
            place[key] = a_value(random)
    text = json.dumps(value)
    if random.random() < 0.1:  # nothing that a value can hold
        text = text.replace("{", '{"version": 1, ', 1) if "{" in text else "[" * 10**4 + text
    return text


def a_place(random: Random, value: Any, deeper: float = 0.7) -> tuple[Any, Any]:
    """Some list or dict within a value, and a key of it; None if there is none."""
    place, key = None, None
    while isinstance(value, (list, dict)) and value and (place is None or random.random() < deeper):
        place = value
        key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = place[key]
    return place, key
