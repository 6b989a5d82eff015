"""What differs between kinds of models, found by training each of them: what recipes refuse, adapt to and save."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("trl")

import transformers as hf
from datasets import Dataset
from trl import SFTConfig
from trl.data_utils import prepare_multimodal_messages

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.scripting import ModelArguments, check_before_loading, finish
from hf_fsdp_tools.scripting.formats import with_places_of_images, with_prompt_turns
from tests.api import train_demo_tokenizer

SIZES = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "num_local_experts": 4, "mamba_d_ssm": 32,
    "mamba_n_heads": 4, "mamba_d_head": 8,
}  # fmt: skip
ASK = {"role": "user", "content": "Which?"}
CHATS = {name: [ASK, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
TEXT = [{"text": "A shard."}] * 8


@pytest.fixture(scope="module")
def tokenizer():
    return train_demo_tokenizer(vocab_size=400, max_length=256)


def check(kind: str, rows: list[dict], tokenizer, folder: Path, *, auto_class=None, length=64, **options) -> None:
    hf.AutoConfig.for_model(kind, **SIZES).save_pretrained(folder / kind)
    model_args = ModelArguments(model_name_or_path=str(folder / kind), **options)
    training = SFTConfig(output_dir=str(folder / "out"), max_length=length, use_cpu=True, bf16=False)
    check_before_loading(model_args, training, tokenizer, rows, auto_class=auto_class)


def test_what_a_kind_of_model_cannot_do_is_named_with_what_helps(tokenizer, tmp_path):
    for kind in ("t5", "bart"):
        said = rf"{kind} is an encoder and a decoder \({kind}\).* Give a causal language m"
        with pytest.raises(ConfigError, match=said):
            check(kind, TEXT, tokenizer, tmp_path)
    classifier = hf.AutoModelForSequenceClassification
    with pytest.raises(ConfigError, match=r"--max_length 256: .*roberta has 254 positions"):
        check("roberta", TEXT, tokenizer, tmp_path, auto_class=classifier, length=256)
    check("roberta", TEXT, tokenizer, tmp_path, auto_class=classifier, length=254)
    check("bert", TEXT, tokenizer, tmp_path, auto_class=classifier, length=256)
    every = {"use_peft": True, "lora_target_modules": ["all-linear"]}
    with pytest.raises(ConfigError, match=r"lora_dropout.* of MixtralForC.*, or use --lora_dropout 0"):
        check("mixtral", TEXT, tokenizer, tmp_path, **every)
    check("mixtral", TEXT, tokenizer, tmp_path, **every, lora_dropout=0.0)
    with pytest.raises(ConfigError, match=r"'out_proj' is incompatible with Mamba.*lm_head\. Name some of them\.$"):
        check("falcon_h1", TEXT, tokenizer, tmp_path, **every)
    classifier = {**every, "lora_task_type": "SEQ_CLS", "auto_class": hf.AutoModelForSequenceClassification}
    with pytest.raises(ConfigError, match=r"modules_to_save cannot be applied .*pre_classifier, classifier\. Name"):
        check("distilbert", TEXT, tokenizer, tmp_path, **classifier)
    asked, good, bad = ASK["content"], *CHATS.values()
    alone = {name: turns[1:] for name, turns in CHATS.items()}
    for row, expected in (
        ({"prompt": asked, **CHATS, "score": 1}, {**CHATS, "score": 1}),  # as ultrafeedback
        ({"prompt": asked, **alone}, CHATS),
        ({"prompt": asked, "completion": good[1:]}, {"prompt": [ASK], "completion": good[1:]}),
        ({"prompt": asked, "chosen": "a", "rejected": "b"}, {"prompt": asked, "chosen": "a", "rejected": "b"}),
        ({"prompt": [ASK], "chosen": good[1:], "rejected": bad[1:]}, {"prompt": [ASK], **alone}),
    ):
        assert with_prompt_turns(Dataset.from_list([row]))[0] == expected
    with pytest.raises(ConfigError, match=r"Some of `prompt`, `completion` are text, and some are turns"):
        check("llama", [{"prompt": [ASK], "completion": "This."}] * 8, tokenizer, tmp_path)


def test_a_sample_that_fails_does_not_cost_the_model(tmp_path):
    done: list[str] = []
    accelerator = SimpleNamespace(print=done.append, is_main_process=True, end_training=lambda: done.append("ended"))
    saves = {"save_state": lambda: done.append("state"), "save_model": lambda: done.append("model")}
    trainer = SimpleNamespace(**saves, accelerator=accelerator, state=SimpleNamespace(log_history=[]), ema=None)
    trainer.eval_dataset = [1]
    training = SimpleNamespace(output_dir=str(tmp_path), push_to_hub=False, eval_strategy="epoch")
    finish(trainer, training, None, None, lines={"checkpoint": "here", "sample": lambda: f"after {done[-1]}"})
    assert done[:2] == ["model", "state"] and "\nsample           after state\n" in done[2] and done[3] == "ended"
    assert "not evaluated: fewer rows are held out than all processes take at once" in done[2]
    fails = Mock(side_effect=RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"))
    finish(trainer, training, None, None, lines={"checkpoint": "here", "sample": fails})
    assert (
        done[4:6] == ["model", "state"] and "sample           could not be made: RuntimeError: probability" in done[6]
    )


def test_images_are_where_the_text_has_their_place():
    """LLaVA's and LLaMA-Factory's rows; TRL puts all images before the first question and leaves the word there."""
    asked = [{"role": "user", "content": "<image>\nWho?"}, {"role": "assistant", "content": "She."}]
    later = [*asked, {"role": "user", "content": "And <image> here, <image>"}, {"role": "assistant", "content": "He."}]
    plain = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Who?"}]
    rows = [{"images": ["a"], "messages": asked}, {"images": list("abc"), "messages": later}]
    rows += [{"images": ["a", "b"], "messages": plain}, {"images": [], "messages": plain}]
    found = list(with_places_of_images(Dataset.from_list(rows)))
    said = [["".join(part["text"] or "#" for part in turn["content"]) for turn in row["messages"]] for row in found]
    more = ["#Who?", "She.", "And#here,#", "He."]
    assert said == [["#Who?", "She."], more, ["Look.", "##Who?"], ["Look.", "Who?"]]
    for row in found:
        prepare_multimodal_messages(row["messages"], images=row["images"])  # counts places and images
    streamed = list(with_places_of_images(Dataset.from_list(rows).to_iterable_dataset()))
    assert [row["messages"] for row in streamed] == [row["messages"] for row in found]
    assert with_places_of_images(data := Dataset.from_list(rows[2:])) is data
