"""A browser for the tests that look at pages: the Chromium of this machine, driven by playwright.

Without one, such tests are skipped with the reason; on CI (``CI=true``) they fail instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def executable() -> str:
    """The path of the installed browser; never one that playwright has downloaded."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    _give_up("no Chromium found: install it (Debian: apt-get install chromium) to test the page")


@contextmanager
def browser() -> Iterator[Browser]:
    """A running browser, closed at the end."""
    path = executable()
    if importlib.util.find_spec("playwright") is None:
        _give_up("no playwright found: install it (pip install playwright) to test the page")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield running
        finally:
            running.close()


def _give_up(reason: str) -> NoReturn:
    if os.environ.get("CI", "").lower() == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class Opened:
    """A page in the browser, which notes all that it complains of and asks for."""

    name: str
    """Of the object in the page that answers a call."""

    def __init__(
        self, chromium: Browser, file: Path, text: str, address: str = "", **options: Any
    ) -> None:
        file.write_text(text, "utf-8")
        options.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = chromium.new_context(**options)
        self.page: Page = self.context.new_page()
        self.noted: list[str] = []
        self.page.on("console", lambda message: self.noted.append(message.text))
        self.page.on("pageerror", lambda error: self.noted.append(str(error)))
        self.page.on("request", lambda request: self.noted.append(request.url))
        self.address = file.as_uri() + address
        self.reopen()

    def reopen(self) -> None:
        self.page.goto(self.address)
        self.noted.remove(self.address.partition("#")[0])
        self.frame()

    def __call__(self, expression: str) -> Any:
        return self.page.evaluate(f"{self.name}.{expression}")

    def frame(self) -> None:
        """Wait until what was asked for is drawn."""
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def close(self) -> None:
        assert self.noted == [], "it loads quietly, and nothing else"
        self.context.close()
