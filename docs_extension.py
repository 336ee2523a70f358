"""What the documentation has beside its pages (see mkdocs.yml): docstrings, and the explorer."""

from __future__ import annotations

import re
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from taktline.cli.explorer import page

_DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


class AsMarkdown(griffe.Extension):
    """Rewrites each docstring as Markdown before it is rendered.

    Doctests become code blocks; the marks of reStructuredText, ``::`` and roles, go.
    """

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            text = re.sub(r"^ *::\n\n", "", obj.docstring.value, flags=re.MULTILINE)
            text = _ROLE.sub(r"`\1`", text)
            obj.docstring.value = _DOCTEST.sub(
                lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text
            )


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Called by mkdocs with the files of the site: adds what ``taktline explore`` writes."""
    files.append(File.generated(config, "explorer.html", content=page()))
