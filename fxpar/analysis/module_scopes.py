"""Which part of a layer a node of a step belongs to: attention or MLP.

Enters: a step without calls of regions. Leaves: by node `attn` (norm, attention and the sum with what entered) or `mlp`
(norm, MLP and that sum), or nothing outside of layers.

A layer is the smallest numbered module of the author's that has an attention and, outside of the attention's module,
a matrix product. In it all up to the sum behind the attention is `attn`, and the rest `mlp`. A node of the backward
belongs where the forward's of its module and line do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fxpar.ir.program import Program, ScalarType, note
from fxpar.ops.attention import attention_forward
from fxpar.ops.operator import alike

aten = torch.ops.aten

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
    """The scope of each node that has one."""
    calls = [n for n in program.graph.nodes if n.op == "call_function" and not isinstance(note(n).type, ScalarType)]
    forward = [node for node in calls if note(node).phase == ""]
    scopes: dict[fx.Node, str] = {}
    for layer, attention in _layers(forward):
        scopes |= _cut(layer, attention)
    places: dict[tuple[str, str], set[str]] = {}
    for node, scope in scopes.items():
        places.setdefault((note(node).fqn, note(node).source), set()).add(scope)
    last = ""
    for node in calls:
        if note(node).phase == "":
            continue
        near = places.get((note(node).fqn, note(node).source), set())
        last = next(iter(near)) if len(near) == 1 else last if last in near else ""
        if last:
            scopes[node] = last
    return scopes


def _packet(node: fx.Node) -> object:
    """The operator without its overload; fxpar's own is itself."""
    return getattr(alike(node.target), "overloadpacket", node.target)


def _is_inside(node: fx.Node, module: str) -> bool:
    return f"{note(node).fqn}.".startswith(f"{module}.")


def _child(words: Sequence[str], depth: int) -> str:
    """The module below one of that depth; of a numbered list (`layer.0`) the entry."""
    is_list = depth + 1 < len(words) and words[depth + 1].isdigit()
    return ".".join(words[: depth + 1 + is_list])


def _layers(forward: Sequence[fx.Node]) -> Iterator[tuple[list[fx.Node], str]]:
    """The nodes of each layer, and the module in it that holds the attention."""
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
    last = max(i for i, node in enumerate(layer) if _packet(node) in _ATTENTION)
    inner = _child(note(layer[last]).fqn.split("."), len(module.split(".")))
    end = max(i for i, node in enumerate(layer) if i == last or (inner != module and _is_inside(node, inner)))
    for i in range(end + 1, len(layer)):
        if note(layer[i]).fqn != module and not _is_inside(layer[i], inner):
            break
        if _packet(layer[i]) in _SUMS:
            end = i
            break
    return {node: "attn" if i <= end else "mlp" for i, node in enumerate(layer)}
