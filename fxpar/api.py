"""`fxpar.parallelize`: from a model and a plan to this rank's module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar.capture.capture import check_model, check_samples
from fxpar.checkpoint.initial import open_alike
from fxpar.checkpoint.parallel_module import ParallelModule, local_weights
from fxpar.checkpoint.safetensors_files import Checkpoint
from fxpar.compile import check_arguments
from fxpar.cudagraphs.full import FullIterationGraphs
from fxpar.cudagraphs.graph_cache import PartialGraphs
from fxpar.cudagraphs.transformer_engine import EngineGraphs
from fxpar.errors import InputError, shown
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES
from fxpar.peer_memory.runtime.copy_transport import CopyTransport
from fxpar.pipeline.runtime.pipeline import PipelineExecutor
from fxpar.plan.plan import Plan
from fxpar.runtime.graph_modes import MODES
from fxpar.runtime.prefetch import Prefetched
from fxpar.runtime.refusals import Unwrappable
from fxpar.runtime.runner import STAGE_RUNNERS
from fxpar.runtime.steps import TRANSPORTS
from fxpar.runtime.world import connect, join, start_workers

# The features of the runtime, which knows them by these registries alone.
MODES |= {"partial": PartialGraphs, "transformer_engine": EngineGraphs, "full_iteration": FullIterationGraphs}
STAGE_RUNNERS["pp"] = PipelineExecutor
TRANSPORTS["copy"] = CopyTransport

_LONGEST_TIMEOUT = 1e7  # a third of a year; the process groups count in microseconds


def parallelize(
    model: nn.Module,
    plan: Plan,
    example: Any,
    loss: Callable[[Any, Any], Tensor] | str | None = None,
    passes: Sequence[Pass] = DEFAULT_PASSES,
    checkpoint: str | Path | Checkpoint | None = None,
    check_inputs: bool = True,
    timeout: float = 600.0,
) -> ParallelModule:
    """Compiles a single-device model into the part that this process runs.

    Example:
        ```python
        model = fxpar.parallelize(model, fxpar.Plan(), example=batch)
        loss = model.train_step(batch)
        ```

    Args:
        model: any `nn.Module` on the CPU or a device, in the mode (training, evaluation) to compile first. Its weights
            must be the same on every rank. This rank copies its shards, bit for bit, and leaves the model unchanged:
            delete it to free its memory. A model built under `torch.device("meta")` is never whole. Its modules are
            initialised one by one on the run's device, as `fxpar.materialize(model, plan.seed, device)` does.
        plan: how to split; its world size must be the number of processes.
        example: a batch as `train_step` will see it (a mapping, a tuple or a tensor), with at least two samples. Its
            structure, its types and which sizes are equal matter. Costs are those of its sizes.
        loss: a callable `(outputs, batch) → scalar` traced with the model, the name of a scalar output, or None. None
            takes the output `loss`, or else the only scalar output.
        passes: the compiler's passes in order; see `fxpar.passes`.
        checkpoint: safetensors from which each rank reads its shards of the weights: a file, an index, a folder with
            `model.safetensors` or its index, or a `fxpar.Checkpoint`, which can rename tensors. Values are cast to the
            model's types and the plan's precision. Buffers that are not saved keep the model's values. If the model has
            an adapter of peft, it may be that of the adapter or of the base model.
        check_inputs: whether every call compares the ranks' batches, by a checksum on the device. On GPUs the loss of a
            call whose batches differ is NaN, and the next call raises the error. If this is off, batches that differ
            give wrong results. Ranks always compare that they make the same calls at the same step.
        timeout: seconds that ranks wait for each other to compile, here and when a call needs another program. It is
            also the timeout of collectives, if this call creates the process groups.

    Raises:
        InputError: the model, plan, example or world cannot be used, or differs between ranks.
        RankError: another rank failed, ended or did not come in time; the text names it and its reason.
        CheckpointError: the checkpoint cannot be read, or its names or shapes differ from the model's.
        LayoutError, CheckFailed: a static check rejected the program, which is a bug of a pass.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST_TIMEOUT:
        remedy = f"pass a positive number, {_LONGEST_TIMEOUT:g} at most"
        raise InputError(f"must be a number of seconds, got {shown(timeout)}", where="timeout", remedy=remedy)
    agreement = connect(timeout)
    with agreement.call("parallelize"):
        check_arguments(model, plan, passes)
        _check(model, loss)
        _check_options(check_inputs)
        check_samples(example)
        start_workers(plan)
        world = join(plan, agreement)
        opened = None if checkpoint is None else open_alike(checkpoint, model, agreement.agree)
        weights = partial(local_weights, checkpoint=opened)
        module = ParallelModule(model, plan, world, example, loss, passes, weights, check_inputs)
        agreement.agree({}, "")  # every rank holds its shards
    return module


def _check_options(check_inputs: Any) -> None:
    if not isinstance(check_inputs, bool):
        raise InputError(f"must be True or False, got {shown(check_inputs)}", where="check_inputs", remedy="pass one")


def _check(model: nn.Module, loss: Any) -> None:
    if loss is not None and not callable(loss) and (not isinstance(loss, str) or not loss):
        raise InputError(
            f"must be a callable or the name of an output, got {shown(loss)}",
            where="loss",
            remedy="pass an output's name or a callable",
        )
    if isinstance(model, nn.Module) and any(isinstance(module, Unwrappable) for module in model.modules()):
        raise InputError(
            "the model is parallelised already", where="parallelize", remedy="pass the author's model, once"
        )
    check_model(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise InputError("is a DTensor, split already", where=name, remedy="pass the unsplit model")


def shard_batch(batch: Any, model: ParallelModule) -> Any:
    """Returns this process's rows of a batch that has the rows of all data ranks: what its `train_step` takes.

    Example:
        ```python
        rows = fxpar.shard_batch(batch, model)
        loss = model.train_step(rows)
        ```

    Args:
        batch: the batch of all data ranks, as the model's forward takes it; or a list of these, the microbatches of a
            step.
        model: what `parallelize` returned. Its program says which dimension of each entry holds the rows.

    Returns:
        A batch of the same structure. Entries without rows stay whole. Without data parallelism it is the batch itself.
        If the data ranks do not divide the rows, the first ranks get one row more.

    Raises:
        InputError: an entry has fewer rows than there are data ranks.
    """
    check_parallel(model, "shard_batch")
    return model.own_rows(batch)


def prefetch(batches: Iterable[Any], model: ParallelModule) -> Prefetched:
    """Yields batches for a model's calls, and copies each to the model's device while the step before it runs.

    On a GPU a separate stream copies from pinned memory. Tensors that are not pinned are first copied to pinned memory,
    on the host. Work that is queued after a batch was handed over waits for its copy by an event, on the stream that is
    current then. A step without graphs computes on the copy itself. A replayed step first copies it into the static
    inputs of its graph. The source runs in the caller's thread: give it workers, as a `DataLoader` has, so that it
    works during a step.

    One batch is read ahead. The source may reuse the memory of a batch for the next one, because the next is only
    requested after the last was read. An error of the source is raised unchanged, in place of the batch that it
    concerns. You may keep batches: nothing else is written into their memory. If the host is more than two steps ahead
    of the device, it waits, so that batches do not pile up.

    On CPUs batches are passed on unchanged, when they are requested. With CUDA graphs they are copied and read ahead
    there too, as a stand-in.

    Example:
        ```python
        for batch in fxpar.prefetch(loader, model):
            loss = model.train_step(batch)
        ```

    Args:
        batches: what `train_step` takes (also lists of microbatches), or the keyword arguments of a call. Mappings,
            tuples and lists may be nested and keep their types. Values that are not tensors are passed on unchanged.
        model: what `parallelize` returned.

    Returns:
        An iterable of the source's length. Each iteration of it iterates the source once.

    Raises:
        InputError: `batches` cannot be iterated, or `parallelize` did not make `model`.
    """
    check_parallel(model, "prefetch")
    if not isinstance(batches, Iterable):
        remedy = "pass an iterable of batches, such as a DataLoader"
        raise InputError(f"a {type(batches).__name__} cannot be iterated", where="prefetch", remedy=remedy)
    return Prefetched(batches, model.world.device, model.plan.cuda_graphs.is_on)


def check_parallel(model: Any, where: str) -> None:
    """Refuses a model that `parallelize` did not return.

    Raises:
        InputError: names `where`.
    """
    if not isinstance(model, ParallelModule):
        remedy = "pass what parallelize returned"
        raise InputError(f"must be a ParallelModule, got a {type(model).__name__}", where=where, remedy=remedy)
