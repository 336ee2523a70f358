"""Devices, as users name them."""

from __future__ import annotations

from typing import Any

import torch

from taktline.checks import refuse

__all__ = ["require_device"]


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
    except (RuntimeError, ValueError):  # no such device, or none of that number
        pass
    refuse("device", 'a device such as "cpu" or "cuda:0"', value)
