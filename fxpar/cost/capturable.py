"""What a CUDA graph can hold, and the largest parts of a step that it can.

Enters: a step. Leaves: for a node why it cannot be captured, and to which part of a layer it belongs; the runs of nodes
that can, with what enters and leaves them in bytes, and what stands between them.

A graph replays kernels with the addresses and sizes of its capture, and nothing of Python: what reads a value on the
host, or makes a tensor whose shape depends on values, cannot be in one. Devices are no part of a program: all of it
runs on the rank's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxpar.cost.communication import symbol_sizes, value_bytes
from fxpar.ir.program import Program, ScalarType, TensorType, note, output_types
from fxpar.ir.step import PHASES
from fxpar.ops.attention import attention_forward
from fxpar.ops.operator import TORCH_OPERATORS, Operator, alike
from fxpar.signatures.op_call import bind_arguments

aten = torch.ops.aten


_TAGS = (
    (torch.Tag.data_dependent_output, "reads a value on the host"),
    (torch.Tag.dynamic_output_shape, "makes a tensor whose shape depends on values"),
    (torch.Tag.cudagraph_unsafe, "is marked as unsafe in CUDA graphs by its author"),
)
# Of these torch's kernels for GPUs wait for the device, or ask it for errors, which no tag says.
_WAITING = "waits for the device inside of its kernel"
_UNSAFE: Mapping[Any, str] = {
    packet: _WAITING
    for name in (
        *("_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_inv_ex", "linalg_lu_factor_ex"),
        *("linalg_cholesky_ex", "linalg_ldl_factor_ex", "_linalg_solve_ex", "_linalg_det", "_linalg_slogdet"),
        *("linalg_lstsq", "linalg_qr", "geqrf", "ormqr", "lu_unpack", "randperm", "_ctc_loss"),
        *("embedding_renorm", "_embedding_bag", "multinomial", "bernoulli", "_pin_memory", "_use_cudnn_ctc_loss"),
    )
    if (packet := getattr(aten, name, None)) is not None
}


def why_not_capturable(node: fx.Node) -> str:
    """Returns why no CUDA graph can hold an operation of a program; empty where one can."""
    target = node.target
    if isinstance(target, Operator):
        return target.uncaptured
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    if target.overloadpacket in _UNSAFE:
        return _UNSAFE[target.overloadpacket]
    if target.overloadpacket is aten.histc and not _has_bounds(node):
        return "reads the smallest and the largest value on the host; pass it its bounds"
    if target.overloadpacket is aten.index and not _has_mask(node):
        return ""
    if target.overloadpacket is aten.index_put and not _is_fill(node):
        return "writes at a mask, whose true places are counted on the host"
    return next((reason for tag, reason in _TAGS if tag in target.tags), "")


def _has_mask(node: fx.Node) -> bool:
    """Returns whether some indices are no numbers: how many places a mask has depends on its values."""
    indices = [index for index in bind_arguments(node)["indices"] if isinstance(index, fx.Node)]
    return any(_dtype(index) in (torch.bool, torch.uint8) for index in indices)


def _is_fill(node: fx.Node) -> bool:
    """Returns whether indices are numbers, or one value is written at a mask, which torch does not count."""
    if not _has_mask(node):
        return True
    arguments = bind_arguments(node)
    values = note(arguments["values"]).type
    return isinstance(values, TensorType) and not values.shape and not arguments.get("accumulate", False)


def _has_bounds(node: fx.Node) -> bool:
    """Returns whether a histogram is told its bounds; equal ones mean that it is to find them."""
    arguments = bind_arguments(node)
    return bool(arguments.get("min", 0) != arguments.get("max", 0))


def _dtype(node: fx.Node) -> torch.dtype:
    (kind,) = output_types(node)
    return kind.dtype


@dataclass(frozen=True)
class CaptureRegion:
    """Nodes that follow each other and that one CUDA graph can hold.

    Attributes:
        phase: forward or backward; the parameter phase belongs to the backward.
        nodes: names, in order.
        inputs: bytes of what it reads of others, by name of the node; parameters and inputs among them.
        outputs: bytes of what others read of it.
    """

    phase: str
    nodes: tuple[str, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


@dataclass(frozen=True)
class Boundary:
    """A node between regions.

    Attributes:
        phase: as of `CaptureRegion`.
        node: its name.
        reason: why no graph holds it.
    """

    phase: str
    node: str
    reason: str


def capture_regions(
    program: Program, sizes: Mapping[str, int] | None = None
) -> tuple[list[CaptureRegion], list[Boundary]]:
    """Returns the largest parts of a step that CUDA graphs can hold, and what stands between them, in order.

    Args:
        program: marked by `mark_regions`, without calls of regions.
        sizes: of the inputs by symbol; the example's where they are not given.
    """
    values = symbol_sizes(program, sizes)
    regions: list[CaptureRegion] = []
    boundaries: list[Boundary] = []
    for phase, reason, nodes in _runs(program):
        if reason:
            boundaries += [Boundary(phase, node.name, reason) for node in nodes]
            continue
        inside = set(nodes)
        reads = dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside)
        leaving = [node for node in nodes if any(user not in inside for user in node.users)]
        regions.append(
            CaptureRegion(
                phase,
                tuple(node.name for node in nodes),
                {node.name: value_bytes(program, node, values) for node in reads if output_types(node)},
                {node.name: value_bytes(program, node, values) for node in leaving if output_types(node)},
            )
        )
    return regions, boundaries


def _runs(program: Program) -> Iterator[tuple[str, str, list[fx.Node]]]:
    """Yields phase, reason and nodes of what follows each other with one reason; numbers are in no graph."""
    names = {phase: "backward" if phase else "forward" for phase in PHASES}
    for name in dict.fromkeys(names.values()):
        nodes = [
            node
            for node in program.graph.nodes
            if node.op == "call_function"
            and names[note(node).phase] == name
            and not isinstance(note(node).type, ScalarType)
        ]
        for reason, run in itertools.groupby(nodes, key=lambda node: note(node).uncaptured):
            yield name, reason, list(run)


# A node of a step belongs to attention (`attn`: norm, attention and the sum with what entered) or MLP (`mlp`: norm,
# MLP and that sum), or to nothing outside of layers. Where tokens are routed the MLP is in three parts: `moe_router`
# (norm, router and what else each token goes through), `moe_preprocess` (the sort, up to where rows start to travel or
# are multiplied), and `moe`, all that follows from these.
# A layer is the smallest numbered module of the author's that has an attention and, outside of the attention's
# module, a matrix product. In it all up to the sum after the attention is `attn`. A node of the backward belongs where
# the forward's of its module and line do.


_ATTENTION = frozenset(
    {
        aten.scaled_dot_product_attention,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten.softmax,
        aten._softmax,
        attention_forward,
    }
)
_PRODUCTS = frozenset({aten.linear, aten.addmm, aten.mm, aten.matmul, aten.bmm})
_SUMS = frozenset({aten.add})


def scopes(program: Program) -> dict[fx.Node, str]:
    """Returns the scope of each node that has one."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and not isinstance(note(n).type, ScalarType)]
    forward = [node for node in calls if note(node).phase == ""]
    scopes: dict[fx.Node, str] = {}
    for layer, attention in _layers(forward):
        scopes |= _cut(layer, attention)
    places: dict[tuple[str, str], set[str]] = {}
    for node, scope in scopes.items():
        places.setdefault(_line(node), set()).add(scope)
    backward = [node for node in calls if note(node).phase != ""]
    to_move = Counter(note(node).fqn for node in backward if _moves_rows(node))
    last = ""
    for node in backward:
        near = places.get(_line(node), set())
        if "moe" in near and len(near) > 1:  # of one line of the author's: preprocess comes after the last rows
            last = "moe" if to_move[note(node).fqn] else "moe_preprocess"
        else:
            last = next(iter(near)) if len(near) == 1 else last if last in near else ""
        to_move[note(node).fqn] -= _moves_rows(node)
        if last:
            scopes[node] = last
    return scopes


def _packet(node: fx.Node) -> object:
    """Returns the operator without its overload; fxpar's own is itself."""
    return getattr(alike(node.target), "overloadpacket", node.target)


def _is_inside(node: fx.Node, module: str) -> bool:
    return f"{note(node).fqn}.".startswith(f"{module}.")


def _child(words: Sequence[str], depth: int) -> str:
    """Returns the module below one of that depth; of a numbered list (`layer.0`) the entry."""
    is_list = depth + 1 < len(words) and words[depth + 1].isdigit()
    return ".".join(words[: depth + 1 + is_list])


def _layers(forward: Sequence[fx.Node]) -> Iterator[tuple[list[fx.Node], str]]:
    """Yields the nodes of each layer, and the module in it that holds the attention."""
    known: set[str] = set()
    for node in forward:
        if _packet(node) not in _ATTENTION:
            continue
        words = note(node).fqn.split(".")
        for end in range(len(words), 0, -1):
            module, inner = ".".join(words[:end]), _child(words, end)
            if not words[end - 1].isdigit():
                continue
            layer = [other for other in forward if _is_inside(other, module)]
            if any(_packet(other) in _PRODUCTS and not _is_inside(other, inner) for other in layer):
                if module not in known:
                    known.add(module)
                    yield layer, module
                break


def _cut(layer: Sequence[fx.Node], module: str) -> dict[fx.Node, str]:
    depth = len(module.split("."))

    def child(node: fx.Node) -> str:
        return _child(note(node).fqn.split("."), depth)

    # A router has a softmax too.
    routed = {child(node) for node in layer if _sorts(node)} - {module}
    last = max(
        (i for i, node in enumerate(layer) if _packet(node) in _ATTENTION and child(node) not in routed), default=-1
    )
    if last < 0:
        return {}
    inner = child(layer[last])
    end = max(i for i, node in enumerate(layer) if i == last or (inner != module and _is_inside(node, inner)))
    for i in range(end + 1, len(layer)):
        if note(layer[i]).fqn != module and not _is_inside(layer[i], inner):
            break
        if _packet(layer[i]) in _SUMS:
            end = i
            break
    return {**dict.fromkeys(layer[: end + 1], "attn"), **_cut_mlp(layer[end + 1 :])}


def _cut_mlp(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Returns the scopes of what follows the attention of a layer."""
    first = next((i for i, node in enumerate(nodes) if _sorts(node)), None)
    if first is None:
        return dict.fromkeys(nodes, "mlp")
    moved = next((i for i in range(first, len(nodes)) if _moves_rows(nodes[i])), len(nodes))
    while first and _line(nodes[first - 1]) == _line(nodes[first]):
        first -= 1
    scopes = {**dict.fromkeys(nodes[:first], "moe_router"), **dict.fromkeys(nodes[first:moved], "moe_preprocess")}
    followed = {*nodes[first : moved + 1]}
    for node in nodes[moved:]:
        if not followed.isdisjoint((node, *node.all_input_nodes)):
            followed.add(node)
        is_of_rows = node in followed or _line(node) == _line(nodes[first])
        scopes[node] = "moe" if is_of_rows else "moe_router"
    return scopes


def _line(node: fx.Node) -> tuple[str, str]:
    return note(node).fqn, note(node).source


def _sorts(node: fx.Node) -> bool:
    """Returns whether a node sorts tokens by what they are routed to."""
    return _packet(node) is torch.ops.fxpar.sort_by_expert


def _moves_rows(node: fx.Node) -> bool:
    """Returns whether it is a product of floating rows, or sends them to other ranks."""
    if not any(kind.dtype.is_floating_point for kind in output_types(node)):
        return False
    target = node.target
    if isinstance(target, Operator):
        return bool(target.uncaptured or (target.traffic is not None and (target.kinds is None or target.sends[0])))
    record = TORCH_OPERATORS.get(target)
    return _packet(node) in _PRODUCTS or (record is not None and record.flops is not None)
