"""Builds models on the meta device, with a log of how their tensors are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from taktline import pytree
from taktline.errors import StateError
from taktline.private import private
from taktline.split.arguments import NUMBER_READERS, Args, Kwargs, tensors_in
from taktline.split.on_meta.operation_log import (
    Log,
    Operator,
    keep,
    without_torch_functions,
    written,
)

_Mode = private("torch.utils._python_dispatch.TorchDispatchMode", "deferred()")
_modes = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "deferred()")
_CONJ = private("torch.ops.aten._conj.default", "conjugates in deferred()", None)


@contextmanager
def deferred() -> Iterator[None]:
    """Build a model without memory for its parameters.

    All tensors created inside are on the meta device, and the operations are recorded.
    :func:`materialise` runs them for one stage: it gets the values that the model would have
    if it were built as usual, on the CPU, from the same seed. Code inside sees tensors on the CPU,
    and may read their values.

    The global generator advances, but less than usual.

    >>> from torch import nn
    >>> from taktline.split import deferred, materialise
    >>> _ = torch.manual_seed(0)
    >>> with deferred():
    ...     model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    >>> model[1].weight.device
    device(type='meta')
    >>> last = materialise(model[1], "cpu")
    >>> _ = torch.manual_seed(0)
    >>> as_usual = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    >>> torch.equal(last.weight, as_usual[1].weight)
    True
    """
    if any(isinstance(mode, _Recorder) for mode in _modes()):
        yield
        return
    log = Log()
    keep(log)
    try:
        with _Disguise(log), _Recorder(log):
            yield
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise StateError(
            f"{error}\n\nWhat is built in deferred() reads values in a way that cannot be recorded "
            "(see above). Read them with item() or tolist(), or build this part outside"
        ) from error


class _Recorder(_Mode):
    """Runs operations on the meta device instead of the CPU, and logs them."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with without_torch_functions():
            return self._record(func, args, dict(kwargs or {}))

    def _record(self, op: Operator, args: Args, kwargs: Kwargs) -> Any:
        if op is _CONJ:  # memory does not show what is such a view
            op = torch.ops.aten.conj_physical.default
        given = tensors_in((args, kwargs))
        if op is torch.ops.aten.lift_fresh.default:
            return self._log.on_meta(given[0])
        draws = torch.Tag.nondeterministic_seeded in op.tags
        if given and not any(tensor.is_meta for tensor in given) and not draws:
            return op(*args, **kwargs)
        if any(not tensor.is_meta for tensor in written(op, args, kwargs)):
            raise StateError(
                f"{op} changes a tensor that was made outside of deferred(); make it inside"
            )
        args, kwargs = pytree.tree_map(self._log.on_meta, (args, kwargs))
        if "device" in kwargs or (not given and _takes_device(op)):
            kwargs.update(device=torch.device("meta"))
        if kwargs.get("pin_memory"):
            kwargs.update(pin_memory=False)
        try:
            result = op(*args, **kwargs)
        except NotImplementedError:  # on the meta device; what it returns is a constant
            if draws or written(op, args, kwargs):
                raise StateError(
                    f"{op} cannot be recorded; build the part that calls it outside of deferred()"
                ) from None
            args, kwargs = pytree.tree_map(self._log.real, (args, kwargs))
            return pytree.tree_map(self._log.on_meta, op(*args, **kwargs))
        self._log.add(op, args, kwargs, result)
        return result


class _Disguise(TorchFunctionMode):
    """Shows tensors of a log as if they were on the CPU: some code skips the meta device."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE:
            return torch.device("cpu") if args[0].is_meta else args[0].device
        if func == _IS_META:
            return False
        if func in _READING:
            args, kwargs = pytree.tree_map(self._log.real, (args, kwargs))
        return func(*args, **kwargs)


_DEVICE = torch.Tensor.device.__get__  # pyright: ignore[reportAttributeAccessIssue]
_IS_META = torch.Tensor.is_meta.__get__  # pyright: ignore[reportAttributeAccessIssue]
_READING = {
    *NUMBER_READERS,
    torch.Tensor.__array__,
    torch.Tensor.__complex__,
    torch.Tensor.__contains__,
    torch.Tensor.__format__,
    torch.Tensor.__repr__,
    torch.Tensor.numpy,
}


def _takes_device(op: Operator) -> bool:
    return any(argument.name == "device" for argument in op._schema.arguments)
