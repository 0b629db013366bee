"""A model that lies on a GPU is compared with its capture there, though it is traced without memory."""

import pytest
import torch

from fxpar.capture.capture import capture
from fxpar.cli.models import load_model
from fxpar.plan.plan import Plan
from fxpar.verify.values import check_capture


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
