"""Devices: checks of a user's choice, and whether there are enough GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from taktline.checks import refuse
from taktline.errors import ArgumentError


def require_device(value: Any) -> torch.device:
    """A device, or its name.

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


def require_usable_device(value: Any) -> torch.device:
    """A device on which this process can make tensors.

    >>> require_usable_device("xla")
    Traceback (most recent call last):
    taktline.errors.ArgumentError: device xla cannot be used here: Could not run ...
    """
    device = require_device(value)
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, ImportError, RuntimeError) as error:  # as torch was built, or no driver
        why = str(error).partition("\n")[0]
        raise ArgumentError(f"device {device} cannot be used here: {why}") from error


def gpu_for_each_process() -> bool:
    """Whether there is a GPU for each process that a launcher has started on this machine."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() >= here


def keep_generators(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Afterwards the random number generators of the CPU and of these devices are as before."""
    return torch.random.fork_rng({device for device in devices if device.type == "cuda"})
