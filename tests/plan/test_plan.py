"""The plan: what it accepts, how it says no, and its way to a file and back."""

import copy
import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpar
from fxpar.errors import InputError, PlanError
from fxpar.mesh.axes import Atom
from fxpar.plan.plan import PRECISIONS, SPLITS, Plan
from fxpar.plan.plan_options import Communication, Experts, Operators, Pipeline, Recompute

LATER = ("cp",)

text_keys = st.text(min_size=1, max_size=20)
plans = st.builds(
    Plan,
    tp=st.integers(1, 4096),
    split=st.dictionaries(text_keys, st.sampled_from(SPLITS), max_size=5),
    operators=st.builds(Operators, batchwise_ops=st.lists(text_keys, max_size=3)),
    experts=st.builds(Experts, expert_modules=st.lists(text_keys, max_size=3)),
    pipeline=st.just(Pipeline()),
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


def test_globs_of_row_wise_operators_are_sorted_and_each_once() -> None:
    plan = Plan(dp=2, operators=Operators(batchwise_ops=("mylib.scan.default", "*.Scan", "mylib.scan.default")))
    assert plan.operators.batchwise_ops == ("*.Scan", "mylib.scan.default")
    assert plan.on_one_rank() == Plan()


@pytest.mark.parametrize("given", ["mylib.scan.default", [""], [3], None])
def test_row_wise_takes_a_list_of_globs(given: object) -> None:
    with pytest.raises(PlanError, match=r"operators.batchwise_ops must be a list of globs"):
        Plan.from_dict({"operators": {"batchwise_ops": given}})


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
        Plan(tp=0, cp=2, split={"*.fc": "sideways"}, seed=-1, precision="fp64")
    for part in ("tp must be", "cp=2", "sideways", "seed must be", "fp64"):
        assert part in str(caught.value)


@pytest.mark.parametrize("axis", LATER)
def test_axes_of_later_work_are_refused_by_name(axis: str) -> None:
    with pytest.raises(PlanError, match=f"{axis}=2 is not supported yet: leave {axis}=1"):
        Plan(**{axis: 2})  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["tp", "pp", *LATER])
@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_sizes_are_positive_integers(axis: str, size: object) -> None:
    with pytest.raises(PlanError, match=f"{axis} must be an integer from 1 to 4096, got {size!r}"):
        Plan(**{axis: size})  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1.5, True, 5000, "2", None])
def test_chunks_of_tokens_are_counted(count: Any) -> None:
    reason = re.escape(f"communication.token_chunks must be an integer from 1 to 4096 or 'auto', got {count!r}")
    with pytest.raises(PlanError, match=reason):
        Plan(tp=2, communication=Communication(token_chunks=count))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "0", False])
def test_seeds_outside_63_bits_are_refused(seed: object) -> None:
    with pytest.raises(PlanError, match="seed"):
        Plan(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [["*.fc"], "column", None])
def test_a_split_that_is_no_mapping_is_refused(split: object) -> None:
    with pytest.raises(PlanError, match="must be a mapping from name globs"):
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
    with pytest.raises(PlanError, match=r"here: unknown option tpp, tempo; choose from tp, dp"):
        Plan.from_yaml("tpp: 2\ntempo: 1\n", where="here")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- tp: 2\n", "no mapping"),
        ("tp", "no mapping"),
        ("tp: [2", "not YAML"),
        ("tp: two\n", "tp must be an integer from 1 to 4096, got 'two'"),
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
    with pytest.raises(PlanError, match=r"plan\.yaml: the file must be text in UTF-8"):
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
    with pytest.raises(PlanError, match="tp must be an integer"):
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
    with pytest.raises(PlanError, match=r"cost\.latency must be a positive number in SI units, got -1"):
        Plan(cost=fxpar.Cost(latency=-1))


@pytest.mark.parametrize(
    ("constant", "message"),
    [
        ({"hidden": 1.5}, "cost.hidden must be a part from 0 to 1, got 1.5"),
        ({"hidden": -0.5}, "cost.hidden must be a positive number in SI units, got -0.5"),
        ({"multiprocessors": 13.5}, "cost.multiprocessors must be an integer, got 13.5"),
        ({"multiprocessors": 0}, "cost.multiprocessors must be a positive number in SI units, got 0"),
        ({"kernel_latency": True}, "cost.kernel_latency must be a positive number in SI units, got True"),
    ],
)
def test_constants_that_no_machine_has_are_refused(constant: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan(cost=fxpar.Cost(**constant))


def test_constants_may_be_nothing() -> None:
    plan = Plan(cost=fxpar.Cost(hidden=0.0, kernel_latency=0, copy_latency=0.0))
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_sizes_whose_parts_have_no_refinement_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match=r"cp = 2 ranks of the dense part and ep = 3 ranks of the expert part, and 2"):
        Plan(cp=2, dp=3, ep=3)
    with pytest.raises(PlanError, match=r"world size 2 is not a multiple of etp·ep·pp = 2·2·1 = 4"):
        Plan(tp=2, ep=2)
    with pytest.raises(PlanError, match="16777216 ranks are more than 131072"):
        Plan(tp=4096, dp=4096)


def test_layouts_name_the_axes_of_the_dense_part_in_nesting_order() -> None:
    plan = Plan(tp=2, dp=3)
    assert list(plan.axes.items()) == [("dp", 3), ("tp", 2)]
    assert plan.mesh.atoms_of("dp-tp") == (Atom(3, 2), Atom(2, 1))
    assert plan.on_one_rank().axes == {}


def test_how_rows_travel_is_an_option_of_experts_on_several_ranks() -> None:
    plan = Plan(dp=2, ep=2, experts=Experts("dropless"), compile=True)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.on_one_rank().experts.dispatch == "static"
    budgeted = Plan.from_yaml("{dp: 2, ep: 2, experts: {recv_capacity_factor: 1.25}}")
    assert budgeted == Plan(dp=2, ep=2, experts=Experts(recv_capacity_factor=1.25))
    assert budgeted.on_one_rank().experts.recv_capacity_factor is None
    spare = Plan.from_yaml("{dp: 2, ep: 2, experts: {spare_experts: 1}}")
    assert spare == Plan(dp=2, ep=2, experts=Experts(spare_experts=1))
    assert spare.on_one_rank() == Plan()
    all_of_it = Plan.from_yaml("{dp: 2, ep: 2, experts: {spare_experts: 1, min_gain: 0}}")
    assert Plan.from_yaml(all_of_it.to_yaml()) == all_of_it != spare


def test_what_an_expert_takes_is_an_option_of_every_layout() -> None:
    limited = Plan(experts=Experts(capacity_factor=1.25, drop_policy="position", pad_to_capacity=True))
    assert Plan.from_yaml(limited.to_yaml()) == limited
    assert limited.on_one_rank() == Plan()
    assert Plan(dp=2, ep=2, experts=Experts(capacity_factor=1, dispatch="dropless")).experts.capacity_factor == 1
    assert Plan(dp=2, ep=2, experts=Experts(capacity_factor=2, recv_capacity_factor=1.5)).experts.capacity_factor == 2
    assert Plan(pp=2, dp=2, ep=2, experts=Experts(recv_capacity_factor=1.5)).world_size == 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"experts": Experts(recv_capacity_factor=0.5), "dp": 2, "ep": 2},
            "must be a number of at least 1, got 0.5",
        ),
        (
            {"experts": Experts(recv_capacity_factor=True), "dp": 2, "ep": 2},
            "recv_capacity_factor must be a number of at least 1, got True",
        ),
        (
            {"experts": Experts(recv_capacity_factor=float("nan")), "dp": 2, "ep": 2},
            "recv_capacity_factor must be a number of at least 1, got nan",
        ),
        ({"experts": Experts(recv_capacity_factor=2), "dp": 2}, "is of dispatch='static' with ep of at least 2"),
        (
            {"experts": Experts(recv_capacity_factor=2, dispatch="dropless"), "dp": 2, "ep": 2},
            "is of dispatch='static' with ep of at least 2",
        ),
        (
            {
                "experts": Experts(recv_capacity_factor=2),
                "dp": 2,
                "ep": 2,
                "cuda_graphs": fxpar.CudaGraphs("transformer_engine"),
            },
            r"leave it out, or give CudaGraphs\('full_iteration'\)",
        ),
        ({"size_programs": 0}, "size_programs must be an integer from 1 to 4096, got 0"),
        ({"size_programs": True}, "size_programs must be an integer from 1 to 4096, got True"),
        (
            {"experts": Experts(capacity_factor=0)},
            "capacity_factor must be a number above 0, got 0",
        ),
        ({"experts": Experts(capacity_factor=True)}, "capacity_factor must be a number above 0, got True"),
        ({"experts": Experts(capacity_factor=float("nan"))}, "capacity_factor must be a number above 0, got nan"),
        ({"experts": Experts(capacity_factor=float("inf"))}, "capacity_factor must be a number above 0, got inf"),
        (
            {"experts": Experts(capacity_factor=1, drop_policy="random")},
            "drop_policy='random' is unknown: choose one of probs, pos",
        ),
        ({"experts": Experts(capacity_factor=1, pad_to_capacity=1)}, "pad_to_capacity must be True or False, got 1"),  # type: ignore[arg-type]
        (
            {"experts": Experts(drop_policy="position")},
            "drop_policy is of a capacity_factor: give one, or leave drop_policy out",
        ),
        ({"experts": Experts(pad_to_capacity=True)}, "pad_to_capacity is of a capacity_factor: give one"),
        (
            {"experts": Experts(capacity_factor=1, pad_to_capacity=True, dispatch="dropless"), "dp": 2, "ep": 2},
            "dispatch='dropless' sends rows alone, and pad_to_capacity others too",
        ),
        (
            {"experts": Experts(capacity_factor=2, pad_to_capacity=True, recv_capacity_factor=1.5), "dp": 2, "ep": 2},
            "recv_capacity_factor and pad_to_capacity both say how many places a buffer has",
        ),
        (
            {"experts": Experts(capacity_factor=1.5, recv_capacity_factor=1.5), "dp": 2, "ep": 2},
            "is no less than capacity_factor=1.5",
        ),
        (
            {"experts": Experts("some"), "dp": 2, "ep": 2},
            "choose one of static, allgather, alltoall, dropless",
        ),
        ({"experts": Experts("dropless"), "dp": 2}, "and ep=1: give ep of at least 2"),
        (
            {"experts": Experts(spare_experts=1), "dp": 2},
            "spare_experts=1 is of experts on several ranks, and ep=1: give ep of at least 2, or leave it out",
        ),
        (
            {"experts": Experts(spare_experts=-1), "dp": 2, "ep": 2},
            "must be auto or a whole number of at least 0, got -1",
        ),
        (
            {"experts": Experts(spare_experts=1, min_gain=-0.1), "dp": 2, "ep": 2},
            "min_gain must be a share of an even load, of at least 0, got -0.1",
        ),
        (
            {"experts": Experts(spare_experts=1, min_gain=float("nan")), "dp": 2, "ep": 2},
            "min_gain must be a share of an even load, of at least 0, got nan",
        ),
        (
            {"experts": Experts(spare_experts="some"), "dp": 2, "ep": 2},
            "must be auto or a whole number of at least 0, got",
        ),
        ({"experts": Experts(spare_experts="auto"), "dp": 2, "ep": 2}, "spare_experts='auto' need each other"),
        ({"experts": Experts(expert_loads="a.json"), "dp": 2, "ep": 2}, "spare_experts='auto' need each other"),
        ({"experts": Experts(spare_experts="auto", expert_loads="a.json"), "dp": 2}, "and ep=1: give ep of at least 2"),
        ({"experts": Experts(expert_loads=1)}, "expert_loads must be the name of a file, got 1"),  # type: ignore[arg-type]
        ({"experts": Experts(min_gain=0.1)}, "min_gain is of spare_experts: give some, or leave min_gain out"),
        (
            {"experts": Experts(spare_experts=True), "dp": 2, "ep": 2},
            "must be auto or a whole number of at least 0, got True",
        ),
        (
            {"experts": Experts("allgather"), "dp": 2},
            "dispatch='allgather' is of experts on several ranks, and ep=1",
        ),
        (
            {"experts": Experts("alltoall"), "dp": 2},
            "dispatch='alltoall' is of experts on several ranks, and ep=1",
        ),
        (
            {"experts": Experts(capacity_factor=1, pad_to_capacity=True, dispatch="allgather"), "dp": 2, "ep": 2},
            "dispatch='allgather' sends tokens, and pad_to_capacity rows",
        ),
        (
            {"experts": Experts("dropless"), "dp": 2, "ep": 2, "cuda_graphs": fxpar.CudaGraphs("full_iteration")},
            r"CudaGraphs\('full_iteration'\) cannot: give CudaGraphs\('partial'\)",
        ),
        (
            {"experts": Experts("dropless"), "dp": 2, "ep": 2, "cuda_graphs": fxpar.CudaGraphs("transformer_engine")},
            r"CudaGraphs\('transformer_engine'\) cannot: give CudaGraphs\('partial'\)",
        ),
        (
            {
                "experts": Experts("dropless"),
                "dp": 2,
                "ep": 2,
                "cuda_graphs": fxpar.CudaGraphs("partial", scope=("attn", "moe")),
            },
            "give moe_router and moe_preprocess, or dispatch='static'",
        ),
    ],
)
def test_a_dispatch_that_means_nothing_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan(**options)


def test_an_axis_may_have_links_of_its_own() -> None:
    cost = fxpar.Cost(axes={"tp": {"bandwidth": 9e11}, "dp": {"latency": 2e-5, "bandwidth": 45e9}})
    plan = Plan(tp=2, dp=2, cost=cost)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.to_dict()["cost"] == {"axes": {"dp": {"bandwidth": 45e9, "latency": 2e-5}, "tp": {"bandwidth": 9e11}}}
    assert copy.deepcopy(cost) == pickle.loads(pickle.dumps(cost)) == cost
    assert {cost: 1}[pickle.loads(pickle.dumps(cost))] == 1
    usual = fxpar.Cost()
    assert cost.on(["tp"]) == fxpar.Cost(bandwidth=9e11)
    assert cost.on(["dp", "tp"]) == fxpar.Cost(bandwidth=45e9, latency=2e-5)
    assert cost.on(["cp"]) == cost.on([]) == usual.on(["dp"]) == usual
    with pytest.raises(TypeError):
        cost.axes["dp"]["latency"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"xp": {"latency": 1.0}}, "cost.axes has the unknown axis 'xp': choose from pp, dp"),
        ({"dp": 3}, "cost.axes['dp'] must be a mapping of bandwidth and latency, or one, got 3"),
        ({"dp": {}}, "cost.axes['dp'] must be a mapping of bandwidth and latency, or one, got {}"),
        (
            {"dp": {"flops": 1.0}},
            "cost.axes['dp'] must be a mapping of bandwidth and latency, or one, got {'flops': 1.0}",
        ),
        ({"dp": {"latency": 0}}, "cost.axes['dp'].latency must be a positive number in SI units, got 0"),
        ({"dp": {"bandwidth": True}}, "cost.axes['dp'].bandwidth must be a positive number in SI units, got True"),
        ([], "cost.axes must be a mapping"),
    ],
)
def test_links_that_are_none_are_refused(axes: Any, text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        Plan(cost=fxpar.Cost(axes=axes))
    with pytest.raises(PlanError, match=re.escape(text)):
        Plan.from_dict({"cost": {"axes": axes}})


def test_what_is_recomputed_is_an_option_with_a_budget() -> None:
    plan = Plan(recompute=Recompute("selective", activation_memory_budget=0.5))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_yaml("recompute: {mode: selective, activation_memory_budget: 4096}") == Plan(
        recompute=Recompute("selective", 4096)
    )
    assert plan.on_one_rank().recompute == Recompute()  # bytes are those of one of the plan's ranks


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recompute": Recompute("some")}, "choose one of none, selective, full"),
        (
            {"recompute": True},
            r"recompute must be a fxpar.Recompute, got True: write Recompute\(OPTION=VALUE\) of its options",
        ),
        ({"recompute": "full"}, r"write Recompute\(mode='full'\)"),
        ({"recompute": Recompute(activation_memory_budget=0.5)}, "is of mode='selective'"),
        ({"recompute": Recompute("full", activation_memory_budget=0.5)}, "is of mode='selective'"),
        (
            {"recompute": Recompute("selective", activation_memory_budget=-1)},
            "must be a part from 0 to 1, or a number of bytes, got ",
        ),
        (
            {"recompute": Recompute("selective", activation_memory_budget=1.5)},
            "must be a part from 0 to 1, or a number of bytes, got ",
        ),
        (
            {"recompute": Recompute("selective", activation_memory_budget=True)},
            "must be a part from 0 to 1, or a number of bytes, got ",
        ),
        (
            {"recompute": Recompute("selective", activation_memory_budget=float("nan"))},
            "must be a part from 0 to 1, or a number of bytes, got ",
        ),
        (
            {"recompute": Recompute("selective", activation_memory_budget="1GB")},  # type: ignore[arg-type]
            "must be a part from 0 to 1, or a number of bytes, got ",
        ),
    ],
)
def test_a_recomputation_that_means_nothing_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan(**options)


def test_options_of_records_are_named_where_they_stand() -> None:
    with pytest.raises(PlanError, match=r"dispatch is an option of experts; write 'experts: \{dispatch: …\}'"):
        Plan.from_yaml("{dp: 2, ep: 2, dispatch: alltoall}")
    with pytest.raises(PlanError, match=r"write recompute=dataclasses.replace\(plan.recompute, activation_memory"):
        Plan().replace(activation_memory_budget=0.5)
    with pytest.raises(
        PlanError, match=r"pipeline must be a mapping, got 'x'; write 'pipeline: \{OPTION: VALUE\}' of its options st"
    ):
        Plan.from_yaml("pipeline: x")
    with pytest.raises(PlanError, match=r"here: experts: unknown option tempo; choose from dispatch, recv"):
        Plan.from_dict({"experts": {"tempo": 1}}, where="here")


def test_records_are_read_only_and_sorted() -> None:
    plan = Plan(pp=3, pipeline=Pipeline({"h.2": 2, "h.1": 1}), experts=Experts(expert_modules=("b", "a", "b")))
    assert list(plan.pipeline.stages) == ["h.1", "h.2"]
    assert plan.experts.expert_modules == ("a", "b")
    assert Pipeline((3, 1)).stages == (3, 1)
    for record in (plan.pipeline, plan.experts):
        assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record
        assert {record: 1}[copy.deepcopy(record)] == 1
    with pytest.raises(TypeError):
        plan.pipeline.stages["h.1"] = 2  # type: ignore[index]


def test_one_device_keeps_what_says_what_the_model_is() -> None:
    told = Plan(operators=Operators(added_losses=("*.AddLoss",)), experts=Experts(expert_modules=("*.experts",)))
    assert told.replace(dp=2, ep=2, recompute=Recompute("full")).on_one_rank() == told


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "{pp: 2, pipeline: {stages: {a: {1: 1, b: 2}}}}",
            "stages['a'] must be an integer from 1 to 4096, got {1: 1, 'b': 2}",
        ),
        ("{pp: 2, pipeline: {stages: {a: [[1]]}}}", "stages['a'] must be an integer from 1 to 4096, got [[1]]"),
        ("{pp: 2, pipeline: {stages: {a: &x {b: *x}}}}", "must be an integer from 1 to 4096, got {"),
        ("{pp: 2, pipeline: {stages: {1: 1}}}", "pipeline.stages has the key 1: write the name of a module"),
        ("cuda_graphs: {impl: partial, scope: [moe, [x]]}", "cuda_graphs.scope has ['x']: choose from attn"),
        ("experts: ['*.experts']", "write 'experts: {OPTION: VALUE}' of its options dispatch, recv_capacity_factor"),
        (
            "{ep: 1, experts: {dispatch: exact}}",
            "is unknown: choose one of static, allgather, alltoall, dropless; help(",
        ),
        (
            "{pp: 2, pipeline: {group_size: 0}}",
            "group_size must be an integer from 1 to 4096, got 0; help(",
        ),
    ],
)
def test_wrong_records_are_refused_once_and_by_what_was_written(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=re.escape(reason)):
        Plan.from_yaml(text)


def test_what_is_no_record_is_told_with_an_example_that_can_be_written() -> None:
    for option, example in {
        "recompute": "full",
        "communication": "copy",
        "experts": "*.experts",
        "operators": "mylib.*",
        "cuda_graphs": "full",
        "pipeline": "x",
    }.items():
        wrong: dict[str, Any] = {option: example}
        with pytest.raises(PlanError, match=f"{option} must be .*, got '") as caught:
            Plan(**wrong)
        can = option in ("recompute", "communication")
        assert ("(OPTION=VALUE) of its options" in str(caught.value)) != can
        assert (f"='{example}')" in str(caught.value)) == can


def test_a_record_made_of_a_list_that_changes_is_read_anew() -> None:
    names: Any = ["x"]
    record = fxpar.CudaGraphs("partial", names)
    names[0] = "attn"
    assert Plan(cuda_graphs=record) == Plan(cuda_graphs=fxpar.CudaGraphs("partial", ("attn",)))
