"""What a forward remembers outside of its module and what it raises: nothing stays behind, and the reason is told."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.torch_version import TorchVersion

from fxpar.capture.capture import capture
from fxpar.capture.python_state import OtherMemos
from fxpar.errors import CaptureError
from fxpar.verify.values import check_capture

WIDTH = 12


@functools.lru_cache
def mask(size: int) -> Tensor:
    return torch.ones(size, size).tril()


@functools.lru_cache(maxsize=8)
def table() -> Tensor:
    return torch.arange(float(WIDTH))


class Tables:
    @functools.cache  # noqa: B019
    def rows(self) -> Tensor:
        return torch.arange(float(WIDTH))

    @functools.cached_property
    def own(self) -> Tensor:
        return torch.arange(float(WIDTH))


TABLES, HELD, NESTED = Tables(), dict[int, Tensor](), dict[str, dict[int, Any]]({"inner": {}})
LAST: Tensor | None = None
KNOWN = list[Tensor]()


def by_global(x: Tensor) -> Tensor:
    global LAST
    if LAST is None:
        LAST = torch.arange(float(WIDTH))
    return x * LAST


def by_attribute(x: Tensor) -> Tensor:
    if not hasattr(by_attribute, "kept"):
        by_attribute.kept = torch.arange(float(WIDTH))  # type: ignore[attr-defined]
    return x * by_attribute.kept  # type: ignore[attr-defined, no-any-return]


def closed() -> Callable[[Tensor], Tensor]:
    kept: Tensor | None = None

    def run(x: Tensor) -> Tensor:
        nonlocal kept
        kept = torch.arange(float(WIDTH)) if kept is None else kept
        return x * kept

    return run


def by_list(x: Tensor) -> Tensor:
    KNOWN.append(x)
    return KNOWN[-1] * 2


def by_nest(x: Tensor) -> Tensor:
    kept: Tensor = NESTED["inner"].setdefault(WIDTH, torch.arange(float(WIDTH)))
    return x * kept


def by_dict(x: Tensor) -> Tensor:
    if WIDTH not in HELD:
        HELD[WIDTH] = torch.arange(float(WIDTH))
    return x * HELD[WIDTH]


class Slotted:
    __slots__ = ("kept",)
    kept: Tensor


class Counted(type):
    kept: Tensor


class Instance(metaclass=Counted):
    pass


# Each keeps a tensor under the name `kept` once it was asked.
KEEPERS = {
    "a namespace": types.SimpleNamespace(),
    "a thread's own": threading.local(),
    "an object with slots": Slotted(),
    "a class of a class": Instance,
}
WEAK, USERS = weakref.WeakKeyDictionary[nn.Module, Tensor](), UserDict[int, Tensor]()


def by_keeper(name: str) -> Callable[[Tensor], Tensor]:
    keeper = KEEPERS[name]

    def run(x: Tensor) -> Tensor:
        if not hasattr(keeper, "kept"):
            (type(keeper) if isinstance(keeper, type) else keeper).kept = torch.arange(float(WIDTH))  # type: ignore[attr-defined]
        return x * keeper.kept  # type: ignore[attr-defined, no-any-return]

    return run


def by_weak(x: Tensor) -> Tensor:
    return x * WEAK.setdefault(OWNER, torch.arange(float(WIDTH)))


def by_users(x: Tensor) -> Tensor:
    return x * USERS.setdefault(WIDTH, torch.arange(float(WIDTH)))


OWNER = nn.Identity()
REMEMBERING: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask for each length": lambda x: (x.transpose(1, 2) @ mask(x.shape[1])).transpose(1, 2),
    "a table": lambda x: x * table(),
    "a memoised method": lambda x: x * TABLES.rows(),
    "a cached property": lambda x: x * TABLES.own,
    "a global": by_global,
    "an attribute of a function": by_attribute,
    "a closure": closed(),
    "a dict": by_dict,
    "a dict in a dict": by_nest,
    "a list": by_list,
    "a dictionary by weak references": by_weak,
    "a user's dictionary": by_users,
    **{name: by_keeper(name) for name in KEEPERS},
}


class Between(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        return self.down(self.middle(self.up(x))).square().sum()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 6, 8)}


@pytest.mark.parametrize("name", REMEMBERING)
def test_nothing_is_left_behind(name: str) -> None:
    model, example = Between(REMEMBERING[name]), batch()
    captured = capture(model, example)
    assert not HELD
    assert not KNOWN
    assert not NESTED["inner"]
    assert LAST is None
    assert table.cache_info().currsize == mask.cache_info().currsize == Tables.rows.cache_info().currsize == 0
    assert "own" not in vars(TABLES)
    assert not any(hasattr(keeper, "kept") for keeper in (by_attribute, *KEEPERS.values()))
    assert not WEAK
    assert not USERS
    check_capture(captured, model, example)
    result = model(**example)
    assert not isinstance(result, FakeTensor)
    result.backward()
    forget()


def forget() -> None:
    global LAST
    LAST = None
    for store in (HELD, KNOWN, NESTED["inner"], WEAK, USERS):
        store.clear()
    for keeper in KEEPERS.values():
        owner = type(keeper) if isinstance(keeper, type) else keeper
        if hasattr(owner, "kept"):
            del owner.kept
    for memo in (mask, table, Tables.rows):
        memo.cache_clear()
    vars(TABLES).clear()
    vars(by_attribute).clear()


def test_what_was_remembered_before_still_is() -> None:
    model = Between(REMEMBERING["a table"])
    kept = table()
    capture(model, batch())
    assert table() is kept
    forget()


def test_a_mask_that_is_remembered_follows_the_length() -> None:
    program = capture(Between(REMEMBERING["a mask for each length"]), batch()).program
    assert {s.name for s in program.symbols} == {"b", "s"}


class Reason(Exception):
    pass


def fail(error: BaseException) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        raise error

    return run


RAISING: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a division": (lambda x: x * (1 // (x.dim() - 3)), "raises ZeroDivisionError: integer division"),
    "an error of its own": (fail(Reason("too deep")), "raises Reason: too deep"),
    "an end of iteration": (fail(StopIteration()), "raises StopIteration"),
    "a generator": (
        lambda x: x * torch.rand(3, 6, 12, generator=torch.Generator()),
        "draws from a generator of its own",
    ),
    "an unnamed operator": (lambda x: x * torch.zeros_like(x).random_(0, 5), "random_ is an operator that no graph"),
}


@pytest.mark.parametrize("name", RAISING)
def test_whatever_a_forward_raises_is_one_error_with_its_line(name: str) -> None:
    middle, reason = RAISING[name]
    with pytest.raises(CaptureError, match=rf"test_memo\.py:\d+: .*{reason}"):
        capture(Between(middle), batch())


class Silent(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)


def test_a_model_without_results_is_refused() -> None:
    with pytest.raises(CaptureError, match="outputs: the model returns no tensor"):
        capture(Silent(8, 8), (torch.randn(3, 8),))


class Named(nn.Module):
    """Submodules whose names a graph module has for itself."""

    NAMES = ("code", "graph", "print_readable", "recompile", "meta", "module", "to_folder", "add_submodule")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.NAMES:
            x = getattr(self, name)(x)
        return x


class Turned(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).abs()


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(5, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(lambda head: torch.vmap(lambda row: row @ head)(x))(self.heads).sum(0)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.cells(x)[0]


# A vmap in another one asks for the number of elements: torch 2.11 has none for sizes that are symbols.
MAPPED = [Mapped] if TorchVersion(torch.__version__) >= "2.12" else []
UNUSUAL = [Named, Turned, *MAPPED, *(functools.partial(Recurrent, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN))]


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_modules_are_captured(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, example = Between(kind()), batch()
    captured = capture(model, example)
    check_capture(captured, model, example)
    assert not any(node.meta["custom"]["fxpar"].random for node in captured.program.graph.nodes if node.op != "output")


class Registry(dict[str, type]):
    """Makes an object of what it holds when it is asked, as registries of activations do."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


ACTIVATIONS = Registry(silu=nn.SiLU, gelu=nn.GELU)


def test_registries_are_left_alone() -> None:
    before = dict(ACTIVATIONS.items())
    model = Between(lambda x: ACTIVATIONS["silu"](x))
    check_capture(capture(model, batch()), model, batch())
    assert dict(ACTIVATIONS.items()) == before
    assert list(ACTIVATIONS) == ["silu", "gelu"]


def test_a_memo_that_was_made_behind_a_capture_forgets_what_the_next_one_left() -> None:
    """The process is searched again where there are more memos than before, or others."""
    for _ in range(2):
        OtherMemos().forget()

        @functools.lru_cache
        def made(size: int) -> Tensor:
            return torch.empty(size)

        with FakeTensorMode():
            made(3)
        OtherMemos().forget()
        assert made.cache_info().currsize == 0
