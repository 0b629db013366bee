"""Steps parameters a chunk at a time, so that what a step needs besides them is there for two chunks alone.

Enters: parameter groups and a class of optimizers that treats each element by itself. Leaves: their step, on float32
values of parameters in half precision (main weights), with a state that lies on the device or in the host's memory.

State and main weights of all parameters of one type and with the same state are one flat tensor each. A chunk is a
range of it, whatever parameters it cuts. On a GPU its values are on their way in and out while other chunks are
computed.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpar.cost.parameter_memory import CHUNK as CHUNK
from fxpar.cost.parameter_memory import CHUNKS
from fxpar.errors import InputError
from fxpar.runtime.sharded import Sharded, local_of

MAIN = "main"
_LOADED = -1  # stands for all pieces of a parameter
Kind = type[torch.optim.Optimizer]
_Kinds = tuple[torch.dtype, tuple[tuple[str, torch.dtype], ...]]


@dataclass
class _Parameter:
    """A parameter, and where its elements are in the flat tensors.

    Attributes:
        group: number of its parameter group.
        start: its first element.
        numbers: of each of its pieces, the state that is no tensor like the parameter, such as the count of steps.
        values: its state, as the optimizer's `state` has it; None before its first step.
    """

    parameter: Tensor
    group: int
    start: int
    numbers: dict[int, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Any] | None = None

    def numbers_of(self, first: int) -> dict[str, Any] | None:
        """Returns those of the piece that begins there; None before its first step."""
        if first in self.numbers:
            return self.numbers[first]
        loaded = self.numbers.get(_LOADED)
        if loaded is None:
            return None
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in loaded.items()}

    @property
    def flat(self) -> Tensor:
        """Returns this rank's elements in the order of memory, f[n]; shares memory."""
        return _flat(local_of(self.parameter))


@dataclass(frozen=True)
class _Slice:
    """What of a parameter is in one chunk: `size` elements from `first` on, at `place` of the chunk."""

    entry: _Parameter
    first: int
    place: int
    size: int


@dataclass
class _Flat:
    """All parameters of one type and with the same state.

    Attributes:
        entries: in order.
        values: by state key, and `main`, one tensor of all elements.
        chunks: the pieces of each.
    """

    entries: list[_Parameter]
    values: dict[str, Tensor]
    chunks: list[tuple[int, int, list[_Slice]]]


class ChunkedStep:
    """Steps some parameter groups; `Optimizer` gives it groups and state.

    Args:
        kind: a class of torch's optimizers.
        groups: complete ones.
        device: of the parameters.
        main_weights: whether it steps on float32 values of what is in half precision.
        offload: whether the host has the state.

    Raises:
        InputError: the host has too little memory, or the class makes its state before its first step or mixes
            elements.
    """

    def __init__(
        self,
        kind: Kind,
        groups: Sequence[dict[str, Any]],
        device: torch.device,
        *,
        main_weights: bool,
        offload: bool,
    ) -> None:
        self.param_groups = [*groups]
        self.state: dict[Tensor, dict[str, Any]] = {}
        self._device = device
        self._step, _ = _probe(kind, groups[0], torch.float32, device)
        for group in groups:
            _check_elements(kind, group, device)
        self._step_supports_amp_scaling = getattr(self._step, "_step_supports_amp_scaling", False)
        self._flats = list(self._sorted(kind, main_weights, offload))
        self._entries = {entry.parameter: (flat, entry) for flat in self._flats for entry in flat.entries}
        is_cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if offload and is_cuda else None

    def _sorted(self, kind: Kind, main_weights: bool, offload: bool) -> Iterator[_Flat]:
        # What an algorithm keeps depends on options of the group, such as SGD's momentum.
        probed: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}
        by_kind: dict[_Kinds, list[tuple[int, Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    key = number, parameter.dtype
                    if key not in probed:
                        probed[key] = self._state_types(kind, group, parameter.dtype, main_weights)
                    by_kind.setdefault((parameter.dtype, tuple(probed[key].items())), []).append((number, parameter))
        counts = {kinds: sum(local_of(p).numel() for _, p in some) for kinds, some in by_kind.items()}
        if offload:
            check_host(sum(count * k.itemsize for (_, kinds), count in counts.items() for _, k in kinds))
        make = registered_memory if offload and self._device.type == "cuda" else _on_device
        for (dtype, kinds), some in by_kind.items():
            values = {key: make(counts[dtype, kinds], kind_of, self._device) for key, kind_of in kinds}
            entries, start = [], 0
            for number, parameter in some:
                entries.append(_Parameter(parameter, number, start))
                start += local_of(parameter).numel()
            yield _Flat(entries, values, _chunks(entries))

    def _state_types(
        self, kind: Kind, group: dict[str, Any], dtype: torch.dtype, main_weights: bool
    ) -> dict[str, torch.dtype]:
        """Returns the types of the state of an element, by key."""
        is_main = main_weights and dtype in (torch.bfloat16, torch.float16)
        _, state = _probe(kind, group, torch.float32 if is_main else dtype, self._device)
        kinds = {key: value.dtype for key, value in state.items() if isinstance(value, Tensor) and value.shape == (2,)}
        return {**kinds, MAIN: torch.float32} if is_main else kinds

    # ------------------------------------------------------------------ state

    def has(self, parameter: Tensor, key: str) -> bool:
        """Returns whether it has such a state of the parameter."""
        return parameter in self._entries and key in self._entries[parameter][0].values

    def view(self, parameter: Tensor, key: str) -> Tensor:
        """Returns the state of a parameter, of its shape and cut as it is; shares memory with what is stepped."""
        flat, entry = self._entries[parameter]
        part = local_of(parameter)
        view = (
            flat.values[key]
            .narrow(0, entry.start, part.numel())
            .as_strided(part.shape, part.stride(), flat.values[key].storage_offset() + entry.start)
        )
        return Sharded(view, parameter.place) if isinstance(parameter, Sharded) else view

    def _adopt(self, flat: _Flat, entry: _Parameter) -> None:
        """Takes a state that was loaded."""
        loaded = self.state.get(entry.parameter)
        if not loaded:  # or no longer: a user has cleared it, or what was loaded has none
            entry.numbers, entry.values = {}, None
        if loaded and loaded is not entry.values:
            views = {key: self.view(entry.parameter, key) for key in flat.values}
            for key, view in views.items():
                if key == MAIN and key not in loaded:
                    flat.values[MAIN].narrow(0, entry.start, entry.flat.numel()).copy_(
                        entry.flat
                    )  # the weights are all that there is of them
                    continue
                if key not in loaded:
                    raise InputError(
                        f"lacks {key} of a parameter",
                        where="a loaded state of the optimizer",
                        remedy="load one that was saved with the same options of the Optimizer",
                    )
                local_of(view).copy_(local_of(loaded[key]))
            numbers = {key: value for key, value in loaded.items() if key not in flat.values}
            entry.numbers = {_LOADED: numbers}
            entry.values = {**numbers, **views}
            self.state[entry.parameter] = entry.values

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        """Makes a step of the parameters that have gradients; the host waits for it where it has the state.

        Raises:
            InputError: a parameter was frozen when the optimizer was made, and has a gradient.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._entries:
                    raise InputError(
                        "was frozen when the optimizer was made, and has a gradient now",
                        where=f"a parameter of shape {list(parameter.shape)}",
                        remedy="make the optimizer after requires_grad_(True)",
                    )
        for flat in self._flats:
            for entry in flat.entries:
                if entry.parameter.grad is not None:
                    self._adopt(flat, entry)
            chunks = [
                (start, size, some)
                for start, size, pieces in flat.chunks
                if (some := [piece for piece in pieces if piece.entry.parameter.grad is not None])
            ]
            self._run(flat, chunks)
            for entry in flat.entries:
                if entry.parameter.grad is not None:
                    self._keep(flat, entry)
        if self._streams is not None:
            self._streams[1].synchronize()  # whoever reads the host's memory knows of no stream

    def _run(self, flat: _Flat, chunks: Sequence[tuple[int, int, Sequence[_Slice]]]) -> None:
        if self._streams is None:
            for start, size, pieces in chunks:
                self._piecewise(flat, {key: v.narrow(0, start, size) for key, v in flat.values.items()}, pieces)
            return
        coming, leaving = self._streams
        main = torch.cuda.current_stream(self._device)
        room = min(CHUNK, max((size for _, size, _ in chunks), default=0))
        # A chunk is computed while the next one comes and the last one leaves.
        places = [
            {k: torch.empty(room, dtype=v.dtype, device=self._device) for k, v in flat.values.items()}
            for _ in range(min(CHUNKS, len(chunks)))
        ]
        left = [torch.cuda.Event() for _ in places]
        coming.wait_stream(main)
        arrived: dict[int, torch.cuda.Event] = {}

        def fetch(number: int) -> None:
            start, size, _ = chunks[number]
            with torch.cuda.stream(coming):
                coming.wait_event(left[number % len(places)])
                for key, value in flat.values.items():
                    places[number % len(places)][key][:size].copy_(value.narrow(0, start, size), non_blocking=True)
                arrived[number] = coming.record_event()

        for number, (start, size, pieces) in enumerate(chunks):
            for ahead in range(number, min(number + 2, len(chunks))):
                if ahead not in arrived:
                    fetch(ahead)
            staged = {key: value[:size] for key, value in places[number % len(places)].items()}
            main.wait_event(arrived[number])
            self._piecewise(flat, staged, pieces)
            leaving.wait_stream(main)
            with torch.cuda.stream(leaving):
                for key, value in flat.values.items():
                    value.narrow(0, start, size).copy_(staged[key], non_blocking=True)
                left[number % len(places)].record(leaving)
        main.wait_stream(leaving)  # memory of `places` is the main stream's, and is given back behind what reads it

    def _piecewise(self, flat: _Flat, staged: Mapping[str, Tensor], pieces: Sequence[_Slice]) -> None:
        """Steps what is in a chunk, whose state and main weights are on the device."""
        step, targets = self._step, {}
        step.state = defaultdict(dict)
        params: dict[int, list[Tensor]] = {}
        for piece in pieces:
            values = {key: value.narrow(0, piece.place, piece.size) for key, value in staged.items()}
            target, weights = values.pop(MAIN, None), piece.entry.flat.narrow(0, piece.first, piece.size)
            if target is None:
                target = weights
            else:  # what something else has written counts: torch counts no writes through `data`
                target.copy_(target.where(target.to(weights.dtype) == weights, weights))
            gradient = _flat_gradient(piece.entry.parameter)
            target.grad = gradient.narrow(0, piece.first, piece.size).to(target.dtype)
            if (numbers := piece.entry.numbers_of(piece.first)) is not None:
                step.state[target] = {**values, **numbers}
            params.setdefault(piece.entry.group, []).append(target)
            targets[target] = piece, values
        step.param_groups = [{**self.param_groups[number], "params": some} for number, some in params.items()]
        for name in ("found_inf", "grad_scale"):  # which torch's fused optimizers look for
            setattr(step, name, getattr(self, name, None))
        step.step()
        for target, (piece, values) in targets.items():
            after = step.state[target]
            for key, value in values.items():
                if after.get(key) is not None and after[key] is not value:  # the first step has made it
                    value.copy_(after[key])
            numbers = piece.entry.numbers[piece.first] = {k: v for k, v in after.items() if k not in values}
            for key, value in numbers.items():
                if isinstance(value, Tensor) and value.dim():
                    raise InputError(
                        f"needs a state {key} now, for which there is no memory",
                        where="an option of a parameter group",
                        remedy="make the optimizer with the option",
                    )
            if MAIN in staged:
                piece.entry.flat.narrow(0, piece.first, piece.size).copy_(target)
        step.state = defaultdict(dict)

    def _keep(self, flat: _Flat, entry: _Parameter) -> None:
        """Shows the state of a parameter that was stepped."""
        entry.numbers.pop(_LOADED, None)
        numbers = entry.numbers[0] if entry.numbers else {}
        if entry.values is None:
            entry.values = {key: self.view(entry.parameter, key) for key in flat.values}
        entry.values.update(numbers)
        self.state[entry.parameter] = entry.values


def taken(kind: Kind, group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a complete group that the class takes when it is made."""
    known = option_names(kind)
    return {name: value for name, value in group.items() if name in known}


def option_names(kind: Kind) -> list[str]:
    """Returns the options that a class takes; those of its base too where it hands over what it does not name."""
    names: list[str] = []
    for base in kind.__mro__:
        parameters = inspect.signature(base).parameters.values()
        names += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in names]
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in names if name != "params"]


def _probe(
    kind: Kind, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[torch.optim.Optimizer, Mapping[str, Any]]:
    """Returns an optimizer with the options of a group, and the state that it makes for two elements.

    Raises:
        InputError: it makes it before its first step.
    """
    options = taken(kind, group)
    parameter = torch.zeros(2, dtype=dtype, device=device, requires_grad=True)
    step = kind([parameter], **options)
    if step.state:
        raise InputError(
            "makes its state before its first step",
            where=kind.__name__,
            remedy="pass neither offload nor main_weights, or another algorithm such as adamw",
        )
    parameter.grad = torch.zeros_like(parameter)
    step.step()
    return step, step.state[parameter]


def _check_elements(kind: Kind, group: Mapping[str, Any], device: torch.device) -> None:
    """Refuses a class whose steps of a parameter are others than those of its two halves.

    Raises:
        InputError: they are, as where a rate follows the norm of a parameter.
    """
    options = taken(kind, group)
    options |= {"lr": 0.1} if "lr" in options else {}  # schedules may begin with 0, which shows nothing
    values = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.25, -0.125], device=device)

    def stepped(start: int, stop: int) -> Tensor:
        parameter = values[start:stop].clone().requires_grad_()
        step = kind([parameter], **options)
        for factor in (0.5, -2.0):
            parameter.grad = factor * values[start:stop].square()
            step.step()
        return parameter.detach()

    if not torch.allclose(stepped(0, 6), torch.cat([stepped(0, 3), stepped(3, 6)]), rtol=1e-4):
        raise InputError(
            "makes other steps of a parameter than of its parts",
            where=kind.__name__,
            remedy="pass neither offload nor main_weights, or an element-wise algorithm such as adamw",
        )


def _chunks(entries: Sequence[_Parameter]) -> list[tuple[int, int, list[_Slice]]]:
    """Returns start, size and pieces of each chunk."""
    chunks: list[tuple[int, int, list[_Slice]]] = []
    for entry in entries:
        first, count = 0, local_of(entry.parameter).numel()
        while first < count:
            if not chunks or chunks[-1][1] == CHUNK:
                chunks.append((entry.start + first, 0, []))
            start, filled, pieces = chunks[-1]
            size = min(CHUNK - filled, count - first)
            chunks[-1] = (start, filled + size, [*pieces, _Slice(entry, first, filled, size)])
            first += size
    return chunks


def _flat(part: Tensor) -> Tensor:
    """Returns the elements of a part in the order of memory; shares memory.

    Raises:
        InputError: they do not lie side by side.
    """
    if torch.empty_like(part, device="meta").stride() != part.stride():
        raise InputError(
            "has elements that do not lie side by side",
            where=f"a parameter of shape {list(part.shape)}",
            remedy="make it contiguous before parallelize",
        )
    return part.as_strided((part.numel(),), (1,))


def _flat_gradient(parameter: Tensor) -> Tensor:
    """Returns a gradient in the order of its parameter's memory."""
    assert parameter.grad is not None
    part, gradient = local_of(parameter), local_of(parameter.grad)
    return _flat(gradient if gradient.stride() == part.stride() else torch.empty_like(part).copy_(gradient))


# ---------------------------------------------------------------------- memory of the host


def check_host(needed: int) -> None:
    """Refuses to take more than the host has.

    Args:
        needed: bytes of one rank.

    Raises:
        InputError: all ranks of the machine together need more than is free.
    """
    ranks, free = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _free_bytes()
    if needed * ranks > free:
        raise InputError(
            f"needs {needed * ranks / 2**30:.1f} GiB of the host's memory for {ranks} ranks, of which "
            f"{free / 2**30:.1f} are free",
            where="offload",
            remedy="share the state out over data ranks (Plan(dp=…, shard='optimizer')), or leave it on the GPUs",
        )


def _free_bytes() -> int:
    """Returns what Linux says is free, for this process's group."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(facts["inactive_file"])
        free = min(free, int(text) - used)
    return free


def _on_device(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def registered_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns memory that a GPU can copy from and to by itself.

    It is registered: torch rounds pinned memory up to a power of two.
    """
    value = torch.zeros(count, dtype=dtype)
    if value.nbytes:
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(value.data_ptr(), value.nbytes, 0)))
        weakref.finalize(value, cudart.cudaHostUnregister, value.data_ptr())
    return value
