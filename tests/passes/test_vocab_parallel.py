"""vocab_parallel: operations over a vocabulary that is cut become their composites."""

from __future__ import annotations

from tests.passes.modules import changed_by
from tests.passes.words import captured

VOCAB_PARALLEL = """\
… 9
%embedding = fxpar.embedding[tp](%words_weight, %ids) : f32[b, 2*s, 6] tp:P {role="vocab"}
… 11
%cross_entropy_loss = fxpar.cross_entropy[tp](%view, %view_1) : f32[] tp:I {role="vocab"}
… 1
"""


def test_golden() -> None:
    assert changed_by("vocab_parallel", captured()) == VOCAB_PARALLEL
