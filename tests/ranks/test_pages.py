"""The blocks of Python of user pages run, with small checkpoints in the place of names on the hub."""

import json
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import Accelerator
from torch.utils.data import DataLoader

import hf_fsdp_tools
from hf_fsdp_tools import TrainerSettings, from_pretrained, make_accelerator, steps
from tests._checkpoints import make_quantized, small_llama, word_tokenizer
from tests._dist import run_ranks
from tests._documents import PAGES, blocks
from tests._store import on_ranks, s3_server
from tests._training import ShardedTrainer, arguments, make_rows

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
for _package in ("s3fs", "moto"):
    pytest.importorskip(_package, reason="needs s3fs and moto: pip install 'hf-fsdp-tools[test]'")

BLOCKS = {
    f"{block.page}, block {block.number}": block.text
    for block in blocks()
    if (block.kind, block.runner) == ("run", PAGES)
}
INSTEAD = {
    "Qwen/Qwen3-8B": "{folder}/llama",
    "openai/gpt-oss-20b": "{folder}/mxfp4",
    "me/my-adapter": "adapter",
    "run/checkpoint-500": "run",  # the checkpoint that the block has saved
    "trainer.train(resume": "trainer.train(); trainer.train(resume",
    "dp_replicate_size=2": "dp_replicate_size=1",
}
"""What is in the pages, and what one rank on this machine runs in its place."""
LEAVES = {"out": "config.json", "out/ema": "config.json", "adapter": "adapter_config.json", "merged": "config.json"}
"""Folders that blocks save to, and a file that is there then."""
RUN = {"output_dir": "run", "max_steps": 1, "use_cpu": True, "report_to": "none", "checksums": True}
MAKES: dict[str, Callable[[Any], bool]] = {
    "short_reward": lambda function: function(["four", [{"content": ""}]]) == [-0.004, 0.0],
    "settings": lambda settings: settings == TrainerSettings(checksums=True),
}
"""Names that blocks leave, and what they are then."""


class Given(dict[str, Any]):
    """Names that a block takes for granted: each is made when the block first asks for it."""

    def __init__(self, code: str, folder: Path, url: str) -> None:
        super().__init__({name: getattr(door, name) for door in (hf_fsdp_tools, steps) for name in door.__all__})
        self.update({name: getattr(hf, name) for name in ("AutoModelForCausalLM", "BitsAndBytesConfig", "Trainer")})
        self.update({"torch": torch, "Accelerator": Accelerator, "islice": islice, "LoraConfig": peft.LoraConfig})
        reads = "HfArgumentParser" in code
        makes = hf.TrainingArguments if reads else partial(hf.TrainingArguments, use_cpu=True)
        self.update(TrainingArguments=makes, DPOTrainer=trl.DPOTrainer, HfArgumentParser=hf.HfArgumentParser)
        self.update(MyTrainer=type("MyTrainer", (ShardedTrainer,), {}))
        self.update(name=str(folder / "llama"), folder="saved", url=url, step=500)
        self._pairs = "DPOTrainer" in code

    def __missing__(self, name: str) -> Any:
        makers: dict[str, Callable[[], Any]] = {
            "tokenizer": word_tokenizer,
            "loader": lambda: DataLoader(make_rows(4), batch_size=2),  # type: ignore[arg-type]
            "accelerator": lambda: make_accelerator(cpu=True),
            "model": self._prepared,
            "optimizer": lambda: (self._prepared(), self["optimizer"])[1],
            "arguments": self._arguments,
            "data": self._data,
            "trainer": self._trainer,
        }
        if name not in makers:
            raise KeyError(name)  # a name of Python itself, or one that no page explains
        self[name] = makers[name]()
        return self[name]

    def _prepared(self) -> Any:
        model = from_pretrained(self["name"], accelerator=self["accelerator"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self["model"], self["optimizer"] = self["accelerator"].prepare(model, optimizer)
        return self["model"]

    def _arguments(self) -> Any:
        kind = trl.DPOConfig if self._pairs else hf.TrainingArguments
        return arguments(Path("run"), kind, max_steps=1, save_strategy="steps", save_steps=1, bf16=False)

    def _data(self) -> Any:
        if not self._pairs:
            return make_rows(4)
        from datasets import Dataset

        return Dataset.from_dict({"prompt": ["w3 w4"] * 4, "chosen": [" w5"] * 4, "rejected": [" w6"] * 4})

    def _trainer(self) -> ShardedTrainer:
        kind = type("Averaging", (ShardedTrainer,), {"fsdp_settings": TrainerSettings(ema_decay=0.999)})
        options = self["arguments"]  # before the model: the accelerator of the block's own model is no longer asked
        model = from_pretrained(self["name"], accelerator=make_accelerator(options))
        trainer: ShardedTrainer = kind(model=model, args=options, train_dataset=make_rows(4))
        trainer.train()
        return trainer


def one_block(title: str, folder: Path, url: str) -> None:
    code = BLOCKS[title]
    for there, here in INSTEAD.items():
        code = code.replace(there, here.format(folder=folder))
    place = folder / re.sub(r"\W+", "-", title)
    place.mkdir()
    os.chdir(place)
    Path("run.yaml").write_text(json.dumps(RUN))
    bodies = {"TrainerSettings": TrainerSettings}  # that of a class does not see what is given
    given = Given(code, folder, url)
    exec(compile(code, title, "exec"), bodies, given)
    for saved, file in LEAVES.items():
        assert f'"{saved}"' not in code or Path(saved, file).exists(), f"{title} leaves no {saved}/{file}"
    for name, is_right in MAKES.items():
        assert name not in given or is_right(given[name]), f"{title} makes {name} {given[name]}"


def test_blocks_of_user_pages_run(tmp_path: Path) -> None:
    assert len(BLOCKS) > 15
    word_tokenizer().save_pretrained(small_llama(tmp_path / "llama"))
    make_quantized("mxfp4", tmp_path / "mxfp4")
    cases = {title: partial(one_block, title) for title in BLOCKS}
    with s3_server() as server:
        run_ranks(on_ranks, 1, server.url, cases, tmp_path, server.url)
