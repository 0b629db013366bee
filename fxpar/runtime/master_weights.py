"""Mixed precision at run time: float32 main values and the copies that programs run on (`fxpar.ir.step`).

Enters: a module's parameters. Leaves: their copies in the programs' type, cast when the values may have changed.

What changes a tensor is not always seen. torch counts writes of its operators (`Tensor._version`), but not those of
its fused optimizers, of collectives or NumPy. So copies are kept only where a call goes on with an accumulation:
gradients are there, no optimizer has stepped, and no write was counted. Every other call casts anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from fxpar.checkpoint.sharded import leaf_of, local_of
from fxpar.errors import InputError
from fxpar.runtime.parameters import Undrawn, WholeParameter, check_replaced


class MainParameter(WholeParameter):
    """A parameter of which copies are made: writes through `data` are counted as all others are."""

    _stands_for = nn.Parameter

    @property
    def data(self) -> Tensor:
        """The values without their history. A write to them counts, which one to torch's own `data` does not."""
        return self.detach().as_subclass(Undrawn)

    @data.setter
    def data(self, value: Tensor) -> None:
        check_replaced(self, value)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        torch.autograd.graph.increment_version(self)


class Copies:
    """Copies of main values.

    Attributes:
        casts: how many parameters have been cast so far.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.casts = 0
        self._dtype = dtype
        self._copies: dict[str, Tensor] = {}
        self._seen: dict[str, tuple[int, ...]] = {}
        self._mode = (False, False)
        reference = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            copies = reference()
            if copies is not None:
                copies.expire()

        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)

    def expire(self) -> None:
        """Makes the next call cast all: the values have been changed."""
        self._seen.clear()

    def current(self, parameters: Mapping[str, Tensor], training: bool, differentiated: bool) -> list[Tensor]:
        """The copies of some parameters, as fresh as their values.

        Args:
            parameters: by name.
            training: the module's mode.
            differentiated: whether the call has a backward.
        """
        mode, self._mode = self._mode, (training, differentiated)
        has_gradients = any(leaf_of(main).grad is not None for main in parameters.values())
        accumulates = mode == self._mode and differentiated and has_gradients
        changed = [name for name, main in parameters.items() if self._seen.get(name) != _state(main)]
        self._cast(parameters, changed if accumulates else list(parameters), changed)
        return [self._copies[name] for name in parameters]

    @torch.no_grad()
    def _cast(self, parameters: Mapping[str, Tensor], names: list[str], changed: list[str]) -> None:
        """Casts some; graphs that saved a copy learn of it where its main values are known to have changed."""
        with torch.inference_mode(False):  # what is made in that mode can never be trained
            for name in names:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(local_of(parameters[name]), dtype=self._dtype)
        if names:
            # Through `data`, which is not counted: a pending backward may have saved copies that keep their values.
            parts = [local_of(parameters[name]) for name in names]
            torch._foreach_copy_([self._copies[name].data for name in names], parts)
        if changed:
            torch.autograd.graph.increment_version([self._copies[name] for name in changed])
        self._seen.update({name: _state(parameters[name]) for name in names})
        self.casts += len(names)


def _state(main: Tensor) -> tuple[int, ...]:
    """Differs after a write that torch counts."""
    leaf = leaf_of(main)
    return main._version, leaf._version, leaf.data_ptr()


def check_scaler(scaler: Any, precision: str, device: torch.device) -> None:
    """Checks what a training step is given to scale its loss.

    Raises:
        InputError: float16 without a scaler, or something else than one.
    """
    remedy = f"pass scaler=torch.amp.GradScaler({device.type!r}), and step and update with it"
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InputError(f"a {type(scaler).__name__} is no GradScaler", where="scaler", remedy=remedy)
    if precision != "fp16" or (scaler is not None and scaler.is_enabled()):
        return
    lost = "has no scaler" if scaler is None else "has a scaler that is disabled"
    raise InputError(
        f"a step in float16 {lost}, and small gradients would be lost as zeros", where="train_step", remedy=remedy
    )
