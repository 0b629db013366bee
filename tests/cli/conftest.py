from pathlib import Path

import pytest

from tests.cli.tool import SPLIT, TINY, fxpar

SMALL = '''
import torch
from torch import nn
from torch.nn import functional

from fxpar import register_pass
from fxpar.passes import DEFAULT_PASSES


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.proj = nn.Linear(12, 20), nn.Linear(20, 12)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.proj(functional.gelu(self.fc(x)) * 0.5))


def build():
    return Small(), {"x": torch.randn(3, 5, 12), "target": torch.randn(3, 5, 12)}, loss


def loss(outputs, batch):
    return functional.mse_loss(outputs, batch["target"])


def without_loss():
    return Small(), (torch.randn(3, 5, 12),)


def one_sample():
    return Small(), (torch.randn(1, 5, 12),)


def half_precision():
    return Small(), (torch.randn(3, 5, 12).bfloat16(),)


def noisy():
    print("a word on stdout")
    return build()


@register_pass("halve", requires={"canonical"})
def halve(program):
    """Halves a factor, which is wrong."""
    for node in program.graph.nodes:
        if 0.5 in node.args:
            node.args = (node.args[0], 0.25)
    return program


@register_pass("nothing")
def nothing(program):
    """Keeps the program."""
    return program


@register_pass("faulty")
def faulty(program):
    """Raises."""
    return program.graph["faulty"]


@register_pass("forgetful", requires={"moon"})
def forgetful(program):
    """Requires what no pass provides."""
    return program


INSERTED = [item.name for item in DEFAULT_PASSES].index("insert_collectives") + 1
GOOD = [*DEFAULT_PASSES[:1], nothing, *DEFAULT_PASSES[1:]]
WRONG = [*DEFAULT_PASSES[:INSERTED], halve, *DEFAULT_PASSES[INSERTED:]]
FAULTY = [DEFAULT_PASSES[0], faulty, *DEFAULT_PASSES[1:]]
FORGETFUL = [DEFAULT_PASSES[0], forgetful, *DEFAULT_PASSES[1:]]
SHORT = DEFAULT_PASSES[: INSERTED - 1]
UNREGISTERED = [build]
EMPTY = []
NUMBER = 3


def wrong_result():
    return 3


def wrong_loss():
    return Small(), {"x": torch.randn(3, 5, 12)}, 3


def raises():
    raise ValueError("no such weights")
'''


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with a model that is captured at once, and with passes of a user's own."""
    path = tmp_path_factory.mktemp("user") / "fxpar_small_model.py"
    path.write_text(SMALL)
    return str(path)


@pytest.fixture(scope="session")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump folder of a split model; not to be changed."""
    folder = tmp_path_factory.mktemp("cli") / "dump"
    result = fxpar("run", TINY, *SPLIT, "--dump", str(folder))
    assert result.status == 0, result.err
    return folder
