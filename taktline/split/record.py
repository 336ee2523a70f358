"""Records the forward of a model once, without the data of its layers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.side_values import Aside, current_aside
from taktline.split.arguments import Args, Call, device_of
from taktline.split.empty_model import EmptyModel, joined
from taktline.split.kinds import Absent
from taktline.split.nested import mapped
from taktline.split.patches import patched
from taktline.split.recorder import Casts, Recorder
from taktline.split.steps import Kind, Modes, Record
from taktline.split.without_data import Fakes, no_data

_lock = threading.RLock()
"""One forward is recorded at a time: functions of torch are replaced meanwhile."""


def record(empty: EmptyModel, call: Call, casts: Casts | None = None) -> Record:
    """Run the forward of a model once with these arguments."""
    device = device_of(call)
    devices = tuple(dict.fromkeys(("cpu", device.type)))
    state = random.getstate()
    with _lock, keep_generators([device]), no_data(), torch.compiler.set_stance("force_eager"):
        fakes = Fakes(device)
        with empty.filled(fakes.filled):
            recorder = Recorder(empty, fakes, devices, casts or {})
            modes = Modes.now(devices)
            args, kwargs = _mapped_arguments(call, fakes.argument)
            given = mapped(
                (args, kwargs), lambda tensor: recorder.value(tensor, "an argument of the model")
            )
            with patched(recorder, empty), RecordedAside(recorder):
                with recorder, _noting_failure(empty):
                    output = empty.model(*args, **kwargs)
                result = recorder.template(output)
                _require_no_new_buffers(empty, recorder)
            for generator, before in recorder.generators.values():
                generator.set_state(before)
    random.setstate(state)
    return Record(
        given=given,
        steps=recorder.steps,
        result=result,
        modes=modes,
        memory=recorder.memory,
        state_memory=recorder.state_memory,
        aliases=recorder.aliases,
        is_parameter=empty.parameters,
        names=recorder.names,
        changes_buffers=recorder.changes_buffers,
        sized={recorder.values[each] for each in recorder.sized if each in recorder.values},
        metas=recorder.metas,
        costs=recorder.costs,
        runs=recorder.runs,
    )


def _require_no_new_buffers(empty: EmptyModel, recorder: Recorder) -> None:
    """Raise if the forward itself has set a buffer to a tensor that differs in each call."""
    inside = {id(part) for unit in empty.modules.values() for part in unit.modules()}
    for path, module in empty.model.named_modules():
        for key, tensor in module._buffers.items() if id(module) not in inside else ():
            value = None if tensor is None else recorder.values.get(id(tensor))
            name = joined(path, key)
            if value is not None and recorder.differs_in_each_call(value, name):
                raise PartitionError(
                    f"the forward of {empty.kind.__name__} sets its buffer {name!r} to a new "
                    "tensor, which stages cannot follow; change it in place, with copy_()"
                )


@contextmanager
def _noting_failure(empty: EmptyModel) -> Iterator[None]:
    """Say in an error of the model's own why its forward was run."""
    try:
        yield
    except PartitionError:
        raise
    except Exception as error:
        error.add_note(
            f"taktline.split.by_names ran the forward of {empty.kind.__name__} without data, to "
            "record its steps"
        )
        raise


def _mapped_arguments(call: Call, change: Callable[[Any], Any]) -> Call:
    """The arguments of a call with tensors replaced, in new containers."""
    leaves, spec = pytree.tree_flatten(call, is_leaf=lambda part: isinstance(part, Absent))
    return pytree.tree_unflatten(
        [change(x) if isinstance(x, (torch.Tensor, Absent)) else x for x in leaves], spec
    )


class RecordedAside(Aside):
    """The side values of a forward that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(0, {})
        self._recorder = recorder

    def _note(self, target: Any, args: Args, output: Any = None) -> None:
        recorder = self._recorder
        if recorder.is_inside:
            return
        with recorder.unrecorded():
            step = recorder.add_step(Kind.CALL, target, *recorder.template((args, {})))
            step.draws = True
            if output is not None:
                step.output = recorder.value(output, f"the skip {args[0]!r}")
                recorder.unknown.add(step.output)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put a value, and record it."""
        super().put(name, value)
        self._note(_put, (name, value))

    def get(self, name: str) -> torch.Tensor:
        """A value that was put before, as the value of a step."""
        found = super().get(name)
        if self._recorder.is_inside:
            return found
        with self._recorder.unrecorded():
            made = found.view_as(found)
        self._note(_get, (name,), made)
        return made

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, and record it."""
        super().add(loss)
        self._note(_add_loss, (loss,))


def _put(name: str, value: torch.Tensor) -> None:
    current_aside().put(name, value)


def _get(name: str) -> torch.Tensor:
    return current_aside().get(name)


def _add_loss(loss: torch.Tensor) -> None:
    current_aside().add(loss)
