"""The static verifiers, each with the properties under which it applies; here are those of operations and of stages.

Enters: a program. Leaves: nothing, or the first failure. They run after every pass of the manager, and in one line from
a test: `verify_static(program)`.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fxpar.errors import CheckFailed
from fxpar.ir.grad_flow import reached
from fxpar.ir.program import (
    Program,
    ScalarType,
    TensorType,
    describe,
    note,
    operands,
    output_layouts,
    output_types,
    tensor_type,
)
from fxpar.ir.properties import Property
from fxpar.ir.regions import inlined
from fxpar.ir.stages import Stage, is_transfer, stage_of, stages_of
from fxpar.layout.symbolic_sizes import evaluate
from fxpar.manager import Verifier
from fxpar.ops.operator import Operator
from fxpar.rewrite.loss_reduction import COUNT
from fxpar.rules import bind_arguments
from fxpar.rules.table import question
from fxpar.signatures.check_cache import Facts, facts_of
from fxpar.verify.phases import check_buffers, check_chunks, check_step
from fxpar.verify.shapes import check_shapes
from fxpar.verify.structure import check_header, check_structure
from fxpar.verify.types import check_choice, check_types

# Derivatives: what stands on a gradient's way has one.

_MISSING = re.compile(r"(the )?derivative for \S+ is not implemented")
# Operators that have one, with the types of their operands: an operator does not lose its derivative.
_known: set[Any] = set()
# What else shapes may not fit, other checks say.
_FAILURES = (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError, ArithmeticError)


def check_derivatives(program: Program, facts: Facts) -> None:
    """Differentiates each operator of torch once in a process, on shapes, as a program uses it first.

    Raises:
        CheckFailed: PyTorch has no derivative of it.
    """
    sizes, flags = {s.name: s.example for s in program.all_symbols}, facts.flags
    differentiated, sound = reached(program, flags), facts.known("derivatives")
    for node in program.graph.nodes:
        if node not in differentiated or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operand_flags = tuple([flags[operand] for operand in facts.operands[node]])
        if (facts.numbers[node], operand_flags) in sound:
            continue
        kinds = tuple(kind.dtype for operand in facts.operands[node] for kind in output_types(operand))
        key = node.target, kinds, operand_flags
        if key not in _known and _is_differentiated(node, flags, sizes):
            _known.add(key)
        if key in _known:
            sound[facts.numbers[node], operand_flags] = True


def _is_differentiated(node: fx.Node, flags: Mapping[fx.Node, tuple[bool, ...]], sizes: Mapping[str, int]) -> bool:
    """Returns whether PyTorch came to the end of it: of operands that do not fit one another it says nothing.

    Raises:
        CheckFailed: there is no derivative.
    """
    tracked: list[Tensor] = []

    def value(operand: fx.Node) -> Any:
        kind = note(operand).type
        if isinstance(kind, ScalarType):
            return evaluate(kind.value, sizes)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        tensors = []
        for item, flag in zip(kinds, flags[operand], strict=True):
            assert isinstance(item, TensorType)
            shape = [evaluate(size, sizes) for size in item.shape]
            tensors.append(torch.empty(shape, dtype=item.dtype, device="meta", requires_grad=flag))
            tracked.extend(tensors[-1:] if flag else [])
        return tensors if isinstance(kind, tuple) else tensors[0]

    try:
        args, kwargs = map_arg((node.args, node.kwargs), value)
        with torch.enable_grad():
            outputs = node.target(*args, **kwargs)  # type: ignore[operator]
        made_of_it = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        results = [r for r in made_of_it if isinstance(r, Tensor) and r.requires_grad]
        torch.autograd.grad(results, tracked, [torch.empty_like(r) for r in results], allow_unused=True)
    except _FAILURES as error:
        if missing := _MISSING.search(str(error)):
            raise CheckFailed(missing[0], where=describe(node), remedy="detach its operand, or use another") from None
        return False
    return True


_NETWORK = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
)
_UNSET = re.compile(r"(?:^|_)empty(?:_|$)")
_NORMS = re.compile(r"(?:batch|instance)_norm")
_KERNELS = re.compile(r"aten\.(native_)?(layer|group)_norm\.default")
# Of tensors that are not dense ones; on some operands PyTorch does not come back from them.
_NOT_DENSE = re.compile(r"nested|sparse|mkldnn|jagged|(?<!fake_)quantize")
_BITS = re.compile(r"aten\.(bitwise_\w+|__[a-z]?(and|or|xor|shift)__)\.\w+")
_ARITHMETIC = re.compile(r"aten::(add|sub|rsub|mul|div|true_divide|pow|fmod|remainder|floor_divide|atan2|lerp|xlogy)")
_ASSERTIONS = re.compile(r"aten::(_assert\w*|_functional_assert\w*|(_functional_)?sym_constrain_range\w*|_print)$")


# Operations: ranks compute the same of the same operands only where an operation writes to none of them, reads nothing
# else, and does not communicate by itself. What PyTorch raises on the device alone (a probability of 1.5) is refused.


def check_operations(program: Program, facts: Facts | None = None) -> None:
    """Refuses operations in place, memory that nothing has written, own communication, and numbers out of bounds.

    Args:
        facts: of the program, where they are known.

    Raises:
        CheckFailed: names the first.
    """
    facts = facts or facts_of(program)
    is_canonical, flags = Property.CANONICAL in program.properties, facts.flags
    sound = facts.known("operations", is_canonical)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        key = facts.numbers[node], True in flags[node]
        if key in sound:  # equal layers, and what a pass left alone
            continue
        try:
            hash(question(node))
        except TypeError as error:
            _fail(node, f"takes what is no argument of an operation ({error})", "pass numbers, words, types and lists")
        if isinstance(node.target, torch._ops.OpOverload):
            _check_effects(node, node.target)
            if is_canonical:
                _check_canonical(node, node.target)
        elif note(node).type is None:
            _fail(node, "has no type", "note its type")
        _check_domains(node)
        if any(flags[node]):
            _check_arithmetic(node)
        sound[key] = True
    check_derivatives(program, facts)


def _fail(node: fx.Node, reason: str, remedy: str) -> None:
    raise CheckFailed(reason, where=describe(node), remedy=remedy)


def _check_effects(node: fx.Node, target: torch._ops.OpOverload) -> None:
    name, arguments = target._schema.name, bind_arguments(node)
    if target._schema.is_mutable:
        written = [a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        remedy = "call the operation that returns a new tensor"
        _fail(node, f"{target} writes to its operand {', '.join(written)}", remedy)
    trains = any(arguments.get(flag) is True for flag in ("training", "train", "use_input_stats"))
    if _NORMS.search(name) and trains and "functional" not in name and arguments.get("running_mean") is not None:
        _fail(node, f"{target} writes to its running statistics", "pass None for them")
    if target.namespace in _NETWORK:
        _fail(node, f"{target} communicates by itself", "write the coercion of fxpar that does it")
    if _NOT_DENSE.search(name.partition("::")[2]):
        _fail(node, f"{target} makes or takes tensors that are not dense", "write it with dense tensors")
    if name == "aten::from_file":
        _fail(node, "reads a file", "make it an input or a buffer")
    if note(node).type is None and not _ASSERTIONS.fullmatch(name):
        _fail(node, "has no type", "note its type, or take the node out if nothing uses it")


def _check_canonical(node: fx.Node, target: torch._ops.OpOverload) -> None:
    """Refuses what canonicalize takes out: memory that nothing has written, and where tensors lie."""
    arguments = bind_arguments(node)
    if _UNSET.search(target._schema.name.partition("::")[2]):
        _fail(node, f"{target} holds what is in memory by chance", "make it of zeros")
    device = node.kwargs.get("device") or arguments.get("device")
    if device is not None and ("device" in node.kwargs or getattr(device, "type", "") == "meta"):
        _fail(node, f"names the device {device}", "leave it out: the run says where tensors are")
    if arguments.get("layout") not in (None, torch.strided):
        _fail(node, f"asks for the layout {arguments['layout']}", "keep tensors dense")


Domain = tuple[str, Callable[[Any], bool]]


def _number(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and not _is_huge(value) and holds(value)


def _scalar(holds: Callable[[float], bool]) -> Callable[[Any], bool]:
    """Returns `_number`, also of a complex number whose parts both are so; what cannot take one has no result."""
    real = _number(holds)
    return lambda value: real(value.real) and real(value.imag) if isinstance(value, complex) else real(value)


def _is_huge(value: float) -> bool:
    return isinstance(value, int) and value.bit_length() > 64


def _optional(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Returns the same for sizes too, which are finite, and for None."""
    return lambda value: value is None or isinstance(value, fx.Node) or holds(value)


def _one_of(*words: Any) -> Domain:
    return f"one of {', '.join(map(str, words))}", lambda value: any(
        type(value) is type(w) and value == w for w in words
    )


_PROBABILITY: Domain = ("within [0, 1]", _number(lambda value: 0 <= value <= 1))
_FINITE: Domain = ("a finite number", _optional(_scalar(math.isfinite)))
_NO_NAN: Domain = ("a number", _optional(_scalar(lambda value: not math.isnan(value))))
_NOT_NEGATIVE: Domain = ("finite and not negative", _optional(_number(lambda value: 0 <= value < math.inf)))
_POSITIVE: Domain = ("finite and positive", _optional(_number(lambda value: 0 < value < math.inf)))

# By the names that schemas of numbers and words share; tensors are no concern of these.
_DOMAINS: Mapping[str, Domain] = {
    **dict.fromkeys(("dropout_p", "dropout", "label_smoothing"), _PROBABILITY),
    **dict.fromkeys("alpha beta scale input_scale negative_slope weight momentum exponent".split(), _FINITE),
    **dict.fromkeys("mean margin delta start end step spacing dx median from to lower upper".split(), _FINITE),
    **dict.fromkeys("eps epsilon std correction lambd atol rtol".split(), _NOT_NEGATIVE),
    **dict.fromkeys("other min max min_val max_val ord".split(), _NO_NAN),
    "sigma": _POSITIVE,
    "reduction": _one_of(0, 1, 2),
    "approximate": _one_of("none", "tanh"),
    "rounding_mode": _one_of(None, "trunc", "floor"),
}
# Of single operators, which the names above do not tell.
_OWN: Mapping[str, Mapping[str, Domain]] = {
    "aten.pad.default": {"mode": _one_of("constant", "reflect", "replicate", "circular")},
    "aten.softplus.default": {"beta": _POSITIVE},
    "aten.celu.default": {"alpha": ("finite and not zero", _optional(_number(lambda v: math.isfinite(v) and v != 0)))},
    "aten.exponential.default": {"lambd": _POSITIVE},
    "aten.addcmul.default": {"value": _FINITE},
    "aten.addcdiv.default": {"value": _FINITE},
}


def _check_domains(node: fx.Node) -> None:
    name = str(node.target)
    arguments = bind_arguments(node) if isinstance(node.target, torch._ops.OpOverload) or _draws(node) else {}
    domains = dict(_OWN.get(name, {}))
    if _draws(node) or re.search(r"dropout|bernoulli", name):
        domains["p"] = _PROBABILITY
    for key, value in arguments.items():
        domain = domains.get(key) or _DOMAINS.get(key)
        if domain is None or _is_tensor(node, key, value):
            continue
        if not domain[1](value):
            _fail(node, f"{key}={value} is not {domain[0]}", "write another")
    _check_pairs(node, arguments)
    if _KERNELS.fullmatch(name):
        _check_kernel(node)
    if _BITS.fullmatch(name) and any(kind.is_float for operand in operands(node) for kind in output_types(operand)):
        _fail(node, f"{name} of floating numbers", "cast them to integers or booleans")


def _check_arithmetic(node: fx.Node) -> None:
    """Refuses infinities: sums with them depend on an order, so that ranks may give others than one device."""
    if isinstance(node.target, torch._ops.OpOverload) and _ARITHMETIC.fullmatch(node.target._schema.name):
        for key, value in bind_arguments(node).items():
            if isinstance(value, (float, complex)) and not cmath.isfinite(value):
                _fail(node, f"computes with {key}={value} what carries a gradient", "fill masked elements in instead")


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, Operator) and node.target.draws


def _is_tensor(node: fx.Node, key: str, value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return True
    if isinstance(value, fx.Node):
        return value in operands(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return value is None and key != "p"
    kinds = {a.name: str(a.type) for a in node.target._schema.arguments}
    return value is None and "Tensor" in kinds.get(key, "")


def _check_kernel(node: fx.Node) -> None:
    """Checks that weights of norms are of the type of what they normalise, or float32 where that is a half."""
    first, *rest = [kind.dtype for operand in operands(node) for kind in output_types(operand)]
    wider = {torch.float32} if first in (torch.float16, torch.bfloat16) else set()
    for dtype in rest:
        if dtype not in {first, *wider}:
            _fail(node, f"normalises {first} with weights of {dtype}", "cast them first")


def _check_pairs(node: fx.Node, arguments: Mapping[str, Any]) -> None:
    """Checks bounds to be in order, lists to be of one length, a padding index to be in its table."""
    for least, most in (("min_val", "max_val"), ("from", "to"), ("lower", "upper"), ("low", "high")):
        low, high = arguments.get(least), arguments.get(most)
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
            _fail(node, f"{least}={low} is above {most}={high}", "exchange them")
    shifts, dims = arguments.get("shifts"), arguments.get("dims")
    if isinstance(shifts, Sequence) and isinstance(dims, Sequence) and len(shifts) != len(dims or [0]):
        _fail(node, f"{len(shifts)} shifts are given for {len(dims)} dimensions", "write as many of both")
    table, word = arguments.get("weight"), arguments.get("padding_idx")
    if isinstance(table, fx.Node) and isinstance(word, int) and table in operands(node):
        rows = output_types(table)[0].shape[0]
        if word < -1 or (isinstance(rows, int) and word >= rows):
            _fail(node, f"padding_idx={word} is none of the {rows} rows", "write -1 for none")


# Stages: each node is computed by one, and reads what that stage has.


def check_stages(program: Program) -> None:
    """Checks that an operation is on one stage, reads what that has or receives, and nothing crosses twice.

    Raises:
        CheckFailed: names the node, and the cut between two stages.
    """
    count = program.plan.pipeline_stages
    received: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        if len(note(node).stages) != 1 or not 0 <= stage_of(node) < count:
            noted = "+".join(map(str, note(node).stages)) or "none"
            raise CheckFailed(f"is on {noted} and not on one of {count} stages", where=describe(node))
        if is_transfer(node):
            _check_transfer(node, received)
        else:
            for read in node.all_input_nodes:
                _check_read(program, node, read)
    _check_held(program)
    nodes = program.output_nodes()
    for name, what in {program.loss: "loss", COUNT: "count of what is in the loss"}.items():
        node = nodes.get(name)
        if node is not None and node.op == "call_function" and stage_of(node) != count - 1:
            raise CheckFailed(f"the {what} is on stage {stage_of(node)}, not on the last", where=describe(node))
    check_neighbours(stages_of(program))


def _check_transfer(node: fx.Node, received: dict[tuple[fx.Node, int], fx.Node]) -> None:
    stage, (source,) = stage_of(node), node.all_input_nodes
    cut = f"the cut in front of stage {stage}"
    if source.op != "call_function":
        raise CheckFailed(
            f"%{source.name} is no result of a stage, but crosses {cut}", where=describe(node), remedy="read it itself"
        )
    if stage_of(source) != stage - 1:
        raise CheckFailed(
            f"%{source.name} of stage {stage_of(source)} crosses {cut}: a stage receives of the one before alone",
            where=describe(node),
            remedy="pass the value from stage to stage",
        )
    origin = _origin(source)
    before = received.setdefault((origin, stage), node)
    if before is not node:
        raise CheckFailed(f"%{origin.name} crosses {cut} twice, as %{before.name} too", where=describe(node))


def _origin(node: fx.Node) -> fx.Node:
    """Returns what is passed on from stage to stage."""
    while is_transfer(node):
        (node,) = node.all_input_nodes
    return node


def _check_read(program: Program, node: fx.Node, read: fx.Node) -> None:
    stage = stage_of(node)
    if read.op == "call_function" and note(read).stages != (stage,):
        other = "+".join(map(str, note(read).stages)) or "none"
        raise CheckFailed(
            f"reads %{read.name} of stage {other}, which stage {stage} never gets",
            where=describe(node),
            remedy=f"put fxpar.transfer on each cut between stages {other} and {stage}",
        )
    parameter = program.parameter(read) if read.op == "placeholder" else None
    if parameter is not None and stage not in note(read).stages:
        lost = ", so that its gradient of it is not summed" if parameter.trainable else ""
        raise CheckFailed(
            f"reads %{read.name}, which stage {stage} does not hold{lost}",
            where=describe(node),
            remedy=f"note stage {stage} on the parameter",
        )


def _check_held(program: Program) -> None:
    """Checks that parameters are held by those that read them."""
    nodes = program.placeholders()
    for parameter in program.parameters:
        node = nodes[parameter.node]
        readers = {stage_of(user) for user in node.users if user.op == "call_function"}
        stages = note(node).stages
        if stages != (tuple(sorted(readers)) or (0,)):
            holders = "+".join(map(str, stages)) or "no stage"
            raise CheckFailed(
                f"is held by {holders} and read by {'+'.join(map(str, sorted(readers))) or 'none'}",
                where=parameter.fqn,
                remedy="note the stages that read it; what nothing reads is of stage 0",
            )
    for entry in program.inputs:
        if note(nodes[entry.node]).stages:
            raise CheckFailed("every stage has the inputs of a call", where=entry.path, remedy="note no stage")


def check_neighbours(stages: Sequence[Stage]) -> None:
    """Checks that each stage receives what the one before sends, in order, and gradients come back of it.

    Args:
        stages: all of them, in order.

    Raises:
        CheckFailed: names the value and the cut.
    """
    for sender, receiver in pairwise(stages):
        cut = f"the cut in front of stage {receiver.number}"
        if sender.sent != tuple(receiver.received):
            odd = sorted({*sender.sent} ^ {*receiver.received}) or sender.sent
            raise CheckFailed(f"what is sent and what is received differ at {cut}", where=odd[0])
        entries = {entry.node: entry for entry in receiver.program.inputs}
        nodes = sender.program.output_nodes()
        for name, placeholder in receiver.received.items():
            node, received, entry = nodes[name], receiver.program.node(placeholder), entries[placeholder]
            if tensor_type(node) != entry.type or output_layouts(node) != output_layouts(received):
                raise CheckFailed(f"is another type or layout than was sent, behind {cut}", where=describe(received))
            if entry.carries != (name in sender.tangents):
                waits = name in sender.tangents
                reason = f"stage {sender.number} waits for its gradient" if waits else "its gradient goes nowhere"
                reason += f", and behind {cut} it {'is an input without one' if waits else 'has one'}"
                raise CheckFailed(reason, where=describe(received), remedy="write (gradient) on what is received of it")


STATIC: tuple[Verifier, ...] = (
    Verifier("header", frozenset(), check_header, uses_facts=True),
    Verifier("structure", frozenset(), check_structure, uses_facts=True),
    Verifier("operations", frozenset(), check_operations, of_operations=True, uses_facts=True),
    Verifier("choice", frozenset({Property.LAYOUTS}), check_choice, until=Property.COLLECTIVES, uses_facts=True),
    # Types come first: they say which coercion a wrong shape lacks.
    Verifier("types", frozenset({Property.COLLECTIVES}), check_types, of_operations=True, uses_facts=True),
    Verifier("shapes", frozenset(), check_shapes, of_operations=True, uses_facts=True),
    Verifier("stages", frozenset({Property.STAGES}), check_stages),
    Verifier("chunks", frozenset({Property.STEP}), check_chunks),
    Verifier("buffers", frozenset({Property.STEP}), check_buffers),
    Verifier("step", frozenset({Property.STEP}), check_step, of_dataflow=True),
)


def verify_static(program: Program) -> tuple[str, ...]:
    """Runs every static check whose properties hold, and returns their names.

    Raises:
        CheckFailed, LayoutError: the first failure.
        InputError: the program names an autograd function that cannot be imported.
    """
    program = inlined(program)
    facts = facts_of(program)
    applied = [verifier for verifier in STATIC if verifier.applies(program)]
    for verifier in applied:
        verifier.judge(facts)
    return tuple(verifier.name for verifier in applied)
