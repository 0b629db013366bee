"""What the ranks of a test world do with `fxpar.Trainer`, and the same with transformers' own on one process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fxpar
from fxpar.errors import FxparError
from tests.runtime.jobs import Found, kept

LENGTH, VOCABULARY, SAMPLES, BATCH = 14, 48, 11, 4


class Texts(Dataset[dict[str, Tensor]]):
    """Random words, of which other numbers count in each row; notes which rows were read."""

    def __init__(self, samples: int = SAMPLES, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
        self.starts = torch.randint(1, LENGTH - 2, (samples,), generator=generator).tolist()
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        labels = self.words[index].clone()
        labels[: self.starts[index]] = -100
        return {"input_ids": self.words[index], "labels": labels}


def llama() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """What a launcher tells a rank, which accelerate keeps for the process; nothing in the test's own."""
    if not dist.is_initialized():
        yield
        return
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, told):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def arguments(folder: Path, rows: int, **options: Any) -> transformers.TrainingArguments:
    """Two epochs of two steps, the last of which has a smaller batch; clipped, with a schedule."""
    sizes = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "num_train_epochs": 2}
    steps: dict[str, Any] = {"gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 3, "eval_steps": 2}
    rates = {"learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1}
    quiet = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    options = {"max_grad_norm": 0.5, "eval_strategy": "steps", **sizes, **steps, **rates, **quiet, **options}
    return transformers.TrainingArguments(output_dir=str(folder), **options)


class Logged(transformers.TrainerCallback):
    """A logger: it takes records on one process alone."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **other: Any) -> None:
        if state.is_world_process_zero:
            self.records.append(dict(logs))


def accuracy(predictions: Any) -> dict[str, float]:
    likeliest, labels = predictions.predictions[:, :-1].argmax(-1), predictions.label_ids[:, 1:]
    scores = {"accuracy": float((likeliest == labels)[labels != -100].mean())}
    return scores | {"rows": len(labels), "size": float(numpy.abs(predictions.predictions).sum())}


def trainer(
    folder: Path, plan: fxpar.Plan | None, model: Any = None, trainer_options: Any = None, **options: Any
) -> Any:
    """Transformers' own without a plan."""
    rows = BATCH if plan is None else BATCH // plan.dp
    made: dict[str, Any] = {"train_dataset": Texts(), "eval_dataset": Texts(5, seed=1), **(trainer_options or {})}
    model = llama() if model is None else model
    if plan is None:
        return transformers.Trainer(model, arguments(folder, rows, **options), **made)
    return fxpar.Trainer(model, arguments(folder, rows, **options), plan=plan, **made)


def trained(folder: Path, plan: fxpar.Plan | None, resumes: bool = False, **options: Any) -> Found:
    """Trains; returns what became of it."""
    logged = Logged()
    with launched():
        made = {"callbacks": [logged], "compute_metrics": accuracy, **options.pop("trainer_options", {})}
        it = trainer(folder, plan, trainer_options=made, **options)
        it.train_dataset.read.clear()  # those of the example
        it.train(resume_from_checkpoint=resumes or None)
    records = [record for record in it.state.log_history if "train_runtime" not in record]
    weights = it.model.state_dict() if plan is None else it.model.full_state_dict()
    return {
        "records": [{k: v for k, v in r.items() if not k.endswith(("second", "runtime", "time"))} for r in records],
        "weights": weights,
        "read": it.train_dataset.read,
        "logged": len(logged.records),
        "flos": it.state.total_flos,
        "tokens": it.state.num_input_tokens_seen,
    }


def resumed(folder: Path, plan: fxpar.Plan, other: fxpar.Plan) -> tuple[Found, Found, Found]:
    """A training; the same, taken up before its last checkpoint was complete; and that under another plan."""
    whole = trained(folder, plan)
    return whole, _taken_up(folder, plan), _taken_up(folder, other)


def _taken_up(folder: Path, plan: fxpar.Plan) -> Found:
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "checkpoint-4" / "trainer_state.json").write_text('{"cut off')
    dist.barrier()
    return trained(folder, plan, resumes=True)


class Killer(transformers.TrainerCallback):
    """Ends this process in the fourth step, without a word."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **other: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path, plan: fxpar.Plan, rank: int) -> None:
    options: dict[str, Any] = {"compute_metrics": accuracy}
    options |= {"callbacks": [Killer()]} if dist.get_rank() == rank else {}
    with launched():
        trainer(folder, plan, trainer_options=options, save_steps=1).train()


def accelerated(axis: str) -> tuple[list[float], str]:
    """Losses of a loop with accelerate's loader, backward and clipping; and why its loader cannot be taken."""
    losses: list[float] = []
    with launched():
        accelerator = Accelerator(cpu=True)
        data = Texts(8)
        batch = {name: torch.stack([data[i][name] for i in range(4)]) for name in ("input_ids", "labels")}
        plan = fxpar.Plan(**{axis: 2})  # type: ignore[arg-type]
        model = kept(("accelerated", axis), lambda: fxpar.parallelize(llama(), plan, batch))
        optimizer = fxpar.Optimizer(model, "adamw", lr=1e-2)
        try:
            for rows in accelerator.prepare(DataLoader(data, 2)):
                loss = model(**rows).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        except FxparError as error:
            return losses, str(error)
    return losses, ""
