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


class RandomState:
    """The state of all generators in a checkpoint; raises if they cannot take it."""

    def __init__(self, state: Any, model: HeldModel) -> None:
        """Try everything on generators that nobody uses."""
        device, self._ranks = _drawing(model)
        self._state: dict[str, Any] = state
        version, numbers, gauss = state["python"]
        self._python = (version, tuple(numbers.tolist()), gauss)
        random.Random().setstate(self._python)
        kind, keys, *rest = state["numpy"]
        self._numpy = (kind, keys.numpy().astype(np.uint32), *rest)
        np.random.RandomState().set_state(self._numpy)
        torch.Generator().set_state(state["torch"])
        # That of another kind of device stays as it is.
        self._device = None if device.type == "cpu" or state["device"] is None else device
        if self._device is not None:
            torch.Generator(device).set_state(state["device"])
        if self._ranks is not None and state["ranks"] is not None:
            kinds = [torch.device("cpu"), device]  # in the order of their generators
            for kind, states in zip(kinds, state["ranks"], strict=False):
                for each in states:
                    torch.Generator(kind).set_state(each)

    def apply(self) -> None:
        """Set the state of all generators."""
        torch.set_rng_state(self._state["torch"])
        if self._device is not None:
            module = torch.get_device_module(self._device)
            module.set_rng_state(self._state["device"], self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._ranks is not None and self._state["ranks"] is not None:
            self._ranks.set_states(self._state["ranks"])


def _drawing(model: HeldModel) -> tuple[torch.device, RankRandom | None]:
    """The device whose generator a model draws from, and those of ranks in this process."""
    if model.schedule is not None:
        return model.schedule._runner.device, model.schedule._runner._random
    return model.held[0].tensor.device if model.held else torch.device("cpu"), None
