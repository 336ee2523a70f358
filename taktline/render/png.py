"""Timelines as PNG: the SVG, drawn with Pillow."""

from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

from taktline.errors import PlanFileError
from taktline.render.palette import lighter

_SCALE = 2
"""Pixels of the picture for one of the drawing, for screens with many of them."""


def to_png(svg: str) -> bytes:
    """A drawing by :func:`taktline.render.svg.to_svg` as a picture; it takes Pillow.

    >>> from taktline.plan import build, simulate
    >>> from taktline.render.svg import to_svg
    >>> to_png(to_svg([simulate(build("1f1b", ranks=2, microbatches=2))]))[1:4]
    b'PNG'
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise PlanFileError(
            "picture.png", "needs Pillow: pip install 'taktline[plot]'; or draw an .svg"
        ) from None
    # The XML is our own, so it is safe to parse.
    root = ElementTree.fromstring(svg)
    width, height = (round(float(root.attrib[name]) * _SCALE) for name in ("width", "height"))
    picture = Image.new("RGB", (width, height), "white")
    brush = ImageDraw.Draw(picture)

    def write(element: Any, x: float, y: float, inherited: dict[str, str]) -> None:
        """A text, and those in it behind it."""
        look = inherited | element.attrib
        font = ImageFont.load_default(float(look.get("font-size", "10")) * _SCALE)
        place = {"middle": "ms", "end": "rs"}.get(look.get("text-anchor", ""), "ls")
        text = element.text or ""
        brush.text((x * _SCALE, y * _SCALE), text, look.get("fill", "black"), font, place)
        x += font.getlength(text) / _SCALE
        for inner in element:
            write(inner, x + float(inner.get("dx", "0")), y, look)

    for element in root:
        name, look = element.tag.rpartition("}")[2], element.attrib
        if name == "rect":
            x, y = float(look.get("x", "0")), float(look.get("y", "0"))
            right, bottom = x + float(look["width"]), y + float(look["height"])
            idle = look["fill"].startswith("url")
            edge = look.get("stroke") if right - x > 2 else None
            box = [_SCALE * at for at in (x, y, max(right, x), max(bottom, y))]
            brush.rectangle(box, "#ececea" if idle else look["fill"], edge)
        elif name == "path":
            points = [(_SCALE * x, _SCALE * y) for x, y in _points(look["d"])]
            if "fill-opacity" in look:
                brush.polygon(points, lighter(look["fill"], 1 - float(look["fill-opacity"])))
            brush.line(points, look["stroke"])
        elif name == "text":
            write(element, float(look["x"]), float(look["y"]), {})
    kept = io.BytesIO()
    picture.save(kept, "PNG")
    return kept.getvalue()


def _points(path: str) -> list[tuple[float, float]]:
    """The corners of a path that goes along the axes."""
    x = y = 0.0
    points: list[tuple[float, float]] = []
    for step, numbers in re.findall(r"([MHVv])([^MHVvZ]*)", path):
        first, *rest = map(float, numbers.split())
        match step:
            case "M":
                x, y = first, rest[0]
            case "H":
                x = first
            case "V":
                y = first
            case _:
                y += first
        points.append((x, y))
    return points
