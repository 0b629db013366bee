"""Small random models of transformers' architectures.

Enters: `TYPE[,key=value…]`, a model type of transformers with fields of its configuration. Leaves: a model with random
weights and an example batch. Nothing is downloaded. Models above `LARGEST` parameters are built without memory.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from fxpar.errors import InputError, shown

BATCH, SEQUENCE = 3, 16
LARGEST = 200_000_000
# Beyond any model and any example: configurations make lists of such lengths, and loops of so many layers.
_MOST_LAYERS, _MOST_SIZE, _MOST_ELEMENTS = 1000, 2**24, 2**28

# Sizes that differ from each other pairwise, so that no two dimensions can be taken for one another. A configuration
# gets the sizes whose names it knows, as fields or through its attribute map.
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _INTERMEDIATE, _VOCABULARY, _POSITIONS = 2, 96, 8, 4, 160, 259, 64
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), _LAYERS),
    **dict.fromkeys(("hidden_size", "d_model"), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    "num_key_value_heads": _KV_HEADS,
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim"), _INTERMEDIATE),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), _INTERMEDIATE),
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": _POSITIONS,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 7,
}
_TOKENS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_FIRST_PLAIN_TOKEN = 3
_DROPOUT = 0.1
_OWN = "write a function that returns (model, batch) and give file.py:function"

# What the constructors of transformers raise for sizes that do not fit together.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


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
    samples, length = BATCH if batch is None else batch, SEQUENCE if seq is None else seq
    for option, value in (("--batch", samples), ("--seq", length)):
        if value < 2:
            raise InputError(f"{value} is too small", where=f"{where} {option}", remedy="give at least 2")
    config = _config(transformers, transformers.CONFIG_MAPPING[kind], pairs, length, where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, has_loss = _model(transformers, config, where)
        torch.manual_seed(seed + 1)
        try:
            example = _example(model, config, samples, length, has_loss, where)
        except RuntimeError as error:  # no numbers below a size of 0
            raise InputError(_line(error), where=where, remedy="give other sizes") from None
    return Built(model, example, None if has_loss else mean_square)


def mean_square(outputs: Any, batch: Any) -> Tensor:
    """The loss of models that have none: the mean square of the first output."""
    first: Tensor = outputs[0]
    return first.float().square().mean()


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


def _value(text: str, where: str) -> Any:
    try:
        return _numbers(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):  # a number of too many digits, brackets in brackets
        raise InputError(
            f"{shown(text)} is no value", where=where, remedy="write a number, a word or [a, list]"
        ) from None


def _numbers(value: Any) -> Any:
    """YAML reads 1e-5 as text."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _config(transformers: Any, cls: Any, pairs: list[str], length: int, where: str) -> Any:
    """The configuration: what the user gave, small sizes for the rest."""
    fields = {p.name: p.default for p in inspect.signature(cls.__init__).parameters.values() if p.name != "self"}
    fields["num_labels"] = None  # taken by every configuration, declared by none
    aliases: dict[str, str] = dict(cls.attribute_map)

    def own(name: str) -> str | None:
        name = aliases.get(name, name)
        return name if name in fields else None

    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = own(key.strip())
        if not equals or name is None:
            common = inspect.signature(transformers.PreTrainedConfig.__init__).parameters
            valid = sorted({*(f for f in fields if f not in common), *aliases})
            reason = f"has no key '{key}'" if equals else f"'{pair}' is no key=value"
            raise InputError(reason, where=where, remedy=f"choose from {', '.join(valid)}")
        if name in given:
            raise InputError(f"has the key '{key}' twice", where=where, remedy="keep one")
        given[name] = _value(text, where)
        _check_size(name, given[name], where)
    settings = {**_defaults(fields, own, length), **given}
    settings |= {k: v for k, v in _derived(fields, settings, own).items() if k not in given}
    try:
        config = cls(**settings)
    except _strict_errors() as error:
        raise InputError(_line(error), where=where, remedy="give other values") from None
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # T5's own, which checkpoints bring
    return _even_rotary(config, given)


def _check_size(name: str, value: Any, where: str) -> None:
    """Refuses sizes that no configuration has; in a mapping (rotary positions, say) numbers are no sizes."""
    most = _MOST_LAYERS if "layer" in name and "size" not in name else _MOST_SIZE
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int) and abs(number) > most:
            raise InputError(
                f"{name}={shown(number)} is more than {most}",
                where=where,
                remedy="give a smaller number, or write one that is no size with a point (1e9 or 1000000000.0)",
            )


def _strict_errors() -> tuple[type[Exception], ...]:
    """What a configuration raises for values of another type; the package comes with transformers."""
    from huggingface_hub.errors import StrictDataclassError

    return (*_REFUSALS, StrictDataclassError)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300].rstrip(".") or type(error).__name__


def _defaults(fields: Mapping[str, Any], own: Callable[[str], str | None], length: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, size in _SIZES.items():
        field = own(name)
        if field is None or type(fields[field]) not in (int, type(None)):
            continue
        if name == field or field not in found:
            found[field] = max(size, length) if name == "max_position_embeddings" else size
    for name, default in fields.items():
        is_rate = "dropout" in name or name.endswith("pdrop")
        if is_rate and "layer" not in name and isinstance(default, (int, float)) and not isinstance(default, bool):
            found[name] = default or _DROPOUT
    if "use_cache" in fields:
        found["use_cache"] = False
    if "attention_types" in fields:
        found["attention_types"] = [[["global", "local"], _LAYERS // 2]]
    return found


def _derived(
    fields: Mapping[str, Any], settings: Mapping[str, Any], own: Callable[[str], str | None]
) -> dict[str, Any]:
    """What follows from other sizes: special tokens, a head's width and the part of it that turns."""

    def value(name: str) -> Any:
        field = own(name)
        return settings.get(field, fields.get(field)) if field is not None else None

    vocabulary = value("vocab_size")
    last = vocabulary - 1 if type(vocabulary) is int and vocabulary > 0 else max(_TOKENS.values())
    found = {name: min(token, last) for name, token in _TOKENS.items() if name in fields}
    hidden, heads = value("hidden_size"), value("num_attention_heads")
    if type(hidden) is not int or type(heads) is not int or heads < 1 or hidden % heads:
        return found
    width = hidden // heads
    field = own("head_dim")
    if field is not None and type(fields[field]) in (int, type(None)):
        found[field] = width
    if type(fields.get("rotary_dim")) is int:
        found["rotary_dim"] = width // 2 // 2 * 2
    return found


def _even_rotary(config: Any, given: Mapping[str, Any]) -> Any:
    """Rotary positions turn pairs: a partial factor that leaves an odd width becomes a half."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_parameters" in given:
        return config
    factor, hidden = rope.get("partial_rotary_factor"), getattr(config, "hidden_size", None)
    heads = getattr(config, "num_attention_heads", None)
    if type(factor) is float and type(hidden) is int and type(heads) is int:
        width = getattr(config, "head_dim", None) or hidden // heads
        if int(width * factor) % 2:
            rope["partial_rotary_factor"] = 0.5
    return config


def _model(transformers: Any, config: Any, where: str) -> tuple[nn.Module, bool]:
    """The model in the class that trains it, and whether it returns a loss."""
    try:
        cls, has_loss = _class_of(transformers, config)
        if cls is None:
            raise InputError("transformers has no text or image model of this type", where=where, remedy=_OWN)
        with torch.device("meta"):
            model = cls(config)
        if sum(p.numel() for p in model.parameters()) <= LARGEST:
            model = cls(config)
    except ImportError as error:
        raise InputError(_line(error), where=where, remedy="install what is missing") from None
    except _REFUSALS as error:
        raise InputError(_line(error), where=where, remedy="give other sizes") from None
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
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, decoder),
        (transformers.MODEL_FOR_MASKED_LM_MAPPING, True),
        (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, True),
        (transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, True),
    ]
    for mapping, applies in order:
        if applies and type(config) in mapping:
            found = mapping[type(config)]
            return (found[0] if isinstance(found, tuple) else found), True
    base = transformers.MODEL_MAPPING
    if type(config) not in base:
        return None, False
    found = base[type(config)]
    return (found[0] if isinstance(found, tuple) else found), False


def _example(model: nn.Module, config: Any, samples: int, length: int, has_loss: bool, where: str) -> dict[str, Tensor]:
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        if type(size) is not int:
            size = tuple(size) if isinstance(size, (list, tuple)) and len(size) == 2 else (32, 32)
        height, width = (size, size) if isinstance(size, int) else size
        _check_elements(samples * channels * height * width, where)
        example = {"pixel_values": torch.randn(samples, channels, height, width)}
        if has_loss:
            example["labels"] = torch.randint(0, config.num_labels, (samples,))
    elif main == "input_ids" and type(getattr(config, "vocab_size", None)) is int:
        _check_elements(samples * length, where)
        example = _tokens(config, samples, length, has_loss, "decoder_input_ids" in takes)
    else:
        raise InputError(f"no example is made for models of this kind, which want {main}", where=where, remedy=_OWN)
    if any(p.is_meta for p in model.parameters()):
        return {name: value.to("meta") for name, value in example.items()}
    return example


def _check_elements(count: int, where: str) -> None:
    if count > _MOST_ELEMENTS:
        raise InputError(
            f"its example would have {shown(count)} elements, more than {_MOST_ELEMENTS}",
            where=where,
            remedy="give smaller sizes: the program is that of every batch; --size counts at others",
        )


def _tokens(config: Any, samples: int, length: int, has_loss: bool, decodes: bool) -> dict[str, Tensor]:
    """Ids and labels, some ignored; a decoder's own sequence is shorter, so that it has a symbol of its own."""
    first = min(_FIRST_PLAIN_TOKEN, config.vocab_size - 1)
    ids = torch.randint(first, config.vocab_size, (samples, length))
    target = torch.randint(first, config.vocab_size, (samples, max(2, 3 * length // 4))) if decodes else ids
    if not has_loss:
        return {"input_ids": ids, "decoder_input_ids": target} if decodes else {"input_ids": ids}
    labels = target.clone()
    labels[0, : min(3, target.shape[1] - 1)] = -100
    return {"input_ids": ids, "labels": labels}
