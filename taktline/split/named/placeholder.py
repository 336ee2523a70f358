"""Placeholders for tensors of other stages: a shape and a type, without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import local
from typing import Any, Self

import torch

from taktline import pytree
from taktline.errors import PartitionError
from taktline.split.arguments import Args, Kwargs, aliased

ANYWHERE = 1 << 30
"""The stage of a value that every stage has."""
_META = torch.device("meta")
_MASKS = (torch.bool, torch.uint8)
"""The types of an index whose data decides how many elements it selects."""
_FILLED = {
    torch.ops.aten.full_like,
    torch.ops.aten.new_full,
    torch.ops.aten.new_ones,
    torch.ops.aten.new_zeros,
    torch.ops.aten.ones_like,
    torch.ops.aten.zeros_like,
}
"""Operations that read the shape of their argument alone, so their results need no placeholder."""


class PlaceholderContext:
    """A running forward with placeholders; its methods see each operation on them."""

    runs_model = False
    """Whether it is the model's, which has real tensors, too: their data must not be lost."""
    bare = False
    """Whether the units of this stage get no placeholders, so that they run unchanged."""
    numbers: Any = None
    """The :class:`Numbers` that the forward reads from tensors, if they are tracked."""
    _outer: PlaceholderContext | None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def source(self, placeholders: Sequence[Placeholder]) -> Placeholder:
        """The placeholder whose maker and stage an operation's result gets."""
        return placeholders[0]

    def note_made(self, made: Placeholder, placeholders: Sequence[Placeholder], func: Any) -> None:
        """Note that an operation on placeholders has returned a new one."""

    def note_written(
        self, placeholder: Placeholder, placeholders: Sequence[Placeholder], func: Any
    ) -> None:
        """Note that an operation on placeholders has changed one of them in place."""

    def call(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Call a function of torch with placeholders among its arguments."""
        args, kwargs = resolved((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def note_change(self) -> None:
        """Note that an operation has changed the shape of a placeholder in place."""

    def note_asked(self, placeholder: Placeholder) -> None:
        """Note that the forward reads a number from a placeholder."""

    def __enter__(self) -> Self:
        self._outer = here.context
        here.context = self
        return self

    def __exit__(self, *_: object) -> None:
        here.context = self._outer


class _Here(local):
    """The forward with placeholders that runs on this thread."""

    context: PlaceholderContext | None = None


here = _Here()
_nowhere = PlaceholderContext(_META)


class Placeholder(torch.Tensor):
    """A tensor without data: operations on it return placeholders, and compute shapes alone."""

    meta: torch.Tensor
    _device: torch.device
    maker: str
    """The submodule or parameter that the placeholder comes from."""
    stage: int
    """The stage that has the data."""
    owner: str
    """The unit whose parameter or buffer it replaces; or the parameter of a container itself."""
    history: Any = None
    """How a dry run has seen the placeholder being made."""
    value: torch.Tensor | None
    """The data, once it has come from another stage."""

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, maker: str, stage: int, device: torch.device, *, owner: str = ""
    ) -> Placeholder:
        """A placeholder with the shape, strides and type of a meta tensor."""
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
        made.owner = owner
        made.value = None
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: ``__new__`` has set everything."""

    # Properties in Python are faster: torch's own go through __torch_function__.

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The shape of the data."""
        return (self.meta if self.value is None else self.value).shape

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The type of the data."""
        return (self.meta if self.value is None else self.value).dtype

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The device of the data."""
        return self._device if self.value is None else self.value.device

    @classmethod
    def of(cls, tensor: torch.Tensor, maker: str, stage: int, *, owner: str = "") -> Placeholder:
        """A placeholder for a tensor."""
        return cls(as_meta(tensor), maker, stage, tensor.device, owner=owner)

    def typed(self, dtype: torch.dtype) -> Placeholder:
        """A placeholder like this one, with another type."""
        return self._like(self.meta.to(dtype))

    def _like(self, meta: torch.Tensor) -> Placeholder:
        return Placeholder(meta, self.maker, self.stage, self.device, owner=self.owner)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Placeholder({self.maker!r}, {self.dtype}, {list(self.shape)})"

    def __format__(self, format_spec: str) -> str:
        # There is no number to format, as in a message for the log.
        return repr(self) if self.value is None else format(self.value, format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        # A copy is a placeholder that has not got its data yet.
        return self._like(self.meta)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
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
            raise _missing_data(source, "a number")
        if context.runs_model:
            _require_no_writing(func, args, kwargs, source)
        metas = [_without_data(leaf) for leaf in leaves]
        meta_args, meta_kwargs = pytree.tree_unflatten(metas, spec)
        if context.runs_model and func.overloadpacket in _FILLED:
            return func(*meta_args, **{**meta_kwargs, "device": context.device})
        if size_depends_on_data(func, args):
            if context.numbers is None:
                raise _missing_data(source, str(func))
            for placeholder in placeholders:
                context.note_asked(placeholder)
            output = _run_with_sizes(func, meta_args, meta_kwargs, context.numbers, source.maker)
        else:
            output = _run_on_meta(func, meta_args, meta_kwargs, context, source)
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
    """Sent instead of an argument of the model if later stages need its shape alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def as_placeholder(self, device: torch.device) -> Placeholder:
        """A placeholder for the argument."""
        meta = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return Placeholder(meta, "an argument of the model", 0, device)


pytree.register_own(
    Absent,
    lambda absent: ([], [absent.dtype, *absent.shape]),
    lambda _, context: Absent(tuple(context[1:]), context[0]),
)


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the same shape, strides and type."""
    if isinstance(tensor, Placeholder):
        return tensor.meta
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _without_data(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        # Placeholders may share a meta tensor, and some operations change its shape.
        return as_meta(leaf).detach()
    return _META if isinstance(leaf, torch.device) else leaf


def resolved(tree: Any) -> Any:
    """A tree in which placeholders that have got their data are replaced by it."""
    return pytree.tree_map_only(
        Placeholder,
        lambda placeholder: placeholder if placeholder.value is None else placeholder.value,
        tree,
    )


def _require_no_writing(func: Any, args: Args, kwargs: Kwargs, source: Placeholder) -> None:
    """Raise if an operation writes data that is missing here into a real tensor."""
    if not func._schema.is_mutable:
        return
    for written in aliased(func, args, kwargs, written=True):
        if isinstance(written, torch.Tensor) and not isinstance(written, Placeholder):
            raise PartitionError(
                f"the forward writes ({func}) a value of {source.maker!r} into a tensor that every "
                "stage has, but only one stage has that value; make a new tensor instead, or cut "
                "the model with taktline.pipeline, which traces it"
            )


def size_depends_on_data(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of an operation's result depends on data."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def _run_on_meta(
    func: Any, args: Args, kwargs: Kwargs, context: PlaceholderContext, source: Placeholder
) -> Any:
    """The result of an operation on the meta device; if it needs data, that for zeros."""
    try:
        return func(*args, **kwargs)
    except Exception as error:
        if not context.runs_model and not isinstance(error, NotImplementedError):
            raise
        if func.overloadpacket is torch.ops.aten._pack_padded_sequence:
            raise _missing_data(source, "a packed sequence") from error
        if not context.runs_model or torch.Tag.data_dependent_output in func.tags:
            raise _missing_data(source, str(func)) from error
        return _run_filled(func, args, kwargs, most=False)


def _run_with_sizes(func: Any, args: Args, kwargs: Kwargs, numbers: Any, maker: str) -> Any:
    """The result of an operation whose shape depends on data, in sizes of the run's numbers."""
    most, least = (_run_filled(func, args, kwargs, most=most) for most in (True, False))

    def sized(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        likely = zip(one.shape, other.shape, strict=True)
        shape = [numbers.take_size(sizes, maker) for sizes in likely]
        return torch.empty(shape, dtype=one.dtype, device=_META)

    return pytree.tree_map(sized, most, least)


def _run_filled(func: Any, args: Args, kwargs: Kwargs, *, most: bool) -> Any:
    """The result for zeros, or for data that makes the result as large as possible."""

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            is_mask = leaf.dtype in _MASKS
            # An index other than 0 may be out of range.
            is_index = func is torch.ops.aten.index.Tensor and not is_mask
            if is_mask or is_index or not most:
                return torch.full(tuple(leaf.shape), most and is_mask, dtype=leaf.dtype)
            return torch.arange(leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    args, kwargs = pytree.tree_map(filled, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return pytree.tree_map_only(torch.Tensor, as_meta, func(*args, **kwargs))


def _missing_data(source: Placeholder, what: str) -> PartitionError:
    """The error of a forward that needs data which another stage has."""
    return PartitionError(
        f"the forward needs {what}, which depends on the data that {source.maker!r} returns; every "
        "stage runs the forward, but only one has that data; cut the model elsewhere, or by hand"
    )
