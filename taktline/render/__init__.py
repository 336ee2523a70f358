"""Plans and timelines as texts, pictures, pages and traces."""

from taktline.render.files import inline, inline_plan, save, save_plan, show, show_plan
from taktline.render.html import to_html
from taktline.render.svg import to_svg
from taktline.render.text import chart, grid, legend
from taktline.render.trace import to_trace

__all__ = [
    "chart",
    "grid",
    "inline",
    "inline_plan",
    "legend",
    "save",
    "save_plan",
    "show",
    "show_plan",
    "to_html",
    "to_svg",
    "to_trace",
]
