"""A run agrees with its report: collectives one by one, and every byte of memory, exactly."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.runtime import accounting, jobs, models
from tests.runtime.world import World

PARTS = ("parameters", "copies", "buffers", "gradients", "optimizer", "activations")


def directions(listed: Counter[tuple[str, str, int]]) -> Counter[tuple[str, str, int]]:
    """By direction: gradients of parameters and what is recomputed belong to the backward."""
    found: Counter[tuple[str, str, int]] = Counter()
    for (phase, op, size), count in listed.items():
        found["forward" if phase == "forward" else "backward", op, size] += count
    return found


def sums(found: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Number and bytes of all collectives, by direction and operation."""
    result: dict[tuple[str, str], tuple[int, int]] = {}
    for key, count, size in found:
        before = result.get(key, (0, 0))
        result[key] = before[0] + count, before[1] + size
    return result


def assert_agrees(found: list[Any]) -> Any:
    report, listed = found[0]["report"], found[0]["listed"]
    reported = sums(
        (("forward" if c["phase"] == "forward" else "backward", c["op"]), c["count"], c["bytes"])
        for c in report["collectives"]
    )
    for rank, mine in enumerate(found):
        assert sums(((way, op), n, n * size) for (way, op, size), n in mine["sent"].items()) == reported
        if not any(c["phase"] == "recompute" for c in report["collectives"]):
            assert mine["sent"] == directions(listed)
        memory = report["ranks"][rank]
        assert {part: memory[part] for part in PARTS} == {part: mine[part] for part in PARTS}
        assert report["peak"]["bytes"] == mine["peak"]
    assert sum(module["activations"] for module in report["modules"]) == found[0]["activations"] > 0
    return report


# On two ranks it is that of every run with checkpoints, below; on two axes in tests/runtime/test_data_parallel.py.
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_step_is_as_reported(world2: World, name: str) -> None:
    report = assert_agrees(world2.run(accounting.account, name))
    assert {c["phase"] for c in report["collectives"]} >= {"forward", "backward"}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "nanogpt"])
def test_a_step_with_sequence_parallelism_is_as_reported(world2: World, name: str) -> None:
    report = assert_agrees(world2.run(accounting.account, name, "sequence"))
    assert {"all_gather", "reduce_scatter"} <= {c["op"] for c in report["collectives"]}


@pytest.mark.matrix
def test_a_step_in_mixed_precision_is_as_reported(world2: World) -> None:
    report = assert_agrees(world2.run(accounting.account, "llama", "mixed"))
    first = report["ranks"][0]
    assert first["gradients"] == first["parameters"] == 2 * first["copies"] > 0


def test_checkpointed_layers_keep_their_input_and_send_again_what_they_recompute(world2: World) -> None:
    report = assert_agrees(world2.run(accounting.account, "gpt2", "checkpointed"))
    kept = {module["module"]: (module["tensors"], module["formula"]) for module in report["modules"]}
    assert kept["transformer.h.1"] == (1, "384*b*s")
    again = [c for c in report["collectives"] if c["phase"] == "recompute"]
    # Of both layers the first sum: what is behind the last is drawn again, and reads nothing of it.
    assert [(c["op"], c["count"], c["formula"]) for c in again] == [("all_reduce", 2, "768*b*s")]


def test_one_process_is_as_reported() -> None:
    """A tied head, buffers, and a parameter without a gradient."""
    model = jobs.tiny_module()
    found, report = accounting.step(model, models.batch()), model.report()
    (memory,) = report.ranks
    assert {part: getattr(memory, part) for part in PARTS} == {part: found[part] for part in PARTS}
    assert report.peak.bytes == found["peak"]
    assert memory.gradients == memory.parameters - model.get_parameter("unused").nbytes
    assert "Tiny" in str(report)
