"""Sample calls of the operators of routed rows, alone and in groups.

Enters: a `Draw`. Leaves: samples by name. Counts are so small that any order of them fits the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpar.ops.permute import sort_by_expert
from fxpar.oracle.ranks import sample
from fxpar.oracle.samples import Draw, Samples


def _sorted(d: Draw, experts: int, *lead: int) -> tuple[Tensor, Tensor]:
    """An order of rows, and how many each expert has."""
    return sort_by_expert(d.i(experts, *lead, 4, 2), experts)  # type: ignore[no-any-return]


def routed(d: Draw) -> dict[str, Samples]:
    """Rows and experts' matrices: one group, groups with experts of their own, and groups that share experts."""
    a, b, i, o = (6, 6, 6, 12) if d.even else d.sizes(4)
    experts, rows, tokens, k = 3, 7, 4, 2
    order = torch.stack([torch.tensor([5, 0, -1, 7, 2, 3, 6]).roll(shift) for shift in range(a * b)]).view(a, b, rows)
    counts = (d.i(3, a, b, experts) + torch.tensor([0, 1, 0])).clamp_max(2)
    one = torch.tensor([2, 0, 3])
    x, y = d.normal(a, b, rows, i), d.normal(a, b, rows, o)
    by_name: dict[str, Samples] = {
        "sort_by_expert": [sample(d.i(experts, tokens, k), experts), sample(d.i(experts, a, b, tokens, k), experts)],
        "moe_permute": [
            sample(d.normal(tokens, i), order[0, 0], k),
            sample(d.normal(a, tokens, i), order[:, 0], k),
            sample(d.normal(tokens, i), torch.tensor([5, 0, -1, 7, 2, 3]), k),
        ],
        "moe_unpermute": [
            sample(x[0, 0], order[0, 0], tokens, k),
            sample(x[:, 0], order[:, 0], tokens, k),
            sample(d.normal(6, i), torch.tensor([5, 0, -1, 7, 2, 3]), tokens, k),
        ],
        "moe_combine": [
            sample(x[0, 0], d.normal(tokens, k), order[0, 0], torch.float64),
            sample(x[:, 0], d.normal(a, tokens, k), order[:, 0], torch.float64),
        ],
        "take_weighed": [
            sample(d.normal(tokens, i), d.normal(tokens, k), order[0, 0], torch.float64),
            sample(d.normal(a, tokens, i), d.normal(a, tokens, k), order[:, 0], torch.float64),
            sample(d.normal(tokens, i), d.normal(tokens, k), torch.tensor([5, 0, -1, 7, 2, 3]), torch.float64),
        ],
        "dot_rows": [
            sample(d.normal(tokens, i), x[0, 0], order[0, 0], k, torch.float64),
            sample(d.normal(a, tokens, i), x[:, 0], order[:, 0], k, torch.float64),
        ],
        "swiglu_rows": [
            sample(d.normal(rows, 2, i), one),
            sample(d.normal(a, b, rows, 2, i), counts),
        ],
        "swiglu_gradient": [
            sample(x[0, 0], d.normal(rows, 2, i), one),
            sample(x, d.normal(a, b, rows, 2, i), counts),
        ],
        "grouped_linear": [
            sample(x[0, 0], d.normal(experts, o, i), one, False),
            sample(x[0, 0], d.normal(experts, i, o), one, True),
            sample(x[:, 0], d.normal(experts, o, i), counts[:, 0], False),
            sample(x, d.normal(b, experts, i, o), counts, True),
        ],
        "grouped_outer": [
            sample(y[0, 0], x[0, 0], one, 0),
            sample(y[:, 0], x[:, 0], counts[:, 0], 0),
            sample(y, x, counts, 1),
        ],
        "expand_by_expert": [
            sample(d.normal(experts, o), one, rows),
            sample(d.normal(experts, o), counts[:, 0], rows),
            sample(d.normal(b, experts, o), counts, rows),
        ],
        "sum_by_expert": [
            sample(y[0, 0], one, 0),
            sample(y[:, 0], counts[:, 0], 0),
            sample(y, counts, 1),
        ],
        "drop_by_position": [
            sample(d.i(experts, tokens, k), experts, 2),
            sample(d.i(experts, a, b, tokens, k), experts, 2),
        ],
        "drop_by_probability": [
            sample(d.i(experts, tokens, k), d.normal(tokens, k), experts, 2),
            sample(d.i(experts, a, b, tokens, k), d.normal(a, b, tokens, k), experts, 2),
        ],
        "group_sizes": [sample(one.cumsum(0)), sample(counts.cumsum(-1))],
        "dispatch_indices": [sample(*_sorted(d, experts + 1, a), 2, 7), sample(*_sorted(d, experts + 1, a, b), 2, 7)],
        "block_excess": [sample(d.i(5, a, 4), 2, 3), sample(d.i(5, a, b, 4), 2, 3)],
        "received_order": [sample(d.i(3, a, 2, experts), 7), sample(d.i(3, a, b, 2, experts), 7)],
        "arrived_order": [sample(d.i(3, a, 2, experts), 14), sample(d.i(3, a, b, 2, experts), 14)],
        "resize_rows": [sample(x, rows + 2, 0), sample(x, rows - 3, 0), sample(x[0, 0], rows + 1, 0)],
    }
    return {f"fxpar.{name}.default": samples for name, samples in by_name.items()}
