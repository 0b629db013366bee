"""`fxpar.parallelize`: from a model and a plan to this rank's module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxpar.capture.capture import check_model, check_samples
from fxpar.checkpoint.initial import open_alike
from fxpar.checkpoint.safetensors_files import Checkpoint
from fxpar.compile import check_arguments
from fxpar.cudagraphs import full
from fxpar.errors import InputError, shown
from fxpar.manager import Pass
from fxpar.passes import DEFAULT_PASSES
from fxpar.peer_memory.runtime.mailboxes import Mailboxes
from fxpar.pipeline.runtime.pipeline import PipelineExecutor
from fxpar.plan.plan import Plan
from fxpar.runtime import graph_modes
from fxpar.runtime.module import ParallelModule
from fxpar.runtime.prefetch import Prefetched
from fxpar.runtime.refusals import Unwrappable
from fxpar.runtime.runner import STAGE_RUNNERS
from fxpar.runtime.steps import TRANSPORTS
from fxpar.runtime.world import connect, join, start_workers

# The features of the runtime, which knows them by these registries alone.
graph_modes.MODES.update(full.MODES)
STAGE_RUNNERS["pp"] = PipelineExecutor
TRANSPORTS["copy"] = Mailboxes

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

    Args:
        model: any `nn.Module` on the CPU or a device, in the mode (training, evaluation) to compile first. It must hold
            the same weights on every rank; this rank keeps copies of its shards, bit for bit, and the model is left as
            it is (delete it to free its memory). Built under `torch.device("meta")`, it is never whole: its modules are
            initialised one after the other on the run's device, as `fxpar.materialize(model, plan.seed, device)` does,
            and this rank keeps its shards.
        plan: how to split; its world size must be the number of processes.
        example: a batch as `train_step` will see it (a mapping, a tuple or a tensor), at least two samples; only its
            structure, types and which sizes are equal matter.
        loss: a callable `(outputs, batch) → scalar` traced with the model, the name of a scalar output, or None for the
            output `loss`, else the only scalar.
        passes: the compiler's passes in order; see `fxpar.passes`.
        checkpoint: safetensors from which the weights are read instead, each rank its shards: a file, an index, a
            folder with `model.safetensors` or its index, or a `fxpar.Checkpoint` (other names). Values are cast to the
            model's types and the plan's precision. Buffers that are not saved keep the model's values.
        check_inputs: whether every call compares the ranks' batches, modes and kinds of call. Values are compared by a
            checksum on the device: on GPUs the loss of a call whose batches differ is NaN, and the next call raises
            the error. Without it, batches that differ give wrong results; that ranks make the same calls at the same
            step is compared in any case.
        timeout: seconds that ranks wait for each other to compile, here and when a call needs another program. Also the
            timeout of the process groups' collectives, where groups are created here and not by the caller.

    Raises:
        InputError: the model, plan, example or world cannot be used, or differs between ranks; the text names what and
            the remedy.
        RankError: another rank failed, has ended or did not come in time; names it, and its reason.
        CheckpointError: the checkpoint cannot be read, lacks or has more names than the model, or has other shapes.
        LayoutError, CheckFailed: a static check rejected the program, which is a bug of a pass.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST_TIMEOUT:
        remedy = f"pass a positive number, {_LONGEST_TIMEOUT:g} at most"
        raise InputError(f"{shown(timeout)} is no number of seconds", where="timeout", remedy=remedy)
    agreement = connect(timeout)
    with agreement.call("parallelize"):
        check_arguments(model, plan, passes)
        _check(model, loss)
        _check_options(check_inputs)
        check_samples(example)
        start_workers(plan)
        world = join(plan, agreement)
        opened = None if checkpoint is None else open_alike(checkpoint, model, agreement.agree)
        module = ParallelModule(model, plan, world, example, loss, passes, opened, check_inputs)
        agreement.agree({}, "")  # every rank holds its shards
    return module


def _check_options(check_inputs: Any) -> None:
    if not isinstance(check_inputs, bool):
        raise InputError(f"{shown(check_inputs)} is neither True nor False", where="check_inputs", remedy="pass one")


def _check(model: nn.Module, loss: Any) -> None:
    if loss is not None and not callable(loss) and (not isinstance(loss, str) or not loss):
        raise InputError(f"{shown(loss)} is no loss", where="loss", remedy="pass an output's name or a callable")
    if isinstance(model, nn.Module) and any(isinstance(module, Unwrappable) for module in model.modules()):
        raise InputError(
            "the model is parallelised already", where="parallelize", remedy="pass the author's model, once"
        )
    check_model(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise InputError("is a DTensor, split already", where=name, remedy="pass the unsplit model")


def shard_batch(batch: Any, model: ParallelModule) -> Any:
    """This process's rows of a batch of all data ranks: what its `train_step` takes.

    Args:
        batch: as the model's forward takes it, with the rows of all data ranks; or a list of such, the microbatches of
            a step.
        model: made by `parallelize`, whose program says which dimension of which entry is the batch.

    Returns:
        The same nest. Entries that have no rows are whole; without data parallel ranks it is the batch itself. Of rows
        that are no multiple of the data ranks, the first ranks have one more.

    Raises:
        InputError: an entry has fewer rows than there are data ranks.
    """
    _check_parallel(model, "shard_batch")
    return model.own_rows(batch)


def prefetch(batches: Iterable[Any], model: ParallelModule) -> Prefetched:
    """Batches for a model's calls, each of which is copied to its device while the step before runs.

    On a GPU the copy goes over a stream of its own, from pinned memory: tensors that are not pinned are copied into
    such first, on the host. What is queued behind the handing over of a batch waits for its copy by an event, on the
    stream that is current there. A step without graphs computes on the copy itself; a replayed one takes it from there
    into its static inputs, a copy within the device in front of the replay. The source runs in the caller's thread: to
    have it work meanwhile give it workers, as a `DataLoader` has them.

    The source is read one batch ahead. It may use its memory again for the next batch, pinned or on the device: it is
    not asked for that before its last one was read. An error of its own is raised unchanged, in place of the batch it
    concerns. Batches may be kept: no other is written into their memory. Where the host is more than two steps ahead
    of the device, it waits, so that batches do not pile up.

    On CPUs batches are passed on as they are and when they are asked for; with CUDA graphs they are copied and read
    ahead there too, as a stand-in.

    Args:
        batches: what `train_step` takes, lists of microbatches too, or keyword arguments of a call, in any nest of
            mappings, tuples and lists, whose kinds stay. What is no tensor is passed on as it is.
        model: made by `parallelize`.

    Returns:
        An iterable, with the length that the source has. Each iteration is one of the source.

    Raises:
        InputError: `batches` cannot be iterated, or `model` was not parallelised.
    """
    _check_parallel(model, "prefetch")
    if not isinstance(batches, Iterable):
        remedy = "pass an iterable of batches, such as a DataLoader"
        raise InputError(f"a {type(batches).__name__} cannot be iterated", where="prefetch", remedy=remedy)
    return Prefetched(batches, model.world.device, model.plan.cuda_graphs.is_on)


def _check_parallel(model: Any, where: str) -> None:
    if not isinstance(model, ParallelModule):
        remedy = "pass what parallelize returned"
        raise InputError(f"a {type(model).__name__} is no ParallelModule", where=where, remedy=remedy)
