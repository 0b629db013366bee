"""What PyTorch differentiates for some sizes alone: a condition on them, or a program for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, WIDTH = 4, 24, 12


class Mixed(nn.Module):
    """A function of [b, s, 8] between two matrices, and a loss."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.mix(torch.tanh(self.first(x)))) - y).square().mean()


class Recurrent(nn.Module):
    """The LSTM's first result."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


def best(x: Tensor) -> Tensor:
    """Tokens are as many as are picked or more."""
    return x * torch.topk(x, 5, dim=1).values.sum(1, keepdim=True)


def cut(x: Tensor, most: int = 32) -> Tensor:
    """No tokens beyond the most."""
    return x[:, : min(most, x.shape[1])]


def fourier(x: Tensor) -> Tensor:
    return torch.fft.fftn(x, dim=(1, 2)).real


def filtered(x: Tensor) -> Tensor:
    """Its derivative writes through a slice."""
    return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=x.shape[1], dim=1)


def unfolded(x: Tensor) -> Tensor:
    return F.unfold(x.unsqueeze(1), (3, 3), padding=1).unflatten(1, (3, 3)).sum((1, 2)).reshape(x.shape)


def solved(x: Tensor) -> Tensor:
    """Lower triangles of the channels."""
    left = torch.eye(8) + torch.tril(x.transpose(1, 2) @ x / 8, -1)
    return torch.linalg.solve_triangular(left, x.transpose(1, 2), upper=False).transpose(1, 2)


def chunked(x: Tensor) -> Tensor:
    return torch.cat([chunk * i for i, chunk in enumerate(x.chunk(4, 1))], 1)


def grouped(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1] // 8, 8, 8).cumsum(2).reshape(x.shape)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "best": best,
    "cut": cut,
    "fourier": fourier,
    "filtered": filtered,
    "unfolded": unfolded,
    "solved": solved,
    "chunked": chunked,
    "grouped": grouped,
}


def batch(length: int = LENGTH, rows: int = ROWS) -> dict[str, Tensor]:
    """x and y of so many rows and tokens."""
    x, y = torch.randn(2, rows, length, WIDTH, generator=torch.Generator().manual_seed(length))
    return {"x": x, "y": y}


def model(name: str) -> nn.Module:
    """The model of a mix, or of an LSTM."""
    torch.manual_seed(0)
    return Mixed(Recurrent() if name == "lstm" else MIXES[name])
