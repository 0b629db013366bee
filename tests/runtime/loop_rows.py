"""The rows of `tests.runtime.loops`: by class, by index, by name, hooks, averages, freezing, modes."""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from fxpar.checkpoint.parallel_module import ParallelModule
from tests.runtime.loop_moves import COPIED  # its rows too
from tests.runtime.loops import Block, Model, Registry, row, run, step

NOT_SEEN = "would not see it"
DRAWN = "would draw numbers of each rank's own"
REPLACED = "cannot be added, removed or replaced"
HOOKED = "calls no hooks"


def job(kind: str) -> dict[str, tuple[str, Any]]:
    """Runs the rows; see `run`."""
    return run(kind)


# ---------------------------------------------------------------------- by class


@row()
def classes_of_modules(m: Any, b: Any) -> Any:
    return [
        [isinstance(x, nn.LayerNorm), isinstance(x, Block), isinstance(x, Model), type(x).__name__, type(x).__module__]
        for x in m.modules()
    ]


@row()
def classes_compared(m: Any, b: Any) -> Any:
    kinds = {nn.Linear: 1, nn.LayerNorm: 2}
    return [
        (type(x) == nn.Linear, type(x) in (nn.Linear, nn.Embedding), kinds.get(type(x)), x.__class__ is nn.GELU)  # noqa: E721
        for x in m.modules()
    ]


@row()
def registered_by_class(m: Any, b: Any) -> Any:
    return {key: cls is Model for key, cls in Registry.known.items()}


@row()
def made_of_its_class(m: Any, b: Any) -> Any:
    made = type(m.blocks[0].mlp[0])(3, 4)
    return type(made) is nn.Linear, made(torch.ones(2, 3)).shape


@row(joined=True)
def weight_decay_by_class(m: Any, b: Any) -> Any:
    decayed: set[str] = set()
    others: set[str] = set()
    for path, x in m.named_modules():
        for name, _ in x.named_parameters(recurse=False):
            is_decayed = isinstance(x, (nn.Linear, nn.Embedding)) and name == "weight"
            (decayed if is_decayed else others).add(f"{path}.{name}")
    return {("decayed", n) for n in decayed} | {("others", n) for n in others}


@row()
def frozen_by_class(m: Any, b: Any) -> Any:
    for x in m.modules():
        if isinstance(x, nn.LayerNorm):
            x.weight.requires_grad_(False)
            x.bias.requires_grad = False


@row()
def frozen_part(m: Any, b: Any) -> Any:
    m.blocks[0].requires_grad_(False)
    return [step(m, b), step(m, b)]


@row(places=("tp",))
def unfrozen_later(m: Any, b: Any) -> Any:
    m.requires_grad_(False)
    m.blocks[-1].requires_grad_(True)
    first = step(m, b)
    m.embed.requires_grad_(True)
    return first, step(m, b)


@row(places=("tp",))
def dropout_by_class(m: Any, b: Any) -> Any:
    m.eval()
    for x in m.modules():
        if isinstance(x, nn.Dropout):
            x.train()
    with torch.no_grad():
        return m(**b)["loss"]


@row(refused=NOT_SEEN)
def dropout_probability(m: Any, b: Any) -> Any:
    for x in m.modules():
        if isinstance(x, nn.Dropout):
            x.p = 0.3


@row()
def dropout_probability_as_it_is(m: Any, b: Any) -> Any:
    for x in m.modules():
        if isinstance(x, nn.Dropout):
            x.p = 0.0


@row()
def parts_in_evaluation(m: Any, b: Any) -> Any:
    m.norm.eval()
    m.blocks[0].train(False)
    return m.norm.training, m.blocks[0].mlp[0].training, m.training


@row()
def configuration_of_layers(m: Any, b: Any) -> Any:
    linear, norm = m.blocks[1].mlp[0], m.blocks[1].norm
    return linear.in_features, linear.out_features, norm.eps, norm.normalized_shape, m.embed.num_embeddings


# ---------------------------------------------------------------------- by index and name


@row()
def containers(m: Any, b: Any) -> Any:
    names = [type(x).__name__ for x in m.blocks]
    sizes = len(m.blocks), len(m.blocks[0].mlp), len(m.heads), len(m.scales), len(m.biases)
    return names, sizes, "words" in m.heads, "others" in m.heads, [*m.heads], [*m.biases.keys()]


@row()
def slices(m: Any, b: Any) -> Any:
    few, mlp = m.blocks[1:3], m.blocks[0].mlp[:2]
    return type(few) is nn.ModuleList, len(few), few[0] is m.blocks[1], type(mlp) is nn.Sequential, len(mlp)


@row(refused="the program runs the model as a whole")
def call_of_a_slice(m: Any, b: Any) -> Any:
    return m.blocks[0].mlp[:2](torch.zeros(1, 8))


@row()
def shapes_by_path(m: Any, b: Any) -> Any:
    p = m.blocks[-1].mlp[0].weight
    return p.shape, p.numel(), p.dim(), p.dtype, p.device, isinstance(p, nn.Parameter), m.biases["last"].shape


@row()
def getters(m: Any, b: Any) -> Any:
    same = m.get_submodule("blocks.2.mlp.0") is m.blocks[2].mlp[0], m.get_parameter("embed.weight") is m.embed.weight
    return (
        same,
        m.get_buffer("shift"),
        hasattr(m.blocks[0], "norm"),
        hasattr(m, "other"),
        m.get_input_embeddings() is m.embed,
    )


@row()
def trees(m: Any, b: Any) -> Any:
    named = [name for name, _ in m.named_modules()], [name for name, _ in m.named_children()]
    return named, len([*m.children()]), len([*m.modules()]), [n for n, _ in m.named_buffers()], len([*m.buffers()])


@row(joined=True)
def named_parameters(m: Any, b: Any) -> Any:
    return {(n, tuple(p.shape), p.numel()) for n, p in m.named_parameters()}


@row(places=("tp", "dp"))
def counted(m: Any, b: Any) -> Any:
    return m.num_parameters(), sum(p.numel() for p in m.parameters() if p.requires_grad), m.decayed[0].numel()


@row()
def tied(m: Any, b: Any) -> Any:
    return m.heads["words"].weight is m.embed.weight, m.heads.words is m.heads["words"]


@row(places=("tp", "dp"))
def printed(m: Any, b: Any) -> Any:
    # What the parallel module says of splits follows what the author's classes say.
    split = re.compile(r"(; )?(, )?\w+ tp:S\([^)]*\) \[[\d, ]*\]")
    return [split.sub("", text) for text in (str(m), repr(m.blocks[2]), m.blocks[0].extra_repr())]


@row(places=("tp",))
def printed_splits(m: Any, b: Any) -> Any:
    return not isinstance(m, ParallelModule) or "weight tp:S(0) [" in str(m)


@row()
def properties(m: Any, b: Any) -> Any:
    return m.config.width, m.device, m.dtype, m.blocks[0].gain, m.blocks[0].checkpointing, m.config.layers


@row()
def summary(m: Any, b: Any) -> Any:
    return {name: (type(x).__name__, len([*x.children()])) for name, x in m.named_modules()}


@row()
def attributes(m: Any, b: Any) -> Any:
    return sorted(n for n in vars(m.blocks[0].mlp[0]) if not n.startswith("_")), "embed" in dir(m)


@row()
def walked_and_marked(m: Any, b: Any) -> Any:
    for i, x in enumerate(m.modules()):
        x.number = i
    m.tag = "mine"
    return m.blocks[0].norm.number, m.tag


# ---------------------------------------------------------------------- writes


@row(refused=NOT_SEEN)
def forward_replaced(m: Any, b: Any) -> Any:
    m.blocks[0].forward = MethodType(lambda self, x: x, m.blocks[0])


@row(refused=NOT_SEEN)
def class_changed(m: Any, b: Any) -> Any:
    m.blocks[0].norm.__class__ = nn.Identity


@row(refused=NOT_SEEN)
def default_of_the_class(m: Any, b: Any) -> Any:
    m.blocks[0].gain = 2.0


@row(refused=NOT_SEEN)
def attribute_that_forward_asks_for(m: Any, b: Any) -> Any:
    m.blocks[0].damping = 0.5


@row(refused=NOT_SEEN)
def number_of_a_norm(m: Any, b: Any) -> Any:
    m.norm.eps = 1.0


@row(refused="config.use_cache: was changed after parallelize")
def configuration(m: Any, b: Any) -> Any:
    m.config.use_cache = True
    try:
        step(m, b)
    finally:
        m.config.use_cache = False


@row()
def history(m: Any, b: Any) -> Any:
    for _ in range(2):
        m.history.append(step(m, b))
    return len(m.history)


@row(refused=REPLACED)
def layer_replaced(m: Any, b: Any) -> Any:
    for path, x in [*m.named_modules()]:
        if isinstance(x, nn.Linear):
            parent = m.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], nn.Sequential(x, nn.Identity()))


@row(refused=REPLACED)
def layer_by_index(m: Any, b: Any) -> Any:
    m.blocks[0] = Block()


@row(refused=REPLACED)
def layers_swapped(m: Any, b: Any) -> Any:
    m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]


@row(refused=REPLACED)
def layer_appended(m: Any, b: Any) -> Any:
    m.blocks.append(Block())


@row(refused=REPLACED)
def layer_inserted(m: Any, b: Any) -> Any:
    m.blocks.insert(0, Block())


@row(refused=REPLACED)
def layer_removed(m: Any, b: Any) -> Any:
    del m.blocks[-1]


@row(refused=REPLACED)
def layers_cut_off(m: Any, b: Any) -> Any:
    m.blocks = m.blocks[:2]


@row(refused=REPLACED)
def layer_popped(m: Any, b: Any) -> Any:
    m.heads.pop("words")


@row(refused=REPLACED)
def module_added(m: Any, b: Any) -> Any:
    m.add_module("probe", nn.Linear(2, 2))


@row(refused=REPLACED)
def head_replaced(m: Any, b: Any) -> Any:
    m.heads["words"] = nn.Linear(8, 3)


@row(refused=REPLACED)
def parameter_replaced(m: Any, b: Any) -> Any:
    m.norm.weight = nn.Parameter(torch.zeros(8))


@row(refused=REPLACED)
def bias_removed(m: Any, b: Any) -> Any:
    m.blocks[0].mlp[0].bias = None


@row(refused=REPLACED)
def tied_after_the_fact(m: Any, b: Any) -> Any:
    m.blocks[0].mlp[0].weight = m.blocks[1].mlp[0].weight


@row()
def tied_again(m: Any, b: Any) -> Any:
    m.heads["words"].weight = m.embed.weight


@row(refused=REPLACED)
def parameter_registered(m: Any, b: Any) -> Any:
    m.register_parameter("late", nn.Parameter(torch.zeros(2)))


@row(refused=REPLACED)
def buffer_registered(m: Any, b: Any) -> Any:
    m.register_buffer("late", torch.zeros(2))


@row(refused=REPLACED)
def old_weight_norm(m: Any, b: Any) -> Any:
    torch.nn.utils.weight_norm(m.norm)


@row(refused=": ")
def pruned(m: Any, b: Any) -> Any:
    prune.random_unstructured(m.norm, "weight", 0.5)


@row(refused=": ")
def parametrized(m: Any, b: Any) -> Any:
    parametrize.register_parametrization(m.norm, "weight", nn.Identity())


@row(refused=NOT_SEEN)
def checkpointing_enabled(m: Any, b: Any) -> Any:
    m.gradient_checkpointing_enable()


# ---------------------------------------------------------------------- values in place


@row()
def constants(m: Any, b: Any) -> Any:
    for x in m.modules():
        if isinstance(x, nn.LayerNorm):
            nn.init.ones_(x.weight)
            nn.init.constant_(x.bias, 0.25)
        if isinstance(x, nn.Linear) and x.bias is not None:
            x.bias.data.zero_()


@row(refused=DRAWN)
def initialised_by_apply(m: Any, b: Any) -> Any:
    m.apply(lambda x: nn.init.normal_(x.weight, 0.0, 0.02) if isinstance(x, nn.Linear) else None)


@row(refused=DRAWN)
def initialised_data(m: Any, b: Any) -> Any:
    for x in m.modules():
        if type(x) == nn.LayerNorm:  # noqa: E721
            x.weight.data.normal_()


@row(refused=DRAWN)
def initialised_orthogonally(m: Any, b: Any) -> Any:
    nn.init.orthogonal_(m.embed.weight)


@row(refused=DRAWN)
def reset_by_class(m: Any, b: Any) -> Any:
    for x in m.modules():
        if isinstance(x, nn.Linear):
            x.reset_parameters()


@row()
def reset_of_norms(m: Any, b: Any) -> Any:
    m.norm.weight.data.fill_(3.0)
    m.norm.reset_parameters()


@row()
def copied_values(m: Any, b: Any) -> Any:
    with torch.no_grad():
        m.embed.weight.data.copy_(torch.arange(128.0).reshape(16, 8))
        m.blocks[2].mlp[0].weight.copy_(torch.ones(12, 8))
        m.blocks[1].norm.weight.mul_(2).add_(1)


@row(joined=True)
def state_of_a_part(m: Any, b: Any) -> Any:
    return {(name, tuple(value.shape)) for name, value in m.blocks[1].state_dict().items()}


@row()
def loaded_part(m: Any, b: Any) -> Any:
    torch.manual_seed(9)
    m.blocks[1].load_state_dict(Block().state_dict())
    m.norm.load_state_dict({"weight": torch.full((8,), 2.0), "bias": torch.ones(8)})


@row()
def buffer_in_place(m: Any, b: Any) -> Any:
    m.shift.fill_(0.5)
    return step(m, b)


@row()
def averaged(m: Any, b: Any) -> Any:
    average = {n: p.detach().clone() for n, p in m.named_parameters()}
    with torch.no_grad():
        for n, p in m.named_parameters():
            p.mul_(2)
            average[n].mul_(0.9).add_(p.data, alpha=0.1)
        for n, p in m.named_parameters():
            p.copy_(average[n])


@row(refused=COPIED)
def averaged_model(m: Any, b: Any) -> Any:
    AveragedModel(m)


# ---------------------------------------------------------------------- training


@row()
def optimizer_of_the_model_s(m: Any, b: Any) -> Any:
    optimizer = m.configure_optimizers()
    losses = []
    for _ in range(2):
        losses.append(step(m, b))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@row()
def optimizer_of_a_list(m: Any, b: Any) -> Any:
    optimizer = torch.optim.SGD([{"params": m.decayed, "lr": 0.1}, {"params": [m.norm.weight], "lr": 0.5}])
    loss = step(m, b)
    optimizer.step()
    return loss


@row(places=("tp", "dp"))
def clipped(m: Any, b: Any) -> Any:
    step(m, b)
    return clip_grad_norm_(m.parameters(), 0.01)


@row()
def gradients_freed(m: Any, b: Any) -> Any:
    step(m, b)
    m.blocks[0].zero_grad()
    first = all(p.grad is None for p in m.blocks[0].parameters())
    m.zero_grad(set_to_none=False)
    return first, all(not p.grad.any() for p in m.norm.parameters() if p.grad is not None)


@row(joined=True)
def hooks_of_parameters(m: Any, b: Any) -> Any:
    seen: set[str] = set()
    handles = [
        p.register_post_accumulate_grad_hook(lambda p, n=n: seen.add(n)) for n, p in m.named_parameters() if "norm" in n
    ]
    step(m, b)
    for handle in handles:
        handle.remove()
    return seen


@row(places=("dp", "pp"))
def evaluated_without_gradients(m: Any, b: Any) -> Any:
    m.train(False)
    with torch.no_grad():
        return m(**b)["loss"], m.training, m.blocks[0].training


@row()
def trained_with_anomalies(m: Any, b: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True):
        return step(m, b)


@row(refused="would change the element types")
def autocast(m: Any, b: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        step(m, b)


@row(refused="the program runs the model as a whole")
def method_that_runs_parts(m: Any, b: Any) -> Any:
    return m.encode(b["ids"])


# ---------------------------------------------------------------------- hooks, copies, wrappers, moves


@row(refused=HOOKED)
def forward_hooks_by_class(m: Any, b: Any) -> Any:
    for x in m.modules():
        if isinstance(x, nn.GELU):
            x.register_forward_hook(lambda *args: None)


@row(refused=HOOKED)
def hook_of_the_model(m: Any, b: Any) -> Any:
    m.register_full_backward_hook(lambda *args: None)


@row(refused="calls no hooks")
def hook_of_state_dict(m: Any, b: Any) -> Any:
    m.register_state_dict_post_hook(lambda *args: None)
