"""Programs as torch's documentation describes them, importing what they would import."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from taktline.compat import install
from tests.compat.programs import wrapped
from tests.workers import Workers

pytestmark = pytest.mark.processes

VOCABULARY, WIDTH, LAYERS, CHUNKS = 32, 16, 4, 4


class Transformer(nn.Module):
    """A model whose forward skips what was cut off: what another stage has."""

    def __init__(self, keep: range = range(LAYERS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        embeddings, output = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        layers = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self.tok_embeddings = embeddings if 0 in keep else None
        self.layers = nn.ModuleDict({str(number): layers[number] for number in keep})
        self.output = output if LAYERS - 1 in keep else None

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = torch.tanh(layer(h))
        return self.output(h) if self.output else h


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, VOCABULARY, (2, 8, 5), generator=generator)
    return x, y


def tokenwise_loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1))


def check(modules: list[nn.Module]) -> None:
    """Compare the gradients with those of the whole model."""
    model, (x, y) = Transformer(), make_batch()
    tokenwise_loss_fn(model(x), y).backward()
    expected = dict(model.named_parameters())
    for module in modules:
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad)


def _by_hand(rank: int, group: dist.ProcessGroup) -> None:
    install()
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    half = LAYERS // 2
    model = Transformer(range(rank * half, (rank + 1) * half))
    stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=CHUNKS, loss_fn=tokenwise_loss_fn)
    x, y = make_batch()
    losses: list[Tensor] = []
    if rank == 0:
        assert schedule.step(x) is None
    else:
        output = schedule.step(target=y, losses=losses)
        torch.testing.assert_close(output, Transformer()(x))
        assert len(losses) == CHUNKS
    check([model])


def _traced(rank: int, group: dist.ProcessGroup) -> None:
    install()
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

    x, y = make_batch()
    pipe = pipeline(
        module=Transformer(),
        mb_args=(x.chunk(CHUNKS)[0],),
        split_spec={"layers.2": SplitPoint.BEGINNING},
    )
    assert pipe.num_stages == 2
    stage = pipe.build_stage(rank, torch.device("cpu"), group)
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=tokenwise_loss_fn)
    if rank == 0:
        schedule.step(x)
    else:
        torch.testing.assert_close(schedule.step(target=y), Transformer()(x))
    check([stage.submod])
    # A stage whose method somebody wraps goes call by call, traced or not.
    pipe.get_stage_module(rank).zero_grad()
    wrapped(stage)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)
    check([stage.submod])
    assert not schedule._on_ours  # pyright: ignore


@pytest.mark.parametrize("program", [_by_hand, _traced])
def test_programs(clients: Workers, program: object) -> None:
    clients.run(program)  # pyright: ignore[reportArgumentType]
