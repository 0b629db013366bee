"""Stages of a pipeline that Transformer Engine captures, on its double: the same bits, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpar
from fxpar.errors import InputError, PlanError, ScheduleError
from fxpar.pipeline.compiler.builtin_schedules import build_schedule, schedule_of
from fxpar.pipeline.compiler.schedules import from_arrays, order_array, parse_schedule, print_schedule
from tests.cudagraphs import engine, stages
from tests.products import few
from tests.runtime.world import World

ENGINE = fxpar.CudaGraphs("transformer_engine")
INTERLEAVED = {"pp": 2, "virtual_stages": 2, "microbatches": 4}
# Two chunks and three microbatches, on both ranks.
ORDER = [1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1]


@dataclass(frozen=True)
class Captured:
    """A training on the double beside the one without graphs.

    Attributes:
        compared: what both left.
        orders: what was captured, of each variant.
        inputs: how many samples there were without those that have the memory of others, of each variant.
        bytes: of the tensors in these.
    """

    compared: stages.Compared
    orders: list[list[int] | None]
    inputs: list[int]
    bytes: int


def capture(counts: Sequence[int], plan: dict[str, Any], **more: Any) -> Captured:
    """Trains on each rank.

    Args:
        counts: of microbatches, of each step.
        more: of `stages.compare`.
    """
    engine.SEEN = engine.Calls()
    with pytest.MonkeyPatch.context() as patch:
        engine.install(patch)
        compared = stages.compare(counts, plan, impl="transformer_engine", **more)
    samples = engine.SEEN.samples
    tensors = {id(value): value for of_variant in samples for sample in of_variant for value in sample}
    size = sum(value.nbytes for value in tensors.values() if not value.requires_grad)
    inputs = [len({id(sample) for sample in of_variant}) for of_variant in samples]
    return Captured(compared, engine.SEEN.orders, inputs, size)


@pytest.mark.parametrize("plan", few([{"pp": 2}, INTERLEAVED], [INTERLEAVED]), ids=["1f1b", "interleaved_1f1b"])
def test_stages_are_captured_in_the_order_of_their_schedule(world2: World, plan: dict[str, Any]) -> None:
    chunks = plan.get("virtual_stages", 1)
    for rank, captured in enumerate(world2.run(capture, (4, 4, 6, 4, 6), plan)):
        proofs = [schedule_of(fxpar.Plan(**plan), count) for count in (4, 6)]
        assert captured.compared.is_equal
        assert captured.orders == [order_array(proof.schedule, rank) for proof in proofs]
        # Of different stages shapes are different: the first has words, and the last labels.
        assert captured.inputs == [sum(proof.slots[rank]) for proof in proofs]
        assert captured.compared.graphs == [2 * chunks * count for count in (4, 4, 10, 10, 10)]
        figures = captured.compared.figures
        assert (figures.variants, figures.static_bytes) == (2, captured.bytes)


def test_an_order_of_two_chunks_is_captured_as_it_is(world2: World, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(print_schedule(from_arrays([ORDER, ORDER], virtual_stages=2, microbatches=3)))
    plan = {"pp": 2, "virtual_stages": 2, "microbatches": 3, "schedule": str(path)}
    for captured in world2.run(capture, (3, 3, 3), plan):
        assert captured.compared.is_equal
        assert captured.orders == [ORDER]
        assert captured.inputs == [4]


# By ranks and chunks of a rank, how many inputs each rank has, of eight layers in all (SPEC section 5).
INPUTS = {(1, 1): [8], (2, 1): [8, 4], (4, 1): [8, 6, 4, 2], (2, 2): [10, 6], (4, 2): [11, 9, 7, 5]}


@pytest.mark.parametrize("microbatches", [16, 64, 256])
@pytest.mark.parametrize("sizes", INPUTS, ids=str)
def test_inputs_are_as_many_as_are_in_flight_at_once(sizes: tuple[int, int], microbatches: int) -> None:
    pp, chunks = sizes
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    schedule = build_schedule(name, pp=pp, virtual_stages=chunks, microbatches=microbatches)
    layers = [8 // pp // chunks] * chunks
    inputs = []
    for rank in range(pp):
        samples: list[engine.Sample] = [(torch.empty(2),) for _ in range(sum(layers) * microbatches)]
        engine.share(samples, [int(number) for number in order_array(schedule, rank)], layers)
        inputs.append(len({id(sample) for sample in samples}))
    assert inputs == INPUTS[sizes]


class Scaled(nn.Module):
    """Multiplies by a weight, whose gradient is that of a handle."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.tanh(self.linear(x)),)


def test_the_double_spoils_what_transformer_engine_takes_again() -> None:
    modules = (Scaled(), Scaled())
    samples = [(torch.randn(2, 3, requires_grad=True),) for _ in range(6)]
    make: Callable[..., Any] = engine.make_graphed_callables
    options = {"_num_layers_per_chunk": [1, 1], "_reuse_graph_input_output_buffers": True}
    graphed = make(modules, samples, allow_unused_input=True, _order=ORDER, **options)
    started, ends, gradients = [0, 0], list[Any](), list[tuple[Tensor, Tensor]]()
    for number in ORDER:
        chunk = abs(number) - 1
        if number > 0:
            x = torch.randn(2, 3, requires_grad=True)
            (y,) = graphed[chunk * 3 + started[chunk]](x)
            started[chunk] += 1
            assert torch.equal(y, modules[chunk](x)[0])
            ends.append((chunk, x, y))
        else:
            flight = next(flight for flight in ends if flight[0] == chunk)
            ends.remove(flight)
            _, x, y = flight
            (gradient,) = torch.autograd.grad([y], [x], [torch.ones_like(y)])
            (expected,) = torch.autograd.grad([modules[chunk](x)[0]], [x], [torch.ones_like(y)])
            assert torch.equal(gradient, expected)
            assert bool(y.isnan().all())
            gradients.append((gradient, expected))
            assert not any(torch.equal(early, known) for early, known in gradients[:-1])


def test_wrong_orders_and_counts_are_refused_by_the_double() -> None:
    samples = [(torch.randn(2, 3),) for _ in range(4)]
    options: dict[str, Any] = {"allow_unused_input": True, "_num_layers_per_chunk": [1]}
    make: Callable[..., Any] = engine.make_graphed_callables
    for order in ([1, 1, -1], [-1, 1], [1, -1, 1, 1]):
        with pytest.raises(ValueError, match=r"."):
            make((Scaled(),), samples[: len(order) // 2], _order=order, **options)
    with pytest.raises(ValueError, match="3 samples"):
        make((Scaled(),), samples[:3], _order=[1, 1, -1, -1], **options)


class Turned(stages.Deep):
    """Sends what is transposed in its memory, and has weights whose gradients are."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            y = nn.functional.linear(x, layer.weight.t(), layer.bias)
            x = (x + self.drop(torch.tanh(y))).transpose(0, 1)
        x = x.transpose(0, 1)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def test_what_is_transposed_in_its_memory_keeps_its_order(world2: World) -> None:
    for captured in world2.run(partial(capture, build=Turned), (4, 4, 4), INTERLEAVED):
        assert captured.compared.is_equal


def bare() -> stages.Deep:
    """A model whose first stage leaves nothing but gradients that products add up."""
    model = stages.Deep()
    model.words.requires_grad_(False)
    for layer in model.layers:
        layer.register_parameter("bias", None)
    return model


def test_a_stage_all_of_whose_gradients_are_added_up_in_place_is_captured(world2: World) -> None:
    for captured in world2.run(partial(capture, build=bare), (3, 3, 3), {"pp": 2}):
        assert captured.compared.is_equal
        assert captured.compared.graphs == [6, 6, 6]


def doubled() -> tuple[str, bool]:
    """What is said of a model in float64, and whether its weights are as they were."""
    with pytest.MonkeyPatch.context() as patch:
        engine.install(patch)
        (batch,) = stages.microbatches([2])
        model = fxpar.parallelize(stages.Deep().double().train(), fxpar.Plan(pp=2, cuda_graphs=ENGINE), batch[0])
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(InputError) as caught:
            model.train_step(batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        are_same = all(map(torch.equal, weights, model.parameters()))
        model.close()
    return caught.value.reason, are_same


def test_types_that_it_does_not_know_are_refused(world2: World) -> None:
    said = "Transformer Engine captures no pipeline whose gradients are torch.float64"
    assert world2.run(doubled) == [(said, True)] * 2


def hooked() -> list[list[int] | None]:
    """What is captured after a first step that a user's hook has failed."""
    engine.SEEN, fails = engine.Calls(), [True]

    def hook(_: Tensor) -> None:
        if fails.pop():
            raise InputError("fails", where="hook", remedy="none")

    with pytest.MonkeyPatch.context() as patch:
        engine.install(patch)
        (batch,) = stages.microbatches([2])
        model = fxpar.parallelize(stages.Deep().train(), fxpar.Plan(pp=2, cuda_graphs=ENGINE), batch[0])
        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in model.parameters()]
        with pytest.raises(InputError, match="hook"):
            model.train_step(batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for handle in handles:
            handle.remove()
        model.train_step(batch)
        model.close()
    return engine.SEEN.orders


def test_a_first_step_that_has_failed_is_forgotten(world2: World) -> None:
    assert world2.run(hooked) == [[[1, 1, -1, -1]], [[1, -1, 1, -1]]]


def test_tied_weights_and_evaluations_change_no_bit(world2: World) -> None:
    for captured in world2.run(partial(capture, build=stages.tied, evaluate=3), (4, 4, 4), {"pp": 2}):
        assert captured.compared.is_equal
        assert captured.compared.figures.variants == 2


MORE: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 2, "virtual_stages": 2, "schedule": "gpipe"},
    {**INTERLEAVED, "compile": True},
    {**INTERLEAVED, "precision": "bf16"},
    {"pp": 2, "inside": True},
    {"pp": 2, "every": 2, "set_to_none": False},
    {"pp": 2, "build": stages.frozen},
]


@pytest.mark.matrix
@pytest.mark.parametrize("options", MORE, ids=str)
def test_schedules_and_options_change_no_bit(world2: World, options: dict[str, Any]) -> None:
    training = {name: options[name] for name in ("inside", "every", "set_to_none", "build") if name in options}
    plan = {name: option for name, option in options.items() if name not in training}
    for captured in world2.run(partial(capture, **training), (4, 4, 6, 4), plan):
        assert captured.compared.is_equal
        assert captured.compared.graphs[1] >= 8


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"tp": 2}, {"dp": 2}, {"dp": 2, "virtual_stages": 2}], ids=str)
def test_ranks_that_share_a_stage_replay_together(world4: World, options: dict[str, Any]) -> None:
    for captured in world4.run(capture, (4, 4, 4), {"pp": 2, "microbatches": 4, **options}):
        assert captured.compared.is_equal
        assert captured.compared.graphs[0] >= 8


def refused() -> tuple[list[str], bool]:
    """What is said of microbatches of two lengths, and of a number of them too many; whether steps stay the same."""
    losses: list[list[float]] = []
    reasons: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        engine.install(patch)
        for graphs in (fxpar.CudaGraphs(), fxpar.CudaGraphs("transformer_engine", variants=1)):
            torch.manual_seed(0)
            steps = stages.microbatches([4] * 3)
            model = fxpar.parallelize(stages.Deep().train(), fxpar.Plan(pp=2, cuda_graphs=graphs), steps[0][0])
            losses.append([])
            for batch in steps:
                losses[-1].append(float(model.train_step(batch)))
                shorter = {name: value[:, :3] for name, value in batch[-1].items()}
                for wrong in ([*batch[:-1], shorter], batch[:-1]) if graphs.is_on else ():
                    with pytest.raises(InputError) as caught:
                        model.train_step(wrong)
                    reasons.append(f"{caught.value.where}: {caught.value.reason}")
            model.close()
    return reasons, losses[0] == losses[1]


def test_microbatches_that_differ_are_refused_in_front_of_the_schedule(world2: World) -> None:
    for reasons, is_equal in world2.run(refused):
        assert is_equal
        for lengths, count in zip(reasons[::2], reasons[1::2], strict=True):
            assert "microbatch 3: differs from another microbatch of the step in shapes" in lengths
            assert "has 1 variants of graphs" in count


@pytest.mark.parametrize("schedule", ["zb_h1", "zbv"])
def test_schedules_that_split_backwards_are_refused_by_name(schedule: str) -> None:
    with pytest.raises(PlanError, match=rf"schedule='{schedule}' splits backwards"):
        fxpar.Plan(pp=2, virtual_stages=2, schedule=schedule, cuda_graphs=ENGINE)


FILES = {
    "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n": "splits backwards",
    "0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n": "rank 0 runs the backwards of stage 0 in another order than its forwards",
}


@pytest.mark.parametrize(("text", "reason"), FILES.items())
def test_files_that_it_cannot_capture_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    parse_schedule(text)
    path = tmp_path / "order.csv"
    path.write_text(text)
    plan = fxpar.Plan(pp=2, microbatches=2, schedule=str(path), cuda_graphs=ENGINE)
    with pytest.raises(ScheduleError, match=reason):
        schedule_of(plan, 2)
    assert schedule_of(plan.replace(cuda_graphs=fxpar.CudaGraphs("partial")), 2).schedule.pp == 2
