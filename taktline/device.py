"""Devices: checks of a user's choice, and whether there are enough GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch

from taktline.checks import refuse

__all__ = ["gpu_for_each_process", "require_device"]


def require_device(value: Any) -> torch.device:
    """A device, or its name.

    >>> require_device("cpu")
    device(type='cpu')
    >>> require_device("cuda:one")
    Traceback (most recent call last):
    taktline.errors.ArgumentError: device must be a device such as "cpu" or "cuda:0", not 'cuda:one'
    """
    if isinstance(value, torch.device):
        return value
    try:
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return torch.device(value)
    except (RuntimeError, ValueError):  # no such type of device, or no such number
        pass
    refuse("device", 'a device such as "cpu" or "cuda:0"', value)


def gpu_for_each_process() -> bool:
    """Whether there is a GPU for each process that a launcher has started on this machine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() >= here
