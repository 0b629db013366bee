"""Models without memory: the program is that of the model with memory, constants included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from fxpar.capture.capture import Captured, capture
from fxpar.cli.models import load_model
from fxpar.errors import CaptureError
from fxpar.manager import PassManager
from fxpar.passes.canonicalize import canonicalize
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verify.values import check_capture
from tests.capture.models import Net, example, seeded
from tests.products import few
from tests.zoo import CASES


def canonical_text(captured: Captured) -> str:
    return print_program(PassManager([canonicalize]).run(captured.program))


def on_meta(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to("meta"), values)


@pytest.mark.parametrize("name", few(CASES, ["encoder"]))
def test_the_text_is_that_of_the_model_with_memory(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = case.build().train()
    batch = case.example()
    found = canonical_text(capture(model, on_meta(batch), loss=case.loss))
    assert found == canonical_text(capture(case.model(), batch, loss=case.loss))
    assert all(p.is_meta for p in model.parameters())


class Constants(Net):
    """Constants made in every way, on the device of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.attribute = torch.arange(6.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        listed = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], device=x.device, dtype=x.dtype)
        filled = torch.zeros(6, device=x.device, dtype=x.dtype)
        filled[2] = torch.tensor(7.0, dtype=x.dtype)
        h = self.up(x) * listed * x.new_tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) + filled
        return self.down(h + torch.arange(6) + self.attribute).sum()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_constants_keep_their_values(device: str) -> None:
    model = seeded(Constants)
    wanted = capture(model, example())
    found = capture(model.to("meta"), example().to(device))
    assert found.program.constants.keys() == wanted.program.constants.keys()
    for name, value in wanted.program.constants.items():
        torch.testing.assert_close(found.program.constants[name], value)
    assert canonical_text(found) == canonical_text(wanted)


def test_a_tensor_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Constants()
    with pytest.raises(CaptureError, match=r"attribute: a tensor of the meta device .*register it as a buffer"):
        capture(model, example().to("meta"))


class Lost(Net):
    """A value that is computed where the trace does not look, as torch loses one where a thread walks its frames."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Any:
        with disable_proxy_modes_tracing():
            places = torch.arange(self.size or x.shape[0])
        return (self.up(x).sum(-1) + places).sum()


@pytest.mark.parametrize("size", [None, 4])
def test_a_value_that_the_trace_lost_is_refused_where_it_is_read(size: int | None) -> None:
    model = Lost(size).to("meta")
    with pytest.raises(CaptureError, match=r"test_meta.py:\d+: reads a value .* the trace lost.*sys._current_frames"):
        capture(model, torch.zeros(4, example().shape[-1], device="cpu", dtype=example().dtype))


class Kin(nn.Module):
    """Tied weights, frozen weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return (self.second(self.first(x)) * self.scale).sum()


def test_names_ties_and_flags_are_kept_and_the_model_is_untouched() -> None:
    with torch.device("meta"):
        model = Kin()
    before = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    captured = capture(model, torch.ones(3, 4, device="meta"))
    found = {p.fqn: (p.kind, p.trainable, p.tied) for p in captured.program.parameters}
    assert found == {
        "first.weight": ("parameter", True, ("second.weight",)),
        "first.bias": ("parameter", True, ()),
        "second.bias": ("parameter", False, ()),
        "scale": ("buffer", False, ()),
    }
    assert before == {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}


# A model that lies on a GPU is compared with its capture there, though it is traced without memory.


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_on_a_gpu_is_its_capture(name: str) -> None:
    found = load_model(f"hf:{name}", None, None, 0, True)
    captured = capture(found.model, found.batch, Plan(), found.loss)
    check_capture(captured, found.model.cuda(), found.batch)


def test_a_program_says_nothing_of_the_device_of_its_trace() -> None:
    found = load_model("hf:gpt2", None, None, 0, True)
    graph = capture(found.model, found.batch, Plan(), found.loss).program.graph
    asserted = [n for n in graph.nodes if n.target is torch.ops.aten._assert_tensor_metadata.default]
    assert all("device" not in node.kwargs for node in asserted)
