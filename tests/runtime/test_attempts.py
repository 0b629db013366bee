"""A module that looks like one of one process acts like it, or says that it is none."""

from tests.runtime import attempts
from tests.runtime.test_ecosystem import assert_ranks_equal
from tests.runtime.test_training import assert_same
from tests.runtime.world import World


def test_ranks_that_ask_for_different_tensors_are_told(world2: World) -> None:
    first, other = world2.run(attempts.orders)
    assert first.pop("after") == other.pop("after") > 0
    for found in (first, other):
        assert {where for _, where, _, _ in found.values()} == {"a call that all ranks must make"}
    assert first["norm"][2] == "this rank asks for a norm of up.weight while another one asks for something else"
    assert other["whole"][2].startswith("this rank asks for the whole of up.weight")
    assert "no set of names" in first["sum"][3]


def test_losses_with_terms_of_cut_outputs_have_the_gradients_of_one_process(world2: World) -> None:
    first, other = world2.run(attempts.joined)
    assert_ranks_equal(first, other)
    assert_same(first, attempts.joined(), 2e-6)


def test_settings_that_programs_do_not_see_are_refused(world2: World) -> None:
    first, other = world2.run(attempts.settings)
    assert first == other
    assert first.pop("note") == "a word of the script's own"
    assert first.pop("shared memory")[1] == "up.weight.share_memory_()"
    assert [where for _, where, _, _ in first.values()] == ["drop.p = …", "drop", "norm.eps = …"]


def test_steps_by_hand_are_those_of_one_process(world2: World) -> None:
    first, other = world2.run(attempts.by_hand)
    assert_ranks_equal(first, other)
    assert_same(first, attempts.by_hand(), 2e-6)
