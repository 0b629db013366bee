"""Plain calls: the author's outputs, losses by name, evaluation on other batches, and modes."""

import gc
import weakref
from collections import UserDict
from typing import Any

import pytest
import torch

import fxpar
from fxpar.errors import InputError
from tests.runtime import jobs, models
from tests.runtime.test_training import assert_same
from tests.runtime.world import World
from tests.zoo import CASES


def test_a_loss_by_name_among_several_scalars(world2: World) -> None:
    expected = jobs.named_loss()
    for results in world2.run(jobs.named_loss):
        assert float(results["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
        assert_same(results["task"], expected["task"])
        assert_same(results["penalty"], expected["penalty"])
        assert results["keys"] == ["logits", "penalty"]
    assert not torch.equal(expected["task"]["up.weight"], expected["penalty"]["up.weight"])


@pytest.mark.parametrize(("rows", "length"), [(3, 16), (5, 7), (1, 9)])
def test_evaluation_is_the_eager_model_for_any_batch(world2: World, rows: int, length: int) -> None:
    for results in world2.run(jobs.evaluate, "gpt2", rows, length):
        eager: Any = CASES["gpt2"].model().eval()(input_ids=results["ids"])
        torch.testing.assert_close(results["first"], eager.logits, rtol=0, atol=1e-5)
        assert torch.equal(results["first"], results["second"])
        assert results["type"] == type(eager).__name__
        assert results["loss"] is None


def test_a_sharded_output_is_a_dtensor(world2: World) -> None:
    expected = jobs.sharded_output()
    for results in world2.run(jobs.sharded_output):
        assert results["type"] == "DTensor"
        assert results["local"] == (3, 8, 32)
        torch.testing.assert_close(results["logits"], expected["logits"], rtol=0, atol=1e-6)
        assert float(results["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
        assert_same(results["gradients"], expected["gradients"])
        assert_same(results["of logits"], expected["of logits"])


def test_train_and_eval_switch_programs(world2: World) -> None:
    expected = jobs.modes()
    for results in world2.run(jobs.modes):
        assert results["training"] == pytest.approx(expected["training"], rel=1e-6)
        assert results["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6)
        assert results["training"][0] == results["training"][1]
        assert results["evaluated"][0] == results["evaluated"][1] != results["training"][0]
        assert results["graph"] == (True, False)


@pytest.mark.parametrize(("training_first", "rows"), [(True, 4), (False, 8)])
def test_a_head_that_only_training_uses(world2: World, training_first: bool, rows: int) -> None:
    """The first program says how it is held; where that does not use it, it is whole."""
    expected = jobs.auxiliary(training_first)
    for results in world2.run(jobs.auxiliary, training_first):
        assert results["evaluated"] == pytest.approx(expected["evaluated"], abs=1e-6)
        assert results["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert_same(results["gradients"], expected["gradients"])
        assert results["rows"] == rows


# What follows needs no second process: a plan of ones compiles and runs in the same way.


def test_one_process_is_the_eager_model() -> None:
    eager, batch = models.tiny(dropout=0.0), models.batch()
    model = fxpar.parallelize(models.tiny(dropout=0.0), fxpar.Plan(), batch)
    loss = eager(**batch)["loss"]
    loss.backward()
    assert torch.equal(model.train_step(batch), loss.detach())
    expected = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    assert_same(jobs.gradients(model), expected)
    assert "unused" not in expected


def test_arguments_may_be_passed_in_any_way() -> None:
    model, batch = jobs.tiny_module().eval(), models.batch()
    ids, targets = batch["ids"], batch["targets"]
    expected = models.tiny().eval()(ids, targets)["loss"]
    calls = [
        model(ids, targets),
        model(ids, targets=targets),
        model(targets=targets, ids=ids),
        model(ids=ids, targets=targets, scaled=False),
    ]
    for outputs in calls:
        torch.testing.assert_close(outputs["loss"], expected)


def test_mappings_of_any_kind_and_order_share_a_program() -> None:
    model, batch = jobs.tiny_module(), models.batch()
    expected = model.train_step(batch)
    programs = len(list(model._programs))
    model.step = 0
    assert torch.equal(model.train_step(UserDict(reversed(batch.items()))), expected)
    assert len(list(model._programs)) == programs


def test_a_constant_of_the_call_has_its_own_program() -> None:
    model, ids = jobs.tiny_module().eval(), models.batch()["ids"]
    plain, scaled = model(ids=ids)["logits"], model(ids=ids, scaled=True)["logits"]
    torch.testing.assert_close(scaled, 2 * plain)
    torch.testing.assert_close(model(ids=ids, scaled=False)["logits"], plain)


def test_sizes_that_take_another_branch_have_their_own_program() -> None:
    eager = models.tiny(models.Branching)
    model = fxpar.parallelize(models.tiny(models.Branching), fxpar.Plan(), (torch.randn(3, 5, 6),))
    for rows, length in ((2, 5), (4, 8), (2, 9), (7, 20), (1, 5), (1, 7), (1, 20), (2, 1), (3, 6)):
        x = torch.randn(rows, length, 6)
        torch.testing.assert_close(model(x), eager(x))
    assert len(list(model._programs)) == 5


def dropped_and_values(out: torch.Tensor) -> tuple[float, int]:
    """The share of zeros, and how many other values the first column has."""
    return float((out == 0).float().mean()), int(out[:, 0][out[:, 0] != 0].unique().numel())


def test_modules_keep_modes_of_their_own() -> None:
    original = models.tiny(models.Mixed)
    original.first.eval()
    model = fxpar.parallelize(original, fxpar.Plan(), (torch.ones(3, 6),))
    x = torch.ones(200, 6)
    for _ in range(2):  # the second dropout alone, as it came and again after a change
        zeros, values = dropped_and_values(model(x))
        assert 0.4 < zeros < 0.6
        assert values == 1
        model.eval()
        torch.testing.assert_close(model(x), models.tiny(models.Mixed).eval()(x))
        model.get_submodule("second").train()
    model.train()
    zeros, values = dropped_and_values(model(x))
    assert 0.4 < zeros < 0.6
    assert values > 1


def test_masks_change_with_each_call_and_return_with_the_step() -> None:
    model, batch = jobs.tiny_module(), models.batch()
    first, second = model(**batch)["loss"], model(**batch)["loss"]
    assert not torch.equal(first, second)
    model.step = 0
    assert torch.equal(model(**batch)["loss"], first)


def test_flags_of_a_call_reach_the_model() -> None:
    ids = torch.arange(12).reshape(2, 6)
    model: Any = fxpar.parallelize(models.wide_llama().train(), fxpar.Plan(), {"input_ids": ids, "labels": ids})
    eager: Any = models.wide_llama()
    outputs = model.eval()(ids, output_hidden_states=True)
    expected = eager(ids, output_hidden_states=True)
    assert type(outputs) is type(expected)
    assert len(outputs.hidden_states) == len(expected.hidden_states) == 2
    torch.testing.assert_close(outputs.hidden_states[1], expected.hidden_states[1])
    values = model(ids, return_dict=False)
    assert isinstance(values, tuple)
    torch.testing.assert_close(values, eager(ids, return_dict=False))


def test_caches_are_refused_by_name() -> None:
    ids = torch.arange(12).reshape(2, 6)
    eager: Any = models.wide_llama().eval()
    model = fxpar.parallelize(eager, fxpar.Plan(), {"input_ids": ids})
    cache = eager(ids, use_cache=True).past_key_values
    for name, value in {"use_cache": True, "past_key_values": cache}.items():
        with pytest.raises(InputError, match="caches are for generation, which is not supported") as caught:
            model(ids, **{name: value})
        assert caught.value.where == f"batch entry {name}"
    torch.testing.assert_close(model(ids, use_cache=False, past_key_values=None).logits, eager(ids).logits)
    eager.config.use_cache = True
    with pytest.raises(InputError, match="the model returns a cache") as caught:
        fxpar.parallelize(eager, fxpar.Plan(), {"input_ids": ids})
    assert caught.value.where == "model.config.use_cache"


def test_a_tensor_that_the_model_ignores_is_refused() -> None:
    batch = {"input_ids": torch.ones(2, 6, dtype=torch.long), "token_type": torch.zeros(2, 6)}
    with pytest.raises(InputError, match="does nothing with it") as caught:
        fxpar.parallelize(models.wide_llama(), fxpar.Plan(), batch)
    assert caught.value.where == "batch entry token_type"


def test_the_weights_are_not_kept_twice() -> None:
    original = models.tiny()
    watched = weakref.ref(original.up.weight)
    model = fxpar.parallelize(original, fxpar.Plan(), models.batch())
    del original
    gc.collect()
    assert watched() is None
    model.train_step(models.batch())
