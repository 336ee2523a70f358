"""The random number generators of a process: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from taktline.checkpoint.model_state import HeldModel
from taktline.runtime.random_numbers import RankRandom


def random_state(model: HeldModel) -> dict[str, Any]:
    """The state of all generators, also of ranks that share this process."""
    device, ranks = _drawing(model)
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cpu = device.type == "cpu"
    return {
        "torch": torch.get_rng_state(),
        "device": None if cpu else torch.get_device_module(device).get_rng_state(device),
        "python": (version, torch.tensor(numbers), gauss),
        "numpy": (kind, torch.tensor(np.asarray(keys, np.int64)), *rest),
        "ranks": None if ranks is None else ranks.states(),
    }


def set_random_state(state: dict[str, Any], model: HeldModel) -> None:
    """Set the state of all generators, except those of another kind of device."""
    device, ranks = _drawing(model)
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and state["device"] is not None:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if ranks is not None and state["ranks"] is not None:
        ranks.set_states(state["ranks"])


def _drawing(model: HeldModel) -> tuple[torch.device, RankRandom | None]:
    """The device whose generator a model draws from, and those of ranks in this process."""
    if model.schedule is not None:
        return model.schedule._runner.device, model.schedule._runner._random
    return model.held[0].tensor.device if model.held else torch.device("cpu"), None
