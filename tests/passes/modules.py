"""Small modules whose graphs fit on a page, and helpers to take them through the passes."""

import re
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxpar.capture.capture import Captured, capture
from fxpar.ir.program import Program, note, output_layouts
from fxpar.manager import Pass, PassManager
from fxpar.passes import DEFAULT_PASSES
from fxpar.plan.plan import Plan
from fxpar.text.printing import print_program
from fxpar.verify.static import STATIC
from fxpar.verify.values import ValueReport, call_inputs, check_capture, program_state, verify_values
from tests.zoo import stirred

BATCH, SEQUENCE, WIDTH, HEADS, HEAD = 3, 16, 96, 8, 12


def squares(values: Tensor) -> Tensor:
    """A loss that every value reaches."""
    return values.square().sum()


class MLP(nn.Module):
    """norm, up, gelu, down, dropout; biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 160), nn.Linear(160, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.drop(self.down(functional.gelu(self.up(self.norm(x))))))


class GatedMLP(nn.Module):
    """gate and up in one matrix, taken apart by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 320, bias=False), nn.Linear(160, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return squares(self.down(functional.silu(gate) * up))


def heads(x: Tensor, count: int) -> Tensor:
    """[b, s, count·d] → [b, count, s, d]."""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def flat(x: Tensor) -> Tensor:
    """The inverse of `heads`."""
    return x.transpose(1, 2).flatten(2)


class FusedAttention(nn.Module):
    """GPT-2's: a norm and one matrix [q | k | v]."""

    def __init__(self, count: int = HEADS) -> None:
        super().__init__()
        self.count = count
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.count) for part in self.qkv(self.norm(x)).split(WIDTH, -1))
        return squares(self.out(flat(functional.scaled_dot_product_attention(q, k, v, is_causal=True))))


class GroupedAttention(nn.Module):
    """Llama's: fewer heads for k and v, repeated."""

    def __init__(self, count: int = HEADS, groups: int = 4) -> None:
        super().__init__()
        self.count, self.groups = count, groups
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // count * groups, bias=False) for _ in range(2))

    def repeat(self, x: Tensor) -> Tensor:
        b, k, s, d = x.shape
        times = self.count // self.groups
        return x[:, :, None].expand(b, k, times, s, d).reshape(b, k * times, s, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x), self.count), heads(self.k(x), self.groups), heads(self.v(x), self.groups)
        return squares(self.out(flat(functional.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v)))))


class UnequalAttention(nn.Module):
    """Phi-3's: one matrix [q | k | v] with 8, 4 and 4 heads, taken apart by split sizes or by slices."""

    def __init__(self, slices: bool) -> None:
        super().__init__()
        self.slices = slices
        self.qkv, self.out = nn.Linear(WIDTH, 192, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        q, k, v = (y[..., :96], y[..., 96:144], y[..., 144:]) if self.slices else y.split([96, 48, 48], -1)
        attend = functional.scaled_dot_product_attention
        return squares(self.out(flat(attend(heads(q, 8), heads(k, 4), heads(v, 4), enable_gqa=True))))


class InterleavedAttention(nn.Module):
    """BLOOM's: per head q, k and v, attention written out, dropout on the probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, slopes: Tensor) -> Tensor:
        b, s, _ = x.shape
        fused = self.qkv(x).view(b, s, HEADS, 3, HEAD)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        weights = self.drop((q @ k.transpose(-1, -2) + slopes).softmax(-1))
        return squares(self.out(flat(weights @ v)))


class NormedHeads(nn.Module):
    """Qwen3's: a norm on the heads of q, whose weight every head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.out(self.norm(self.q(x).view(x.shape[0], x.shape[1], HEADS, HEAD)).flatten(2)))


class TransposedMLP(nn.Module):
    """Weights used as `x @ w.T`, and a Conv1D-like one as `x @ w + b`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(160, WIDTH) / 10)
        self.down, self.bias = nn.Parameter(torch.randn(160, WIDTH) / 10), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(torch.matmul(x, self.up.T))
        return squares(torch.addmm(self.bias, hidden.view(-1, 160), self.down))


class ScaledMLP(nn.Module):
    """gamma times an MLP, of activations without a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 160), nn.Linear(160, WIDTH)
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return squares(x + self.gamma * self.down(functional.gelu(self.up(x))))


class ChunkedAttention(nn.Module):
    """The weight and the bias of [q | k | v] are taken apart, not their product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
        q, k, v = (heads(functional.linear(x, weight, bias), HEADS) for weight, bias in parts)
        return squares(self.out(flat(functional.scaled_dot_product_attention(q, k, v, is_causal=True))))


class CrossAttention(nn.Module):
    """torch.nn's: one matrix [q | k, v] that is split in two for a memory, or with three, and one bias."""

    def __init__(self, three: bool, **options: Any) -> None:
        super().__init__()
        sizes = {"kdim": 30, "vdim": 30} if three else {}
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **sizes)
        self.memory, self.options = nn.Linear(WIDTH, 30 if three else WIDTH), options

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory(x)
        return squares(self.attend(x, memory, memory, **self.options)[0])


class SelfAttention(nn.Module):
    """torch.nn's with its default options: heads share a dimension with the batch."""

    def __init__(self, count: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.attend, self.options = nn.MultiheadAttention(WIDTH, count, batch_first=True), options

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.attend(x, x, x, **self.options)[0])


class ConvolutionMLP(nn.Module):
    """An MLP of convolutions with kernels of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(WIDTH, 160, 1), nn.Conv1d(160, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.down(functional.gelu(self.up(x.transpose(1, 2)))))


class NormedWeights(nn.Module):
    """Weights with norms of their own: by torch.nn, by functional, or written out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(WIDTH, 160), nn.Linear(160, WIDTH)
        self.length = nn.Parameter(torch.rand(160, 1) + 1)
        if how == "torch.nn":
            nn.utils.parametrizations.weight_norm(self.up)

    def forward(self, x: Tensor) -> Tensor:
        weight, down = self.up.weight, self.down.weight
        if self.how == "functional":
            weight, down = functional.normalize(weight, dim=1), functional.normalize(down, dim=0)
        elif self.how == "written":
            weight = self.length * weight / weight.square().sum(1, keepdim=True).sqrt()
        return squares(functional.linear(functional.gelu(functional.linear(x, weight, self.up.bias)), down))


class MergedAdapter(nn.Module):
    """A weight to which a product of two others is added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 160), nn.Linear(160, WIDTH)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) / 10), nn.Parameter(torch.randn(160, 4) / 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.linear(x, self.up.weight + self.b @ self.a, self.up.bias)
        return squares(self.down(functional.gelu(hidden)))


class Table(nn.Module):
    """Scores against projected parameters, no input of their own: a product of two weights and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.r = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Parameter(torch.randn(1, 10, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return squares(heads(self.q(x), HEADS) @ heads(self.r(self.places), HEADS).transpose(-1, -2))


class SometimesUsed(nn.Module):
    """`spare_up` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 160), nn.Linear(160, WIDTH)
        self.spare_up = nn.Linear(WIDTH, 160)

    def forward(self, x: Tensor) -> Tensor:
        return squares(self.down(functional.gelu(self.up(x))))


class Behind(nn.Module):
    """A layer behind what stands before one in a model: words. Its input carries a gradient, which f must sum."""

    def __init__(self, layer: Callable[..., nn.Module], *args: Any) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(64, WIDTH), layer(*args)

    def forward(self, ids: Tensor) -> Any:
        return self.layer(self.words(ids))


def x() -> Tensor:
    """Activations [b, s, h]."""
    return torch.randn(BATCH, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(2))


def batch_of(module: nn.Module) -> dict[str, Tensor]:
    """A batch that the module takes."""
    if isinstance(module, Behind):
        return {"ids": torch.randint(64, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(2))}
    return {"x": x()} | ({"slopes": torch.randn(HEADS, 1, 1)} if isinstance(module, InterleavedAttention) else {})


@cache
def build(kind: Callable[..., nn.Module], *args: Any) -> tuple[nn.Module, Captured]:
    """A module in training mode and its capture."""
    torch.manual_seed(1)
    module = stirred(kind(*args).train())
    return module, capture(module, batch_of(module), Plan(tp=2))


def run(captured: Captured, split: Mapping[str, str], tp: int = 2, until: str | None = None, **options: Any) -> Program:
    """The program after the default passes, or after `until`, with every static check."""
    program = captured.program.with_(plan=Plan(tp=tp, split=split, **options))
    return PassManager(DEFAULT_PASSES, STATIC).run(program, until=until)


def only(program: Program, *passes: Pass) -> Program:
    """The program after these passes, with every static check."""
    return PassManager(passes, STATIC).run(program)


def values(kind: Callable[..., nn.Module], *args: Any, split: Mapping[str, str], tp: int = 2) -> ValueReport:
    """What the simulated ranks give, compared with one device."""
    module, captured = build(kind, *args)
    check_capture(captured, module, batch_of(module))
    program = run(captured, split, tp)
    inputs = call_inputs(captured, module, batch_of(module))
    return verify_values(captured.program, program, program_state(captured.program, module), inputs)


def shown(program: Program, origins: bool = False) -> str:
    """The program's nodes in the text form, without places in source files and, if not asked for, origins."""
    lines = print_program(program).splitlines()
    body = [re.sub(r"  # .*$", "", line) for line in lines if line.startswith(("%", "return"))]
    if not origins:
        body = [
            re.sub(r'(, )?origin="[^"]*"(, )?', r"\1", line).replace(" {}", "").replace(", }", "}") for line in body
        ]
    return "\n".join(body) + "\n"


def changed(before: Program, after: Program) -> str:
    """Returns the lines of the second program that are not those of the first.

    `… 3` stands for three lines that both have, and `- ` in front of a line whose name is gone.
    """
    old, new = (shown(program).splitlines() for program in (before, after))
    lines = []
    for tag, start, end, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        names = {line.split(" = ")[0] for line in new[first:last]}
        gone = [f"- {line}" for line in old[start:end] if line.split(" = ")[0] not in names]
        lines += [f"… {end - start}"] if tag == "equal" else [*gone, *new[first:last]]
    return "\n".join(lines) + "\n"


def changed_by(name: str, captured: Program, **plan: Any) -> str:
    """Returns what the default pass of this name changes in a captured program under a plan."""
    names = [each.name for each in DEFAULT_PASSES]
    program = captured.with_(plan=captured.plan.replace(**plan))
    before, after = (
        PassManager(DEFAULT_PASSES, STATIC).run(program, until=until) for until in (names[names.index(name) - 1], name)
    )
    return changed(before, after)


def layouts(program: Program) -> dict[str, str]:
    """Layouts of the parameters by name."""
    return {p.fqn: str(output_layouts(program.node(p.node))[0]) for p in program.parameters}


def roles(program: Program) -> dict[str, str]:
    """Roles of the nodes that have one."""
    return {node.name: note(node).role for node in program.graph.nodes if node.op != "output" and note(node).role}
