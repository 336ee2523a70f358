"""Tensors of other stages: their shape and type are known, their data is not here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import local
from typing import Any, Self

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.example import Args, Kwargs
from taktline.split.named.operations import META, depends_on_data, made, no_data, on_meta, sized

__all__ = [
    "ANYWHERE",
    "Absent",
    "Placeholder",
    "PlaceholderContext",
    "as_meta",
    "here",
    "resolved",
]

ANYWHERE = 1 << 30
"""The stage of a value that every stage has."""


# What is to be seen of a tensor here is its shape alone, so the result is no placeholder.
_FILLED = {
    torch.ops.aten.full_like,
    torch.ops.aten.new_full,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_zeros,
    torch.ops.aten.ones_like,
    torch.ops.aten.zeros_like,
}


class PlaceholderContext:
    """A forward in which placeholders appear; says where what is made of them comes from."""

    mixed = False
    """Whether tensors with data appear in it, too, and matter."""
    bare = False
    """Whether no placeholder comes to the submodules of this stage: they run as they are."""
    repeats = False
    """Whether what is not of this stage is known from another call."""
    numbers: Any = None
    """The :class:`Numbers` that it asks for, if they are known, or to be noted."""
    _outer: PlaceholderContext | None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def source(self, placeholders: Sequence[Placeholder]) -> Placeholder:
        """The placeholder that decides whose value an operation's result is."""
        return placeholders[0]

    def note_made(self, made: Placeholder, placeholders: Sequence[Placeholder], func: Any) -> None:
        """Note that an operation on placeholders has made one."""

    def note_written(
        self, placeholder: Placeholder, placeholders: Sequence[Placeholder], func: Any
    ) -> None:
        """Note that an operation on placeholders has changed one of them in place."""

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call a function of torch that is given placeholders."""
        args, kwargs = resolved((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def note_change(self) -> None:
        """Note that a placeholder has got another shape."""

    def note_asked(self, placeholder: Placeholder) -> None:
        """Note that the forward asks a placeholder for a number."""

    def __enter__(self) -> Self:
        self._outer = here.context
        here.context = self
        return self

    def __exit__(self, *_: object) -> None:
        here.context = self._outer


class _Here(local):
    """What runs on this thread."""

    context: PlaceholderContext | None = None
    """The forward that is running, if it knows placeholders."""


here = _Here()
_nowhere = PlaceholderContext(META)


class Placeholder(torch.Tensor):
    """A tensor without data: operations on it return placeholders, and cost next to nothing."""

    meta: torch.Tensor
    _device: torch.device
    maker: str
    """The submodule, or the parameter, that it comes from."""
    stage: int
    """The stage that has made it."""
    parameter: bool
    """Whether it is a parameter of the model itself."""
    owner = ""
    """The unit whose parameter or buffer it is."""
    history: Any = None
    """Where a walk has seen it come from."""
    value: torch.Tensor | None
    """The data, once it has come from another stage."""

    @staticmethod
    def __new__(
        cls,
        meta: torch.Tensor,
        maker: str,
        stage: int,
        device: torch.device,
        *,
        parameter: bool = False,
    ) -> Placeholder:
        """A tensor with what a meta tensor knows, on a device."""
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
        )
        made.meta = meta
        made._device = device
        made.maker = maker
        made.stage = stage
        made.parameter = parameter
        made.value = None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done above."""

    # In Python, as forwards ask often: torch would ask __torch_function__ each time.

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Its shape."""
        return (self.meta if self.value is None else self.value).shape

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Its type."""
        return (self.meta if self.value is None else self.value).dtype

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where its data would be."""
        return self._device if self.value is None else self.value.device

    @classmethod
    def of(
        cls, tensor: torch.Tensor, maker: str, stage: int, *, parameter: bool = False
    ) -> Placeholder:
        """What is left of a tensor without its data."""
        return cls(as_meta(tensor), maker, stage, tensor.device, parameter=parameter)

    def typed(self, dtype: torch.dtype) -> Placeholder:
        """The same with another type."""
        return self._like(self.meta.to(dtype))

    def _like(self, meta: torch.Tensor) -> Placeholder:
        made = Placeholder(meta, self.maker, self.stage, self.device, parameter=self.parameter)
        made.owner = self.owner
        return made

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Placeholder({self.maker!r}, {self.dtype}, {list(self.shape)})"

    def __format__(self, format_spec: str) -> str:
        # A text for people: there is no number to be shown.
        return repr(self) if self.value is None else format(self.value, format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        # Its own attributes do not change, except that it gets its data, which a copy has not.
        return self._like(self.meta)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        return (here.context or _nowhere).call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        placeholders = [leaf for leaf in leaves if isinstance(leaf, Placeholder)]
        context = here.context or PlaceholderContext(placeholders[0].device)
        source = context.source(placeholders)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise no_data(source, "a number")
        if context.mixed:
            _require_no_writing(func, args, kwargs, source)
        metas = [_without_data(leaf) for leaf in leaves]
        meta_args, meta_kwargs = pytree.tree_unflatten(metas, spec)
        if context.mixed and func.overloadpacket in _FILLED:
            return func(*meta_args, **{**meta_kwargs, "device": context.device})
        if depends_on_data(func, args):
            if context.numbers is None:
                raise no_data(source, str(func))
            for placeholder in placeholders:
                context.note_asked(placeholder)
            output = sized(func, meta_args, meta_kwargs, context, source.maker)
        else:
            output = made(func, meta_args, meta_kwargs, context, source)
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), context.device)
        # An operation in place returns the tensor itself.
        same = {id(meta): leaf for meta, leaf in zip(metas, leaves, strict=True)}

        def as_made(meta: torch.Tensor) -> Placeholder:
            placeholder = same.get(id(meta))
            if not isinstance(placeholder, Placeholder):
                new = Placeholder(meta, source.maker, source.stage, device)
                context.note_made(new, placeholders, func)
                return new
            if (meta.shape, meta.stride()) != (placeholder.shape, placeholder.stride()):
                context.note_change()
            context.note_written(placeholder, placeholders, func)
            placeholder.maker, placeholder.meta = source.maker, meta
            return placeholder

        return pytree.tree_map_only(torch.Tensor, as_made, output)


@dataclass(frozen=True, slots=True)
class Absent:
    """An argument of the model of which later stages need the shape alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def as_placeholder(self, device: torch.device) -> Placeholder:
        """What a forward sees of it."""
        meta = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return Placeholder(meta, "an argument of the model", 0, device)


pytree.register_pytree_node(
    Absent,
    lambda absent: ([], [absent.dtype, *absent.shape]),
    lambda _, context: Absent(tuple(context[1:]), context[0]),
)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the same shape, strides and type."""
    return tensor.meta if isinstance(tensor, Placeholder) else on_meta(tensor)


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # Several may have one meta tensor in common, and some operations change its shape.
        return as_meta(leaf).detach()
    return META if isinstance(leaf, torch.device) else leaf


def resolved(tree: Any) -> Any:
    """A tree with the data of those placeholders that have got theirs."""
    return pytree.tree_map_only(
        Placeholder,
        lambda placeholder: placeholder if placeholder.value is None else placeholder.value,
        tree,
    )


def _require_no_writing(func: Any, args: Args, kwargs: Kwargs, source: Placeholder) -> None:
    """Raise if an operation would write what is not here into a tensor that is."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[place] if place < len(args) else kwargs.get(argument.name)
        if isinstance(written, torch.Tensor) and not isinstance(written, Placeholder):
            raise PartitionError(
                f"the forward writes ({func}) a value of {source.maker!r} into a tensor that every "
                "stage has, but only one stage has that value; make a new tensor instead, or cut "
                "the model with taktline.pipeline, which traces it"
            )
