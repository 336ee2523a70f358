"""The layers of one recurrent module, in several stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import taktline as tl
from taktline.errors import PartitionError
from tests.split.training import gradients

WIDTH, DEPTH = 6, 4


class Stacked(nn.Module):
    def __init__(self, kind: Any = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.rnn = kind(WIDTH, WIDTH, DEPTH, **options)
        self.norm = nn.LayerNorm(self._width())

    def _width(self) -> int:
        return (2 if self.rnn.bidirectional else 1) * (self.rnn.proj_size or WIDTH)

    def forward(self, x: Tensor) -> Any:
        x, state = self.rnn(torch.tanh(self.embed(x)))
        return self.norm(x), state


class Given(Stacked):
    """A state to begin with, for sequences without a batch."""

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x[:, 0])
        state = x.mean().expand(DEPTH, WIDTH)
        return self.rnn(x, (state, 2 * state))


class Packed(Stacked):
    def forward(self, x: Tensor) -> Any:
        packed = pack_padded_sequence(self.embed(x), torch.tensor([5, 3]))
        return pad_packed_sequence(self.rnn(packed)[0])[0]


class PackedFirst(Stacked):
    def forward(self, x: Tensor) -> Any:
        return self.norm(self.rnn(pack_padded_sequence(x, torch.tensor([5, 3])))[0].data)


def total(output: Any) -> Tensor:
    leaves = pytree.tree_leaves(output)
    return sum((leaf.square().sum() for leaf in leaves), torch.zeros(()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Stacked(),
        lambda: Stacked(dropout=0.5),
        lambda: Stacked(bidirectional=True, batch_first=True, dropout=0.2),
        lambda: Stacked(proj_size=2, bias=False),
        lambda: Stacked(nn.GRU, bidirectional=True),
        lambda: Stacked(nn.RNN, nonlinearity="relu"),
        lambda: Given(),
        lambda: Given(batch_first=True),
    ],
)
@pytest.mark.parametrize("cuts", [["rnn.2"], ["rnn.0", "rnn.1", "rnn.3", "norm"]])
def test_the_layers_do_what_the_module_does(make: Any, cuts: list[str]) -> None:
    torch.manual_seed(0)
    model = make()
    if isinstance(model, Given):
        cuts = [cut for cut in cuts if cut != "norm"]
    plain, x = copy.deepcopy(model), torch.randn(5, 2, 3)
    pieces = tl.split.by_names(model, cuts, example=(x,))
    assert not pieces.ties
    assert {name for piece in pieces for name in piece.state_dict()} == model.state_dict().keys()
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        output = pieces(x)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        total(expected).backward()
        total(output).backward()
        # What all layers begin with gets the gradients of several stages, in another order.
        exact: dict[str, Any] = {} if isinstance(model, Given) else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(gradients(model), gradients(plain), **exact)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zbv", 2)])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_pipeline_cuts_between_them(schedule: str, ranks: int, deferred: bool) -> None:
    torch.manual_seed(0)
    plain = Stacked(batch_first=True)
    torch.manual_seed(0)
    if deferred:
        with tl.split.deferred():
            model = Stacked(batch_first=True)
    else:
        model = Stacked(batch_first=True)
    x = torch.randn(8, 5, 3)
    (total(plain(x)) / 4).backward()
    with tl.Pipeline(
        model,
        example=(x[:2],),
        schedule=schedule,
        ranks=ranks,
        microbatches=4,
        loss_fn=lambda output, _: total(output),
    ) as pipe:
        pipe.step(x, target=torch.zeros(8))
        assert list(pipe.state_dict()) == list(plain.state_dict())
        found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    torch.testing.assert_close(found, gradients(plain))


def test_their_weights_count() -> None:
    pieces = tl.split.auto(Stacked(), 3, (torch.randn(5, 2, 3),))
    assert pieces.division.starts == ("", "rnn.1", "rnn.3")  # pyright: ignore[reportAttributeAccessIssue]
    weights = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH) * 4
    memory = pieces.division.partition.stage_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert memory == (weights + 4 * 4 * WIDTH, 2 * weights, weights + 2 * 4 * WIDTH)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Packed(), r"needs a packed sequence, which depends on the data that 'embed' returns"),
        (PackedFirst(), r"layers of LSTM cannot be in several stages if its input is a packed"),
    ],
)
def test_packed_sequences_are_refused(model: nn.Module, text: str) -> None:
    x = torch.randn(5, 2, 3 if isinstance(model, Packed) else WIDTH)
    with pytest.raises(PartitionError, match=text):
        tl.split.by_names(model, ["rnn.1"], example=(x,))


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(PartitionError, match=r"cuts name 'rnn.4', but Stacked has no such"):
        tl.split.by_names(Stacked(), ["rnn.4"], example=(torch.randn(5, 2, 3),))
