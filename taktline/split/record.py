"""Records the forward of a model once, without the data of its layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from taktline import pytree
from taktline.device import keep_generators
from taktline.errors import PartitionError
from taktline.side_values import Aside, current_aside
from taktline.split.arguments import Call, device_of
from taktline.split.empty_model import EmptyModel, joined
from taktline.split.kinds import Absent
from taktline.split.nested import mapped, parts_in
from taktline.split.patches import patched
from taktline.split.recorder import Recorder
from taktline.split.steps import Kind, Record, State, Value
from taktline.split.without_data import Casts, Fakes, no_data

_lock = threading.RLock()
"""One forward is recorded at a time: functions of torch are replaced meanwhile."""


def record(empty: EmptyModel, call: Call, casts: Casts | None = None) -> Record:
    """Run the forward of a model once with these arguments."""
    device = device_of(call)
    fakes = Fakes(device, casts or {})
    with (
        _lock,
        keep_generators([device]),
        no_data(),
        torch.compiler.set_stance("force_eager"),
        empty.filled(fakes.filled),
    ):
        recorder = Recorder(empty, fakes, tuple(dict.fromkeys(("cpu", device.type))))
        made = recorder.record
        args, kwargs = pytree.tree_map(
            fakes.argument, call, is_leaf=lambda part: isinstance(part, Absent)
        )
        made.given = mapped(
            (args, kwargs), lambda tensor: recorder.value(tensor, "an argument of the model")
        )
        with patched(recorder, empty), RecordedAside(recorder):
            with recorder, _noting_failure(empty):
                output = empty.model(*args, **kwargs)
            made.result = recorder.template(output)
            _require_no_new_buffers(empty, recorder)
        for generator, before in recorder.generators.values():
            generator.set_state(before)
    return made


def _require_no_new_buffers(empty: EmptyModel, recorder: Recorder) -> None:
    """Raise if the forward itself has set a buffer to a tensor that differs in each call."""
    for path, module in outer_modules(empty):
        for key, tensor in module._buffers.items():
            value = recorder.values.get(id(tensor))
            name = joined(path, key)
            if value is not None and _differs_in_each_call(recorder.record, value, State(name)):
                raise PartitionError(
                    f"the forward of {empty.kind.__name__} sets its buffer {name!r} to a new "
                    "tensor, which stages cannot follow; change it in place, with copy_()"
                )


def outer_modules(empty: EmptyModel) -> list[tuple[str, nn.Module]]:
    """The modules that are in no unit, with their names."""
    inside = {id(part) for unit in empty.modules.values() for part in unit.modules()}
    return [(name, m) for name, m in empty.model.named_modules() if id(m) not in inside]


def _differs_in_each_call(record: Record, value: Value, buffer: State) -> bool:
    """Whether a value depends on arguments, on what units compute, or on a buffer."""
    needed = {value}
    for step in reversed(record.steps):
        if not needed.isdisjoint(step.makes):
            if step.kind is Kind.UNIT or step.draws or buffer in step.states:
                return True
            needed.update(step.reads)
    return not needed.isdisjoint(parts_in(record.given, Value))


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


class RecordedAside(Aside):
    """The side values of a forward that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(0, {})
        self._recorder = recorder

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put a value, and record it."""
        if self._recorder.is_recording:
            return self._recorder.function(put_skip, (name, value), {})
        return super().put(name, value)

    def get(self, name: str) -> torch.Tensor:
        """A value that was put before, as the value of a step."""
        if self._recorder.is_recording:
            return self._recorder.function(get_skip, (name,), {})
        found = super().get(name)
        return found.view_as(found)

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, and record it."""
        if self._recorder.is_recording:
            return self._recorder.function(add_loss, (loss,), {})
        return super().add(loss)


def put_skip(name: str, value: torch.Tensor) -> None:
    """Put a skip of the stage that runs."""
    current_aside().put(name, value)


def get_skip(name: str) -> torch.Tensor:
    """A skip of the stage that runs."""
    return current_aside().get(name)


def add_loss(loss: torch.Tensor) -> None:
    """Add a loss of the stage that runs."""
    current_aside().add(loss)
