"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: tests assert nothing about time. On CI the same examples each time, so that what
# fails there fails for its change; everywhere else new ones, to find what nobody thought of.
settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
