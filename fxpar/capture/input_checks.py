"""Checks what goes into a trace: refuses models and examples that tracing would misread in silence (DESIGN section 9).

Enters: a model and its example inputs. Leaves: inputs that share no tensor, or errors that name what cannot be kept.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from fxpar.errors import CaptureError

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


def separate(values: Any) -> Any:
    """Returns the nest with tensors cloned: two arguments that are one tensor would become one placeholder."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), values)


def check_model(model: nn.Module) -> None:
    """Refuses models whose training step is more than their forward and its gradient.

    Raises:
        CaptureError: hooks on gradients or on all modules, a wrapper that communicates or compiles by itself,
            TorchScript, a forward that was replaced, autocast around the call, parameters that share memory.
    """
    _check_modes()
    _check_global_hooks()
    for name, module in model.named_modules():
        fault = _fault(module)
        if fault is not None:
            raise CaptureError(fault[0], where=name or type(module).__name__, remedy=fault[1])
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                "has hooks on its gradient, which a trace of the forward does not see",
                where=name,
                remedy="remove them; change the gradients after backward",
            )
    _check_memory(model)
    _check_adapters(model)


def _check_global_hooks() -> None:
    """Refuses hooks of all modules of the process: the compiled program runs no modules."""
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        hooks = getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
        for hook in hooks.values():
            raise CaptureError(
                f"the hook {getattr(hook, '__qualname__', type(hook).__name__)} is called for every module of the "
                "process, and the compiled program would never call it",
                where=f"register_module_{kind}_hook",
                remedy="remove it before parallelize, and look at what the model returns",
            )


def _check_memory(model: nn.Module) -> None:
    """Refuses trainable parameters in whose memory other tensors of the model lie: copies of it would not."""
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # Spans are compared and not storages: many parameters may lie side by side in one storage.
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() and tensor.data_ptr():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.append((tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size(), name, tensor))
    spans.sort(key=lambda entry: entry[:2])
    # What ends last, of all and of what is trained: a long tensor may reach into others than the next.
    reach = trained = (0, "")
    for start, end, name, tensor in spans:
        last_end, other = reach if tensor.requires_grad else trained
        if start < last_end:
            raise CaptureError(
                f"shares memory with {other} and is another tensor, so that training one would leave the other as it "
                "is",
                where=name,
                remedy="tie them by assigning the parameter itself (head.weight = words.weight), or clone the values",
            )
        reach = max(reach, (end, name))
        trained = max(trained, (end, name)) if tensor.requires_grad else trained


def _check_adapters(model: nn.Module) -> None:
    """Refuses what peft puts into a model and nobody could train or save; one LoRA adapter is carried."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]
    configs = getattr(model, "peft_config", {}) if isinstance(model, peft.PeftModel) else {}
    if layers and not configs:
        remedy = "make the adapter with peft.get_peft_model(model, config)"
        raise CaptureError("has an adapter, and the model is none of peft's", where=layers[0][0], remedy=remedy)
    if len(configs) > 1:
        remedy = "keep one: model.delete_adapter(name) before parallelize"
        raise CaptureError(f"has several adapters: {', '.join(configs)}", where=type(model).__name__, remedy=remedy)
    for name, config in configs.items():
        if config.peft_type != "LORA":
            reason = f"is made by a {type(config).__name__}, and LoRA alone is supported"
            raise CaptureError(reason, where=f"adapter {name}", remedy="take a peft.LoraConfig")
    for name, layer in layers:
        fault = _adapter_fault(layer)
        if fault is not None:
            raise CaptureError(fault[0], where=name, remedy=fault[1])


def _adapter_fault(layer: Any) -> tuple[str, str] | None:
    """Returns why a layer with an adapter of peft cannot be trained, and the remedy; None where it can."""
    if layer.merged:
        return "its adapter is merged, and would not be trained", "call model.unmerge_adapter() before"
    if hasattr(layer, "parameter_name"):
        reason = f"the adapter of the parameter {layer.parameter_name} changes it in the forward"
        return reason, "adapt modules alone: target_modules=[…] without target_parameters"
    base = layer.get_base_layer()
    for tensor in (*base.parameters(), *base.buffers()):
        if not tensor.is_floating_point() or tensor.itemsize < 2 or type(tensor.data) is not Tensor:
            return "its base layer is quantised", "load the base in bfloat16, and share its memory out: Plan(shard=…)"
    return None


def _check_modes() -> None:
    """Refuses autocast around a trace, which would cast in the trace and not where the model runs."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise CaptureError(
                "is switched on around the call, and would cast in the trace alone",
                where=f"autocast on {device}",
                remedy="leave it before, and set Plan(precision=…)",
            )


def _fault(module: nn.Module) -> tuple[str, str] | None:
    """Returns why a module cannot be traced, and the remedy; None where it can."""
    override = vars(module).get("forward")
    compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
    if compiled or hasattr(override, "_torchdynamo_orig_callable"):
        remedy = "pass the model as it was before, with Plan(compile=True) to have each rank's program compiled"
        return "is compiled already, by torch.compile", remedy
    if _holds_module(override):
        name = getattr(override, "__qualname__", override)
        reason = f"its forward was replaced by the function {name}, which calls the forward that it was made around "
        remedy = "pass the model as it was before it was wrapped (by accelerate, say), or write a class for it"
        return f"{reason}and not that of a copy", remedy
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript", "pass the Python module it was made from"
    if module._backward_hooks or module._backward_pre_hooks:
        reason = "has backward hooks, which a trace of the forward does not see"
        return reason, "remove them; change the gradients after backward"
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)):
        return f"{type(module).__name__} communicates by itself", "pass the model inside it (model.module)"
    if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "makes sparse gradients", "make it with sparse=False"
    if isinstance(module, FSDPModule):
        return "was sharded by fully_shard, and communicates by itself", "pass the model as it was before"
    return None


def _holds_module(function: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Returns whether a function speaks of a module, or of a method of one: copies of it speak of the same."""
    if not inspect.isfunction(function) or id(function) in seen:
        return False
    names = inspect.getclosurevars(function)
    for referent in (*names.nonlocals.values(), *names.globals.values(), getattr(function, "__wrapped__", None)):
        if isinstance(referent, nn.Module) or isinstance(getattr(referent, "__self__", None), nn.Module):
            return True
        if _holds_module(referent, seen | {id(function)}):
            return True
    return False


def check_loss(loss: Any) -> None:
    """Refuses losses that take other arguments, or that would learn: their parameters belong to no model.

    Raises:
        CaptureError: names the parameter, or the arguments.
    """
    if loss is not None:
        try:
            inspect.signature(loss).bind(None, None)
        except TypeError as error:
            raise CaptureError(
                f"cannot be called with outputs and batch: {error}", where="loss", remedy="take two arguments"
            ) from None
        except ValueError:  # a function in C tells nothing of itself
            pass
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    for name, parameter in parameters:
        if parameter.requires_grad:
            raise CaptureError(
                "the loss has a parameter of its own",
                where=f"loss.{name}",
                remedy="make it a part of the model, or freeze it",
            )


def check_example(values: Any) -> None:
    """Refuses example inputs that a trace would misread.

    Raises:
        CaptureError: no tensor at all, a tensor that requires a gradient, is empty or not dense, or an object that is
            neither a tensor nor a plain constant.
    """
    leaves = [(f"example{pytree.keystr(path)}", value) for path, value in pytree.tree_flatten_with_path(values)[0]]
    for where, value in leaves:
        if isinstance(value, Tensor):
            _check_tensor(where, value)
        elif not isinstance(value, _CONSTANTS):
            raise CaptureError(
                f"a {type(value).__name__} can be neither traced nor kept as a constant",
                where=where,
                remedy="pass tensors, numbers, strings or containers (torch.export.register_dataclass makes one)",
            )
    if not any(isinstance(value, Tensor) for _, value in leaves):
        raise CaptureError("the example holds no tensor", where="example", remedy="pass a batch as training sees it")


def check_samples(example: Any) -> None:
    """Refuses an example of one sample, whose sizes of 1 a trace makes constants.

    A program may run on one sample: then it is traced for that alone. What a user gives as an example is meant for all.

    Raises:
        CaptureError: every tensor has one element in its first dimension.
    """
    tensors = [value for value in pytree.tree_leaves(example) if isinstance(value, Tensor) and value.dim()]
    if tensors and all(value.shape[0] == 1 for value in tensors):
        raise CaptureError("holds one sample", where="example", remedy="use at least two: sizes of 1 become constants")


def _check_tensor(where: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise CaptureError(
            "requires a gradient; only parameters do",
            where=where,
            remedy="detach it, or make it a parameter of a module",
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(f"has the layout {tensor.layout}", where=where, remedy="pass a dense tensor")
    if 0 in tensor.shape:
        raise CaptureError(f"has the empty shape {list(tensor.shape)}", where=where, remedy="use at least two samples")


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by parameter name of `forward`; `*args` as a tuple, `**kwargs` as a mapping.

    Raises:
        CaptureError: forward does not take them.
    """
    try:
        return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise CaptureError(
            f"does not fit the model's forward: {error}", where="example", remedy="pass what forward takes"
        ) from None


@contextlib.contextmanager
def no_host_random(model: nn.Module) -> Iterator[None]:
    """Refuses a forward that draws from Python's or numpy's generator: a trace would repeat that draw for ever.

    Raises:
        CaptureError: at the end, in place of what arrays of such numbers led to; both generators are then as they
            were.
    """
    python, array = random.getstate(), np.random.get_state(legacy=False)
    drawn: list[str] = []
    failure: CaptureError | None = None
    try:
        yield
    except CaptureError as error:
        failure = error
    finally:
        unchanged = {"random": random.getstate() == python, "numpy": _same_state(array)}
        random.setstate(python)
        np.random.set_state(array)
        drawn = [name for name, same in unchanged.items() if not same]
    if failure is not None and "numpy" not in drawn:
        raise failure
    if drawn:
        raise CaptureError(
            f"the forward draws random numbers on the host ({' and '.join(drawn)}), which a trace would make constants",
            where=type(model).__name__,
            remedy="switch that augmentation or layer dropping off, or draw in the data loader and pass the result",
        ) from failure


def _same_state(before: Any) -> bool:
    now: Any = np.random.get_state(legacy=False)
    return bool(now["state"]["pos"] == before["state"]["pos"] and (now["state"]["key"] == before["state"]["key"]).all())
