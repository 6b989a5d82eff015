"""Configurations within configurations, and the class of a configuration's model."""

import copy
import inspect
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.modeling.pickles import read_json_object
from hf_fsdp_tools.text import did_you_mean, quoted

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""How configurations name the number of positions."""

_ABSENT = object()


def config_of_layer(module: Any) -> Any:
    """The configuration of an attention module, or None; that of its layer where layers differ (transformers 5.22)."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    differs = layer is not None and getattr(config, "is_heterogeneous", False)
    return config.per_layer_config[layer] if differs and config is not None else config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text model within a configuration, itself where there is none; of two, the decoder's."""
    try:
        text: PreTrainedConfig = config.get_text_config()
    except ValueError:  # a text encoder and a decoder, as MusicGen has
        text = config.get_text_config(decoder=True)
    return text


def max_positions(config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model; None where its configuration sets no limit (relative positions)."""
    if hasattr(config, "relative_attention_num_buckets"):
        return None
    for part in (text_config(config), config):
        for name in _POSITIONS:
            if isinstance(limit := getattr(part, name, None), int) and limit > 0:
                return limit
    return None


def has_angles(config: PreTrainedConfig) -> bool:
    """Whether positions are rotary angles, which there are beyond those of the configuration too."""
    return bool(getattr(text_config(config), "rope_parameters", None))


def beyond_positions(limit: int) -> str:
    """What is said of a model with angles (`has_angles`) whose rows are longer than its configuration has positions."""
    return (
        f"has {limit:,} positions, and angles beyond them, of which it has seen none; rope_parameters (YaRN) in its "
        "config.json scale them to such lengths."
    )


_INNER = {"csm": ("depth_decoder", "depth_decoder_"), "kyutai_speech_to_text": ("codec_model", "codec_")}
"""By model type: a model inside that generates with settings of its own, and how the names of these settings begin in
`generation_config.json`. Source: `from_pretrained` and `save_pretrained` of the two classes, transformers 5.23."""


def set_generation_config(model: Any, config: GenerationConfig | None) -> None:
    """Give a model that generates its settings, and a model inside it the settings that are stored among them."""
    if not model.can_generate():
        return
    if config is not None:
        model.generation_config = copy.deepcopy(config)
    if inner := _INNER.get(model.config.model_type):
        name, prefix = inner
        own = vars(model.generation_config)
        inside = {key.removeprefix(prefix): own.pop(key) for key in list(own) if key.startswith(prefix)}
        vars(getattr(model, name).generation_config).update({"_from_model_config": False, **inside})


def whole_generation_config(model: Any) -> GenerationConfig:
    """The settings of a model that generates as they are stored, those of a model inside it among them."""
    config: GenerationConfig = model.generation_config
    if inner := _INNER.get(model.config.model_type):
        name, prefix = inner
        config = copy.deepcopy(config)
        inside = getattr(model, name).generation_config.to_diff_dict()
        vars(config).update({prefix + key: value for key, value in inside.items() if key != "transformers_version"})
    return config


_BASE = transformers.AutoModel


def model_class(
    config: PreTrainedConfig, auto_class: Any = None, *, trust_remote_code: bool = False, as_stored: bool = False
) -> Any:
    """The class with which a configuration's model is built: a model class, or an auto class that chooses it.

    1. `auto_class`, if it is given.
    2. The class in `architectures`, if the installed transformers has it for such a configuration, or code that comes
       with the checkpoint. A base model without a loss (`LlamaModel`, `ViTModel`) is that of 3, whose head is new, as
       `AutoModelFor…` has it; of a kind without such a class it is itself.
    3. By the kind of the configuration: images with text, speech to text, text to text, classes of images, masked
       tokens, next tokens; else the base model.
    """
    if auto_class is not None:
        return class_named(auto_class)
    listed = getattr(config, "architectures", None)  # of which a damaged file may make anything
    entries = listed if isinstance(listed, list | tuple) else [listed]
    names = [name for name in entries if isinstance(name, str)]
    own_code = _own_code(config)
    remote = next(
        (getattr(transformers, n) for n, cls in own_code.items() if str(cls).rpartition(".")[2] in names), None
    )
    own = next(filter(None, (_own_class(config, name) for name in names)), None)
    usual = _class_of_kind(config)
    if trust_remote_code and remote is None and usual is not None and usual.__name__ in own_code:
        remote = usual  # as transformers does, whatever class the config names
    named = (remote or own) if trust_remote_code else (own or remote)
    if named is not None and (as_stored or usual in (None, _BASE) or not _is_base(config, named)):
        return named
    return usual or transformers.AutoModelForCausalLM


def class_named(auto_class: Any) -> Any:
    """An auto class or a model class, also by its name in transformers."""
    cls = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    if isinstance(cls, type) and (hasattr(cls, "from_config") or hasattr(cls, "_from_config")):
        return cls
    name = str(auto_class)
    alike = [entry for entry in dir(transformers) if entry[:3].lower() == name[:3].lower()]  # of all, it takes seconds
    cure = did_you_mean(name, alike, otherwise=". Use AutoModelForCausalLM, AutoModel, …, or a model class.")
    raise ConfigError(f"auto_class {quoted(auto_class)} is no model class of transformers{cure}")


def _own_class(config: PreTrainedConfig, name: str) -> Any:
    """The class of transformers of that name if it is made for such configurations."""
    cls: Any = getattr(transformers, name.removeprefix("FSDP"), None)
    is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    made_for: Any = getattr(cls, "config_class", None) if is_model else None
    return cls if made_for is not None and isinstance(config, made_for) else None


def _own_code(config: PreTrainedConfig) -> dict[str, Any]:
    """Names of classes in the code that comes with a checkpoint, by the auto class that finds them."""
    own_code = getattr(config, "auto_map", None)
    known = own_code if isinstance(own_code, dict) else {}
    return {name: remote for name, remote in known.items() if hasattr(transformers, str(name))}


def _is_base(config: PreTrainedConfig, cls: Any) -> bool:
    """Whether a class is a model without a head that gives no loss; CLIP, which compares, gives one."""
    bases = transformers.MODEL_MAPPING.get(type(config), None)
    if cls not in (bases if isinstance(bases, tuple) else (bases,)) or not issubclass(cls, PreTrainedModel):
        return False
    return "For" not in cls.__name__ and "return_loss" not in inspect.signature(cls.forward).parameters


def _class_of_kind(config: PreTrainedConfig) -> Any:
    """The auto class with which such a configuration's model is trained; None for an unknown kind."""
    kind, hf = type(config), transformers
    base = hf.MODEL_MAPPING.get(kind, None)
    if isinstance(base, type) and not _is_base(config, base):
        return _BASE
    kinds = [
        (text_config(config) is not config, hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, hf.AutoModelForImageTextToText),
        (config.is_encoder_decoder, hf.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, hf.AutoModelForSpeechSeq2Seq),
        (config.is_encoder_decoder, hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, hf.AutoModelForSeq2SeqLM),
        (True, hf.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, hf.AutoModelForImageClassification),
        (not getattr(config, "is_decoder", False), hf.MODEL_FOR_MASKED_LM_MAPPING, hf.AutoModelForMaskedLM),
        (True, hf.MODEL_FOR_CAUSAL_LM_MAPPING, hf.AutoModelForCausalLM),
        (True, hf.MODEL_MAPPING, _BASE),
    ]
    for holds, mapping, auto_class in kinds:
        if holds and kind in mapping:
            return auto_class
    remote = next((name for name in _own_code(config) if name.startswith("AutoModelFor")), "")
    return getattr(hf, remote, None)


# ---- what other readers look for in config.json ----


def write_older_keys(config: PreTrainedConfig, folder: Path) -> None:
    """Put the keys of transformers 4 next to those of 5 in the `config.json` that transformers wrote to a folder.

    transformers 4, mlx-lm, vLLM and llama.cpp know no `rope_parameters` and other names of layers, and compute with
    defaults instead or fail. Whatever the file of the base has under other names stays, where it says the same.
    """
    file = folder / "config.json"
    content = json.loads(file.read_text())
    base = _file_of_base(config.name_or_path)
    _add_older_keys(config, content, base if base.get("model_type") == config.model_type else {})
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer or a processor as transformers does, but under the names of transformers 4: no class is called
    TokenizersBackend there, other special tokens are no `extra_special_tokens`, and those with a name are."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    content = json.loads(text) if "TokenizersBackend" in text or "_special_tokens" in text else {}
    renamed = {name: value for name, value in content.items() if value != "TokenizersBackend"}
    if renamed != content:
        words = getattr(tokenizer, "tokenizer", tokenizer)
        was = _file_of_base(getattr(words, "name_or_path", None), file.name).get("tokenizer_class", "")
        renamed["tokenizer_class"] = was if was.endswith("Fast") else "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        renamed["additional_special_tokens"] = renamed.pop("extra_special_tokens")
    if named := renamed.pop("model_specific_special_tokens", None):
        renamed["extra_special_tokens"] = named
    if renamed != content:
        file.write_text(json.dumps(renamed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def file_at_hand(name: str, file: str, revision: str | None = None) -> Path | None:
    """A file of a folder, or of a repository in the cache of the hub; None where it is not there (any more)."""
    try:
        path = cached_file(name, file, revision=revision, local_files_only=True)
    except (OSError, ValueError):  # also a folder that is gone, or a place in a store, which is no name of the hub
        return None
    return None if path is None else Path(path)


def _file_of_base(name: str | None, file: str = "config.json") -> dict[str, Any]:
    """A JSON file of what something was read from; empty where it is not at hand any more."""
    path = file_at_hand(name, file) if name else None
    return {} if path is None else dict(read_json_object(path))


@contextmanager
def with_older_keys() -> Iterator[None]:
    """Let configs that transformers saves in a block have these keys, before what it uploads in the same call."""
    save = PreTrainedConfig.save_pretrained

    def save_both(config: PreTrainedConfig, folder: str | PathLike[str], **keywords: Any) -> None:
        save(config, folder, **keywords)
        write_older_keys(config, Path(folder))

    with replaced(PreTrainedConfig, save_pretrained=save_both):
        yield


def _add_older_keys(config: PreTrainedConfig, content: dict[str, Any], base: Any) -> None:
    now = config.to_dict()
    base = base if isinstance(base, dict) else {}
    for name, part in vars(config).items():
        if isinstance(part, PreTrainedConfig) and name in content:
            _add_older_keys(part, content[name], base.get(name))
    if base:
        _add_keys_of_base(config, content, base)
    if config.attribute_map.get("num_experts") == "num_local_experts":
        content["num_experts"] = now["num_local_experts"]
    content |= next((keys for keys in _older_ropes(now) if _reads_the_same(type(config), now, keys)), {})


def _add_keys_of_base(config: PreTrainedConfig, content: dict[str, Any], base: dict[str, Any]) -> None:
    """Give a file the keys that the file of its base has otherwise and that say what it says; and `use_cache`, which
    trainers turn off, as it was.

    A key says what values of the configuration change without it, and these must be as in the base still.
    """
    kind, ours = type(config), dict(content)
    was, now = _read(kind, base), _read(kind, ours)
    for key in base.keys() - {"transformers_version"} if was and now else ():
        if ours.get(key, _ABSENT) == base[key]:
            continue
        others = _read(kind, {name: value for name, value in base.items() if name != key})
        says = {name for name in was if others.get(name, _ABSENT) != was[name]} if others else {key} & was.keys()
        as_it_was = all(now.get(name, _ABSENT) == was[name] for name in says)
        if as_it_was and (says or key in ours or getattr(config, key, _ABSENT) == base[key]):
            again = _read(kind, {**ours, key: base[key]})
            if again and {**again, key: None} == {**now, key: None} and again.get(key) == now.get(key, again.get(key)):
                content[key] = base[key]
    if "use_cache" in content and "use_cache" in was:
        content["use_cache"] = was["use_cache"]


def _read(kind: type[PreTrainedConfig], values: dict[str, Any]) -> dict[str, Any]:
    """All values of a configuration by those of a file, which has no infinity; empty where its class refuses these."""
    try:
        with warnings.catch_warnings(action="ignore"):
            read: dict[str, Any] = kind.from_dict(kind._decode_special_floats(copy.deepcopy(values))).to_dict()
    except Exception:  # of its checks of values: it does not know these keys
        return {}
    return read


def _older_ropes(now: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What `rope_parameters` was in transformers 4, in turn: in most classes, GPT-NeoX, Gemma 3, OLMo 3, ModernBERT."""

    def base_and_scaling(of: dict[str, Any], base: str = "rope_theta") -> dict[str, Any]:
        other = {"rope_theta", "partial_rotary_factor"} | ({"rope_type"} if "type" in of else set())
        other |= {"original_max_position_embeddings"} & now.keys()
        kept = {key: value for key, value in of.items() if key not in other}
        return {base: of["rope_theta"], "rope_scaling": None if kept == {"rope_type": "default"} else kept}

    rope = now.get("rope_parameters") or {}
    part, whole, near = (rope.get(key) for key in ("partial_rotary_factor", "full_attention", "sliding_attention"))
    if "rope_theta" in rope:
        yield base_and_scaling(rope) | ({} if part is None else {"partial_rotary_factor": part})
        yield base_and_scaling(rope, "rotary_emb_base") | {"rotary_pct": part}
    elif whole and near and "rope_theta" in whole.keys() & near.keys():
        yield base_and_scaling(whole) | {"rope_local_base_freq": near["rope_theta"]}
        yield base_and_scaling(whole)
        yield {"global_rope_theta": whole["rope_theta"], "local_rope_theta": near["rope_theta"]}


def _reads_the_same(kind: type[PreTrainedConfig], now: dict[str, Any], keys: dict[str, Any]) -> bool:
    """Whether a class reads the same configuration with older keys, and from them instead of `rope_parameters`."""
    alone = {key: value for key, value in now.items() if key != "rope_parameters"} | keys
    read = [_read(kind, each) for each in (now, now | keys, alone)]
    if not all(read):
        return False
    is_left = any("theta" in key or "base" in key for key in (read[-1].keys() - read[0].keys()) & keys.keys())
    plain, *others = [{key: value for key, value in each.items() if key not in keys} for each in read]
    return not is_left and others == [plain, plain]
