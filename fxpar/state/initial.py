"""Initial weights of models that were built on the meta device (SPEC section 2.4).

Enters: a model whose tensors have shapes and no values. Leaves: the values that its authors' initialisers give, one
module at a time, from a seed and the module's name alone: whoever initialises the module on a device of the same kind
gets the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fxpar.errors import InputError, shown

# Fills integers before they are initialised; floating tensors are filled with NaN.
_UNWRITTEN = 0xFB
# Where a module keeps a tensor: its `_parameters` or `_buffers`, and the name in it.
_Place = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class ModelTensor:
    """A parameter or buffer of a model with all its names, in the order of `named_parameters`.

    Attributes:
        names: under which modules hold it; more than one where it is tied.
    """

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def first(self) -> str:
        """The name that stands for it."""
        return self.names[0]

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, else a buffer."""
        return isinstance(self.tensor, nn.Parameter)


def named_tensors(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and buffer of a model once: all parameters before all buffers."""
    entries: dict[int, tuple[Tensor, list[str]]] = {}
    for pairs in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in pairs:
            entries.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [ModelTensor(tuple(names), tensor) for tensor, names in entries.values()]


def materialize(model: nn.Module, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Gives a model that was built under `torch.device("meta")` its initial weights, and returns it.

    A tensor comes from the initialiser of the module that holds it: `_init_weights` of the transformers model around
    it (or of any module around it that has this method), else `reset_parameters`; initialisers of the modules around
    it run after that, as GPT-2's scaled residual projections need. Each module's random state is a hash of the seed
    and of its name, so that values depend on neither the process nor the order; a GPU draws other numbers than a CPU.
    The process's own random states are left as they were. Tied weights are initialised once, under their first name.
    Tensors that have values keep them. `fxpar.parallelize` gives each rank its part of the same bits.

    What a constructor does to weights by itself (a loop that rescales some of them, say) is no initialiser, and is
    lost on the meta device: it belongs into `_init_weights` or `reset_parameters`. A constructor that writes
    `torch.Tensor(n, m)` passes the meta device by: such a tensor counts as one that has values, whatever they are.

    Args:
        model: changed in place: its meta parameters and buffers are replaced by new ones.
        seed: `Plan.seed` of the run that it is to be compared with.
        device: where the values are drawn: `device` of the run that it is to be compared with.

    Raises:
        InputError: a tensor that no initialiser fills, or an initialiser that fails without the values of others.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a {type(model).__name__} is no nn.Module", where="materialize", remedy="pass the model")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise InputError(f"{shown(seed)} is no integer in [0, 2^63)", where="seed", remedy="pass Plan.seed of the run")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(reason, where=f"device {shown(device)}", remedy="name one such as 'cpu' or 'cuda'") from None
    weights: dict[str, Tensor] = {}
    for values in initialised(model, seed, place):
        weights.update(values)
    for entry in named_tensors(model):
        if entry.first in weights:
            value = weights[entry.first]
            if entry.is_parameter:
                value = nn.Parameter(value, requires_grad=entry.tensor.requires_grad)
            for name in entry.names:
                store, leaf = _place(model, name)
                store[leaf] = value
    return model


def initialised(
    model: nn.Module, seed: int, device: torch.device, names: set[str] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Initial values of a model's meta tensors on a device by first name, one module after the other.

    Only the module at hand has memory, and the model is as before whenever a dict is yielded. It must stay so until the
    end: initialisers draw numbers for what has memory. A caller that empties the dict never holds two modules. See
    `materialize`.

    Args:
        names: first names of the tensors that are wanted; None for all of the meta device.

    Raises:
        InputError: see `materialize`.
    """
    _check_attributes(model)
    aside: list[tuple[_Place, Tensor]] = []
    modules: dict[str, list[str]] = {}
    for entry in named_tensors(model):
        if entry.tensor.is_meta:
            path, _, leaf = entry.first.rpartition(".")
            modules.setdefault(path, []).append(leaf)
        else:
            aside += [(_place(model, name), entry.tensor) for name in entry.names]
    for path, leaves in modules.items():
        full = {leaf: f"{path}.{leaf}".lstrip(".") for leaf in leaves}
        needed = [leaf for leaf in leaves if names is None or full[leaf] in names]
        if needed:
            with _set_aside(aside):
                values = _ModuleInitializer(model, path, leaves, device).values(seed)
            yield {full[leaf]: values.pop(leaf) for leaf in needed}


def _place(model: nn.Module, name: str) -> _Place:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if leaf in module._parameters else module._buffers), leaf


def _check_attributes(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise InputError(
                    "a tensor of the meta device that is neither parameter nor buffer has no values",
                    where=f"{path}.{name}".lstrip("."),
                    remedy="register it as a buffer, or make it in forward",
                )


@contextlib.contextmanager
def _set_aside(aside: Sequence[tuple[_Place, Tensor]]) -> Iterator[None]:
    """Keeps tensors that have values from initialisers, which may read a buffer's."""
    for (store, leaf), value in aside:
        store[leaf] = _ghost(value) if isinstance(value, nn.Parameter) else value.clone()
    try:
        yield
    finally:
        for (store, leaf), value in aside:
            store[leaf] = value


def _ghost(value: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=value.requires_grad)


class _ModuleInitializer:
    """A module that is initialised by itself: its own tensors get memory, all others stay on the meta device.

    Args:
        model: the whole.
        path: the module's name.
        leaves: names of its meta tensors that it holds first.
        device: of the memory.
    """

    def __init__(self, model: nn.Module, path: str, leaves: Sequence[str], device: torch.device) -> None:
        self._path, self._device = path, device
        parts = path.split(".") if path else []
        around = [".".join(parts[:count]) for count in range(len(parts), -1, -1)]
        self._chain = [(name, model.get_submodule(name)) for name in around]  # from the module to the model
        self._module = self._chain[0][1]
        stores = (self._module._parameters, self._module._buffers)
        self._places: dict[str, dict[str, Any]] = {leaf: stores[leaf in stores[1]] for leaf in leaves}

    def values(self, seed: int) -> dict[str, Tensor]:
        """The values of its tensors.

        Raises:
            InputError: a tensor stays unfilled.
        """
        meta = {leaf: store[leaf] for leaf, store in self._places.items()}
        digest = hashlib.sha256(f"{seed}:{self._path}".encode()).digest()
        authors, resets = self._authors(), self._resets()
        unfilled: list[str] = []
        try:
            # What `_init_weights` leaves alone has what the constructor gave it.
            for initialisers in [authors, resets + authors] if authors else [resets]:
                for leaf, store in self._places.items():
                    store[leaf] = _unwritten(meta[leaf], self._device)
                with _drawing(digest, self._device), torch.no_grad(), self._device:
                    for name, initialise in initialisers:
                        self._run(name, initialise)
                unfilled = [leaf for leaf, store in self._places.items() if not _is_written(store[leaf], meta[leaf])]
                if not unfilled:
                    break
            values = {leaf: store[leaf].detach() for leaf, store in self._places.items() if leaf not in unfilled}
        finally:
            for leaf, store in self._places.items():
                store[leaf] = meta[leaf]
        for leaf in unfilled:
            self._refuse(leaf)
        return values

    def _authors(self) -> list[tuple[str, Callable[[], Any]]]:
        """`_init_weights` for the module and each one around it, by the nearest that has the method."""
        initialisers = []
        for index, (name, module) in enumerate(self._chain):
            for _, owner in self._chain[index:]:
                method = getattr(owner, "_init_weights", None)
                if callable(method) and _takes(method, module):
                    initialisers.append((name, _call(method, module)))
                    break
        return initialisers

    def _resets(self) -> list[tuple[str, Callable[[], Any]]]:
        """`reset_parameters` of the module and of those around it; torch's attention has a `_reset_parameters`."""
        initialisers = []
        for name, module in self._chain:
            method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(method) and _takes(method):
                initialisers.append((name, _call(method)))
        return initialisers

    def _run(self, name: str, initialise: Callable[[], Any]) -> None:
        try:
            initialise()
        except RuntimeError as error:
            raise InputError(
                f"its initialiser cannot run where {self._path or 'the model'} alone has memory: "
                f"{str(error).splitlines()[0]}",
                where=name or type(self._chain[-1][1]).__name__,
                remedy="initialise the model on the CPU, or load a checkpoint",
            ) from error

    def _refuse(self, leaf: str) -> None:
        kind = type(self._module).__name__
        what = "buffer" if leaf in self._module._buffers else "parameter"
        raise InputError(
            f"is a {what} of a {kind}, which has no initialiser that fills it",
            where=f"{self._path}.{leaf}".lstrip("."),
            remedy=f"fill it in {kind}.reset_parameters() or the model's _init_weights(), or give it values before: "
            "tensors that have some keep them",
        )


def _takes(method: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _call(method: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: method(*arguments)


def _unwritten(meta: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor of the meta device, filled with what no initialiser leaves."""
    tensor = torch.empty_like(meta, device=device)
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor = torch.full((*tensor.shape, tensor.element_size()), _UNWRITTEN, dtype=torch.uint8, device=device)
        tensor = tensor.view(meta.dtype).reshape(meta.shape)
    return nn.Parameter(tensor, requires_grad=meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor


def _is_written(value: Any, meta: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.is_meta or value.shape != meta.shape or value.dtype != meta.dtype:
        return False
    if value.is_floating_point() or value.is_complex():
        return not bool(value.isnan().any())
    elements = (value.detach().contiguous().reshape(-1, 1).view(torch.uint8) == _UNWRITTEN).all(-1)
    # In one byte it is a value like others.
    return not bool(elements.all() if value.element_size() == 1 and value.numel() else elements.any())


@contextlib.contextmanager
def _drawing(digest: bytes, device: torch.device) -> Iterator[None]:
    """Random states from a digest, of the generators of host and device; those before come back at the end."""
    states = random.getstate(), np.random.get_state()
    number = int.from_bytes(digest[:8], "little") >> 1
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.default_generator.manual_seed(number)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed(number)
        np.random.seed(int.from_bytes(digest[:4], "little"))
        random.seed(digest)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
