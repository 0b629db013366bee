"""`fxpar.Trainer`: the Trainer of transformers, whose model runs under a plan.

Enters: the arguments of `transformers.Trainer`, and a plan. Leaves: its training, evaluation, logs and callbacks, with
fxpar's steps, rows and checkpoints. Only this module needs transformers and accelerate.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from fxpar.api import parallelize
from fxpar.checkpoint.parallel_module import ParallelModule
from fxpar.errors import CheckpointError, InputError
from fxpar.loop.data import RankRows, data_ranks
from fxpar.optim.optimizer import Optimizer
from fxpar.plan.plan import Plan
from fxpar.runtime.rank_batches import data_part

try:
    import transformers
    from accelerate import Accelerator
    from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler, prepare_data_loader
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, align_special_tokens
except ImportError as error:
    remedy = "pip install 'fxpar[hf]'"
    raise InputError(f"needs transformers and accelerate: {error}", where="fxpar.Trainer", remedy=remedy) from error

_align_tokens: Callable[[Any, Any], None] = align_special_tokens
_STATE = "trainer_state.json"
_IGNORED = -100  # what the losses of transformers leave out
_COUNT = "num_items_in_batch"
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
_LEAVE_OUT = "leave it out"
# Arguments that would wrap or change the model, or do what the plan does; each with the reason and the remedy.
_REFUSED: Mapping[str, tuple[str, str]] = {
    "activation_checkpointing": ("the plan says what is recomputed", "pass Plan(recompute=fxpar.Recompute(…))"),
    "auto_find_batch_size": ("ranks would try again at different times", "choose per_device_train_batch_size"),
    "bf16_full_eval": ("the plan says the element types", "pass Plan(precision='bf16')"),
    "debug": ("the compiled program calls no hooks", _LEAVE_OUT),
    "deepspeed": ("would split the model a second time", "pass Plan(shard='parameters')"),
    "enable_jit_checkpoint": ("ranks get the signal at different times", "pass save_steps=…"),
    "fp16": ("loss scaling is not supported here", "pass Plan(precision='bf16'), or use fxpar.train with a scaler"),
    "fp16_full_eval": ("the plan says the element types", "pass Plan(precision='bf16')"),
    "fsdp": ("would split the model a second time", "pass Plan(shard='parameters')"),
    "gradient_checkpointing": ("the plan says what is recomputed", "pass Plan(recompute=fxpar.Recompute(…))"),
    "neftune_noise_alpha": ("the compiled program calls no hooks", "add the noise in the model's forward"),
    "parallelism_config": ("would split the model a second time", "pass fxpar.Plan(…) with these sizes"),
    "push_to_hub": ("would upload one rank's part", "call save_model(), and upload that folder"),
    "save_on_each_node": ("a checkpoint is one folder, which all ranks see", "pass an output_dir that all of them see"),
    "torch_compile": ("the module's programs are compiled by itself", "pass Plan(compile=True)"),
    "torch_empty_cache_steps": ("programs keep their memory", _LEAVE_OUT),
    "use_liger_kernel": ("the program is compiled before", "apply_liger_kernel(model) before you make the Trainer"),
}


class PlanAccelerator(Accelerator):  # type: ignore[misc]
    """Leaves to the plan what accelerate would do a second time: wrapping, averaging and sharing out of rows.

    Attributes:
        module: what runs; None before it is there.
        is_whole: whether all ranks hold the rows of all, as in an evaluation.
    """

    module: ParallelModule | None = None
    is_whole = False

    @property
    def num_processes(self) -> int:
        """Returns 1: the rows of a loader are not shared out again, and losses are of all ranks."""
        return 1

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Returns loaders that copy to the device; other objects unchanged."""
        # Else evaluation prepares the model each time, and says how long that took.
        self._models += [entry for entry in objects if isinstance(entry, nn.Module)]
        prepared = tuple(self._loader(entry) if isinstance(entry, DataLoader) else entry for entry in objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def _loader(self, loader: DataLoader[Any]) -> Any:
        seeds = loader.worker_init_fn
        if isinstance(seeds, partial) and "rank" in seeds.keywords and self.module is not None:
            # Workers of ranks that read the same rows draw the same numbers.
            rank = data_part(self.module.world.mesh, self.module.world.rank)
            loader.worker_init_fn = partial(seeds.func, *seeds.args, **{**seeds.keywords, "rank": rank})
        options = {"put_on_device": True, "non_blocking": self.non_blocking, "dispatch_batches": False}
        return prepare_data_loader(loader, self.device, num_processes=1, process_index=0, **options)

    def prepare_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Returns the model."""
        return model

    def unwrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Returns the module, also for what calls it."""
        return model if isinstance(model, nn.Module) else self.module

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips the gradients of the module, all together; returns their norm before that."""
        assert self.module is not None
        return self.module.clip_grad_norm_(max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """Returns a scalar of each data rank."""
        if self.is_whole or self.module is None or self.module.world.size == 1:
            return tensor.reshape(1)
        mesh = self.module.world.mesh
        parts = {data_part(mesh, rank): rank for rank in reversed(range(self.module.world.size))}
        return super().gather(tensor)[[parts[part] for part in sorted(parts)]]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns what it gets: all ranks have the predictions for all rows."""
        return input_data

    def pad_across_processes(self, tensor: Any, *args: Any, **options: Any) -> Any:
        """Returns what it gets, as `gather_for_metrics`."""
        return tensor


class Trainer(transformers.Trainer):
    """Trains, evaluates, saves and resumes as `transformers.Trainer` does, with a model under a plan.

    All ranks make the same calls. `per_device_train_batch_size` and `per_device_eval_batch_size` are rows of a data
    rank, so that one process with that many times the data ranks computes the same. Ranks of other axes read the rows
    of their data rank. In evaluation each rank reads all rows, and computes those of its data rank.

    Example:
        ```python
        args = transformers.TrainingArguments("out", max_steps=2, per_device_train_batch_size=4)
        trainer = fxpar.Trainer(language_model, args, train_dataset=rows, plan=fxpar.Plan())
        trainer.train()
        ```

    Args:
        model: the author's, on the CPU or the meta device; it is split when the Trainer is made.
        args: as of transformers.
        plan: how to split.
        example: a batch as the collator makes it; by default of the first rows of a dataset.
        checkpoint: safetensors with the weights; see `parallelize`.
        options: other arguments of `transformers.Trainer`.

    Raises:
        InputError: an argument would wrap or change the model a second time, or there is nothing to make an example of.
        PlanError: the number of processes is not the plan's.
    """

    model: Any
    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        *,
        plan: Plan | None = None,
        example: Mapping[str, Any] | None = None,
        checkpoint: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InputError(f"there is none, got {plan!r}", where="plan", remedy="pass plan=fxpar.Plan(tp=2), say")
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        _check(type(self), model, args, plan, options)
        args.device  # noqa: B018 - counts GPUs, of which a process has one
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(model, args, data_collator, **options)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or getattr(self.accelerator, "parallelism_config", None):
            remedy = "start with accelerate launch --multi_gpu, or with torchrun"
            raise InputError("would split the model a second time", where="accelerate's configuration", remedy=remedy)
        tokenizers = (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
        if isinstance(self.processing_class, tokenizers) and hasattr(model, "config"):
            _align_tokens(model, self.processing_class)  # train() would change what is compiled
        self._set_signature_columns_if_needed()  # the parallel module's forward takes anything
        batch = self._example() if example is None else dict(example)
        counts = self._counts_items(batch)
        if counts:
            batch[_COUNT] = torch.tensor(1.0)
            plan = _summed(plan)
        self._size = model.num_parameters(exclude_embeddings=True) if hasattr(model, "num_parameters") else 0
        self._undecayed = {name for name, _ in model.named_parameters()} - {*self.get_decay_parameter_names(model)}
        try:
            module = parallelize(model.train(), plan, batch, loss=self._loss_function(), checkpoint=checkpoint)
        except InputError as error:
            if error.where != f"batch entry {_COUNT}":
                raise
            remedy = "set model.accepts_loss_kwargs = False: the losses of the batches of a step are averaged then"
            raise InputError("the model's loss does not read it", where=_COUNT, remedy=remedy) from error
        if args.world_size != module.world.size:
            reason = f"transformers sees {args.world_size} processes, and the plan has {module.world.size}"
            remedy = "start with torchrun or accelerate launch; on CPUs pass use_cpu=True too"
            raise InputError(reason, where="world size", remedy=remedy)
        self.model = self.model_wrapped = self.callback_handler.model = self.accelerator.module = module
        self._parts: list[Any] = []  # of the step, until its last batch is there

    def create_accelerator_and_postprocess(self) -> None:
        """Makes an accelerator that leaves model, rows and gradients to the plan."""
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PlanAccelerator  # transformers names the class itself
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves it where it is: each rank copies its shards."""

    # ------------------------------------------------------------------ batches

    def _example(self) -> dict[str, Any]:
        """Returns the collated first rows of a dataset, the same on all ranks."""
        dataset: Any = self.train_dataset if self.train_dataset is not None else self.eval_dataset
        if isinstance(dataset, dict):
            dataset = next(iter(dataset.values()))
        if dataset is None:
            raise InputError("there is no dataset to make one of", where="example", remedy="pass example=… a batch")
        rows = max(2, self._train_batch_size)
        with torch.random.fork_rng(devices=[]):
            while True:
                loader = super()._get_dataloader(dataset, "Example", rows)
                batch = dict(next(iter(loader)))
                # Equal sizes in an example are one size in all batches.
                if not any(rows in v.shape[1:] for v in batch.values() if isinstance(v, Tensor) and len(v) == rows):
                    return batch
                rows += 1

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Returns a loader of this data rank's rows to train on, or of all rows to evaluate."""
        parts, part = data_ranks(self.model), data_part(self.model.world.mesh, self.model.world.rank)
        drop_last = self.args.dataloader_drop_last
        if not is_training:
            return super()._get_dataloader(
                dataset, description, batch_size * parts, sampler_fn, False, *args, **options
            )

        def rows_of(dataset: Any) -> Any:
            sampler = None if sampler_fn is None else sampler_fn(dataset)
            if type(sampler) is RandomSampler:  # whose order is that of each process
                seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
                sampler = SeedableRandomSampler(dataset, data_seed=seed)
            if sampler is None:
                return None
            count = self.model.plan.microbatches
            rest = 0 if drop_last else len(sampler) % (batch_size * parts)
            if count > 1 and (batch_size % count or rest % (parts * count)):
                raise InputError(
                    f"cannot cut batches of {batch_size} rows a data rank, or the last of {len(sampler)} samples",
                    where=f"microbatches={count}",
                    remedy="pass a multiple of it as per_device_train_batch_size, and dataloader_drop_last=True",
                )
            return RankRows(sampler, batch_size, parts, part, drop_last)

        if isinstance(dataset, IterableDataset) and parts > 1:
            if not drop_last:
                reason = f"nobody knows how many rows its last batch has, for {parts} data ranks"
                raise InputError(reason, where="train_dataset", remedy="pass dataloader_drop_last=True")
            dataset = IterableDatasetShard(dataset, batch_size, True, num_processes=parts, process_index=part)
        return super()._get_dataloader(dataset, description, batch_size, rows_of, True, *args, **options)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the rows of a step, of all data ranks."""
        rows: int = self._train_batch_size * args.gradient_accumulation_steps
        return rows * data_ranks(self.model)

    # ------------------------------------------------------------------ losses and gradients

    def _counts_items(self, batch: Mapping[str, Any]) -> bool:
        """Returns whether losses are divided by what counts in all batches of a step."""
        counts = self._get_num_items_in_batch([batch], self.args.device) is not None
        if counts and not self.model_accepts_loss_kwargs:
            reason = "the model's forward takes no **kwargs, and so no num_items_in_batch"
            raise InputError(reason, where="compute_loss_func", remedy="compute the loss in the model's forward")
        return counts

    def _loss_function(self) -> Callable[[Any, Any], Tensor] | None:
        """Returns the loss that is not the model's; None where it is."""
        loss = self.compute_loss_func
        if loss is None and self.label_smoother is not None:
            shifts = type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            loss = partial(self.label_smoother, shift_labels=shifts)
        if loss is None:
            return None
        return lambda outputs, batch: loss(outputs, batch["labels"], num_items_in_batch=batch.get(_COUNT))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Runs forward and backward of a step when its last batch is there; returns the loss, or 0 before that."""
        inputs = dict(self._prepare_inputs(inputs))
        if num_items_in_batch is not None:
            inputs[_COUNT] = num_items_in_batch
        self._parts.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._parts = self._parts, []
        if not self.model.training:
            self.model.train()
        # A batch alone is cut by Plan.microbatches; of an accumulation each is a microbatch.
        loss: Tensor = self.model.train_step(parts if self.args.gradient_accumulation_steps > 1 else parts[0])
        return loss

    def create_optimizer(self, model: Any = None) -> Any:
        """Makes `fxpar.Optimizer` with the algorithm of the arguments, once."""
        if self.optimizer is None:
            algorithm, options = self.optimizer_cls_and_kwargs or self._algorithm()
            options = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay, **options}
            groups = dict(options.pop("groups", {}))
            if self._undecayed and self.args.weight_decay:
                groups[lambda name, _: name in self._undecayed] = {"weight_decay": 0.0}
            self.optimizer = Optimizer(self.model, algorithm, groups=groups, **options)
        return self.optimizer

    def _algorithm(self) -> tuple[Any, dict[str, Any]]:
        """Returns the optimizer's class and options that the arguments name."""
        name = str(getattr(self.args.optim, "value", self.args.optim))
        if name not in _OPTIMIZERS:
            raise InputError(
                f"{name!r} is none that steps each element by itself on parts of parameters",
                where="optim",
                remedy=f"choose from {', '.join(_OPTIMIZERS)}, or pass optimizer_cls_and_kwargs=(fxpar.optim.Muon, …)",
            )
        algorithm, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        return algorithm, dict(options)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        """Returns False: the module's own norm counts parameters of all kinds."""
        return False

    def floating_point_ops(self, inputs: Any) -> float:  # type: ignore[override]
        """Returns this rank's part of the FLOPs of a batch, as transformers estimates them from the whole model."""
        words = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        world = self.model.world.size
        return 0 if words is None else 6 * words.numel() * self._size * data_ranks(self.model) / world

    # ------------------------------------------------------------------ evaluation

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Evaluates a batch with the rows of all ranks; all of them return the results for all rows.

        Returns:
            Loss f32[rows], the same for each row, logits and labels.
        """
        rows, inputs = self._even(inputs)
        gathers = not prediction_loss_only or self._loss_function() is not None
        with self._whole_batches():
            call: Any = partial(self._whole_outputs, gathers)
            loss, *predictions = super().prediction_step(call, inputs, prediction_loss_only, ignore_keys)

        def cut(value: Any) -> Any:
            return value[:rows] if isinstance(value, Tensor) and value.dim() and len(value) >= rows else value

        logits, labels = pytree.tree_map(cut, predictions)
        # transformers repeats it for each row, and takes the mean over rows.
        return None if loss is None else loss.repeat(rows), logits, labels

    @contextmanager
    def _whole_batches(self) -> Iterator[None]:
        self.accelerator.is_whole = True
        try:
            yield
        finally:
            self.accelerator.is_whole = False

    def _whole_outputs(self, gathers: bool, **inputs: Any) -> Any:
        """Returns the model's outputs for all rows, of which this rank computes those of its data rank."""
        if "labels" not in inputs:
            inputs.pop(_COUNT, None)  # a loss that is not the model's reads both
        outputs = self.model(**self.model.own_rows(inputs))
        if not gathers:
            return outputs
        return pytree.tree_map(lambda v: v.full_tensor() if isinstance(v, DTensor) else v, outputs)

    def _even(self, inputs: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Returns the rows of a batch, and it with as many for each data rank; rows that were added do not count.

        Raises:
            InputError: the loss would count them.
        """
        parts = data_ranks(self.model)
        rows = next(len(value) for value in inputs.values() if isinstance(value, Tensor) and value.dim())
        more = max(-rows % parts, 2 * parts - rows if parts > 1 else 0)  # a data rank with one row has another program
        if not more:
            return rows, dict(inputs)
        labels = [inputs[name] for name in self.label_names if inputs.get(name) is not None]
        classes = getattr(self.model.config, "num_labels", 2) if hasattr(self.model, "config") else 2
        if any(label.is_floating_point() for label in labels) or (
            labels and (classes < 2 or self.label_names != ["labels"])
        ):
            raise InputError(
                f"a batch has {rows} rows for {parts} data ranks, and its loss would count rows that fill it up",
                where="eval_dataset",
                remedy=f"choose per_device_eval_batch_size so that {parts} divides the last batch too",
            )

        def filled(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim() or len(value) != rows:
                return value
            last = value[-1:].expand(more, *value.shape[1:])
            return torch.cat([value, torch.full_like(last, _IGNORED) if name in self.label_names else last])

        return rows, {name: filled(name, value) for name, value in inputs.items()}

    # ------------------------------------------------------------------ checkpoints

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Trains; `resume_from_checkpoint=True` continues the last checkpoint that is complete."""
        self._parts = []
        if resume_from_checkpoint is True:
            folders = Path(str(self.args.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            complete = [f for f in folders if re.fullmatch(r".*-\d+", f.name) and _is_complete(f)]
            if not complete:
                remedy = "leave it out for a first run, or pass the folder of a checkpoint"
                reason = f"{self.args.output_dir} has no complete checkpoint"
                raise CheckpointError(reason, where="resume_from_checkpoint", remedy=remedy)
            resume_from_checkpoint = str(max(complete, key=lambda f: int(f.name.rpartition("-")[2])))
        return super().train(resume_from_checkpoint, *args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes what `from_pretrained` reads, and the tokenizer's files. All ranks must call it."""
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            return  # into a checkpoint, whose training save has the weights
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        self.model.save_checkpoint(output_dir or self.args.output_dir, tokenizer=tokenizer)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        position = {"step": self.state.global_step}
        self.model.save_training(output_dir, self.optimizer, self.lr_scheduler, position=position, keep=1)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # a checkpoint with the Trainer's state is complete

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Refuses what has no training save; the weights come with the optimizer's state."""
        if not [*Path(resume_from_checkpoint).glob("training-*")]:
            raise CheckpointError(
                "is no checkpoint of fxpar.Trainer with all that a training is",
                where=str(resume_from_checkpoint),
                remedy="leave save_only_model out when saving, or start from its weights: from_pretrained(folder)",
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.model.resume_training(checkpoint, self.optimizer, self.lr_scheduler)

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        self.model.load_checkpoint(next(iter(sorted(best.glob("training-*"), reverse=True)), best))


def _is_complete(folder: Path) -> bool:
    """Returns whether a checkpoint has the Trainer's state, which is written last."""
    try:
        json.loads((folder / _STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def _summed(plan: Plan) -> Plan:
    """Returns the plan for losses that are divided by what counts in the whole step.

    Raises:
        InputError: it reduces losses otherwise.
    """
    if plan.loss_reduction not in ("mean", "sum"):
        reason = f"losses are divided by what counts in the whole step, got {plan.loss_reduction!r}"
        raise InputError(reason, where="loss_reduction", remedy=_LEAVE_OUT)
    return dataclasses.replace(plan, loss_reduction="sum")


def _check(kind: type[Trainer], model: Any, args: Any, plan: Plan, options: Mapping[str, Any]) -> None:
    """Refuses arguments by which Trainer would wrap or change the model, or that a plan cannot follow.

    Raises:
        InputError: names the argument.
    """
    problems: dict[str, tuple[Any, str, str]] = {
        name: (getattr(args, name, None), *texts) for name, texts in _REFUSED.items()
    }
    sampling = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    config, standard = args.accelerator_config, type(args.accelerator_config)()
    accumulates = args.gradient_accumulation_steps > 1 and plan.microbatches > 1
    problems |= {
        "compute_loss": (
            kind.compute_loss is not transformers.Trainer.compute_loss,
            "the compiled step would not call it",
            "pass compute_loss_func=…, which is traced",
        ),
        "model_init": (options.get("model_init"), "the model is split once", "pass model=model_init()"),
        "optimizers": (
            (options.get("optimizers") or (None,))[0],
            "it has the parameters of the unsplit model",
            "pass optimizer_cls_and_kwargs=(torch.optim.AdamW, {…})",
        ),
        "device_map": (
            getattr(model, "hf_device_map", None),
            "the model is on several devices already",
            "load it without device_map, or on the meta device with checkpoint=folder",
        ),
        "bf16": (
            args.bf16 and plan.precision != "bf16",
            "the plan says the element types",
            "pass Plan(precision='bf16') too",
        ),
        "Plan(precision='fp16')": (plan.precision == "fp16", *_REFUSED["fp16"]),
        "train_sampling_strategy": (
            sampling not in ("random", "sequential"),
            f"{sampling!r} makes other batches for each number of ranks",
            "pass 'random' or 'sequential', or sort the dataset",
        ),
        "average_tokens_across_devices": (
            not args.average_tokens_across_devices,
            "a loss is that of all data ranks",
            _LEAVE_OUT,
        ),
        "accelerator_config": (config != standard, "the plan says who reads which rows", _LEAVE_OUT),
        "gradient_accumulation_steps": (
            accumulates,
            "its batches are the microbatches",
            "leave Plan.microbatches out, or take one larger batch",
        ),
    }
    for name, (is_so, reason, advice) in problems.items():
        if is_so:
            raise InputError(reason, where=name, remedy=advice)
    if isinstance(model, ParallelModule):
        raise InputError("is parallelised already", where="model", remedy="pass the author's model: plan=… splits it")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"must be a module, got {type(model).__name__}", where="model", remedy="pass the author's model"
        )
