"""Opens an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``, so that a cut can go between its layers.

The opened module calls one submodule for each layer. It keeps the weights itself, under their own
names, so that each weight lies in the stages that use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from taktline.errors import PartitionError
from taktline.split.named.units import derived_class

_FUNCTIONS: dict[str, Any] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


class Layer(nn.Module):
    """One layer; its weights are arguments."""

    def __init__(self, whole: nn.RNNBase, number: int) -> None:
        super().__init__()
        self.mode, self.bias, self.bidirectional = whole.mode, whole.bias, whole.bidirectional
        self.dropout = whole.dropout if number < whole.num_layers - 1 else 0.0
        self.train(whole.training)

    def forward(self, x: Tensor, state: tuple[Tensor, ...], *weights: Tensor) -> Any:
        """The output for a sequence, time first, and the last state."""
        start = state if self.mode == "LSTM" else state[0]
        x, *last = _FUNCTIONS[self.mode](
            x, start, weights, self.bias, 1, 0.0, self.training, self.bidirectional, False
        )
        return nn.functional.dropout(x, self.dropout, self.training), tuple(last)


class Layers:
    """Mixed into the class of a recurrent module that is opened."""

    _modules: dict[str, Layer]
    training: bool

    def forward(self, input: Any, hx: Any = None) -> Any:
        """The output of the last layer, and the last states of all layers."""
        whole: Any = self
        if isinstance(input, PackedSequence):
            raise PartitionError(
                f"the layers of {type(self).__name__} cannot be in several stages if its input is "
                "a packed sequence; cut the model elsewhere, or pass padded sequences"
            )
        x, is_unbatched = input, input.dim() == 2
        if is_unbatched:
            x = x.unsqueeze(0 if whole.batch_first else 1)
        x = x.transpose(0, 1) if whole.batch_first else x
        states = self._first_states(x, hx, is_unbatched=is_unbatched)
        directions = 2 if whole.bidirectional else 1
        found: list[tuple[Tensor, ...]] = []
        for number, layer in enumerate(self._modules.values()):
            part = slice(number * directions, (number + 1) * directions)
            x, last = layer(x, tuple(each[part] for each in states), *self.weights(number))
            found.append(last)
        ends = [torch.cat(parts) for parts in zip(*found, strict=True)]
        x = x.transpose(0, 1) if whole.batch_first else x
        if is_unbatched:
            x = x.squeeze(0 if whole.batch_first else 1)
            ends = [each.squeeze(1) for each in ends]
        return x, tuple(ends) if whole.mode == "LSTM" else ends[0]

    def weights(self, number: int) -> list[Tensor]:
        """The weights of a layer, in the order in which torch takes them."""
        whole: Any = self
        kinds = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if whole.bias else [])]
        kinds += ["weight_hr"] if whole.proj_size else []
        ends = ["", "_reverse"] if whole.bidirectional else [""]
        return [getattr(self, f"{kind}_l{number}{end}") for end in ends for kind in kinds]

    def _first_states(self, x: Tensor, hx: Any, *, is_unbatched: bool) -> list[Tensor]:
        """The states with which the layers begin."""
        whole: Any = self
        if hx is not None:
            given = list(hx) if whole.mode == "LSTM" else [hx]
            return [each.unsqueeze(1) for each in given] if is_unbatched else given
        count = whole.num_layers * (2 if whole.bidirectional else 1)
        widths = [whole.proj_size or whole.hidden_size]
        widths += [whole.hidden_size] if whole.mode == "LSTM" else []
        return [x.new_zeros(count, x.shape[1], width) for width in widths]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # The class would flatten all weights together, and a stage has some of them alone.
        return nn.Module._apply(self, fn, recurse)  # pyright: ignore[reportArgumentType]

    def flatten_parameters(self) -> None:
        """Leave the weights where they are."""


def recurrent_in(model: nn.Module) -> dict[str, nn.RNNBase]:
    """The recurrent modules with several layers that can be opened, by name."""
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name
        and isinstance(module, nn.RNNBase)
        and type(module) in (nn.LSTM, nn.GRU, nn.RNN)
        and module.num_layers > 1
        and "forward" not in vars(module)
        and not (module._forward_pre_hooks or module._compiled_call_impl)
    }


def tensors_of(model: nn.Module, name: str) -> list[Tensor]:
    """The parameters and buffers that a submodule uses."""
    module = model.get_submodule(name)
    whole, _, key = name.rpartition(".")
    parent = model.get_submodule(whole)
    if isinstance(parent, Layers):
        return parent.weights(int(key))
    return [*module.parameters(), *module.buffers()]


def open_recurrent(model: nn.Module, cuts: Iterable[object]) -> nn.Module:
    """A copy of the model that shares its tensors; cuts go between its recurrent layers."""
    inside = {str(cut).rpartition(".")[0] for cut in cuts}
    found = {name: module for name, module in recurrent_in(model).items() if name in inside}
    return _replaced(model, "", found) if found else model


def _replaced(module: nn.Module, path: str, opened: Collection[str]) -> nn.Module:
    if path in opened:
        return _opened(module)
    below = [name for name in opened if not path or name.startswith(f"{path}.")]
    if not below:
        return module
    made = object.__new__(type(module))
    made.__dict__ = {**vars(module), "_modules": dict(module._modules)}
    for key, child in module._modules.items():
        if child is not None:
            made._modules[key] = _replaced(child, f"{path}.{key}" if path else key, below)
    return made


def _opened(module: Any) -> nn.Module:
    made = object.__new__(derived_class(type(module), Layers))
    layers = {str(number): Layer(module, number) for number in range(module.num_layers)}
    # The list of all weights would keep alive those of other stages.
    made.__dict__ = {**vars(module), "_modules": layers, "_flat_weights": []}
    return made
