"""What forwards do between their submodules, and what becomes of it in stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import taktline as tl
from taktline.errors import PartitionError

X = torch.linspace(-1, 1, 8).reshape(2, 4)
Body = Callable[..., Any]
HERE = r"test_idioms\.py:\d+"


class Net(nn.Module):
    """Three blocks, and a forward that a test chooses."""

    def __init__(self, body: Any, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList((block or (lambda: nn.Linear(4, 4)))() for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("shift", torch.full((4,), 0.25))
        self.__dict__["body"] = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["body"](self, *args, **kwargs)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(run: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Outputs and gradients of two calls."""
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        given = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        with tl.collect_losses() as added:
            output = run(*given[0], **given[1])
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        loss = sum((t.square().sum() for t in tensors if t.requires_grad), torch.zeros(()))
        sum(added, start=loss).backward()
        found += tensors
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return found, gradients, {name: b.clone() for name, b in model.named_buffers()}


def require_same(
    make: Callable[[], nn.Module], *args: Any, cuts: Any = ("blocks.1", "blocks.2"), **kwargs: Any
) -> tl.split.Pieces:
    """Train a model and its stages, which must do the same to the last bit."""
    plain, model = make(), make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pieces = tl.split.by_names(model, cuts, example=(args, kwargs))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    outputs, gradients, buffers = trained(pieces, model, *args, **kwargs)
    right, right_gradients, right_buffers = trained(plain, plain, *args, **kwargs)
    assert len(outputs) == len(right)
    assert all(map(torch.equal, outputs, right))
    for name, gradient in right_gradients.items():
        found = gradients[name]
        assert (found is None) == (gradient is None), name
        assert gradient is None or torch.equal(found, gradient), name
    for name, buffer in right_buffers.items():
        assert torch.equal(buffers[name], buffer), name
    return pieces


def refused(make: Callable[[], nn.Module], text: str, *args: Any, **kwargs: Any) -> None:
    """The cut, or the first call, must be refused, with the line of the forward."""
    model = make()

    def run() -> None:
        pieces = tl.split.by_names(model, ["blocks.1", "blocks.2"], example=(args, kwargs))
        for _ in range(2):
            pieces(*args, **kwargs)

    with pytest.raises(PartitionError, match=text):
        run()


# What is right


def masks(self: Any, x: Tensor) -> Tensor:
    mask = torch.arange(4, device=x.device) < x.shape[1] - 1
    x = self.embed(x)
    for block in self.blocks:
        x = x + block(x).masked_fill(~mask, 0.0)
    return self.head(x)


def parameters(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x) * self.scale
    x = self.blocks[0](x) + self.shift
    x = self.blocks[1](x) * self.scale
    return F.linear(self.blocks[2](x), self.embed.weight, self.embed.bias)


def no_grad_in_parts(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    with torch.no_grad():
        x = self.blocks[0](x) * 2
    x = self.blocks[1](x)
    with torch.no_grad():
        norm = x.norm()
    return self.blocks[2](x / norm)


def mixed_types(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = self.blocks[0](self.embed(x))
        with torch.autocast("cpu", enabled=False):
            y = self.blocks[1](x.float())
        return (self.blocks[2](y) @ y.t()).float()


class Double(torch.autograd.Function):
    """Whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 5


def own_function(self: Any, x: Tensor) -> Tensor:
    x = Double.apply(self.embed(x))
    return self.blocks[2](Double.apply(self.blocks[1](self.blocks[0](x))))


def checkpoints(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return self.head(x)


def reentrant(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return self.head(x)


def one_checkpoint(self: Any, x: Tensor) -> Tensor:
    def most(x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.run(x) + y) * self.scale

    return self.head(checkpoint(most, self.embed(x), x, use_reentrant=False))


def nested_checkpoints(self: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(self.blocks[0], torch.tanh(x), use_reentrant=False)

    x = checkpoint(inner, self.embed(x), use_reentrant=False)
    return self.blocks[2](self.blocks[1](x))


def new_tensor_in_place(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    room = torch.zeros(2, 4)
    room[:, 1:] = self.blocks[0](x)[:, 1:]
    total = torch.zeros(4).scatter_add_(0, torch.tensor([0, 1, 1, 0]), x[0])
    x = self.blocks[1](room)
    return self.blocks[2](x) + total


def argument_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.embed(x.clone())
    x[0] = 1.0
    y = self.blocks[0](y) + x
    x.add_(2)
    return self.blocks[2](self.blocks[1](y) + x)


def crossing_in_place(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    y = self.blocks[0](x) * 1.0
    z = self.blocks[1](x)
    y += z
    y[0].mul_(2)
    return self.blocks[2](y)


def views(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    first, second = x.chunk(2, -1)
    x = self.blocks[0](torch.cat([second, first], -1))
    x = self.blocks[1](x + torch.cat([first, first], -1))
    return self.blocks[2](x).view(-1)[1:]


def several_times(self: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = self.blocks[0](torch.relu(x))
    for _ in range(2):
        x = self.blocks[2](self.blocks[1](x)) + self.embed(x)
    return x


def draws(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    noise = torch.rand(2, 4)
    x = F.dropout(self.blocks[0](x), 0.5, self.training) + noise
    x = self.blocks[1](x) * noise
    return self.blocks[2](x) + noise


def losses(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    tl.add_loss(x.square().mean())
    x = self.blocks[0](x)
    x = self.blocks[1](x)
    tl.add_loss(x.square().mean())
    return self.blocks[2](x)


def sizes_of_arguments(self: Any, x: Tensor) -> Tensor:
    some = x[x[:, 0] < 0]
    x = self.embed(x)
    x = self.blocks[0](x) + len(some)
    x = self.blocks[1](x) + self.embed(some).sum()
    if (some < 0).all():
        x = x * 2
    return self.blocks[2](x)


def masks_of_arguments(self: Any, x: Tensor) -> Tensor:
    mask = x[:, 0] < 0
    x = self.blocks[0](self.embed(x))
    some = x[mask]
    x = x.clone()
    x[mask, 1:] = self.blocks[1](some)[:, 1:] * len(some)
    return self.blocks[2](x) + x.masked_select(mask[:, None]).sum()


def sizes_of_activations(self: Any, x: Tensor) -> Tensor:
    x = self.blocks[0](self.embed(x))
    counts = torch.bincount((x > 0).flatten().long(), minlength=2)
    x = self.blocks[1](x[x[:, 0] > -0.1]) * counts[0]
    return self.blocks[2](x)


def gradient_hooks(self: Any, x: Tensor) -> Tensor:
    x = self.blocks[0](self.embed(x))
    x.register_hook(lambda gradient: gradient * 3)
    return self.blocks[2](self.blocks[1](x))


def detaches(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    y = self.blocks[0](x.detach())
    return self.blocks[2](self.blocks[1](y) + x.data)


def buffer_in_place(self: Any, x: Tensor) -> Tensor:
    x = self.run(self.embed(x))
    if self.training:
        self.shift.mul_(0.9).add_(x.detach().mean(0))
    return x + self.shift


def calls_forward(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = block.forward(torch.relu(x))
    return self.head(x)


RIGHT: list[Any] = [
    masks, parameters, no_grad_in_parts, mixed_types, own_function, checkpoints, reentrant,
    one_checkpoint, nested_checkpoints, new_tensor_in_place, crossing_in_place, views,
    several_times, losses, sizes_of_arguments, gradient_hooks, detaches, draws,
    buffer_in_place, argument_in_place,
]  # fmt: skip


@pytest.mark.parametrize("body", RIGHT, ids=lambda body: body.__name__)
def test_as_the_plain_model(body: Body) -> None:
    require_same(lambda: Net(body), X.clone())


class Aux(nn.Linear):
    """Keeps a loss in an attribute."""

    aux: Any = None

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        self.aux = output.square().mean()
        return output


def attributes(self: Any, x: Tensor) -> Any:
    x = self.run(self.embed(x))
    return x, sum(block.aux for block in self.blocks)


class Appends(nn.Linear):
    """Puts what it has computed into a list."""

    def forward(self, input: Tensor, kept: Any = None, table: Any = None) -> Tensor:
        output = super().forward(input)
        kept.append(output.mean())
        table[f"{len(table)}"] = output.sum()
        return output


def lists(self: Any, x: Tensor) -> Any:
    x, kept, table = self.embed(x), [], {"x": x}
    for block in self.blocks:
        x = block(x, kept, table=table)
    return x, torch.stack(kept), table


@dataclass
class Carried:
    x: Tensor
    total: Tensor
    depth: int = 0


class Carries(nn.Linear):
    """Takes and returns a dataclass."""

    def forward(self, input: Any) -> Any:
        output = super().forward(input.x)
        return Carried(output, input.total + output.sum(), input.depth + 1)


def dataclasses(self: Any, x: Tensor) -> Any:
    carried = self.run(Carried(self.embed(x), torch.zeros(())))
    return {"x": carried.x, "total": carried.total * carried.depth, "none": None}


class Changes(nn.Linear):
    """Changes an object that it is given."""

    def forward(self, input: Any) -> Any:
        input.x = super().forward(input.x)
        input.all.append(input.x)
        return input


def objects(self: Any, x: Tensor) -> Any:
    state = SimpleNamespace(x=self.embed(x), all=[])
    for block in self.blocks:
        state = block(state)
    return state.x, sum(state.all)


def inner_hooks(self: Any, x: Tensor) -> Any:
    x, kept = self.embed(x), []
    hooks = [b[0].register_forward_hook(lambda m, i, o: kept.append(o)) for b in self.blocks]
    x = self.run(x)
    for hook in hooks:
        hook.remove()
    return x, torch.stack(kept)


class Pair(nn.Linear):
    """Returns what it got, too."""

    def forward(self, input: Tensor, mask: Any = None) -> Any:
        return super().forward(input) * mask, mask


def returned(self: Any, x: Tensor) -> Tensor:
    mask = (x > 0).float()
    x = self.embed(x)
    for block in self.blocks:
        x, mask = block(x, mask)
    return x * mask


def only_keywords(self: Any, x: Tensor, *, factor: float, other: Tensor | None = None) -> Tensor:
    x = self.blocks[0](self.embed(x) * factor)
    if other is not None:
        x = x + other
    return self.blocks[2](self.blocks[1](x))


def pair(kind: Any) -> Callable[[], nn.Module]:
    return lambda: kind(4, 4)


@pytest.mark.parametrize(
    ("body", "block"),
    [
        (attributes, pair(Aux)),
        (lists, pair(Appends)),
        (dataclasses, pair(Carries)),
        (objects, pair(Changes)),
        (inner_hooks, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
        (returned, pair(Pair)),
        (lambda self, x: self.head(self.run(x)), lambda: nn.BatchNorm1d(4)),
        (lambda self, x: self.head(self.run(x)), lambda: nn.Dropout(0.5)),
    ],
    ids=["attributes", "lists", "dataclasses", "objects", "hooks", "returned", "norms", "dropout"],
)
def test_side_values_of_units(body: Any, block: Any) -> None:
    require_same(lambda: Net(body, block), X)


class Doubles(nn.Linear):
    """Has a call of its own, which does more than its forward."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2) + 1


def test_a_call_of_its_own() -> None:
    require_same(lambda: Net(lambda self, x: self.run(self.embed(x)), pair(Doubles)), X)


class Evaluated(nn.Module):
    """Another model in evaluation, for another kind of call, and with other data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, *, mask: Tensor, factor: float = 1.0) -> Tensor:
        x = F.dropout(self.blocks[0](x), 0.9, self.training)
        if not mask.all():
            x = x * mask
        x = self.blocks[1](x) * factor + len(mask)
        return self.blocks[2](x) if self.training else x


def test_calls_of_other_kinds() -> None:
    model = Evaluated()
    pieces = tl.split.by_names(model, ["blocks.1"], example=((X,), {"mask": torch.ones(2, 4)}))
    for each in (model.eval(), *pieces):
        each.eval()
    for rows, factor in ((1, 1.0), (2, 1.0), (2, 0.5)):
        for mask in (torch.ones(rows, 4), torch.zeros(rows, 4), torch.ones(rows, 4)):
            x = torch.randn(rows, 4)
            options: dict[str, Any] = {"mask": mask, "factor": factor}
            assert torch.equal(pieces(x, **options), model(x, **options))


def test_tied_weights() -> None:
    def make() -> nn.Module:
        model = Net(lambda self, x: self.run(self.embed(x)))
        model.blocks[2].weight = model.embed.weight
        return model

    assert len(require_same(make, X).ties) == 1


def test_a_type_that_changes_after_the_cut() -> None:
    pieces = tl.split.by_names(Net(masks), ["blocks.1"], example=(X,))
    pieces[1].double()
    message = r"stage 1 has changed from torch\.float32 to torch\.float64; .* before the model is"
    with pytest.raises(PartitionError, match=message):
        pieces(X)
    model = Net(masks).double()
    pieces = tl.split.by_names(model, ["blocks.1"], example=(X.double(),))
    assert torch.equal(pieces(X.double()), model(X.double()))


def test_the_model_is_as_it_was() -> None:
    class Frozen(dict[str, int]):
        def update(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("frozen")

        def __setitem__(self, *_: Any) -> None:
            raise RuntimeError("frozen")

    def body(self: Any, x: Tensor) -> Tensor:
        self.last = x.shape
        return self.run(self.embed(x)) * self.config["scale"]

    def make() -> nn.Module:
        model: Any = Net(body)
        model.config = Frozen(scale=3)
        return model

    model = make()
    before = dict(vars(model))
    tl.split.by_names(model, ["blocks.1"], example=(X,))
    assert vars(model) == before
    assert model.config == {"scale": 3}
    require_same(make, X)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_and_wrapped_units() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def make() -> nn.Module:
        model: Any = Net(lambda self, x: self.head(self.run(self.embed(x))))
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
        return model

    require_same(make, X)


def test_units_with_adapters() -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft")

    def make() -> nn.Module:
        model = Net(lambda self, x: self.head(self.run(self.embed(x))))
        config = peft.LoraConfig(r=2, target_modules=["0", "1", "2"], init_lora_weights=False)
        torch.manual_seed(1)
        peft.inject_adapter_in_model(config, model)
        return model

    require_same(make, X)


def test_a_scaled_loss_under_autocast() -> None:
    found: list[dict[str, Tensor]] = []
    for cuts in ([], ["blocks.1"]):
        model = Net(lambda self, x: self.head(self.run(self.embed(x)) * self.scale))
        run = tl.split.by_names(model, cuts, example=(X,)) if cuts else model
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(X).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append({name: p.detach() for name, p in model.named_parameters()})
    for name, right in found[0].items():
        assert torch.equal(found[1][name], right), name


def test_a_hook_that_keeps_outputs_for_the_forward() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        self.kept.clear()
        x = self.run(self.embed(x))
        return self.head(x + self.kept[0] * self.kept[2])

    def make() -> nn.Module:
        model: Any = Net(body)
        model.kept = {}
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(
                lambda _, __, output, number=number: model.kept.__setitem__(number, output)
            )
        return model

    refused(make, r"a hook of 'blocks\.0' refers to the model, .* in an attribute of its own", X)


class Clamps(nn.Linear):
    """Keeps its weight in bounds."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.3, 0.3)
        return super().forward(input)


class Hooking(nn.Module):
    """Adds up what is inside of it, with hooks that its first call registers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.found: list[Any] = []
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in () if self.hooked else self.layers:
            layer.register_forward_hook(lambda _, __, output: self.found.append(output))
        self.hooked = True
        for layer in self.layers:
            x = layer(x)
        found, self.found = self.found, []
        return x + sum(found)


def test_units_that_register_hooks_in_their_first_call() -> None:
    require_same(lambda: Net(lambda self, x: self.run(self.embed(x)), Hooking), X)


def test_micro_batches_under_way_need_their_weights() -> None:
    pipe = tl.Pipeline(
        [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Clamps())],
        ranks=2,
        microbatches=2,
        loss_fn=squares,
        schedule="gpipe",
    )
    with pytest.raises(tl.StageError, match=r"under way at once: .* change weights after step"):
        pipe.step(torch.cat([X, X]), target=torch.cat([X, X]))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("body", [masks, one_checkpoint], ids=lambda body: body.__name__)
def test_a_pipeline_runs_the_pieces(body: Body, schedule: str) -> None:
    cuts = ["blocks.1"] if schedule == "1f1b" else ["blocks.0", "blocks.1", "blocks.2"]
    inputs, targets = torch.cat([X, X * 2]), torch.ones(4, 2)

    model, plain = Net(body), Net(body)
    pieces = tl.split.by_names(model, cuts, example=(X,))
    pipe = tl.Pipeline(pieces, ranks=2, schedule=schedule, microbatches=2, loss_fn=squares)
    pipe.step(inputs, target=targets)
    for x, target in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        (squares(plain(x), target) / 2).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    right = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        assert torch.equal(found[name], gradient), name


# What is refused, by name


def asks_activation(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    if x.sum() > 0:
        x = x * 2
    return self.run(x)


def reads_sizes_of_activations(self: Any, x: Tensor) -> Tensor:
    x = self.blocks[0](self.embed(x))
    x = x[x[:, 0] > 0]
    return self.blocks[2](self.blocks[1](x)) / len(x)


def counts(self: Any, x: Tensor) -> Tensor:
    self.count = getattr(self, "count", 0) + 1
    return self.run(self.embed(x)) * self.count


def numpy_number(self: Any, x: Tensor) -> Tensor:
    return self.run(self.embed(x)) + np.random.rand()


_OWN = torch.Generator()


def clock(self: Any, x: Tensor) -> Tensor:
    return self.run(self.embed(x)) * time.perf_counter()


def layer_drop(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        if torch.rand(()) > 0.01:
            x = block(x)
    return x


def earlier_call(self: Any, x: Tensor) -> Tensor:
    x = self.run(self.embed(x) + getattr(self, "memory", 0))
    self.memory = x.detach()
    return x


def buffer_of_two_stages(self: Any, x: Tensor) -> Tensor:
    x = self.blocks[1](self.blocks[0](self.embed(x)))
    self.shift.add_(x.detach().mean(0))
    return self.blocks[2](x) + self.shift


def view_and_base(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x) * 1.0
    view = x[0]
    y = self.blocks[0](x)
    y = self.blocks[1](y)
    view.mul_(2)
    return self.blocks[2](y + x)


def makes_a_generator(self: Any, x: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(3)
    return self.run(self.embed(x) * torch.rand(2, 4, generator=own))


def seeds_a_generator(self: Any, x: Tensor) -> Tensor:
    _OWN.manual_seed(3)
    return self.run(self.embed(x) * torch.rand(2, 4, generator=_OWN))


def seeds_between(self: Any, x: Tensor) -> Tensor:
    x = self.blocks[0](self.embed(x)) * torch.rand(2, 4, generator=_OWN)
    _OWN.manual_seed(3)
    x = self.blocks[1](x) * torch.rand(2, 4, generator=_OWN)
    return self.blocks[2](x)


def a_mask_by_keyword(self: Any, x: Tensor) -> Tensor:
    mask = x < 0
    return self.run(self.embed(x)) + self.embed(x).masked_select(mask=mask).sum()


def gradient_of_blocks(self: Any, x: Tensor) -> Tensor:
    begin = self.embed(x)
    x = self.blocks[1](self.blocks[0](begin)) + begin
    (slope,) = torch.autograd.grad((x + begin).square().sum(), begin, create_graph=True)
    return self.blocks[2](x + slope)


def gradient_of_a_weight(self: Any, x: Tensor) -> Tensor:
    x = self.run(self.embed(x) * self.scale) * self.scale
    (slope,) = torch.autograd.grad(x.square().sum(), self.scale, create_graph=True)
    return x + slope


def in_vmap(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    return self.blocks[2](self.blocks[1](torch.vmap(self.blocks[0])(x)))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            asks_activation,
            HERE + r".* needs the data of a value that submodules",
        ),
        (sizes_of_activations, HERE + r": bincount needs the data of a value"),
        (a_mask_by_keyword, HERE + r": masked_select needs the data of a value"),
        (reads_sizes_of_activations, HERE + r": __getitem__ needs the data of a value"),
        (counts, r"changes its attribute 'count' in each call"),
        (numpy_number, HERE + r" does something else in each call"),
        (clock, HERE + r" does something else in each call"),
        (layer_drop, HERE + r" reads .* a random number, .*\(a layerdrop of 0"),
        (earlier_call, HERE + r" uses a tensor that .* in an earlier call"),
        (
            buffer_of_two_stages,
            HERE + r" changes 'shift', which stages \[1, 2\] use",
        ),
        (
            view_and_base,
            HERE + r" changes a value in place in stage 1.* view of it",
        ),
        (gradient_of_blocks, HERE + r" asks for gradients in stage 1, of what stage 0 has made"),
        (gradient_of_a_weight, HERE + r" asks for gradients in stage 2, of what stage 0 has made"),
        (in_vmap, HERE + r".*torch.vmap"),
        (makes_a_generator, HERE + r" comes after the forward has made or seeded a generator"),
        (seeds_a_generator, HERE + r" comes after the forward has made or seeded a generator"),
        (seeds_between, HERE + r" comes after the forward has made or seeded a generator"),
        (calls_forward, r"does not call 'blocks\.1', .* block\(x\), not block\.forward\(x\)"),
    ],
    ids=lambda each: getattr(each, "__name__", "text"),
)
def test_what_is_refused(body: Body, text: str) -> None:
    refused(lambda: Net(body), text, X)


def test_a_generator_of_its_own_is_used_once() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        noise = torch.rand(2, 4, generator=_OWN)
        x = self.blocks[0](self.embed(x)) * noise
        return self.blocks[2](self.blocks[1](x) * noise)

    model = Net(body)
    _OWN.manual_seed(1)
    pieces = tl.split.by_names(model, ["blocks.1"], example=(X,))
    found = [pieces(X) for _ in range(2)]
    _OWN.manual_seed(1)
    assert all(map(torch.equal, found, [model(X) for _ in range(2)]))


def test_a_parameter_inside_of_a_submodule_without_an_example() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.run(self.embed(x)) @ self.embed.weight

    pieces = tl.split.by_names(Net(body), ["blocks.1"])
    with pytest.raises(PartitionError, match=r"'embed\.weight' in stage 1, but .* pass example="):
        pieces(X)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torch_script() -> None:
    model = Net(lambda self, x: self.run(x), lambda: cast(nn.Module, torch.jit.script(nn.ReLU())))
    with pytest.raises(PartitionError, match=r"'blocks\.0' is a module of TorchScript"):
        tl.split.by_names(model, ["blocks.1"], example=(X,))


def test_an_error_is_the_users_own() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.run(self.embed(x)[:, :3])

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        tl.split.by_names(Net(body), ["blocks.1"], example=(X,))


def test_sizes_that_are_tensors() -> None:
    def body(self: Any, x: Tensor, size: Tensor) -> Tensor:
        image = (self.embed.weight * self.scale)[None, None]
        sizes: Any = tuple(size)
        grown = F.interpolate(image, size=sizes)
        return self.blocks[2](self.blocks[1](x)) * grown.sum()

    model, plain = Net(body), Net(body)
    pieces = tl.split.by_names(model, ["blocks.2"], example=(X, torch.tensor([6, 8])))
    for size in ([6, 8], [3, 5], [6, 8]):
        assert torch.equal(pieces(X, torch.tensor(size)), plain(X, torch.tensor(size)))
