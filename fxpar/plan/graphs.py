"""What of a step is replayed as CUDA graphs.

Enters: nothing. Leaves: `CudaGraphs`, part of a plan. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from fxpar.errors import shown

IMPLEMENTATIONS = ("none", "partial", "transformer_engine", "full_iteration")
SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess")

_MOST_VARIANTS = 10000


@dataclass(frozen=True)
class CudaGraphs:
    """CUDA graphs: kernels of a step are recorded once and launched together, so that the host is out of the way.

    Attributes:
        impl: `none`; `partial`, a graph for each region that can be captured, forward and backward (`fxpar regions`
            lists them); `transformer_engine`, the forward and the backward captured by its `make_graphed_callables`,
            where nothing in them ends a graph;
            `full_iteration`, forward and backward of all microbatches of a `train_step`, and the reductions of
            gradients, in one graph.
        scope: of `partial`, the parts of layers that are captured: `attn` (norm, attention and the residual sum), `mlp`
            (norm, MLP and its sum); all that can be, where none is named.
        variants: graphs that are kept at most, one for each set of shapes, addresses and modes. A call that would need
            another one is refused.
    """

    impl: str = "none"
    scope: tuple[str, ...] = ()
    variants: int = 16

    def __post_init__(self) -> None:
        if isinstance(self.scope, (list, tuple)) and all(isinstance(name, str) for name in self.scope):
            object.__setattr__(self, "scope", tuple(sorted(set(self.scope))))

    @property
    def is_on(self) -> bool:
        """Whether anything is captured."""
        return self.impl != "none"

    def problems(self) -> Iterator[str]:
        """What is wrong with the values."""
        if self.impl not in IMPLEMENTATIONS:
            yield f"cuda_graphs.impl={shown(self.impl)} is unknown: choose one of {', '.join(IMPLEMENTATIONS)}"
        if type(self.variants) is not int or not 1 <= self.variants <= _MOST_VARIANTS:
            yield f"cuda_graphs.variants={shown(self.variants)} is no number of graphs: give one from 1 on"
        yield from self._wrong_scope()

    def _wrong_scope(self) -> Iterator[str]:
        if not isinstance(self.scope, tuple):
            yield f"cuda_graphs.scope={shown(self.scope)} is no list: write names of {', '.join(SCOPES)}"
            return
        for name in self.scope:
            if name not in SCOPES:
                yield f"cuda_graphs.scope has {shown(name)}: choose from {', '.join(SCOPES)}"
        if self.scope and self.impl != "partial":
            yield f"cuda_graphs.scope is of impl partial, and not of {shown(self.impl)}"
        if "moe_preprocess" in self.scope and "moe_router" not in self.scope:
            yield "cuda_graphs.scope has moe_preprocess, which needs moe_router: name both"
        if "moe" in self.scope and {"moe_router", "moe_preprocess"} & set(self.scope):
            yield "cuda_graphs.scope has moe, which holds moe_router and moe_preprocess: name one or the others"

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, in plain values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["scope"] = list(self.scope)
        usual: dict[str, Any] = {**{entry.name: entry.default for entry in fields(self)}, "scope": []}
        return {name: value for name, value in values.items() if value != usual[name]}
