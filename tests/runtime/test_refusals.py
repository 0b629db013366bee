"""What cannot work is refused on every rank alike, with a place, a reason and a remedy, and nothing hangs."""

import pytest

from tests.runtime import jobs
from tests.runtime.world import World

# What the error says of each: a part of its text.
WANTED = {
    "double": "parallelised already",
    "nested": "parallelised already",
    "world": "the plan needs 3 processes (tp=3) and there are 2",
    "generate": "needs caches, which no program has",
    "checkpointing": "what is computed again is chosen",
    "accelerate": "would move and wrap a module that its ranks already share",
    "deepcopy": "cannot be copied",
    "pickle": "cannot be copied or pickled",
    "cast": "cannot be moved or cast",
    "no loss": "returns no loss",
    "unknown": "forward has no such argument",
    "missing": "lacks what forward needs",
    "type": "the model cannot be traced",
    "unequal": "has size 2 in dimension 0",
    "dimensions": "the model cannot be traced",
    "empty": "has the empty shape [0, 5]",
    "array": "a ndarray cannot be part of a program",
    "twice": "multiple values for argument 'ids'",
    "inputs with gradients": "requires a gradient",
    "no_grad": "gradients are off",
    "autocast": "would change the element types",
    "evaluation": "in evaluation mode",
}


def test_calls_that_cannot_work_are_refused_on_all_ranks(world2: World) -> None:
    first, second = world2.run(jobs.refused_calls)
    assert first == second
    assert first.keys() == WANTED.keys()
    for name, text in WANTED.items():
        kind, where, reason, remedy = first[name]
        assert text in reason, name
        assert kind in ("InputError", "PlanError", "CaptureError"), name
        assert where, name
        assert remedy, name


@pytest.mark.parametrize(("what", "where"), [("weights", "unused"), ("plan", "plan split")])
def test_ranks_that_disagree_are_told(world2: World, what: str, where: str) -> None:
    first, second = world2.run(jobs.disagreeing, what)
    assert first == second
    assert first[:2] == ("InputError", where)
    assert first[2].startswith("differs between rank 0")
