"""Runs the notebook, and stores what its cells show: ``python -m tests.notebook`` refreshes it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import tempfile
from typing import Any

from tests.documents import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def executed() -> tuple[dict[str, Any], list[Any]]:
    """The notebook with fresh outputs, and the value that each cell shows."""
    notebook, names, values = json.loads(NOTEBOOK.read_text()), dict[str, Any](), list[Any]()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        *first, last = ast.parse("".join(cell["source"])).body
        assert isinstance(last, ast.Expr)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(first, []), "cell", "exec"), names)
            values.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
        cell["execution_count"], cell["outputs"] = number, []
        if text := printed.getvalue():
            lines = text.splitlines(keepends=True)
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": lines})
        shown = {"output_type": "execute_result", "metadata": {}, "execution_count": number}
        cell["outputs"].append({**shown, "data": dict(_forms(values[-1]))})
    return notebook, values


def _forms(value: Any) -> Any:
    """What a notebook keeps of a value: a drawing if there is one, and its text."""
    for kind, method in (("text/html", "_repr_html_"), ("image/svg+xml", "_repr_svg_")):
        if (text := getattr(value, method, lambda: None)()) is not None:
            yield kind, text.splitlines(keepends=True)
    yield "text/plain", repr(value).splitlines(keepends=True)


if __name__ == "__main__":
    from tests.settled import settle

    settle()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        fresh, _ = executed()
    NOTEBOOK.write_text(json.dumps(fresh, indent=1, ensure_ascii=False) + "\n")
