"""A browser for the tests that look at pages: the Chromium of this machine, driven by playwright.

Without one, such tests are skipped with the reason; on CI (``CI=true``) they fail instead.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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
