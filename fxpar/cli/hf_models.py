"""Small configurations of transformers' architectures.

Enters: a class of configurations and `key=value` fields. Leaves: a configuration with those fields and small sizes for
the rest, also of the parts of a composite model (text, vision).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxpar.cli.plan_flags import yaml_value
from fxpar.errors import InputError, shown

# Beyond any model: configurations make lists of such lengths, and loops of so many layers.
_MOST_LAYERS, _MOST_SIZE = 1000, 2**24

# Sizes that differ from each other pairwise, so that no two dimensions can be taken for one another. A configuration
# gets the sizes whose names it knows, as fields or through its attribute map.
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _INTERMEDIATE, _VOCABULARY, _POSITIONS = 2, 96, 8, 4, 160, 259, 64
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth"), _LAYERS),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim"), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    "num_heads": _HEADS,
    "mamba_n_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim"), _INTERMEDIATE),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), _INTERMEDIATE),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 80),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), _HEADS),
    "linear_num_key_heads": _KV_HEADS,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim"), 12),
    "linear_value_head_dim": 20,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCABULARY),
    "max_position_embeddings": _POSITIONS,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    "image_size": 32,
    "patch_size": 8,
    "max_source_positions": 16,
    "num_labels": 7,
}
# Groups of experts of which each token takes some (8 of DeepSeek's) still have several experts each.
_EXPERTS, _MOST_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 32
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")  # of each token
_TOKENS: Mapping[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_DROPOUT = 0.1

# What the constructors of transformers raise for sizes that do not fit together.
REFUSALS = (
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


def _base() -> Any:
    """Returns the class of all configurations; transformers is an extra."""
    from transformers import PreTrainedConfig

    return PreTrainedConfig


class _Fields:
    """The fields of a class of configurations with their defaults, also under the names that other classes use."""

    def __init__(self, cls: Any) -> None:
        parameters = inspect.signature(cls.__init__).parameters.values()
        self.defaults = {p.name: p.default for p in parameters if p.name != "self"}
        self.defaults["num_labels"] = None  # taken by every configuration, declared by none
        self.aliases: dict[str, str] = dict(cls.attribute_map)

    def own(self, name: str) -> str | None:
        if name not in self.defaults:
            name = self.aliases.get(name, name)
        return name if name in self.defaults else None


def small_config(cls: Any, pairs: list[str], length: int, where: str) -> Any:
    """Returns a configuration with the fields that the user gave, and small sizes for the rest.

    Args:
        cls: a class of configurations of transformers.
        pairs: `key=value`.
        length: tokens of a sample.

    Raises:
        InputError: a key is unknown or comes twice, or the class refuses the values.
    """
    fields = _Fields(cls)
    fixed: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = fields.own(key.strip())
        if not equals or name is None:
            common = inspect.signature(_base().__init__).parameters
            valid = sorted({*(f for f in fields.defaults if f not in common), *fields.aliases})
            reason = f"has no key '{key}'" if equals else f"'{pair}' is no key=value"
            raise InputError(reason, where=where, remedy=f"choose from {', '.join(valid)}")
        if name in fixed:
            raise InputError(f"has the key '{key}' twice", where=where, remedy="keep one")
        fixed[name] = yaml_value(text, where)
        _check_size(name, fixed[name], where)
    try:
        config = _built(cls, fixed, length)
    except _strict_errors() as error:
        raise InputError(first_line(error), where=where, remedy="give other values") from None
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # T5's own, which checkpoints bring
    return config


def _built(cls: Any, fixed: Mapping[str, Any], length: int) -> Any:
    fields = _Fields(cls)
    settings = {**_defaults(fields, length, fixed), **fixed}
    settings |= {k: v for k, v in _derived(fields, settings).items() if k not in fixed}
    parts = {name: part for name, part in _parts(cls, length).items() if name not in fixed}
    try:
        config = cls(**settings, **parts)
    except _strict_errors():
        if not parts:
            raise
        config = cls(**settings)  # sizes of parts may have to fit one another
    return _rotary(config, fixed)


def _parts(cls: Any, length: int) -> dict[str, Any]:
    """Returns small configurations of the parts of a composite model, of the classes that it has by default."""
    names = getattr(cls, "sub_configs", {})
    try:
        whole = cls() if names else None
        return {
            name: _built(type(part), {}, length)
            for name in names
            if isinstance(part := getattr(whole, name, None), _base())
        }
    except _strict_errors():
        return {}


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
    """Returns what a configuration raises for values of another type; the package comes with transformers."""
    from huggingface_hub.errors import StrictDataclassError

    return (*REFUSALS, StrictDataclassError)


def first_line(error: BaseException) -> str:
    """Returns what an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300].rstrip(".") or type(error).__name__


def _is_pair(value: Any) -> bool:
    """Returns whether a size is written as height and width."""
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(type(side) is int for side in value)


def _defaults(fields: _Fields, length: int, others: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    defaults = fields.defaults
    for name, size in _SIZES.items():
        field = fields.own(name)
        if field is not None and name in ("image_size", "patch_size") and _is_pair(defaults[field]):
            settings[field] = [size, size]
        if field is None or type(defaults[field]) not in (int, type(None)):
            continue
        if name == field or field not in settings:
            settings[field] = max(size, length) if name == "max_position_embeddings" else size
    chosen = max(n for name in (*_CHOSEN, "") if type(n := others.get(name, defaults.get(name, 0))) is int)
    for name in _EXPERTS if chosen <= _MOST_EXPERTS else ():
        if type(number := defaults.get(name)) is int and number > _MOST_EXPERTS:
            settings[name] = _MOST_EXPERTS
    if isinstance(defaults.get("depths"), (list, tuple)):  # stages, each of half the resolution
        settings = {name: size for name, size in settings.items() if name not in ("num_stages", "patch_size")}
        settings["depths"] = [1] * len(defaults["depths"])
        if type(defaults.get("window_size")) is int:  # the last stage has one window
            settings |= {"window_size": 2, "image_size": 2 ** (len(defaults["depths"]) + 2)}
    if isinstance(defaults.get("num_block_repeats"), (list, tuple)) and "depth_coefficient" in defaults:
        settings |= {"num_block_repeats": [1] * len(defaults["num_block_repeats"]), "depth_coefficient": 1.0}
    for name, default in defaults.items():
        is_rate = "dropout" in name or name.endswith("pdrop")
        if is_rate and "layer" not in name and isinstance(default, (int, float)) and not isinstance(default, bool):
            settings[name] = default or _DROPOUT
    if "kv_lora_rank" in defaults and (field := fields.own("num_key_value_heads")):
        settings[field] = _HEADS  # made from one latent vector: each head has its own
    # Not of every batch, and drawn on the host.
    settings |= {name: False for name in ("use_cache", "apply_spec_augment") if name in defaults}
    if isinstance(languages := defaults.get("languages"), (list, tuple)) and "default_language" in defaults:
        settings["default_language"] = languages[0]
    if "attention_types" in defaults:
        settings["attention_types"] = [[["global", "local"], _LAYERS // 2]]
    return settings


def _derived(fields: _Fields, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what follows from other sizes: special tokens, a head's width and the part of it that turns."""

    defaults = fields.defaults

    def value(name: str) -> Any:
        field = fields.own(name)
        return settings.get(field, defaults[field]) if field is not None else None

    vocabulary = value("vocab_size")
    last = vocabulary - 1 if type(vocabulary) is int and vocabulary > 0 else max(_TOKENS.values())
    derived = {name: min(token, last) for name, token in _TOKENS.items() if name in defaults}
    hidden, heads = value("hidden_size"), value("num_attention_heads")
    if type(hidden) is not int or type(heads) is not int or heads < 1 or hidden % heads:
        return derived
    width = hidden // heads
    field = fields.own("head_dim")
    if field is not None and type(defaults[field]) in (int, type(None)):
        derived[field] = width
    if type(defaults.get("rotary_dim")) is int:
        derived["rotary_dim"] = width // 2 // 2 * 2
    return derived


def _rotary(config: Any, fixed: Mapping[str, Any]) -> Any:
    """Makes rotary positions fit small heads.

    They turn pairs: a partial factor that leaves an odd width becomes a half. Three position axes (time, height, width)
    share out the pairs.
    """
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "rope_parameters" in fixed:
        return config
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if type(hidden) is not int or type(heads) is not int:
        return config
    factor, width = rope.get("partial_rotary_factor"), vars(config).get("head_dim") or hidden // heads
    if type(factor) is float and int(width * factor) % 2:
        rope["partial_rotary_factor"] = factor = 0.5
    if "mrope_section" in rope or "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        pairs = int(width * (factor or 1)) // 2
        rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return config


# Example batches for small models of transformers' architectures.

OWN = "write a function that returns (model, batch) and give file.py:function"
_FIRST_PLAIN_TOKEN = 3
# Beyond any example.
_MOST_ELEMENTS = 2**28
_CHARACTERS = 259  # of models that take them without a vocabulary
_WAVE = 4000  # samples: a dozen frames of models that make one of 320

Batch = dict[str, Tensor]


def make_example(model: nn.Module, config: Any, samples: int, length: int, has_loss: bool, where: str) -> Batch:
    """Returns a batch that the model runs on, or else the first one, so that the model says what it wants.

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
    """Yields examples from the simplest on: text, other labels, with pixels; sound by its wave or its bands."""
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
    """Returns how many words the model has, or its part for text."""
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
    """Draws ids and labels, some ignored; a decoder's own sequence is shorter, so that it has a symbol of its own."""
    first = min(_FIRST_PLAIN_TOKEN, words - 1)
    ids = torch.randint(first, words, (samples, length))
    target = torch.randint(first, words, (samples, max(2, 3 * length // 4))) if decodes else ids
    if not has_loss:
        return {"input_ids": ids, "decoder_input_ids": target} if decodes else {"input_ids": ids}
    labels = target.clone()
    labels[0, : min(3, target.shape[1] - 1)] = -100
    return {"input_ids": ids, "labels": labels}
