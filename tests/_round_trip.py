"""What is wrong with a checkpoint that was loaded into shards and saved again."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_fsdp_tools import from_pretrained, save_pretrained
from tests._checkpoints import bits, stored_tensors


def resave(model_class: Any, folder: Path, target: Path, **saving: Any) -> None:
    """Load a checkpoint into shards and save it again. Every rank must call."""
    save_pretrained(from_pretrained(folder, auto_class=model_class), target, **saving)


def loads_as_stored(model_class: Any, folder: Path) -> tuple[PreTrainedModel, str]:
    """The plain model of a folder; and what transformers says was missing, unexpected or of another shape."""
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    return model, "; ".join(f"{what}: {sorted(map(str, keys))[:3]}" for what, keys in info.items() if keys)


OLDER_KEYS = {
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct", "rope_local_base_freq",
    "global_rope_theta", "local_rope_theta", "num_experts",
}  # fmt: skip
"""Keys of transformers 4 in `config.json`, which only our saves hold beside those of 5."""


def differences(ours: Path, theirs: Path) -> list[str]:
    """What is not equal in two checkpoints: names, dtypes, shapes and bits of tensors; configs but for the version, and
    for older keys that only ours has."""
    found = []
    a, b = stored_tensors(ours), stored_tensors(theirs)
    if a.keys() != b.keys():
        found.append(f"names: {sorted(a.keys() ^ b.keys())[:4]} ({len(a.keys() - b.keys())} only in ours)")
    for key in sorted(a.keys() & b.keys()):
        if (a[key].dtype, a[key].shape) != (b[key].dtype, b[key].shape):
            found.append(f"{key}: {a[key].dtype} {list(a[key].shape)}, not {b[key].dtype} {list(b[key].shape)}")
        elif not torch.equal(bits(a[key]), bits(b[key])):
            found.append(f"{key}: other values")
    for name in ("config.json", "generation_config.json"):
        one, other = (_config(folder / name) for folder in (ours, theirs))
        one = _without_older(one, other)
        if one != other:
            keys = sorted(k for k in one.keys() | other.keys() if one.get(k) != other.get(k))
            found += [f"{name} {k}: {one.get(k, 'absent')!r}, not {other.get(k, 'absent')!r}" for k in keys]
            found += [f"{name}: {'absent' if not one else 'there'}"] if not keys else []
    return found


def _without_older(ours: Any, theirs: Any) -> Any:
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return ours
    kept = ours.keys() - (OLDER_KEYS - theirs.keys())
    return {key: _without_older(value, theirs.get(key)) for key, value in ours.items() if key in kept}


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text())
    config.pop("transformers_version", None)
    return config
