"""Tables of names: whatever they say of each other, each name has one that stands for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taktline.checkpoint.model_state import joined

NAMES = st.sampled_from("abcdef")
TABLES = st.lists(st.dictionaries(NAMES, NAMES), max_size=4)


@given(TABLES)
def test_names_that_are_said_to_be_alike_have_one_in_common(tables: list[dict[str, str]]) -> None:
    table = joined(*tables)
    assert not table.keys() & set(table.values())
    for aliases in tables:
        for name, known in aliases.items():
            assert table.get(name, name) == table.get(known, known)


@given(TABLES)
def test_others_do_not(tables: list[dict[str, str]]) -> None:
    """No two groups become one but by a table."""
    groups = {name: {name} for name in "abcdef"}
    for name, known in (pair for aliases in tables for pair in aliases.items()):
        both = groups[name] | groups[known]
        groups |= dict.fromkeys(both, both)
    table = joined(*tables)
    for name in groups:
        assert table.get(name, name) in groups[name]
