"""Small random models of transformers' architectures.

Enters: `TYPE[,key=value…]`, a model type of transformers with fields of its configuration. Leaves: a model with random
weights and an example batch. Nothing is downloaded. Models above `LARGEST` parameters are built without memory.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.cli.hf_config import REFUSALS, first_line, small_config
from fxpar.cli.hf_example import OWN, make_example
from fxpar.cli.models import SAMPLES
from fxpar.errors import InputError

SEQUENCE = 16
LARGEST = 200_000_000


@dataclass(frozen=True)
class Built:
    """A model, its example batch and the loss where the model has none of its own."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[Any, Any], Tensor] | None


def build(spec: str, batch: int | None, seq: int | None, seed: int) -> Built:
    """The model and example for `TYPE[,key=value…]`.

    Args:
        spec: without the leading `hf:`.
        batch: samples, at least 2; None for 3.
        seq: tokens a sample; None for 16.
        seed: of the weights and the example.

    Raises:
        InputError: transformers is missing, does not know the type or a key, or refuses the sizes.
    """
    try:
        import transformers
    except ImportError:
        raise InputError(
            "transformers is not installed", where=f"hf:{spec}", remedy="pip install 'fxpar[hf]'"
        ) from None
    where = f"hf:{spec}"
    kind, *pairs = _split(spec)
    known = list(transformers.CONFIG_MAPPING.keys())
    if kind not in known:
        near = difflib.get_close_matches(kind, known, 3) or ["gpt2", "bert", "llama", "vit", "t5"]
        raise InputError(
            f"transformers {transformers.__version__} has no model type '{kind}'",
            where=where,
            remedy=f"try {', '.join(near)}",
        )
    samples, length = SAMPLES if batch is None else batch, SEQUENCE if seq is None else seq
    for option, value in (("--batch", samples), ("--seq", length)):
        if value < 2:
            raise InputError(f"{value} is too small", where=f"{where} {option}", remedy="give at least 2")
    config = small_config(transformers.CONFIG_MAPPING[kind], pairs, length, where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, has_loss = _model(transformers, config, where)
        torch.manual_seed(seed + 1)
        try:
            example = make_example(model, config, samples, length, has_loss, where)
        except RuntimeError as error:  # no numbers below a size of 0
            raise InputError(first_line(error), where=where, remedy="give other sizes") from None
    return Built(model, example, None if has_loss else distance)


def distance(outputs: Any, batch: Any) -> Tensor:
    """The loss of models that have none: the mean square distance of the first output from a wave over its features.

    The mean square of the output alone is constant behind a norm: it would have no gradient to look at.
    """
    first: Tensor = outputs[0].float()
    return (first - torch.arange(first.shape[-1], device=first.device).float().cos()).square().mean()


def _split(spec: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for sign in spec:
        depth += (sign in "[{(") - (sign in ")}]")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def _model(transformers: Any, config: Any, where: str) -> tuple[nn.Module, bool]:
    """The model in the class that trains it, and whether it returns a loss."""
    try:
        cls, has_loss = _class_of(transformers, config)
        if cls is None:
            raise InputError("transformers has no text or image model of this type", where=where, remedy=OWN)
        with torch.device("meta"):
            model = cls(config)
        if sum(p.numel() for p in model.parameters()) <= LARGEST:
            model = cls(config)
    except ImportError as error:
        raise InputError(first_line(error), where=where, remedy="install what is missing") from None
    except REFUSALS as error:
        raise InputError(first_line(error), where=where, remedy="give other sizes") from None
    if "loss_type" in vars(model) and model.loss_type is None:
        model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    for parameter in model.parameters():
        # Biases of zero and norm weights of one would hide one that is added twice or left out.
        if parameter.dim() == 1 and not parameter.is_meta:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model, has_loss


def _class_of(transformers: Any, config: Any) -> tuple[Any, bool]:
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    decoder = getattr(config, "is_decoder", False)
    order = [
        (transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, encoder_decoder),
        (transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, encoder_decoder),
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, decoder),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, True),
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, True),
        (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, True),
        (transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, True),
        (transformers.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING, True),
    ]
    for mapping, applies in order:
        if applies and type(config) in mapping:
            entry = mapping[type(config)]
            return (entry[0] if isinstance(entry, tuple) else entry), True
    base = transformers.MODEL_MAPPING
    if type(config) not in base:
        return None, False
    entry = base[type(config)]
    return (entry[0] if isinstance(entry, tuple) else entry), False
