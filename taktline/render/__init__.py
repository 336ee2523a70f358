"""Plans and timelines as texts, pictures, pages and traces."""

from taktline.render.files import inline, save, show
from taktline.render.html import to_html
from taktline.render.svg import to_svg
from taktline.render.text import chart, grid, legend
from taktline.render.trace import to_trace

__all__ = [
    "chart",
    "grid",
    "inline",
    "legend",
    "save",
    "show",
    "to_html",
    "to_svg",
    "to_trace",
]
