"""What the static checks accept, all ranks together compute as the one device does of which the text speaks too.

A mutant after which both readings of a text change alike (another number, another operation) is a fault of no split,
and harmless here. So is, if rare, one of which both readings raise one error: PyTorch says what shapes do not tell.
One that runs in one reading alone has escaped, as one that differs has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import pytest
import torch

from fxpar.manager import PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from tests.verify import foreign, mutate_values
from tests.verify.cases import Known, known, prepared, sequence, sequence_text
from tests.verify.edits import Mutant
from tests.verify.mixed import mixed, mixed_program
from tests.verify.readings import judge
from tests.verify.test_mutants import accepted

# A program, ranks, sequence parallelism, and how many mutants of the kinds and foreign ones.
SAMPLED = (("sequence", 2, False, 26, 40), ("mixed", 2, True, 13, 25))
MATRIX = (
    ("sequence", 2, False, 400, 800),
    ("sequence", 4, False, 300, 600),
    ("mixed", 2, False, 200, 300),
    ("mixed", 4, True, 300, 400),
    ("gpt2,n_layer=1", 4, False, 200, 250),
    ("gpt2,n_layer=1", 2, True, 100, 150),
    ("llama,num_hidden_layers=1,num_key_value_heads=2", 4, True, 200, 200),
    ("gpt_neox,num_hidden_layers=1", 4, True, 150, 150),
    ("t5,num_layers=1", 2, False, 150, 150),
)


def case(name: str, tp: int, sequence_parallel: bool) -> tuple[str, Known]:
    """A program's text and what it was made of."""
    if name == "sequence":
        return sequence_text(tp), prepared("tail")
    if name == "mixed":
        return print_program(mixed_program(tp, sequence_parallel)), mixed()
    plan = Plan(tp=tp, sequence_parallel=sequence_parallel)
    return print_program(PassManager(DEFAULT_PASSES).run(known(name).captured.with_(plan=plan))), known(name)


@cache
def siblings() -> dict[str, tuple[str, ...]]:
    """For every operator of torch those with the same kinds of required arguments and results."""
    table: dict[object, list[str]] = defaultdict(list)
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if not name.startswith("aten::") or not hasattr(torch.ops.aten, name[6:]):
            continue
        target = getattr(getattr(torch.ops.aten, name[6:]), overload or "default", None)
        if target is not None:
            needed = tuple(str(a.type) for a in target._schema.arguments if not a.has_default_value())
            table[needed, tuple(str(r.type) for r in target._schema.returns)].append(str(target))
    return {name: tuple(o for o in group if o != name) for group in table.values() for name in group}


def conclude(name: str, mutants: list[Mutant], held: Known) -> Counter[str]:
    """What became of the mutants; none escapes."""
    counts: Counter[str] = Counter()
    escaped = []
    for mutant in mutants:
        program = accepted(mutant)
        verdict = judge(program, held.state, held.inputs) if program is not None else None
        counts[verdict.kind if verdict else "rejected"] += 1
        if verdict is not None and verdict.kind == "differs":
            escaped.append(f"{mutant.kind}, {mutant.edit}: {verdict.kind}, {verdict.reason}")
    print(f"\n{name}: {dict(counts)}")
    assert not escaped
    assert counts["stuck"] <= 1 + 0.01 * counts.total()
    assert counts["refused"] <= 1 + 0.01 * counts.total()
    return counts


ROWS = [*SAMPLED, *(pytest.param(*row, marks=pytest.mark.matrix) for row in MATRIX)]


@pytest.mark.parametrize(("name", "tp", "sequence_parallel", "count", "others"), ROWS)
def test_what_is_accepted_the_ranks_compute_as_one_device_does(
    name: str, tp: int, sequence_parallel: bool, count: int, others: int
) -> None:
    text, held = case(name, tp, sequence_parallel)
    mutants = mutate_values.mutants(text, seed=tp + count, count=count)
    assert {mutant.kind for mutant in mutants} == set(mutate_values.KINDS)
    counts = conclude(name, mutants, held)
    assert counts["rejected"] > counts.total() / 3
    conclude(f"{name}, foreign", foreign.foreign(text, siblings(), tp + others, others), held)


def test_both_readings_of_a_right_text_are_the_same() -> None:
    assert judge(sequence(2), prepared("tail").state, prepared("tail").inputs).kind == "same"
    assert judge(mixed_program(4, True), mixed().state, mixed().inputs).kind == "same"


WRONG = (
    ("fxpar.reduce_scatter[tp](%down)", "fxpar.r_to_s[tp](%down)"),
    ("fxpar.all_gather[tp](%norm)", "aten.cat.default([%norm, %norm], 1)"),
)


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_text_whose_readings_differ_is_told(old: str, new: str) -> None:
    from fxpar.text.parsing import parse_program

    found = parse_program(sequence_text(2).replace(old, new).replace("tp:P→", "tp:").replace("tp:S(1)→R", "tp:R"))
    assert judge(found, prepared("tail").state, prepared("tail").inputs).kind != "same"
