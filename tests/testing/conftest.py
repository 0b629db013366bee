"""What tests of the oracles share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxpar.rules import unregister_rule


@pytest.fixture
def gated() -> Iterator[torch._ops.OpOverload]:
    """tanh(x) * scale as an operator of the user's; what a test registers for it goes with it."""
    made: Any = torch.library.Library
    library = made("fxpar_oracle_test", "DEF")
    library.define("gated(Tensor x, Tensor scale) -> Tensor")
    library.impl("gated", lambda x, scale: torch.tanh(x) * scale, "CompositeImplicitAutograd")
    yield torch.ops.fxpar_oracle_test.gated.default
    unregister_rule(torch.ops.fxpar_oracle_test.gated.default)
    library._destroy()
