"""The adapters of peft, as its own files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from taktline.checks import check
from taktline.split.recorded_stage import model_of
from taktline.stage.names import unwrapped
from taktline.train.parameters import gathered_state


def adapted(built: Any) -> Any:
    """The model of peft whose stages a pipeline has, without data; None of other models."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", ())
    inner = (unwrapped(module) for module in built.model.modules.values())
    wholes = (model_of(module) or module for module in inner)
    return next((whole for whole in wholes if isinstance(whole, kind)), None)


def save_adapters(built: Any, whole: Any, folder: Any) -> None:
    """Write the adapters as ``PeftModel.from_pretrained`` reads them; every rank calls it."""
    from peft import get_peft_model_state_dict

    path, state = check("folder", folder, Path), whole.state_dict()
    found = [
        get_peft_model_state_dict(whole, state_dict=state, adapter_name=name)
        for name in whole.peft_config
    ]
    picked = {id(value) for each in found for value in each.values()}
    names = {name for name, value in state.items() if id(value) in picked}
    with built.model.together("save_pretrained()") as call:
        held = gathered_state(built.model, built.ranks, only=names)
        mine = built.model.processes.place == 0

        def write() -> None:
            if mine:
                whole.save_pretrained(path, state_dict={**state, **held})

        built.model.processes.everywhere(write, f"write {path}", call)
