"""What an older transformers, and whatever reads as it does (vLLM, llama.cpp, mlx-lm), finds in what is saved here.

For every type that both know, the older one writes its default `config.json`, as the hub has it, and some tokenizers;
they are read and saved here; and the older one must read from these files what it reads from its own.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import transformers

from tests.api import save_tokenizer, write_older_keys

WRITE = """
import sys, transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
for name in hf.CONFIG_MAPPING:
    try:
        hf.CONFIG_MAPPING[name]().save_pretrained(f"{sys.argv[1]}/found/config {name}")
    except Exception as error:
        print(name, error, file=sys.stderr)
words = Tokenizer(models.BPE())
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
letters = pre_tokenizers.ByteLevel.alphabet()
special = ["<pad>", "<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>"]
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=letters)
words.train_from_iterator(["a shard is a part of a tensor"] * 9, trainer)
marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "BloomTokenizerFast", "GPT2TokenizerFast",
             "GPTNeoXTokenizerFast", "Qwen2TokenizerFast"):
    extra = {"additional_special_tokens": ["<|im_start|>"], "extra_special_tokens": {"image": "<|im_start|>"}}
    for more in ({}, *({key: value} for key, value in extra.items())):
        made = getattr(hf, name)(tokenizer_object=words, **marks, **more)
        made.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
        made.padding_side, made.model_max_length = "left", 512
        made.save_pretrained(f"{sys.argv[1]}/found/tokenizer {name} {' '.join(more)}")
"""
READ = """
import json, pathlib, sys, transformers as hf
def read(path):
    try:
        if path.name.startswith("config"):
            return hf.AutoConfig.from_pretrained(path).to_dict()
        of = hf.AutoTokenizer.from_pretrained(path)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    texts = ["a shard is a part", "It's 12 o'clock,  isn't it?<|im_start|> def f(x):"]
    chat = of.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    named = of.special_tokens_map | {"image": of.special_tokens_map.get("image")}
    return {"ids": of(texts)["input_ids"], "chat": chat, "special": named, "side": of.padding_side, "n": len(of)}
skipped = {"transformers_version", "_name_or_path", "architectures"}
def differences(a, b, at=""):
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | {"error"} & b.keys()):
            if key not in skipped:
                yield from differences(a.get(key), b.get(key), f"{at}.{key}".strip("."))
    elif a != b:
        yield f"{at}: {a!r} is {b!r}"[:300]
root = pathlib.Path(sys.argv[1])
saved = sorted((root / "saved").iterdir())
print(json.dumps({path.name: [*differences(read(root / "found" / path.name), read(path))] for path in saved}))
"""


def equal_values(one: Any, other: Any) -> bool:
    return one.to_dict() | {"_name_or_path": ""} == other.to_dict() | {"_name_or_path": ""}


def equal_tokens(one: Any, other: Any) -> bool:
    return one.special_tokens_map == other.special_tokens_map and one.get_vocab() == other.get_vocab()


def compare(python: str, folder: Path) -> dict[str, list[str]]:
    """By name, what the older transformers reads otherwise from what is saved here than from its own file."""
    (folder / "found").mkdir(parents=True)
    subprocess.run([python, "-c", WRITE, str(folder)], check=True, capture_output=True)
    for found in sorted((folder / "found").iterdir()):
        saved = folder / "saved" / found.name
        try:
            kind = transformers.AutoConfig if found.name.startswith("config") else transformers.AutoTokenizer
            read = kind.from_pretrained(found)
        except Exception as error:  # a default of the older one that this one refuses
            print(f"{found.name}: not read here: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        if kind is transformers.AutoTokenizer:
            save_tokenizer(read, saved)
        else:
            read.save_pretrained(saved)
            write_older_keys(read, saved)
        again = kind.from_pretrained(saved)
        is_config = kind is transformers.AutoConfig
        same = equal_values(again, read) if is_config else equal_tokens(again, read)
        assert same, f"{found.name} is read otherwise here, too"
    done = subprocess.run([python, "-c", READ, str(folder)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))
