"""What must be replaced while a forward is recorded, since it runs no function that torch shows.

In other threads all is as before, and so it is everywhere once the recording has ended.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.hooks import RemovableHandle

from taktline.errors import TorchVersionError
from taktline.private import missing, private
from taktline.side_values import Aside, current_aside

_REGISTER = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")
_LOG = "torch._subclasses.fake_tensor"
_GENERATOR = "_checkpoint_without_reentrant_generator"
_generator = private(
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator", "a recorded forward"
)


recording = SimpleNamespace(recorder=None)
"""Knows the recorder that is at work."""


@contextmanager
def replaced(holder: Any, **values: Any) -> Iterator[None]:
    """Let attributes have other values for a while."""
    before = {name: vars(holder)[name] for name in values if name in vars(holder)}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name in values:  # at no time without it: other threads may use it
            if name in before:
                setattr(holder, name, before[name])
            else:
                delattr(holder, name)


@contextmanager
def patched(recorder: Any, model: nn.Module) -> Iterator[None]:
    """Let calls of modules, functions of autograd, checkpoints and skips come to a recorder."""
    if reason := missing(_generator):
        raise TorchVersionError(reason)
    function, checkpoints = torch.autograd.Function, vars(torch_checkpoint)
    before_apply = inspect.getattr_static(function, "apply")
    name = next(each for each in (f"{_GENERATOR}_impl", _GENERATOR) if each in checkpoints)
    before_region = checkpoints[name]

    def calling(before: Any) -> Any:
        return lambda self, *args, **kwargs: recorder.module(self, before, args, kwargs)

    def forward_of(unit: nn.Module) -> Any:
        before = unit.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # The forward of the model calls it by unit.forward(x).
            return (unit if recorder.is_recording else before)(*args, **kwargs)

        return forward

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording and kind is torch_checkpoint.CheckpointFunction:
            run, preserves, *rest = args
            with recorder.region(bool(preserves)):
                return run(*rest)
        return recorder.function(before_apply.__get__(None, kind), args, kwargs)

    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not recorder.is_recording:
            yield from before_region(*args, **kwargs)
            return
        given = inspect.signature(before_region).bind(*args, **kwargs).arguments
        with recorder.region(bool(given.get("preserve_rng_state", True))):
            yield

    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    with ExitStack() as stack:
        for kind in (kind for kind in kinds if "__call__" in vars(kind)):
            stack.enter_context(replaced(kind, __call__=calling(vars(kind)["__call__"])))
        for unit in {*recorder.empty.modules.values()}:
            if not (unit._forward_hooks or unit._forward_pre_hooks):  # those would not run
                stack.enter_context(replaced(unit, forward=forward_of(unit)))
        stack.enter_context(_watched(recorder))
        stack.enter_context(replaced(function, apply=classmethod(apply)))
        stack.enter_context(replaced(torch_checkpoint, **{name: region}))
        # What torch writes of operations that cannot run without data.
        stack.enter_context(replaced(logging.getLogger(_LOG), disabled=True))
        stack.enter_context(RecordedAside(recorder))
        stack.enter_context(replaced(recording, recorder=recorder))
        yield


@contextmanager
def _watched(recorder: Any) -> Iterator[None]:
    """Let a recorder see what the forward sets on modules, and what no stage would repeat."""
    before_setting = nn.Module.__setattr__
    before_saving, before_removing = saved_tensors_hooks.__enter__, RemovableHandle.remove

    def saving(self: Any) -> None:
        if recorder.is_recording:
            recorder.refuse(
                "lets autograd save other tensors (saved_tensors_hooks, save_on_cpu), which its "
                "stages would not do; use it inside of a submodule"
            )
        before_saving(self)

    def removing(self: Any) -> None:
        if id(self) in recorder.handles:
            recorder.refuse(
                "removes a hook of a tensor, which its stages would keep; leave it, or use "
                "it inside of a submodule"
            )
        before_removing(self)

    def setting(self: Any, key: str, value: Any) -> None:
        recorder.attribute(self, key, value)
        before_setting(self, key, value)

    def registering(name: str) -> Any:
        before = vars(nn.Module)[name]
        return lambda self, hook, **kw: before(self, recorder.hook(self, hook), **kw)

    hooks = {name: registering(name) for name in _REGISTER}
    with (
        replaced(nn.Module, __setattr__=setting, **hooks),
        replaced(saved_tensors_hooks, __enter__=saving),
        replaced(RemovableHandle, remove=removing),
    ):
        yield


class RecordedAside(Aside):
    """The side values of a forward that is recorded."""

    def __init__(self, recorder: Any) -> None:
        super().__init__(0, {})
        self._recorder = recorder

    def put(self, name: str, value: torch.Tensor) -> None:
        """Put a value, and record it."""
        self._run("put", name, value)

    def get(self, name: str) -> torch.Tensor:
        """A value that was put before, as the value of a step."""
        return self._run("get", name)

    def add(self, loss: torch.Tensor) -> None:
        """Add a loss, and record it."""
        self._run("add", loss)

    def _run(self, method: str, *args: Any) -> Any:
        if self._recorder.is_recording:
            return self._recorder.function(call_aside, (method, *args), {})
        found = getattr(super(), method)(*args)
        if method != "get":
            return found
        self._recorder.shared.add(id(found))
        return found.view_as(found)


def call_aside(method: str, *args: Any) -> Any:
    """Put or get a skip, or add a loss, of the stage that runs."""
    return getattr(current_aside(), method)(*args)


METADATA = frozenset(
    [
        *("shape", "size", "dtype", "device", "ndim", "dim", "numel", "nelement", "stride"),
        *("is_floating_point", "is_complex", "layout", "is_contiguous", "requires_grad", "is_cuda"),
        *("element_size", "storage_offset", "names", "__len__", "is_nested", "is_sparse"),
        *("itemsize", "nbytes", "type", "is_leaf", "grad_fn", "is_meta", "_version", "get_device"),
        *("is_shared", "is_cpu", "is_quantized", "is_mkldnn", "__hash__", "__repr__", "__format__"),
        *("__str__", "is_inference", "is_signed", "result_type", "is_same_size", "dim_order"),
        *("output_nr", "is_conj", "is_neg", "is_mps", "is_xpu", "_backward_hooks", "is_pinned"),
        *("untyped_storage", "is_tensor", "is_storage", "name", "is_sparse_csr", "ndimension"),
        *("promote_types", "can_cast", "__dir__", "is_xla", "has_names", "__reduce_ex__"),
    ]
)
"""Functions that read what a kind of call has in common: no data."""
SIZES = frozenset(("shape", "size", "numel", "nelement", "__len__", "stride", "nbytes"))
"""Functions that read sizes, which may depend on data."""
REFUSED = {
    "backward": "runs a backward in the forward, which a stage cannot; use torch.autograd.grad",
    "__set__": "sets an attribute of a tensor, such as x.data or x.grad; use x.copy_() instead",
}
"""Functions that no stage can run."""
EFFECTS = frozenset(
    ("register_hook", "retain_grad", "register_post_accumulate_grad_hook", "call_aside")
)
"""Functions that do something beside what they return."""
STATISTICS = frozenset(("batch_norm", "instance_norm"))
"""Functions that change buffers, which torch does not show."""
PIPE_SPLIT = frozenset(("pipe_split", "_pipe_split", "_pipe_split.default"))
"""Functions with which stages begin: ours, and the operator of torch."""


def name_of(func: Any) -> str:
    """What a function, a method or an attribute of torch is called."""
    name = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name
