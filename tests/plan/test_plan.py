"""The plan: what it accepts, how it says no, and its way to a file and back."""

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpar
from fxpar.errors import InputError, PlanError
from fxpar.plan.plan import PRECISIONS, SPLITS, Plan

LATER = ("cp", "pp", "ep")

text_keys = st.text(min_size=1, max_size=20)
plans = st.builds(
    Plan,
    tp=st.integers(1, 4096),
    split=st.dictionaries(text_keys, st.sampled_from(SPLITS), max_size=5),
    seed=st.integers(0, 2**63 - 1),
    precision=st.sampled_from(PRECISIONS),
)
examples = settings(max_examples=150, deadline=None, derandomize=True)


@examples
@given(plans)
def test_yaml_gives_the_plan_back(plan: Plan) -> None:
    assert Plan.from_yaml(plan.to_yaml()) == plan


@examples
@given(plans)
def test_the_order_of_split_lines_says_nothing(plan: Plan) -> None:
    turned = plan.replace(split=dict(reversed(list(plan.split.items()))))
    assert list(turned.split) == list(plan.split)
    assert turned.to_yaml() == plan.to_yaml()


def test_a_file_gives_the_plan_back(tmp_path: Path) -> None:
    plan = Plan(tp=4, split={"*.mlp.up_proj": "column"}, seed=7, precision="bf16")
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


def test_yaml_holds_only_what_differs_from_the_defaults() -> None:
    assert Plan(tp=2).to_yaml() == "tp: 2\n"
    assert Plan.from_yaml(Plan().to_yaml()) == Plan()
    assert Plan.from_yaml("") == Plan()


def test_one_error_lists_all_that_is_wrong() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(tp=0, pp=2, split={"*.fc": "sideways"}, seed=-1, precision="fp64")
    for part in ("tp=0", "pp=2", "sideways", "seed=-1", "fp64"):
        assert part in str(caught.value)


@pytest.mark.parametrize("axis", LATER)
def test_axes_of_later_work_are_refused_by_name(axis: str) -> None:
    with pytest.raises(PlanError, match=f"{axis}=2 is not supported yet: leave {axis}=1"):
        Plan(**{axis: 2})  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["tp", *LATER])
@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_sizes_are_positive_integers(axis: str, size: object) -> None:
    with pytest.raises(PlanError, match=f"{axis}={size!r} is no positive integer"):
        Plan(**{axis: size})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "0", False])
def test_seeds_outside_63_bits_are_refused(seed: object) -> None:
    with pytest.raises(PlanError, match="seed"):
        Plan(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [["*.fc"], "column", None])
def test_a_split_that_is_no_mapping_is_refused(split: object) -> None:
    with pytest.raises(PlanError, match="no mapping from name globs"):
        Plan(split=split)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["", 3, None])
def test_a_split_key_that_is_no_glob_is_refused(key: object) -> None:
    with pytest.raises(PlanError, match="write a glob"):
        Plan(split={key: "column"})  # type: ignore[dict-item]


@pytest.mark.parametrize("how", ["Column", "", None, ["column"]])
def test_an_unknown_split_is_refused_with_the_choices(how: object) -> None:
    with pytest.raises(PlanError, match=", ".join(SPLITS)):
        Plan(split={"*.fc": how})  # type: ignore[dict-item]


def test_an_unknown_option_is_refused_with_the_choices() -> None:
    with pytest.raises(PlanError, match=r"here: unknown option tpp, schedule; choose from tp, dp"):
        Plan.from_yaml("tpp: 2\nschedule: 1f1b\n", where="here")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- tp: 2\n", "no mapping"),
        ("tp", "no mapping"),
        ("tp: [2", "not YAML"),
        ("tp: two\n", "tp='two'"),
        ("tp: 2\ntp: 4\n", "'tp' stands twice"),
    ],
)
def test_files_that_are_no_plan_are_refused(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan.from_yaml(text)


def test_a_split_line_that_stands_twice_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'\*\.fc' stands twice"):
        Plan.from_yaml('split:\n  "*.fc": column\n  "*.fc": row\n')


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.yaml"):
        Plan.load(tmp_path / "absent.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"plan\.yaml: the file is no UTF-8 text"):
        Plan.load(tmp_path / "plan.yaml")


def test_plan_errors_are_the_users() -> None:
    assert issubclass(PlanError, InputError)


def test_the_world_is_the_product_of_the_axes() -> None:
    assert Plan().world_size == 1
    assert Plan(tp=4).world_size == 4


def test_axes_of_one_rank_are_left_out() -> None:
    assert Plan().axes == {}
    assert Plan(tp=2).axes == {"tp": 2}


def test_replace_checks_and_leaves_the_original() -> None:
    plan = Plan(tp=2)
    assert plan.replace(tp=4).tp == 4
    assert plan.tp == 2
    with pytest.raises(PlanError, match="tp=0"):
        plan.replace(tp=0)


def test_a_plan_is_frozen_and_keeps_its_own_split() -> None:
    lines = {"*.fc": "column"}
    plan = Plan(split=lines)
    lines["*.fc"] = "row"
    assert plan.split == {"*.fc": "column"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.tp = 2  # type: ignore[misc]


def test_a_plan_cannot_be_changed_behind_its_checks() -> None:
    plan = Plan(tp=2, split={"*.fc": "column"})
    with pytest.raises(TypeError):
        plan.split["*.fc"] = "banana"  # type: ignore[index]
    assert {plan: 1}[Plan(tp=2, split={"*.fc": "column"})] == 1
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan


def test_the_cost_s_constants_go_to_a_file_and_back() -> None:
    plan = Plan(tp=2, cost=fxpar.Cost(bandwidth=1e9))
    assert "bandwidth: 1000000000.0" in plan.to_yaml()
    assert Plan.from_yaml(plan.to_yaml()) == plan
    with pytest.raises(PlanError, match="unknown option speed; choose from bandwidth"):
        Plan.from_yaml("cost: {speed: 3}")
    with pytest.raises(PlanError, match=r"cost\.latency=-1 is no positive number"):
        Plan(cost=fxpar.Cost(latency=-1))
