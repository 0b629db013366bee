"""Sample calls of the operations that move elements: views, slices, concatenations, indexing.

Enters: a `Draw` of random sizes and values. Leaves: samples by overload name. Fused dimensions name their segments.
"""

from __future__ import annotations

from fxpar.oracle.ranks import sample
from fxpar.oracle.samples import Draw, Samples


def views(d: Draw) -> dict[str, Samples]:
    """Views and permutations: heads split and merged, fused projections, flattened batches, squeezed dimensions."""
    a, b, c = d.sizes(3)
    x = d.x(a, b, c)
    merged = [
        sample(x, [a, b * c]),
        sample(x, [a * b, c]),
        sample(x, [-1]),
        sample(d.x(a, b * c), [a, b, c]),
        sample(d.x(a * b, c), [a, b, c]),
        sample(d.x(a, 3 * b), [a, 3, b]),
        sample(d.x(a, 3, b), [a, 3 * b], segments=((b, b, b),)),
        sample(d.x(a, b, 2), [b, a, 2]),
        sample(x, [a, 1, b, c]),
        sample(d.x(a, 3 * b), [3 * a, b], segments=((2 * b, b),)),
        sample(d.x(a, 4 * b), [a, 4 * b // 2, 2], segments=((2 * b, b, b),)),
        sample(d.x(4 * b, 2), [8 * b], segments=((2 * b, b, b), (4 * b, 2 * b, 2 * b))),
    ]
    squeezed = d.x(a, 1, b)
    return {
        **dict.fromkeys(("view", "_unsafe_view", "reshape"), merged),
        "flatten.using_ints": [sample(x, 1), sample(x, 0, 1)],
        "unflatten.int": [sample(d.x(a, b * c), 1, [b, c])],
        "unsqueeze": [sample(d.x(a, b), 0), sample(d.x(a, b), -1)],
        "squeeze.dim": [sample(squeezed, 1), sample(d.x(a, b), 0), sample(d.x(2, 3), 0), sample(d.x(2, 3), 1)],
        "squeeze.dims": [sample(squeezed, [1, 2]), sample(d.x(2, 1, 3), [0, 1])],
        "squeeze": [sample(squeezed), sample(d.x(2, 1, 3))],
        "transpose.int": [sample(x, 1, 2), sample(x, 0, -1)],
        "permute": [sample(x, [2, 0, 1]), sample(x, [0, -1, 1])],
        "t": [sample(d.x(a, b)), sample(d.x(a))],
        "expand": [sample(d.x(a, 1, b), [-1, c, -1]), sample(d.x(b), [a, b]), sample(d.x(1, b), [a, 1, b])],
        "repeat": [sample(d.x(a, b), [1, 2]), sample(d.x(a, b), [2, 1, 1])],
        "tile": [sample(d.x(a, b), [3])],
        "diff": [
            sample(x),
            sample(d.x(a, b), 1, 0),
            sample(d.i(9, a, b), 1, -1, d.i(9, a, 1)),
            sample(d.x(a, b), 2, 1, d.x(a, 1), d.x(a, 3)),
            sample(d.mask(a, b)),
        ],
        "flip": [sample(x, [1]), sample(d.x(a, b), [0, 1])],
        "roll": [sample(x, [1], [1]), sample(d.x(a, b), [1])],
        "pixel_shuffle": [sample(d.x(a, 4 * b, 2, 3), 2)],
        "adaptive_avg_pool1d": [sample(x, [2])],
        "adaptive_avg_pool2d": [sample(d.x(a, b, 4, 6), [2, 3])],
        "_adaptive_avg_pool2d": [sample(d.x(a, b, 4, 6), [2, 3])],
        "pixel_unshuffle": [sample(d.x(a, b, 4, 6), 2)],
        "tril": [sample(x), sample(d.x(a, b), 1)],
        "triu": [sample(x), sample(d.x(a, b), 1)],
        "pad": [
            sample(x, [1, 1]),
            sample(x, [0, 0, 1, 0]),
            sample(x, [1, 1], "constant", 2.0),
            sample(x, [1, 0], "reflect"),
        ],
        "slice_scatter": [
            sample(x, d.x(*x.shape[:-1], 1), x.dim() - 1, 0, 1),
            sample(d.x(a, b), d.x(a, 1), 1, 1, 2),
            sample(d.x(a, b), d.x(a, b), 0, 0, 2**40),
        ],
        "select_scatter": [sample(d.x(a, b), d.x(a), 1, 0), sample(d.x(a, b), d.x(b), 0, 1)],
        "constant_pad_nd": [sample(x, [1, 1]), sample(x, [1, -1], 2.0)],
    }


def parts(d: Draw) -> dict[str, Samples]:
    """Slices, splits and concatenations, with fused dimensions of several segments."""
    a, b, c = d.sizes(3)
    x = d.x(a, b)
    fused, equal = d.x(a, 2 * b + 2 * c), d.x(a, 3 * b)
    cuts, thirds = ((2 * b, c, c),), ((b, b, b),)
    slices = [
        sample(x, 1, 0, b - 1),
        sample(x, 1, 1),
        sample(x, 0, 0, 2**63 - 1),
        sample(x, -1, -1),
        sample(equal, 1, b, 2 * b, segments=thirds),
        sample(fused, 1, 2 * b, 2 * b + c, segments=cuts),
        sample(equal, 1, 0, b // 2),
        sample(d.x(a, 2 * b), 1, 0, 2**63 - 1, 2),
        sample(d.x(a, 2 * b), 1, 1, 2**63 - 1, 2),
        sample(d.x(a, 3 * b), 1, 1, 3 * b - 1, 3, segments=((2 * b, b),)),
        sample(d.x(a, 2 * b), 1, b, 2 * b, 2),
    ]
    return {
        "slice.Tensor": slices,
        "select.int": [sample(x, 0, 1), sample(x, -1, -1)],
        "split.Tensor": [sample(equal, b, -1, segments=thirds), sample(x, a, 0), sample(x, 4, 1)],
        "split_with_sizes": [
            sample(fused, [2 * b, c, c], 1, segments=cuts),
            sample(equal, [b, 2 * b], -1, segments=thirds),
        ],
        "split.sizes": [sample(fused, [2 * b, c, c], 1, segments=cuts)],
        "chunk": [sample(equal, 3, 1, segments=thirds), sample(x, 2, 0)],
        "unbind.int": [sample(d.x(2, a)), sample(d.x(a, 3, b), 1)],
        "cat": [
            sample([d.x(a, b), d.x(a, c)], -1, segments=((b, c),)),
            sample([d.x(a, b), d.x(a, b)], 0),
            sample([d.x(2 * a), d.x(b), d.x(b)], segments=((2 * a, b, b), (a, a))),
        ],
        "stack": [sample([d.x(a, b), d.x(a, b)], -1), sample([d.x(a, b)] * 2)],
    }


def indexing(d: Draw) -> dict[str, Samples]:
    """Operations that pick elements by integer tensors."""
    a, b, c = d.sizes(3)
    x = d.x(a, b)
    return {
        "index.Tensor": [
            sample(x, [d.i(a, c)]),
            sample(x, [None, d.i(b, c)]),
            sample(x, [d.i(a, c, 1), d.i(b, b)]),
            sample(d.x(a, b, c), [d.i(a, b, 1), d.i(b, 1, a)]),
            sample(d.x(a, b), [d.i(a, c, b)]),
        ],
        "gather": [
            sample(x, 1, d.i(b, a, c)),
            sample(x, 0, d.i(a, c, b)),
            sample(x, 1, d.i(b, 1, c)),
            sample(d.x(2 * a, b), 1, d.i(b, a, c)),
        ],
        "index_select": [sample(x, 0, d.i(a, c)), sample(x, 1, d.i(b, c))],
        "histc": [sample(d.i(3, a, b).double(), 4, 0, 3), sample(x, 3, -1, 2)],
        "one_hot": [sample(d.i(3, a, b), 3), sample(d.i(3, a), 3)],
        "embedding": [
            sample(x, d.i(a, c)),
            sample(x, d.i(a, c, b)),
            sample(x, d.i(a, c), 0),
            sample(x, d.i(2, 2 * c), -1, True),
        ],
    }


def creation(d: Draw) -> dict[str, Samples]:
    """Tensors made in the element type of another."""
    a, b, c = d.sizes(3)
    x = d.x(a, b)
    return {
        "new_ones": [sample(x, [c])],
        "new_zeros": [sample(x, [c, a])],
        "new_full": [sample(x, [b], 2.0)],
    }
