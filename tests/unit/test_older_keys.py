"""`config.json` holds the keys of transformers 4 beside those of 5, which reads it as before."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedConfig

from hf_fsdp_tools import export_checkpoint
from tests._checkpoints import make_model, tiny_config
from tests._round_trip import OLDER_KEYS
from tests.api import save_tokenizer, write_older_keys
from tests.census.defaults import CONFIG_MAPPING
from tests.readers import compare, equal_tokens

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32, "beta_slow": 1}
BASE = {"rope_theta": 123.0}
HALF = {"partial_rotary_factor": 0.5}


def of_layers(full: dict[str, Any], **sliding: Any) -> dict[str, Any]:
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 45.0} | sliding}


DEFAULT: dict[str, Any] = {"rope_type": "default"} | BASE
NO_SCALING: dict[str, Any] = BASE | {"rope_scaling": None}
ROPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", DEFAULT, NO_SCALING),
    *(
        ("llama", rope | BASE, BASE | {"rope_scaling": rope})
        for rope in (LLAMA3, YARN, *({"rope_type": name, "factor": 2.0} for name in ("linear", "dynamic")))
    ),
    ("gpt_neox", DEFAULT | HALF, {"rotary_emb_base": 123.0, "rotary_pct": 0.5, "rope_scaling": None}),
    (
        "gemma3",
        of_layers({"rope_type": "linear", "factor": 8.0} | BASE),
        BASE | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 45.0},
    ),
]
"""Model types, rope of transformers 5, and the keys of transformers 4; logits are equal in 4.57.6 for all it has."""


def saved(config: PreTrainedConfig, folder: Path) -> dict[str, Any]:
    config.save_pretrained(folder)
    write_older_keys(config, folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def without(keys: set[str], content: Any) -> Any:
    """A configuration without some keys, at every depth but inside `rope_parameters`."""
    if not isinstance(content, dict):
        return content
    return {k: v if k == "rope_parameters" else without(keys, v) for k, v in content.items() if k not in keys}


def refuse_change(config: PreTrainedConfig, folder: Path) -> dict[str, Any]:
    """Refuse a file that transformers reads otherwise than without the older keys, or that changes when it is saved
    again."""
    config.save_pretrained(folder / "plain")
    first, kind = saved(config, folder / "both"), type(config)
    plain, both = (kind.from_pretrained(folder / name) for name in ("plain", "both"))
    assert without(OLDER_KEYS, both.to_dict()) == without(OLDER_KEYS, plain.to_dict())
    again = saved(both, folder / "again")
    plain.save_pretrained(folder / "plain_again")
    is_stable = (folder / "plain_again/config.json").read_text() == (folder / "plain/config.json").read_text()
    assert again == first or not is_stable
    return first


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("model_type", "rope", "older"), ROPES)
def test_older_readers_find_their_keys(tmp_path: Path, model_type: str, rope: dict[str, Any], older: Any) -> None:
    if model_type not in CONFIG_MAPPING:  # 5.17, which is supported too, lacks some of 5.23
        pytest.skip(f"{model_type} is newer than transformers {hf.__version__}")
    text = tiny_config(model_type).get_text_config().to_dict()
    config = CONFIG_MAPPING[text["model_type"]].from_dict(text | ({"rope_parameters": rope} if rope else {}))
    content = refuse_change(config, tmp_path)
    assert {key: content[key] for key in OLDER_KEYS & content.keys()} == older
    if rope:
        assert content["rope_parameters"].items() >= rope.items(), "the newer keys stay"


def test_models_inside_have_keys_of_their_own_and_exports_write_both(tmp_path: Path) -> None:
    content = refuse_change(tiny_config("gemma3"), tmp_path)
    assert {"rope_theta", "rope_local_base_freq"} <= content["text_config"].keys() and "rope_theta" not in content
    # Also where the base has the older keys alone, as it was written by transformers 4.
    make_model("qwen3_moe").save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    content = json.loads(file.read_text())
    content["num_experts"] = content.pop("num_local_experts")
    file.write_text(json.dumps({k: v for k, v in content.items() if k != "rope_parameters"} | NO_SCALING))
    export_checkpoint(tmp_path / "base", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written.items() >= (NO_SCALING | {"num_experts": 4, "num_local_experts": 4}).items()
    assert written["rope_parameters"] == DEFAULT


def test_tokenizers_have_names_of_transformers_4(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"<a>": 0, "<b>": 1, "c": 2}, unk_token="<a>"))
    special = {"unk_token": "<a>", "extra_special_tokens": ["<b>"]}
    save_tokenizer(hf.PreTrainedTokenizerFast(tokenizer_object=words, **special), tmp_path / "base")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "base")
    save_tokenizer(tokenizer, tmp_path / "out")
    content = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (content["tokenizer_class"], content["additional_special_tokens"]) == ("PreTrainedTokenizerFast", ["<b>"])
    assert "extra_special_tokens" not in content
    assert equal_tokens(hf.AutoTokenizer.from_pretrained(tmp_path / "out"), tokenizer)


@pytest.mark.nightly
def test_an_older_transformers_reads_what_is_saved_here(tmp_path: Path) -> None:
    """transformers 4.57.6 in an environment of its own: `OLDER_PYTHON`, or one that is made here."""
    python = os.environ.get("OLDER_PYTHON", str(tmp_path / "older/bin/python"))
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "older"], check=True)
        install = [python, "-m", "pip", "install", "-q", "transformers==4.57.6", "torch==2.13.0"]
        if (done := subprocess.run(install, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"transformers 4.57.6 cannot be installed here: {done.stderr[-200:]}")
    found = compare(python, tmp_path)
    keys = {one.split(":")[0].rsplit(".", 1)[-1] for different in found.values() for one in different}
    assert len(found) > 380 and keys <= {"tie_word_embeddings", "eos_token_id", "bos_token_id"}, "defaults that changed"
