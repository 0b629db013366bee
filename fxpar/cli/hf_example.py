"""Example batches for small models of transformers' architectures.

Enters: a model and its configuration. Leaves: random tokens, pixels or sound, with labels where the model has a loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.cli.hf_config import REFUSALS
from fxpar.errors import InputError, shown

OWN = "write a function that returns (model, batch) and give file.py:function"
_FIRST_PLAIN_TOKEN = 3
# Beyond any example.
_MOST_ELEMENTS = 2**28
_CHARACTERS = 259  # of models that take them without a vocabulary
_WAVE = 4000  # samples: a dozen frames of models that make one of 320

Batch = dict[str, Tensor]


def make_example(model: nn.Module, config: Any, samples: int, length: int, has_loss: bool, where: str) -> Batch:
    """A batch that the model runs on; where none does, the first one of its kind, so that the model says what it wants.

    Args:
        samples: at least 2.
        length: tokens of a sample.
        has_loss: whether the model's class returns a loss for labels.

    Raises:
        InputError: models of this kind want something else, or the example would be too large.
    """
    is_meta = any(p.is_meta for p in model.parameters())
    examples = list(_examples(model, config, samples, length, has_loss, where))
    if not examples:
        main = getattr(model, "main_input_name", "input_ids")
        raise InputError(f"no example is made for models of this kind, which want {main}", where=where, remedy=OWN)
    if is_meta:
        return {name: value.to("meta") for name, value in examples[0].items()}
    runs = (example for example in examples if len(examples) == 1 or _runs(model, example))
    return next(runs, examples[0])


def _runs(model: nn.Module, example: Batch) -> bool:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model(**example)
    except REFUSALS:
        return False
    return "labels" not in example or isinstance(outputs.loss, Tensor)


def _examples(model: nn.Module, config: Any, samples: int, length: int, has_loss: bool, where: str) -> Iterator[Batch]:
    """From the simplest on: text alone, with labels of another kind, with pixels; sound by its wave or its bands."""
    takes, main = inspect.signature(model.forward).parameters, getattr(model, "main_input_name", "input_ids")
    words = _vocabulary(config)
    _check_elements(samples * max(length, _WAVE if main == "input_values" else 1), where)
    classes: Batch = {"labels": torch.randint(0, config.num_labels, (samples,))} if has_loss else {}
    if main == "input_ids":
        decodes = "decoder_input_ids" in takes
        text = _tokens(words or _CHARACTERS, samples, length, has_loss, decodes)
        yield text
        if decodes:
            yield _tokens(words or _CHARACTERS, samples, length, has_loss, False)
        yield {**text, **classes}
        if "pixel_values" in takes:
            yield {**text, **_pixels(config, samples, where)}
    elif main == "pixel_values":
        yield {**_pixels(config, samples, where), **classes}
    elif main in ("input_values", "input_features"):
        decodes = "decoder_input_ids" in takes and words is not None
        text = _tokens(words or 0, samples, length, has_loss, True) if decodes else {}
        text.pop("input_ids", None)
        if main == "input_values":
            yield {main: torch.randn(samples, _WAVE), **(text or classes)}
        bands, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", length)
        _check_elements(samples * bands * frames, where)
        for shape in ((samples, bands, frames), (samples, getattr(config, "max_length", frames), bands)):
            yield {main: torch.randn(shape), **(text or classes)}


def _vocabulary(config: Any) -> int | None:
    """Words of the model, or of its part for text."""
    for part in (config, config.get_text_config()):
        if type(size := getattr(part, "vocab_size", None)) is int:
            return size
    return None


def _pixels(config: Any, samples: int, where: str) -> Batch:
    vision = getattr(config, "vision_config", None)
    sizes = [getattr(part, "image_size", None) for part in (config, vision)]
    size = next((s for s in sizes if s is not None), None)
    if type(size) is not int:
        size = tuple(size) if isinstance(size, (list, tuple)) and len(size) == 2 else (32, 32)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", 3)
    _check_elements(samples * channels * height * width, where)
    return {"pixel_values": torch.randn(samples, channels, height, width)}


def _check_elements(count: int, where: str) -> None:
    if count > _MOST_ELEMENTS:
        raise InputError(
            f"its example would have {shown(count)} elements, more than {_MOST_ELEMENTS}",
            where=where,
            remedy="give smaller sizes: the program is that of every batch; --size counts at others",
        )


def _tokens(words: int, samples: int, length: int, has_loss: bool, decodes: bool) -> Batch:
    """Ids and labels, some ignored; a decoder's own sequence is shorter, so that it has a symbol of its own."""
    first = min(_FIRST_PLAIN_TOKEN, words - 1)
    ids = torch.randint(first, words, (samples, length))
    target = torch.randint(first, words, (samples, max(2, 3 * length // 4))) if decodes else ids
    if not has_loss:
        return {"input_ids": ids, "decoder_input_ids": target} if decodes else {"input_ids": ids}
    labels = target.clone()
    labels[0, : min(3, target.shape[1] - 1)] = -100
    return {"input_ids": ids, "labels": labels}
