"""What is special about Hugging Face models: they cache keys and values, unless told not to."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from taktline.errors import PartitionError
from taktline.split.arguments import Kwargs


def disable_cache(container: nn.Module) -> None:
    """Turn off the cache of a model inside of one that has no argument for it."""
    config: Any = vars(container).get("config")
    if getattr(config, "use_cache", False):
        config = copy.copy(config)
        config.use_cache = False
        vars(container)["config"] = config


def require_no_cache(kwargs: Kwargs) -> None:
    """Raise if a call asks for the cache of all layers."""
    if kwargs.get("use_cache"):
        raise PartitionError(
            "use_cache needs the keys and values of the layers of all stages, but each stage has "
            "only its own; leave it out"
        )
