"""Unusual models: each is captured with its own values and gradients, or refused for the true reason."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch

from fxpar.capture.capture import capture
from fxpar.capture.recording import NAMESPACE
from fxpar.errors import InputError
from fxpar.verify import faithful as values
from tests.capture.models import agree, example, net
from tests.capture.unusual import MODELS


def process() -> dict[str, Any]:
    """What a capture could leave behind."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "enabled": torch.is_grad_enabled(),
        "profile": sys.getprofile(),
        "apply": torch.autograd.function._SingleLevelFunction.__dict__.get("apply"),
        "modes": torch._C._len_torch_function_stack(),
        "operators": [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)],
        "hooks": len(torch.nn.modules.module._global_backward_hooks),
    }


@pytest.mark.parametrize("name", MODELS)
def test_right_or_refused(name: str) -> None:
    forward, reason = MODELS[name]
    model = net(forward)
    attributes = [dict(vars(module)) for module in model.modules()]
    before = process()
    captured = None if reason else capture(model, example())
    if captured is not None:
        assert values.compare(captured, model, example()) == ""
    else:
        with pytest.raises(InputError, match=reason) as error:
            capture(model, example())
        assert error.value.where
        assert error.value.remedy
    assert process() == before
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert all(type(p.data) is torch.Tensor and p.grad is None for p in model.parameters())
    if captured is not None:
        agree(captured, model, example())
