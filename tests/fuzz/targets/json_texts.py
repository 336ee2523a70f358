"""JSON texts from anywhere: the reader that files and messages share."""

from __future__ import annotations

import json
from random import Random

from taktline.checks import loads
from tests.fuzz.mutate import a_value, spoil_bytes, spoil_text


def draw(random: Random) -> str | bytes:
    """The text of some value, mostly spoilt."""
    text = json.dumps(a_value(random, 5), ensure_ascii=random.random() < 0.5)
    if random.random() < 0.5:
        text = spoil_text(random, text)
    data = text.encode("utf-8", "surrogatepass")
    return random.choice([text, data, spoil_bytes(random, data)])


def try_(input: str | bytes) -> None:
    """What is read can be written, and read again."""
    value = loads(input, what="the text")
    assert loads(json.dumps(value), what="the text") == value
