"""Small models of many architectures, each trained on pipelines against the plain model.

``python -m tests.zoo`` runs all of them, and writes docs/models.md.
"""

from __future__ import annotations

from functools import cache

from tests.zoo.architecture import Architecture

__all__ = ["find", "zoo"]


@cache
def zoo() -> list[Architecture]:
    """All architectures."""
    # Here, because transformers takes seconds to import.
    from tests.zoo.diffusion import DIFFUSION
    from tests.zoo.images import IMAGES
    from tests.zoo.language import LANGUAGE
    from tests.zoo.own import OWN
    from tests.zoo.senses import SENSES

    return [*LANGUAGE, *SENSES, *DIFFUSION, *IMAGES, *OWN]


def find(name: str) -> Architecture:
    """One of them."""
    return next(architecture for architecture in zoo() if architecture.name == name)
