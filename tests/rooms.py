"""Draws which rooms of the package import which: ``python -m tests.rooms`` writes the picture."""

from __future__ import annotations

from itertools import pairwise
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


def ways(arrows: dict[str, set[str]], height: dict[str, int]) -> list[list[str]]:
    """The points of each arrow: its rooms, and between them one on each level that it passes."""
    return [
        [room, *(f"{room}-{below} {n}" for n in range(height[room] - 1, height[below], -1)), below]
        for room, direct in sorted(arrows.items())
        for below in sorted(direct)
    ]


def drawing() -> str:
    """The rooms as boxes, the highest on top, with an arrow to each room that one builds on."""
    rooms = imports()
    height = levels(rooms)
    top = max(height.values())
    arrows = ways(needed(rooms), height)
    points = {room: height[room] for room in sorted(rooms)}
    points |= {way[n]: height[way[0]] - n for way in arrows for n in range(1, len(way) - 1)}
    rows = [[point for point, on in points.items() if on == level] for level in range(top, -1, -1)]

    def breadth(row: list[str]) -> int:
        return sum(_GAP + (_WIDTH if point in rooms else 0) for point in row) + _GAP

    width = max(map(breadth, rows))
    middle: dict[str, float] = {}

    def above(point: str) -> float:
        """Where the arrows to a point come from, on average."""
        sources = [middle[one] for way in arrows for one, other in pairwise(way) if other == point]
        return sum(sources) / len(sources) if sources else width / 2

    for row in rows:
        x = (width - breadth(row)) / 2
        for point in sorted(row, key=above):
            wide = _WIDTH if point in rooms else 0
            middle[point] = x + _GAP + wide / 2
            x += _GAP + wide
    upper = {point: 10 + (top - level) * _DROP for point, level in points.items()}
    lines = [
        f"<path d='M{middle[way[0]]:g} {upper[way[0]] + _HEIGHT}"
        + "".join(f"L{middle[p]:g} {upper[p]}V{upper[p] + _HEIGHT}" for p in way[1:-1])
        + f"L{middle[way[-1]]:g} {upper[way[-1]] - 5}' fill='none' stroke='#888' "
        "marker-end='url(#tip)'/>"
        for way in arrows
    ]
    boxes = [
        f"<rect x='{middle[room] - _WIDTH / 2:g}' y='{upper[room]}' width='{_WIDTH}' "
        f"height='{_HEIGHT}' rx='5' fill='#e6f2f0' stroke='#23827c'/>"
        f"<text x='{middle[room]:g}' y='{upper[room] + 18}' text-anchor='middle'>{room}</text>"
        for room in sorted(rooms)
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
