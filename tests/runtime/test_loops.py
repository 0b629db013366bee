"""What training scripts do to a model is as on the plain one, or refused by name; see `loops`."""

import pytest

from tests.runtime import loop_rows, loops
from tests.runtime.world import World


@pytest.mark.parametrize("kind", loops.PLANS)
def test_scripts_do_to_the_module_what_they_do_to_a_model(world2: World, kind: str) -> None:
    first, other = world2.run(loop_rows.job, kind)
    assert len(first) >= 60
    told = {}
    for name, row in loops.ROWS.items():
        if kind not in row.places:
            continue
        detail = first[name][1]
        if row.refused:
            is_right = [o == "refused" and row.refused in str(d) for o, d in (first[name], other[name])]
        elif row.joined:
            values = [value for _, (value, _) in (first[name], other[name])]
            is_right = [values[0] | values[1] == detail[1], kind == "pp" or values[0] == values[1]]
        else:
            is_right = [o == "same" for o, _ in (first[name], other[name])]
        if not all(is_right):
            told[name] = (first[name], other[name])
    assert not told
