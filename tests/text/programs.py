"""Programs written by hand that use every part of the text form."""

import math
import operator
from typing import Any

import sympy
import torch
from torch import fx

from fxpar.ir.program import DTYPES, Input, Note, Parameter, Program, ScalarType, TensorType, set_note
from fxpar.ir.symbols import Symbol
from fxpar.layout.layout import I, Layout, P, Piece, Placement, R, V, shard
from fxpar.layout.symbolic_sizes import Size, symbol
from fxpar.ops.collectives import reduce_from
from fxpar.ops.random import axis_index, dropout
from fxpar.ops.registry import OPERATORS
from fxpar.ops.small_operators import function
from fxpar.plan.plan import Plan

aten = torch.ops.aten
b, s = symbol("b"), symbol("s")


def f32(*shape: Size) -> TensorType:
    return TensorType(torch.float32, shape)


def tp(placement: Placement) -> Layout:
    return Layout.of({"tp": placement})


class Builder:
    """A program written node by node."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan(tp=2)
        self.graph = fx.Graph()
        self.parameters: list[Parameter] = []
        self.inputs: list[Input] = []
        self.constants: dict[str, torch.Tensor] = {}

    def node(self, name: str, target: Any, *args: Any, kwargs: dict[str, Any] | None = None, **kept: Any) -> fx.Node:
        op = "placeholder" if isinstance(target, str) else "call_function"
        made = self.graph.create_node(op, target, args, kwargs or {}, name=name)
        made.name = name
        return set_note(made, Note(**kept))

    def input(self, name: str, kind: TensorType, **kept: Any) -> fx.Node:
        self.inputs.append(Input(name, name, kind))
        return self.node(name, name, type=kind, **kept)

    def tensor(self, name: str, kind: TensorType, fqn: str = "", of: str = "parameter", **kept: Any) -> fx.Node:
        trainable, tied = kept.pop("trainable", of == "parameter"), kept.pop("tied", ())
        self.parameters.append(Parameter(fqn or name, name, of, kind, trainable, tied))
        return self.node(name, name, type=kind, **kept)

    def program(self, outputs: dict[str, Any], **fields: Any) -> Program:
        self.graph.output(tuple(outputs.values()))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        fields = {"symbols": (), **fields}
        owned, given = tuple(self.parameters), tuple(self.inputs)
        return Program(module, owned, given, tuple(outputs), plan=self.plan, constants=self.constants, **fields)


def mlp() -> Program:
    """A row-parallel matrix with its reduction, as the README shows it."""
    build = Builder(Plan(tp=2, split={"*.gate": "column"}))
    x = build.input("x", f32(b, s, 96), layout=tp(Placement("S", 2, (Piece(3, 32),))))
    w = build.tensor("w", f32(64, 96), "mlp.down.weight", layout=tp(Placement("S", 1, (Piece(3, 32),))), role="row")
    needs = (tp(Placement("S", 2, (Piece(3, 32),))), tp(Placement("S", 1, (Piece(3, 32),))))
    down = build.node(
        "down", aten.linear.default, x, w, type=f32(b, s, 64), layout=tp(P), needs=needs, role="row",
        origin='split line "*.down", weight: by hand', fqn="mlp.down", source="model.py:41",
    )  # fmt: skip
    out = build.node(
        "mlp_out", reduce_from, down, kwargs={"axis": "tp"}, type=f32(b, s, 64), layout=tp(I), fqn="mlp.down"
    )
    loss = build.node("loss", aten.sum.default, out, type=f32(), layout=tp(I), source="model.py:42")
    symbols = (Symbol("b", "x", 0, 3), Symbol("s", "x", 1, 16))
    properties = frozenset({"layouts", "collectives"})
    return build.program({"loss": loss, "logits": out}, symbols=symbols, properties=properties, loss="loss")


MLP = """\
fxpar 2
plan {"tp": 2, "split": {"*.gate": "column"}}
properties collectives layouts
symbol b = x.0 like 3
symbol s = x.1 like 16
loss loss
%x = input["x"] : f32[b, s, 96] tp:S(2: 3 x 32)
%w = parameter["mlp.down.weight"] : f32[64, 96] tp:S(1: 3 x 32) {role="row"}
%down = aten.linear.default(%x, %w) : f32[b, s, 64] tp:P \
{needs=tp:S(2: 3 x 32) ; tp:S(1: 3 x 32), role="row", origin="split line \\"*.down\\", weight: by hand"}  \
# mlp.down model.py:41
%mlp_out = fxpar.reduce_from[tp](%down) : f32[b, s, 64] tp:P→I  # mlp.down
%loss = aten.sum.default(%mlp_out) : f32[] tp:I  # - model.py:42
return loss=%loss, logits=%mlp_out
"""


def literals() -> Program:
    """Every kind of argument, tuple outputs, scalars, effects, and names that need care."""
    build = Builder(Plan())
    x = build.input("input", f32(b, 6))  # torch.fx renames %input, which shadows a builtin
    size = build.node("size", aten.sym_size.int, x, 0, type=ScalarType(b))
    half = build.node("half", operator.floordiv, size, 2, type=ScalarType(sympy.floor(b / 2)))
    whole = build.node("whole", operator.mul, half, 2, type=ScalarType(2 * sympy.floor(b / 2) + 1))
    build.node("largest", torch.sym_max, size, -7, type=ScalarType(b))
    build.node("root", math.sqrt, size)
    values: list[Any] = [
        1,
        -2,
        True,
        False,
        None,
        1.0,
        -0.5,
        1e-05,
        1e300,
        math.inf,
        -math.inf,
        math.nan,
        -0.0,
        2**63 - 1,
        -1j,
        complex(math.nan, -math.inf),
    ]
    values += ['say "hi"\\\n', "ünï → # {", [], [[1, 2], [x, [half]]], (3, (4.0, "%x")), torch.device("cuda")]
    values += [*DTYPES.values(), torch.channels_last, torch.strided]
    kwargs = {"path": "my.module.Function"}
    called = build.node("called", function, x, *values, kwargs=kwargs, type=f32(b, 6))
    fill = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": False}
    build.node("zeros_2", aten.zeros.default, [size, whole], kwargs=fill, type=TensorType(torch.bfloat16, (b, 2)))
    top = build.node("topk", aten.topk.default, called, 2, type=(f32(b, 2), TensorType(torch.int64, (b, 2))))
    build.node("empty", aten.unbind.int, x, type=())
    build.node("sync", aten._assert_async.msg, x, "no", fqn="-", source="my dir/a,b.py:3")
    first = build.node("lambda_", operator.getitem, top, 0, type=f32(b, 2), random=3, recompute=2)
    return build.program({"logits": first, "past.0": top, "none": None, "two words": 1.5, "a=b": [first, size]})


def constants() -> Program:
    """Parameters and constants of every kind and element type."""
    build = Builder(Plan())
    build.tensor("wte", f32(4, 2), "wte.weight", tied=("lm_head.weight", 'odd "name"'))
    build.tensor("bias", f32(2), "head.bias", trainable=False, tied=("other.bias",))
    build.tensor("mask", TensorType(torch.bool, (2, 2)), "mask", "buffer")
    for name, dtype in DTYPES.items():
        if not dtype.is_complex:
            floats = [0.1, -math.inf, math.nan, -0.0, 3.0, 1e-3]
            value = torch.tensor(floats if dtype.is_floating_point else [1, 0, 1, 1, 0, 100], dtype=dtype).reshape(2, 3)
            build.tensor(f"c_{name}", TensorType(dtype, (2, 3)), f"lifted.{name}", "constant")
            build.constants[f"lifted.{name}"] = value
    for name, shape in {"scalar": (), "nothing": (0, 3)}.items():
        build.tensor(name, TensorType(torch.int64, shape), name, "constant")
        build.constants[name] = torch.full(shape, -(2**63))
    return build.program({})


def layouts() -> Program:
    """Factors, segments, symbolic runs, several outputs, and shards whose run is not the dimension."""
    build = Builder(Plan(tp=4))
    placements = {
        "factor": shard(1, 288).at(1),
        "thirds": Placement("S", 1, (Piece(3, 96),)),
        "segments": Placement("S", 1, (Piece(1, 192), Piece(1, 48), Piece(1, 48, False))),
        "mixed": Placement("S", 1, (Piece(b, 4), Piece(2, s, False))),
        "flat": Placement("S", 0, (Piece(b * s, 96),)),
        "sequence": Placement("S", 0, (Piece(b, s),)),
        "global_run": shard(1, 576),
        "whole_run": Placement("S", 1, (Piece(1, 288, False),)),
        "varying": V,
    }
    made = [
        build.input(name, f32(b * s * 96, 288), layout=tp(placement), origin="cost")
        for name, placement in placements.items()
    ]
    pair = (tp(placements["thirds"]), tp(R))
    split = build.node("split", aten.unbind.int, made[0], type=(f32(b, 288), f32(2)), layout=pair)
    needs = (tp(placements["segments"]), tp(shard(0, 2)), tp(shard(1, 288)))
    build.node("both", aten.cat.default, [split, made[0]], 1, type=f32(b, 576), layout=tp(I), needs=needs)
    for kind in ("s_to_i", "all_to_all"):
        operator_ = OPERATORS[kind]
        build.node(kind, operator_, made[2], kwargs={"axis": "tp"}, type=f32(b * s * 96, 288), layout=tp(made_to(kind)))
    index = build.node("index", axis_index, kwargs={"axis": "tp"}, type=f32(), layout=tp(V))
    noise = [made[0], made[1], 0.1, [index]]
    build.node("noise", dropout, *noise, type=f32(b * s * 96, 288), layout=tp(I), random=1)
    return build.program({})


def made_to(kind: str) -> Placement:
    return I if kind == "s_to_i" else shard(0, b * s * 96)


def empty_layouts() -> Program:
    """A plan of one rank: layouts of no axis, which differ from no layout."""
    build = Builder(Plan())
    x = build.input("x", f32(b), layout=Layout())
    build.node("bare", aten.neg.default, x, type=f32(b))
    build.node("size", aten.sym_size.int, x, 0, type=ScalarType(b - 1), layout=Layout())
    build.node("two", aten.topk.default, x, 2, type=(f32(2), f32(2)), layout=(Layout(), Layout()), needs=(Layout(),))
    return build.program({})


PROGRAMS = {f.__name__: f for f in (mlp, literals, constants, layouts, empty_layouts)}
