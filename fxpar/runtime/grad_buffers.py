"""Gradients in the memory in which optimizers find them: buffers whose addresses never change.

Enters: gradients of a step by parameter. Leaves: `.grad` of the parameters. After `zero_grad(set_to_none=True)` a
buffer is overwritten, else added to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from fxpar.errors import InputError
from fxpar.ops.small_operators import Destination
from fxpar.runtime.sharded import StageGradient, leaf_of

# Asked of all parameters at each step, in one call each.
_GRADIENT, _HOOKS = attrgetter("grad"), attrgetter("_backward_hooks")
_HOOKS_BEHIND = attrgetter("_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class _Added:
    """Gradients to which a step adds in their own buffers.

    Attributes:
        leaves: of which.
        inside: as of `Buffers.state`.
        gradients: of each.
        placed: where these lie.
        state: of them.
    """

    leaves: Mapping[str, Tensor]
    inside: bool
    gradients: list[Tensor]
    placed: TensorAddresses
    state: Hashable

    def holds(self, leaves: Mapping[str, Tensor], inside: bool, gradients: list[Any]) -> bool:
        """Returns whether the record is still right."""
        is_same = self.leaves is leaves and self.inside == inside and all(map(is_, gradients, self.gradients))
        return is_same and self.placed.holds(gradients)


def _nothing_added() -> _Added:
    return _Added({}, False, [], TensorAddresses([]), None)


@dataclass(frozen=True)
class Placing:
    """Puts gradients of these leaves into their buffers (`fxpar.runtime.calls.GradientSink`)."""

    buffers: Buffers
    leaves: Mapping[str, Tensor]

    def __call__(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Implements `Buffers.placed`."""
        return self.buffers.placed(self.leaves, gradients)

    def destination(self, name: str) -> Destination | None:
        """Implements `Buffers.destination`."""
        return self.buffers.destination(self.leaves, name)


class Buffers:
    """Gradients of a module's parameters, made when they first have one.

    Args:
        graphed: whether steps are replayed. What somebody else made a gradient (autograd, or the user) lies elsewhere
            in each step: a step leaves its own in the buffer then, and it is added later, where no graph knows of it.
        of_stage: whether other ranks of a pipeline have the rest.

    Attributes:
        is_hooked: whether at the last look at their `state` something hooked one.
    """

    is_hooked = True

    def __init__(self, graphed: bool = False, of_stage: bool = False) -> None:
        self._of_stage = of_stage
        self._graphed = graphed
        self._buffers: dict[str, Tensor] = {}
        # Shape, type and device of each: those that know their stage are asked by Python.
        self._kinds: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self._looked_at: Mapping[str, Tensor] = {}
        # At the last look: whether none was there, or all were in their buffers.
        self._is_fresh, self._added = False, _nothing_added()
        self._is_added = self._inside = False
        self._remade = 0  # how often buffers were made anew: graphs know the old ones
        # What `attach` was given last, and the tensors of it with their buffers.
        self._attached: tuple[Any, Any, list[tuple[Tensor, Tensor]]] = ((), (), [])

    @torch.no_grad()
    def placed(self, leaves: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns gradients in the memory where they will be: what they were in can be freed at once.

        Where there are gradients already, they are added to those. What a hook is to see first, and may keep, is left
        where it is.

        Args:
            leaves: the parameters' tensors by name.
            gradients: of some, of this rank's whole step.
        """
        placed, moved, added = dict(gradients), list[str](), list[str]()
        for name, gradient in gradients.items():
            place = self.destination(leaves, name)
            if place is None:
                continue
            memory = placed[name] = self._buffer(name, leaves[name]) if place.tensor is None else place.tensor
            # Empty tensors all have address 0, which says nothing of where they lie.
            if memory.data_ptr() != gradient.data_ptr() or not gradient.numel():  # else it was written there
                (added if place.adds else moved).append(name)
        for names, function in ((moved, torch._foreach_copy_), (added, torch._foreach_add_)):
            if names:
                function([placed[name] for name in names], [gradients[name] for name in names])
        return placed

    def destination(self, leaves: Mapping[str, Tensor], name: str) -> Destination | None:
        """Returns where the gradient of a parameter is to stay; None where a hook is to see it first."""
        leaf = leaves[name]
        if leaf._backward_hooks:
            return None
        if leaf.grad is None and not self._graphed:  # memory of a gradient is taken when it comes
            return Destination(self._buffers.get(name), adds=False, make=partial(self._buffer, name, leaf))
        if leaf.grad is None or self._is_apart(name, leaf):
            return Destination(self._buffer(name, leaf), adds=False)
        return Destination(leaf.grad, adds=True)

    def state(self, leaves: Mapping[str, Tensor], inside: bool = False) -> Hashable:
        """Returns what is equal where gradients are placed alike: over what is there or added to it, at the same
        addresses.

        Strides too: what is transposed has the address of what it is made of. Buffers are made here: one made while a
        graph is recorded would lie in its pool. None without graphs: they are made as gradients come.

        Args:
            leaves: another mapping where a parameter is exchanged or lies elsewhere.
            inside: all is added in the graph.
        """
        every, self._inside = leaves.values(), inside
        self.is_hooked = any(map(_HOOKS, every)) or any(map(_HOOKS_BEHIND, every))
        if not self._graphed:
            return None
        gradients = list(map(_GRADIENT, every))
        self._is_fresh = not self.is_hooked and all(map(is_, gradients, repeat(None)))
        self._is_added = not self.is_hooked and not self._is_fresh and self._added.holds(leaves, inside, gradients)
        # The common cases, of which no buffer need be looked at: all were, and nothing has changed.
        # Questions about 652 parameters took 1.45 ms of the host at each
        # replay, of 2 to 3 in all: few calls ask them now.
        if self._is_fresh and leaves is self._looked_at:
            return self._remade or None
        if self._is_added:
            return self._added.state
        self._leave(leaves)
        places = tuple([self._state(name, leaf, inside) for name, leaf in leaves.items()])
        state = self._remade or None if all(place is None for place in places) else (self._remade, places)
        self._looked_at = leaves if self._is_fresh else {}
        if not self.is_hooked and all(self._buffers.get(n) is g for n, g in zip(leaves, gradients, strict=True)):
            self._added = _Added(leaves, inside, gradients, TensorAddresses(gradients), state)
        return state

    def _leave(self, leaves: Mapping[str, Tensor]) -> None:
        """Makes no more use of buffers that the user has made other parameters' gradients."""
        owners = {_storage(buffer): name for name, buffer in self._buffers.items() if buffer.numel()}
        for name, leaf in leaves.items():
            owner = None if leaf.grad is None else owners.get(_storage(leaf.grad))
            if owner is not None and owner != name and owner in self._buffers:
                del self._buffers[owner]
                self._remade += 1
                self._looked_at, self._attached, self._added = {}, ((), (), []), _nothing_added()

    def _state(self, name: str, leaf: Tensor, inside: bool) -> Hashable:
        if leaf._backward_hooks:
            return "hooked"  # and added after what the hook makes of it
        is_apart = self._is_apart(name, leaf)
        if leaf.grad is None or is_apart:
            self._buffer(name, leaf)
        if leaf.grad is None or (is_apart and not inside):
            return None if leaf.grad is None else "apart"
        return leaf.grad.data_ptr(), leaf.grad.stride()

    @torch.no_grad()
    def add(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], behind: bool = False) -> None:
        """Adds gradients to those of the parameters, with the hooks that autograd would call.

        Args:
            parameters: by name.
            gradients: of some, as each rank has them; those of `placed` are where they belong.
            behind: `attach` adds, after the graph in which this is, what is added after it.
        """
        fresh: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for name, unhooked in gradients.items():
            leaf = leaf_of(parameters[name])
            # `placed` or the product itself has written it there while the backward ran.
            if leaf.grad is not None and unhooked.data_ptr() == leaf.grad.data_ptr():  # added already
                continue
            gradient = _hooked(leaf, unhooked)
            if leaf.grad is None:
                leaf.grad = self._buffer(name, leaf)
                if gradient is not leaf.grad:
                    fresh.append((leaf.grad, gradient))
            elif behind and self._is_apart(name, leaf):
                buffer = self._buffer(name, leaf)
                if gradient is not buffer:
                    fresh.append((buffer, gradient))
            else:
                more.append((leaf.grad, gradient))
        for pairs, function in ((fresh, torch._foreach_copy_), (more, torch._foreach_add_)):
            if pairs:
                function([buffer for buffer, _ in pairs], [gradient for _, gradient in pairs])
        if not self._graphed:
            self._buffers.clear()  # so that gradients that the user frees are no memory in the next forward

    @contextmanager
    def put_back(self, leaves: Mapping[str, Tensor], has_overflowed: Tensor | None) -> Iterator[None]:
        """Leaves gradients that were there before as they are if the surrounded step overflows.

        Args:
            leaves: as of `state`.
            has_overflowed: a bool scalar on the device; None where nothing can overflow.
        """
        if has_overflowed is None:
            yield
            return
        # What lies apart has no fixed address, and is added to after the graph.
        inside = [leaf for name, leaf in leaves.items() if self._inside or not self._is_apart(name, leaf)]
        added = [leaf.grad for leaf in inside if leaf.grad is not None]
        before = [gradient.clone() for gradient in added]
        yield
        for gradient, value in zip(added, before, strict=True):
            gradient.copy_(value.where(has_overflowed, gradient))

    @torch.no_grad()
    def attach(self, leaves: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Gives leaves that have no gradients their buffers, in which they are, and adds what is added afterwards.

        An optimizer in the graph has used the gradients, which are freed after this.
        """
        if self._is_added:
            return
        if self._is_fresh:
            if self._attached[0] is not leaves or self._attached[1] is not names:
                self._attached = (leaves, names, [(leaves[name], self._buffers[name]) for name in names])
            for leaf, buffer in self._attached[2]:
                leaf.grad = buffer
            return
        more: list[tuple[Tensor, Tensor]] = []
        for name in names:
            leaf = leaves[name]
            if leaf.grad is None:
                leaf.grad = self._buffers[name]  # that `state` has looked at
            elif not self._inside and self._is_apart(name, leaf):
                more.append((leaf.grad, self._buffer(name, leaf)))
        if more:
            torch._foreach_add_([grad for grad, _ in more], [buffer for _, buffer in more])

    def _is_apart(self, name: str, leaf: Tensor) -> bool:
        """Returns whether a step adds to a parameter's gradient after its graph."""
        known = self._buffers.get(name)
        if not self._graphed or leaf.grad is None:
            return False
        return known is None or _storage(known) != _storage(leaf.grad)

    def _buffer(self, name: str, leaf: Tensor) -> Tensor:
        known, kind = self._buffers.get(name), (leaf.shape, leaf.dtype, leaf.device)
        if known is None or self._kinds[name] != kind:
            self._kinds[name] = kind
            # With the parameter's strides: torch's foreach kernels are fast only where those of the gradient are equal.
            known = torch.empty_like(leaf, memory_format=torch.preserve_format).detach()
            is_whole = isinstance(leaf, nn.Parameter)  # parts of cut parameters know it by themselves
            known = self._buffers[name] = known.as_subclass(StageGradient) if self._of_stage and is_whole else known
            self._attached = ((), (), [])
        return known


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def call_hooks(leaves: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Calls the hooks of what follows a gradient that is there."""
    for leaf in [leaf for name in names if (leaf := leaves[name])._post_accumulate_grad_hooks]:
        for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
            hook(leaf)


def _hooked(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Returns what the hooks of a tensor make of its gradient, of which they may keep what they see."""
    gradient = gradient.clone() if leaf._backward_hooks else gradient  # it may lie where the next step adds up its own
    for hook in list((leaf._backward_hooks or {}).values()):
        replacement: Any = hook(gradient)
        if replacement is not None:
            gradient = replacement
    return gradient


# Gradients that wait for those of other microbatches, and for their sum over the ranks.


class MicrobatchSum:
    """What microbatches of a step leave, added up: by the products themselves, and all else after each backward.

    It is a `fxpar.runtime.calls.GradientSink`, by name of the value.

    Attributes:
        is_filled: whether a microbatch has left all that it leaves.
    """

    def __init__(self) -> None:
        self.is_filled = False
        self._places: dict[str, Destination] = {}

    def clear(self) -> None:
        """Begins anew, in the same memory."""
        tensors = [place.tensor for place in self._places.values() if place.tensor is not None]
        if tensors:
            torch._foreach_zero_(tensors)

    def __call__(self, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Implements `GradientSink.__call__`, but that `add` adds what is not there: in one kernel for all calls."""
        places = ((name, value, self.destination(name)) for name, value in gradients.items())
        return {
            name: place.tensor if place.tensor is not None and place.has(value) else value
            for name, value, place in places
        }

    def destination(self, name: str) -> Destination:
        """Implements `GradientSink.destination`."""
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = Destination(None, adds=True)
        return place

    def add(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the sums by name, after the backward of a microbatch.

        Args:
            gradients: what it has left, by name; some lie in the sums, of which they are part.
        """
        sums: dict[str, Tensor] = {}
        more: list[tuple[Tensor, Tensor]] = []
        for name, gradient in gradients.items():
            place = self.destination(name)
            if place.tensor is None:
                # A clone: some are views, and what is added to must be this rank's alone.
                place.tensor = gradient.clone()
            elif not place.has(gradient):
                more.append((place.tensor, gradient))
            sums[name] = place.tensor
        self.is_filled = True
        if more:
            torch._foreach_add_([total for total, _ in more], [gradient for _, gradient in more])
        return sums


Finish = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class Waiting:
    """What calls have left so far.

    Args:
        graphed: whether steps are replayed. Sums of microbatches keep their addresses then.

    Attributes:
        holds: whether calls leave theirs, and get no gradients.
    """

    def __init__(self, graphed: bool = False) -> None:
        self.holds, self._graphed, self._adds_up = False, graphed, False
        self._sums: dict[Hashable, MicrobatchSum] = {}
        self._held: dict[str, Tensor] = {}
        self._signature: Hashable = None

    @torch.no_grad()
    def start(self) -> None:
        """Begins a step of microbatches."""
        self._release()
        self._adds_up = True
        for total in self._sums.values():
            total.clear()

    def sum_of(self, key: Hashable) -> MicrobatchSum:
        """Returns where microbatches of the step are added up that leave the same gradients."""
        return self._sums.setdefault(key, MicrobatchSum())

    def _release(self) -> None:
        """Ends a step of microbatches: frees the sums that no graph knows."""
        # One that is empty, as its first microbatch has failed, would be of no use to graphs.
        self._sums = {key: total for key, total in self._sums.items() if self._graphed and total.is_filled}
        self._adds_up = False

    @property
    def is_idle(self) -> bool:
        """Returns whether a call's gradients are summed by themselves."""
        return not self.holds and not self._held

    @torch.no_grad()
    def finished(self, unsummed: dict[str, Tensor], signature: Hashable, finish: Finish) -> Mapping[str, Tensor]:
        """Returns the gradients of a call and of those that waited; none where this one waits too.

        Args:
            unsummed: what the call leaves.
            signature: of what.
            finish: makes gradients of it. A collective call.

        Raises:
            InputError: what waits is of another program.
        """
        is_sum = self._adds_up and self._graphed
        self._release()
        if self.is_idle:
            return finish(unsummed)
        if self._held:
            if signature != self._signature:
                raise InputError(
                    "leaves other gradients than the calls that wait for their sum",
                    where="no_sync",
                    remedy="pass the microbatches of a step as one list, or make calls of one structure, mode and "
                    "kind of sizes under no_sync and right after it",
                )
            torch._foreach_add_(list(unsummed.values()), [self._held[name] for name in unsummed])
        if self.holds:
            # Clones of sums in which the next step adds up its own.
            self._held = {name: value.clone() for name, value in unsummed.items()} if is_sum else unsummed
            self._signature = signature
            return {}
        self._held = {}
        return finish(unsummed)

    def discard(self) -> None:
        """Forgets what waits."""
        self._held = {}


# Where tensors lie in memory.


_PLACE = Tensor.data_ptr


class TensorAddresses:
    """Where tensors lie, and whether they are trained; equal for equal addresses, sizes and strides.

    Asked at each step of all parameters: what Dynamo asks of a compiled function's tensors is asked in one call, and
    the hash is kept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = list(map(_PLACE, tensors))
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        trained = [tensor.requires_grad for tensor in tensors]
        self._facts = (self._places, sizes, strides, trained)
        self._hash = hash(tuple(self._places))
        # Types and devices too, and all as the surrounding has it (inference mode).
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether the tensors lie there still; not, too, where the surrounding is another."""
        return bool(self._guards.check(*tensors)) and list(map(_PLACE, tensors)) == self._places

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TensorAddresses) and self._facts == other._facts)

    def __hash__(self) -> int:
        return self._hash
