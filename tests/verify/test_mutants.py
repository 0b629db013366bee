"""Every mutant of a program that changes a value or a gradient is rejected by the static checks alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from fxpar.errors import CheckFailed, FxparError, InputError, LayoutError
from fxpar.ir.program import Program
from fxpar.text.parsing import parse_program
from fxpar.text.printing import print_program
from fxpar.verification import complete
from fxpar.verify.static import verify_static
from fxpar.verify.values import ValueReport
from tests.verify.cases import Known, chosen, known, prepared, program, sequence_text
from tests.verify.edits import Mutant
from tests.verify.mutate import ALL, mutants
from tests.zoo import CASES

MODELS = tuple(CASES)
SMALL = ("tail", "columns", "sequence", "grouped")
COUNTS = (28, 18, 14, 12)
# Their kinds of cut are among the other models' too.
RARELY = ("bert", "llama", "qwen3", "bloom", "nanogpt", "encoder", "vit")

# Types of transformers whose layouts no plan line gives; one has kv heads that ranks share.
CHOSEN = ("gpt2", "llama", "gpt_neox", "t5", "falcon")
SHARED = "llama,num_key_value_heads=2"
# The pass behind which a program is taken, and behind which its sizes are still those of the whole.
STAGES = (("localize", "assign_rng"), ("insert_collectives", "insert_collectives"), ("assign_rng", "assign_rng"))

# What a program that no check has seen may raise when it is run.
UNRUNNABLE = (RuntimeError, ValueError, TypeError, KeyError, IndexError, AssertionError, FxparError)


@dataclass
class Tally:
    """What became of a program's mutants."""

    made: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    harmless: list[Mutant] = field(default_factory=list)
    escaped: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.made + other.made,
            self.rejected + other.rejected,
            self.harmless + other.harmless,
            self.escaped + other.escaped,
        )

    def conclude(self, name: str) -> None:
        """Prints the table; fails where a mutant escaped, or too many change nothing."""
        print(f"\n{self.table(name)}")
        assert not self.escaped
        assert len(self.harmless) < 0.02 * self.made.total()

    def table(self, name: str) -> str:
        """Mutants by kind, and the proof of the harmless ones."""
        rows = [f"{kind:>18} {self.made[kind]:4} made {self.rejected[kind]:4} rejected" for kind in sorted(self.made)]
        proofs = [f"accepted, all values and gradients equal: {m.kind}, {m.edit}" for m in self.harmless]
        return "\n".join([f"{name}: {self.made.total()} mutants, {self.rejected.total()} rejected", *rows, *proofs])


def texts(name: str) -> list[tuple[str, str]]:
    """A case's programs on 2 and 4 ranks, localised and before that, each with its text before `localize`."""
    if name == "sequence":
        return [(sequence_text(tp), sequence_text(tp)) for tp in (2, 4)]
    found = []
    for tp in (2, 4):
        found.append((print_program(program(name, tp)), print_program(program(name, tp, "assign_rng"))))
        found.append((print_program(program(name, tp, "insert_collectives")),) * 2)
    return found


def accepted(mutant: Mutant) -> Program | None:
    """The mutant's program where the static checks accept it, None where they reject it."""
    try:
        found = parse_program(mutant.text)
        verify_static(found)
    except (InputError, LayoutError, CheckFailed):
        return None
    return found


def judge(tally: Tally, mutant: Mutant, case: Known) -> None:
    """Counts a mutant; where the static checks accept it, its values decide."""
    tally.made[mutant.kind] += 1
    found = accepted(mutant)
    if found is None:
        tally.rejected[mutant.kind] += 1
        return
    runnable = complete(found)
    report = case.compare(runnable) if runnable is not None else None
    if report is not None and report.ok:
        tally.harmless.append(mutant)
    else:
        tally.escaped.append(f"{mutant.kind}, {mutant.edit}: {report.worst if report else 'cannot be completed'}")


def _marked(name: str, rarely: tuple[str, ...]) -> Any:
    return pytest.param(name, marks=pytest.mark.matrix) if name in rarely else name


@pytest.mark.parametrize("name", [_marked(name, RARELY) for name in (*MODELS, *SMALL)])
def test_every_mutant_that_changes_something_is_rejected(name: str) -> None:
    tally = Tally()
    case = prepared("tail" if name == "sequence" else name)
    for place, (text, before) in enumerate(texts(name)):
        for mutant in mutants(text, before, seed=place, count=COUNTS[place]):
            judge(tally, mutant, case)
    tally.conclude(name)


def judge_chosen(kind: str, sequence_parallel: bool, counts: tuple[int, ...]) -> Tally:
    """What became of the mutants of a program whose layouts were chosen."""
    tally = Tally()
    verify_static(chosen(kind, sequence_parallel))
    for place, ((until, whole), count) in enumerate(zip(STAGES, counts, strict=True)):
        text, before = (print_program(chosen(kind, sequence_parallel, stage)) for stage in (until, whole))
        for mutant in mutants(text, before, seed=100 + 10 * place + sequence_parallel, count=count):
            judge(tally, mutant, known(kind))
    return tally


@pytest.mark.parametrize("kind", [_marked(kind, ("gpt2", "t5", "gpt_neox", "falcon")) for kind in CHOSEN])
def test_every_mutant_of_a_chosen_split_is_rejected(kind: str) -> None:
    counts = (10, 4, 2) if kind == "t5" else (16, 6, 4)
    tallies = [judge_chosen(kind, sequence_parallel, counts) for sequence_parallel in (False, True)]
    sum(tallies, Tally()).conclude(kind)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [*CHOSEN, SHARED])
def test_every_mutant_of_a_chosen_split_is_rejected_in_numbers(kind: str) -> None:
    for sequence_parallel in (False, True):
        tally = judge_chosen(kind, sequence_parallel, (400, 200, 100))
        tally.conclude(f"{kind}{', sequence parallel' if sequence_parallel else ''}")


# A table whose words are not cut, where others may be.
_TABLE = """fxpar 2
plan {"tp": 2}
properties canonical collectives layouts vocabulary
loss x
%w = parameter["w"] : f32[32, 8] tp:S(1)
%ids = input["ids"] : i64[3, 4] tp:R
%x = aten.embedding.default(%w, %ids) : f32[3, 4, 8] tp:S(2)
return x=%x
"""


def test_the_mutants_are_of_every_kind() -> None:
    taken = [(_TABLE, _TABLE), *(texts(name)[0] for name in ("gpt2", "tail", "sequence"))]
    taken += [(print_program(p),) * 2 for p in (program("grouped", 4), chosen("gpt2", True))]
    assert {kind for text in taken for kind in kinds_of(*text)} == set(ALL)


def kinds_of(text: str, before: str) -> set[str]:
    """The kinds of which a program has mutants."""
    return {mutant.kind for mutant in mutants(text, before, seed=0, count=2 * len(ALL))}


def test_the_mutants_follow_the_seed() -> None:
    text = sequence_text(2)
    assert mutants(text, text, 5, 20) == mutants(text, text, 5, 20)
    assert mutants(text, text, 5, 20) != mutants(text, text, 6, 20)


def outcome(mutant: Mutant, case: Known) -> str:
    """What running a rejected mutant shows: `changed`, `same`, or `cannot run`."""
    try:
        report: ValueReport = case.compare(parse_program(mutant.text))
    except UNRUNNABLE:
        return "cannot run"
    return "same" if report.ok else "changed"


def test_most_rejected_mutants_do_change_something() -> None:
    counts: Counter[str] = Counter()
    for name, source in (("tail", sequence_text(2)), ("tail", print_program(program("tail", 2)))):
        for mutant in mutants(source, source, seed=11, count=12):
            if accepted(mutant) is None:
                counts[outcome(mutant, prepared(name))] += 1
    print(f"\nrejected mutants, run all the same: {dict(counts)}")
    assert counts["changed"] + counts["cannot run"] > counts.total() / 2
    assert counts["changed"] > 3
