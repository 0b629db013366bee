"""`fxpar.Trainer` trains, evaluates and resumes as transformers' own does on one process."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch.nn import functional

import fxpar
from fxpar.errors import CheckpointError, FxparError, InputError
from fxpar.loop.data import RankRows
from tests.loop import trainer_jobs as jobs
from tests.loop.trainer_jobs import SAMPLES, VOCABULARY
from tests.runtime.jobs import Found
from tests.runtime.world import JOBS, RankFailed, World

ROOT = Path(__file__).resolve().parents[2]
PLANS = {
    "tp": fxpar.Plan(tp=2),
    "dp": fxpar.Plan(dp=2),
    "shard": fxpar.Plan(dp=2, shard="parameters"),
    "pp": fxpar.Plan(pp=2),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return jobs.trained(tmp_path_factory.mktemp("reference"), None, include_num_input_tokens_seen="all")


def assert_alike(found: Found, expected: Found) -> None:
    assert len(found["records"]) == len(expected["records"]) > 0
    for record, wanted in zip(found["records"], expected["records"], strict=True):
        assert record.keys() == wanted.keys()
        assert record == {name: pytest.approx(value, rel=1e-6) for name, value in wanted.items()}
    assert found["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", PLANS)
def test_a_training_is_that_of_one_process(world2: World, reference: Found, tmp_path: Path, name: str) -> None:
    """With other numbers of words in each row, accumulation, a smaller last batch, clipping, and metrics."""
    plan = PLANS[name]
    of_ranks = world2.run(_trained, tmp_path, plan)
    for found in of_ranks:
        assert_alike(found, reference)
        assert (found["flos"], found["tokens"]) == (reference["flos"], reference["tokens"])
    assert [found["logged"] for found in of_ranks] == [reference["logged"], 0]
    _check_rows([found["read"] for found in of_ranks], reference["read"], plan.dp)


def _trained(folder: Path, plan: fxpar.Plan) -> Found:
    return jobs.trained(folder, plan, include_num_input_tokens_seen="all")


def _check_rows(of_ranks: list[list[int]], expected: list[int], dp: int) -> None:
    """Tensor and pipeline ranks read the same rows, data ranks those of their part of each batch."""
    if dp == 1:
        assert of_ranks == [expected] * 2
        return
    parts = [[2, 2, 2] * 2, [2, 2, 1] * 2]
    for read, sizes in zip(of_ranks, parts, strict=True):
        assert len(read) == sum(sizes)
    places = [iter(read) for read in of_ranks]
    rows = [
        [next(place) for _ in range(n)]
        for pair in zip(*parts, strict=True)
        for place, n in zip(places, pair, strict=True)
    ]
    assert [*chain.from_iterable(rows)] == expected


@pytest.mark.parametrize(
    ("plan", "other"),
    [
        (PLANS["shard"], PLANS["pp"]),
        pytest.param(PLANS["tp"], PLANS["dp"], marks=pytest.mark.matrix),
        pytest.param(PLANS["pp"], PLANS["tp"], marks=pytest.mark.matrix),
    ],
    ids=["shard, pp", "tp, dp", "pp, tp"],
)
def test_a_resumed_training_is_the_one_that_never_stopped(
    world2: World, tmp_path: Path, plan: fxpar.Plan, other: fxpar.Plan
) -> None:
    """In the middle of an epoch. The last checkpoint is cut off, as of a training that was killed."""
    for whole, again, elsewhere in world2.run(jobs.resumed, tmp_path, plan, other):
        assert again["records"] == whole["records"]
        assert again["read"] == whole["read"][-len(again["read"]) :]
        for name, tensor in whole["weights"].items():
            assert torch.equal(again["weights"][name], tensor), name
        assert_alike(elsewhere, whole)


@pytest.mark.matrix
@pytest.mark.parametrize("name", PLANS)
def test_a_training_that_is_killed_goes_on(world2: World, captures: Path, tmp_path: Path, name: str) -> None:
    plan = PLANS[name]
    world = World(2, JOBS, group_seconds=10.0, captures=captures)
    try:
        with pytest.raises(RankFailed, match="died"):
            world.run(jobs.killed, tmp_path / "killed", plan, 1)
    finally:
        world.stop(kill=True)
    again = world2.run(jobs.trained, tmp_path / "killed", plan, True)
    for found, whole in zip(again, world2.run(jobs.trained, tmp_path / "whole", plan), strict=True):
        assert found["records"] == whole["records"]
        assert all(torch.equal(found["weights"][key], tensor) for key, tensor in whole["weights"].items())


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_four_ranks_train_as_one_process(
    world4: World, reference: Found, tmp_path: Path, options: dict[str, Any]
) -> None:
    for found in world4.run(_trained, tmp_path, fxpar.Plan(**options)):
        assert_alike(found, reference)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("length", "rows"), [(12, 2), (23, 2), (23, 1), (4, 3), (29, 4)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_data_ranks_share_out_each_batch(parts: int, length: int, rows: int, drop_last: bool) -> None:
    if (drop_last and length < rows * parts) or (not drop_last and 0 < length % (rows * parts) < parts):
        with pytest.raises(InputError, match=r"train_dataset: .*samples"):
            RankRows(range(length), rows, parts, 0, drop_last)
        return
    samplers = [RankRows(range(length), rows, parts, part, drop_last) for part in range(parts)]
    of_parts = [[*sampler] for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(indices) for indices in of_parts]
    batches = [[indices[i : i + rows] for i in range(0, len(indices), rows)] for indices in of_parts]
    assert len({len(of_part) for of_part in batches}) == 1
    rest = -(length % (rows * parts)) if drop_last else 0
    together = [index for pieces in zip(*batches, strict=True) for piece in pieces for index in piece]
    assert together == [*range(length + rest)]


def scaled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    words = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return words / num_items_in_batch / 2


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        pytest.param({"trainer_options": {"compute_loss_func": scaled}}, marks=pytest.mark.matrix),
    ],
    ids=["smoothed", "scaled"],
)
def test_losses_that_are_not_the_models_are_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = jobs.trained(tmp_path / "plain", None, **options)
    assert_alike(jobs.trained(tmp_path / "plan", fxpar.Plan(), **options), expected)


@pytest.mark.matrix
def test_a_loss_that_reads_no_count_is_named_and_averaged(tmp_path: Path) -> None:
    """BERT's takes the count and leaves it: transformers adds the losses of an accumulation then."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    options: dict[str, Any] = {**sizes, **none, "num_labels": 3}
    config = transformers.BertConfig(vocab_size=VOCABULARY, **options)
    bert: Any = transformers.BertForSequenceClassification(config)
    data = [{"input_ids": torch.arange(9) + i, "labels": i % 3} for i in range(SAMPLES)]
    options = {"train_dataset": data, "eval_dataset": data}
    with pytest.raises(InputError, match=r"num_items_in_batch: .*does not read it; set model.accepts_loss_kwargs = Fa"):
        jobs.trainer(tmp_path, fxpar.Plan(), bert, options)
    bert.accepts_loss_kwargs = False
    split = jobs.trainer(tmp_path / "plan", fxpar.Plan(), bert, options, eval_strategy="no")
    split.train()
    plain = jobs.trainer(tmp_path / "plain", None, bert, options, eval_strategy="no")
    plain.train()
    losses = [[r["loss"] for r in it.state.log_history if "loss" in r] for it in (split, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_what_it_saves_generates(tmp_path: Path) -> None:
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "size",
        "greater_is_better": False,
        "save_steps": 2,
    }
    # It has other special words than the model's configuration.
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[EOS]": 7, "a": 3}, "[PAD]"))
    fast: Any = transformers.PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")
    options = {"compute_metrics": jobs.accuracy, "processing_class": tokenizer}
    options |= {"data_collator": transformers.default_data_collator}
    it = jobs.trainer(tmp_path, fxpar.Plan(), trainer_options=options, **best)
    it.train()
    saved = next((Path(it.state.best_model_checkpoint)).glob("training-*"))
    it.save_model(str(tmp_path / "model"))
    generated = []
    for folder in (saved, tmp_path / "model"):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
        generated.append(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).tolist())
        for name, tensor in it.model.full_state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").eos_token_id == 7
    assert model.config.eos_token_id == 7
    assert generated[0] == generated[1]
    assert len(generated[0][0]) == 7
    (saved / "training.json").unlink()
    with pytest.raises(CheckpointError, match=r"is no checkpoint of fxpar\.Trainer"):
        it.train(resume_from_checkpoint=str(tmp_path / "model"))
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        jobs.trainer(tmp_path / "new", fxpar.Plan()).train(resume_from_checkpoint=True)


# By argument a value that would wrap or change the model, and a part of the error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "compiled": ({"torch_compile": True}, "torch_compile: .*Plan\\(compile=True\\)"),
    "checkpointed": ({"gradient_checkpointing": True}, "checkpointing: .*recompute=fxpar.Recompute"),
    "halved": ({"bf16": True}, "bf16: .*Plan\\(precision='bf16'\\)"),
    "scaled": ({"fp16": True}, "fp16: .*scaler"),
    "sorted": ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy: 'group_by_length'"),
    "mixing": ({"optim": "adafactor"}, "optim: 'adafactor'.*choose from adamw_torch"),
    "sharded": ({"fsdp": "full_shard"}, "fsdp: .*Plan\\(shard='parameters'\\)"),
    "cut": ({"accelerator_config": {"split_batches": True}}, "accelerator_config: .*leave it out"),
    "own counts": ({"average_tokens_across_devices": False}, "average_tokens_across_devices: "),
    "searching": ({"auto_find_batch_size": True}, "auto_find_batch_size: "),
    "noisy": ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: "),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_what_would_wrap_or_change_the_model_is_refused(tmp_path: Path, name: str) -> None:
    options, text = REFUSED[name]
    plan = fxpar.Plan()
    with pytest.raises(InputError, match=text):
        jobs.trainer(tmp_path, plan, **options).train()


class Losing(fxpar.Trainer):
    """Computes its loss as scripts for transformers' own do."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


def test_mistakes_are_named(tmp_path: Path) -> None:
    model, plan = jobs.llama(), fxpar.Plan()
    split = jobs.trainer(tmp_path, plan, trainer_options={"eval_dataset": None}, eval_strategy="no")
    moved = jobs.llama()
    moved.hf_device_map = {"": 0}
    adamw = torch.optim.AdamW(model.parameters())
    mistakes: dict[str, Callable[[], Any]] = {
        "plan: there is none": lambda: fxpar.Trainer(model, jobs.arguments(tmp_path, 2)),
        "model: is parallelised already": lambda: jobs.trainer(tmp_path, plan, split.model),
        "device_map: .*without device_map": lambda: jobs.trainer(tmp_path, plan, moved),
        "the plan needs 2 processes": lambda: jobs.trainer(tmp_path, fxpar.Plan(tp=2), model),
        "optimizers: .*optimizer_cls_and_kwargs": lambda: jobs.trainer(
            tmp_path, plan, model, {"optimizers": (adamw, None)}
        ),
        "model_init: .*model=model_init": lambda: jobs.trainer(tmp_path, plan, model, {"model_init": jobs.llama}),
        "compute_loss: .*compute_loss_func": lambda: Losing(model, jobs.arguments(tmp_path, 2), plan=plan),
        "example: there is no dataset": lambda: jobs.trainer(
            tmp_path, plan, model, {"train_dataset": None, "eval_dataset": None}, eval_strategy="no"
        ),
        "gradient_accumulation_steps: .*Plan.microbatches": lambda: jobs.trainer(tmp_path, fxpar.Plan(microbatches=2)),
        "microbatches=2: cannot cut .*the last of 11 samples": lambda: jobs.trainer(
            tmp_path, fxpar.Plan(microbatches=2), gradient_accumulation_steps=1
        ).train(),
        "loss_reduction: ": lambda: jobs.trainer(tmp_path, fxpar.Plan(loss_reduction="token")),
        "accelerate's save_model: .*save_checkpoint": lambda: split.accelerator.save_model(split.model, str(tmp_path)),
        "accelerate's prepare: .*fxpar.Trainer": lambda: transformers.Trainer(
            split.model, jobs.arguments(tmp_path, 2, eval_strategy="no"), train_dataset=jobs.Texts()
        ).train(),
    }
    for text, action in mistakes.items():
        with pytest.raises(FxparError, match=text):
            action()


def test_rows_that_fill_a_batch_up_are_refused_where_they_would_count(tmp_path: Path) -> None:
    """Of two data ranks, one of which would have no row."""
    it = jobs.trainer(tmp_path, fxpar.Plan())
    world = SimpleNamespace(size=2, rank=0, mesh=fxpar.Plan(dp=2).mesh)
    it.model = SimpleNamespace(world=world, config=SimpleNamespace(num_labels=1))
    batch = {"input_ids": torch.ones(1, 3, dtype=torch.int64), "labels": torch.tensor([2])}
    with pytest.raises(InputError, match=r"eval_dataset: a batch has 1 rows for 2 data ranks"):
        it._even(batch)
    it.model.config.num_labels = 3
    rows, filled = it._even(batch)
    assert (rows, filled["labels"].tolist()) == (1, [2, -100, -100, -100])


def test_a_loop_with_accelerate_trains_data_ranks(world2: World) -> None:
    """Its loader gives each process rows of its own, which tensor ranks must not have."""
    (losses, error), _ = world2.run(jobs.accelerated, "dp")
    assert len(losses) == 2
    assert error == ""
    assert all(math.isfinite(loss) for loss in losses)
    (losses, error), _ = world2.run(jobs.accelerated, "tp")
    assert losses == []
    assert "differs between rank 0" in error


@pytest.mark.matrix
def test_accelerate_launch_starts_a_script(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; import fxpar; from tests.loop import trainer_jobs as jobs\n"
        f"it = jobs.trainer(Path({str(tmp_path)!r}), fxpar.Plan(tp=2), max_steps=1)\n"
        "it.train(); print('rank', it.model.world.rank, 'of', it.model.world.size, it.state.global_step)\n"
    )
    (tmp_path / "script.py").write_text(script)
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        *options,
        str(tmp_path / "script.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert {*re.findall(r"rank [01] of 2 1", done.stdout)} == {"rank 0 of 2 1", "rank 1 of 2 1"}
