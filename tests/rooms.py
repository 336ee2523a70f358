"""Draws which rooms of the package import which: ``python -m tests.rooms`` writes the picture."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import grimp

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "rooms.svg"
_WIDTH, _HEIGHT, _GAP, _DROP = 104, 28, 22, 62


def imports() -> dict[str, set[str]]:
    """Each room, and the rooms that it imports; a room is a module or a package of taktline."""
    graph = grimp.build_graph("taktline", exclude_type_checking_imports=True)
    rooms: dict[str, set[str]] = {}
    for module in graph.modules - {"taktline"}:
        mine = rooms.setdefault(_room(module), set())
        for imported in graph.find_modules_directly_imported_by(module) - {"taktline"}:
            mine.add(_room(imported))
    return {room: below - {room} for room, below in rooms.items()}


def _room(module: str) -> str:
    return module.split(".")[1]


def levels(rooms: dict[str, set[str]]) -> dict[str, int]:
    """How far each room lies above those that import nothing; raises if there is a circle."""
    found: dict[str, int] = {}
    while len(found) < len(rooms):
        ready = [room for room in rooms if room not in found and rooms[room] <= found.keys()]
        if not ready:
            raise ValueError(f"a circle among {sorted(rooms.keys() - found.keys())}")
        found |= {
            room: 1 + max((found[below] for below in rooms[room]), default=-1) for room in ready
        }
    return found


def needed(rooms: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports without those that follow from others."""
    below: dict[str, set[str]] = {}
    for room in sorted(rooms, key=levels(rooms).__getitem__):
        below[room] = rooms[room].union(*(below[other] for other in rooms[room]))
    return {
        room: {r for r in direct if not any(r in below[other] for other in direct)}
        for room, direct in rooms.items()
    }


def drawing() -> str:
    """The rooms as boxes, the highest on top, with an arrow to each room that one builds on."""
    rooms = imports()
    height = levels(rooms)
    top = max(height.values())
    rows = [
        (level, list(row))
        for level, row in groupby(
            sorted(rooms, key=lambda room: (-height[room], room)), key=height.__getitem__
        )
    ]
    widest = max(len(row) for _, row in rows)
    width = widest * (_WIDTH + _GAP) + _GAP
    places: dict[str, tuple[float, float]] = {}
    for level, row in rows:
        left = (width - len(row) * (_WIDTH + _GAP) + _GAP) / 2
        for place, room in enumerate(row):
            places[room] = left + place * (_WIDTH + _GAP), 10 + (top - level) * _DROP
    lines = [
        f"<path d='M{x + _WIDTH / 2:g} {y + _HEIGHT:g}L{a + _WIDTH / 2:g} {b - 5:g}' "
        "stroke='#888' marker-end='url(#tip)'/>"
        for room, direct in sorted(needed(rooms).items())
        for x, y in [places[room]]
        for other in sorted(direct)
        for a, b in [places[other]]
    ]
    boxes = [
        f"<rect x='{x:g}' y='{y:g}' width='{_WIDTH}' height='{_HEIGHT}' rx='5' fill='#e6f2f0' "
        f"stroke='#23827c'/><text x='{x + _WIDTH / 2:g}' y='{y + 18:g}' text-anchor='middle'>"
        f"{room}</text>"
        for room, (x, y) in sorted(places.items())
    ]
    tall = 20 + top * _DROP + _HEIGHT
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {tall:g}' "
            f"width='{width:g}' height='{tall:g}' font-family='Helvetica, Arial, sans-serif' "
            "font-size='12'>",
            "<title>The rooms of taktline, and what each builds on</title>",
            "<defs><marker id='tip' viewBox='0 0 6 6' refX='5' refY='3' markerWidth='6' "
            "markerHeight='6' orient='auto'><path d='M0 0L6 3L0 6z' fill='#888'/></marker></defs>",
            f"<rect width='{width:g}' height='{tall:g}' fill='white'/>",
            *lines,
            *boxes,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawing(), "utf-8")
