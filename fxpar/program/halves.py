"""What notes of a program of half batches say: where a half begins, and what of it is whole all the same.

Enters: nothing. Leaves: values of `Note.origin`, which the pass `interleave_halves` sets and the check reads.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

# Origin of what is taken out of the whole, by number of the half.
HALF_OF = ("first half", "second half")
# Origin of what takes of a half the sizes that both have, and the operations that may.
SIZES_ALONE = "sizes of a half"
OF_SIZES = frozenset({aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default})
