"""The lines of a plan: which parameters they name, and what cannot be meant or done is refused."""

import itertools
from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.nn import functional

from fxpar.cost.communication import collectives
from fxpar.errors import PlanError
from fxpar.text.printing import print_program
from tests.passes.modules import (
    MLP,
    WIDTH,
    FusedAttention,
    GroupedAttention,
    build,
    layouts,
    run,
    values,
)


def test_a_line_for_the_parameter_wins_over_one_for_its_module() -> None:
    found = layouts(run(build(MLP)[1], {"up": "column", "up.bias": "replicate"}, until="annotate"))
    assert (found["up.weight"], found["up.bias"]) == ("tp:S(0)", "tp:I")


def test_lines_that_agree_are_no_contradiction() -> None:
    found = layouts(run(build(MLP)[1], {"up": "column", "u?": "column", "down": "row"}, until="annotate"))
    assert found["up.weight"] == "tp:S(0)"


def test_the_order_of_lines_does_not_matter() -> None:
    lines = {"up": "column", "*p": "column", "down.*": "row", "norm.weight": "replicate"}
    captured = build(MLP)[1]
    texts = {print_program(run(captured, dict(order))) for order in itertools.permutations(lines.items())}
    assert len(texts) == 1


def test_two_runs_give_the_same_text() -> None:
    first, second = (print_program(run(build(FusedAttention)[1], {"qkv": "head", "out": "row"})) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ({"upp": "column"}, r"split\['upp'\]: matches no module and no parameter; names look like down, norm, up"),
        ({"up": "column", "u?": "row"}, r"split\['up'\]: says column, but split\['u\?'\] says row, of up\.weight"),
        ({"up": "column", "u*": "row"}, r"split\['up'\]: says nothing: other lines name all its parameters themselves"),
        ({"up.weight": "column", "*.weight": "replicate"}, r"says column, but split\['\*\.weight'\] says replicate"),
        ({"norm": "replicate", "norm.*": "replicate"}, r"split\['norm'\]: says nothing: other lines name all its"),
        ({"norm": "column"}, r"norm\.weight is not a bias of a split matrix, so column says nothing of it; narrow"),
        ({"norm.weight": "row"}, r"split\['norm\.weight'\]: norm\.weight is not a bias of a split matrix"),
        ({"up.bias": "column"}, r"split\['up\.bias'\]: up\.bias is not a bias of a split matrix"),
        ({"up": "head"}, r"split\['up'\]: no view makes heads of the output of up\.weight; use 'column' instead"),
    ],
)
def test_lines_that_cannot_be_meant_are_refused(split: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        run(build(MLP)[1], split, until="annotate")


@pytest.mark.parametrize("split", [{"upp": "column"}, {"up": "column", "u?": "row"}])
def test_lines_are_checked_on_one_rank_too(split: dict[str, str]) -> None:
    with pytest.raises(PlanError, match="split"):
        run(build(MLP)[1], split, tp=1, until="annotate")


@pytest.mark.parametrize("how", ["head", "column"])
@pytest.mark.parametrize("kind", [FusedAttention, GroupedAttention])
def test_heads_that_the_ranks_do_not_divide_are_refused(kind: Callable[..., nn.Module], how: str) -> None:
    """6 heads over 4 ranks: the matrix would divide, its heads do not, and the error names the view that makes them."""
    args = (6,) if kind is FusedAttention else (6, 3)
    message = (
        r"cannot be split by .* over 4 ranks: at %view.* to f32\[b, s, 6, 16\] tears .*; choose a tp that divides it"
    )
    with pytest.raises(PlanError, match=message):
        run(build(kind, *args)[1], {"q*": how}, tp=4, until="annotate")


def test_key_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match=r"k\.weight cannot be split by head over 2 ranks.* tears S\(2\) over 2 ranks"):
        run(build(GroupedAttention, 6, 3)[1], {"k": "head"}, until="annotate")


class Vocabulary(nn.Module):
    """An embedding, a norm and a head, tied or not."""

    def __init__(self, size: int, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(size, WIDTH), nn.Linear(WIDTH, size, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = x[..., 0].abs().long()
        hidden = functional.layer_norm(self.embed(ids), (WIDTH,))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def test_an_odd_vocabulary_is_padded() -> None:
    found = layouts(run(build(Vocabulary, 259, False)[1], {"head": "column"}))
    assert found == {"embed.weight": "tp:S(0: 259 ~ 512)", "head.weight": "tp:S(0: 259 ~ 512)"}
    assert values(Vocabulary, 259, False, split={"head": "column"}).ok


@pytest.mark.parametrize("how", ["column", "vocab"])
@pytest.mark.parametrize("tp", [2, 4])
def test_logits_of_a_cut_vocabulary_are_never_gathered(tp: int, how: str) -> None:
    result = run(build(Vocabulary, 260, False)[1], {"head": how}, tp)
    found = [(c.op, c.phase, c.node) for c in collectives(result)]
    # The words' sum, and backward the head's; of each row its maximum, then its sum of exponentials and its label.
    assert found == [
        ("all_reduce", "forward", "embedding_all_reduce"),
        ("all_reduce", "backward", "embedding_all_reduce"),
        ("all_reduce", "forward", "cross_entropy_loss"),
        ("all_reduce", "forward", "cross_entropy_loss"),
    ]
    assert values(Vocabulary, 260, False, split={"head": how}, tp=tp).ok


@pytest.mark.parametrize("line", ["head", "embed"])
def test_a_tied_vocabulary_is_cut_once_for_both(line: str) -> None:
    split = {line: "vocab"}
    assert layouts(run(build(Vocabulary, 260, True)[1], split)) == {"embed.weight": "tp:S(0: 260 ~ 512)"}
    assert values(Vocabulary, 260, True, split=split).ok


@pytest.mark.parametrize("how", ["column", "row"])
def test_an_embedding_alone_is_no_matrix_product(how: str) -> None:
    with pytest.raises(PlanError, match=rf"embed\.weight is used in no matrix product that it could split by {how}"):
        run(build(Vocabulary, 260, False)[1], {"embed": how}, until="annotate")


def test_a_tied_matrix_can_be_split_by_row() -> None:
    assert values(Vocabulary, 259, True, split={"head": "row"}).ok
