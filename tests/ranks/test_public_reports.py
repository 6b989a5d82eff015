"""Public reports of others' tools, tried on this package, once a day; each case ends right or in one clear line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    Trainer,
)
from trl import ScriptArguments, SFTConfig, SFTTrainer

from hf_fsdp_tools import CheckpointError, ConfigError, from_pretrained, make_accelerator, save_pretrained
from hf_fsdp_tools.scripting import load_splits
from tests._checkpoints import full, make_checkpoint, make_model, word_tokenizer
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, make_rows, new_accelerator
from tests.api import make_demo_model
from tests.recipes._launch import ONCE, launch_series, write_lines

pytestmark = pytest.mark.nightly

QUIET = {"load_kwargs": {"progress": False}}


def settings_of_generation_in_the_config(folder: Path) -> None:
    """transformers#41695."""
    plain = BartForConditionalGeneration.from_pretrained(folder / "bart")
    model, ids = from_pretrained(folder / "bart", **QUIET), torch.arange(10, 22)[None]
    assert torch.equal(model.generate(ids), plain.generate(ids))
    save_pretrained(model, folder / "bart_saved")
    assert json.loads((folder / "bart_saved" / "generation_config.json").read_text())["num_beams"] == 3


def a_step_that_is_skipped_on_nan(folder: Path) -> None:
    """verl#1506: the bad value lies in the shard of one rank."""
    accelerator = new_accelerator()
    model: Any = from_pretrained(folder / "llama", accelerator=accelerator, **QUIET)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    ids = torch.arange(3, 15)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    if dist.get_rank() == 0:
        model.lm_head.weight.grad.to_local()[0, 0] = float("nan")
    gradients = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(ConfigError, match="holds a part of the answer"):
        any(not torch.isfinite(gradient).all() for gradient in gradients)
    assert any(not torch.isfinite(gradient).all().full_tensor() for gradient in gradients)


def a_criterion_with_parameters(folder: Path) -> None:
    """ClassyVision#394."""
    rows, target = torch.arange(3, 15)[None] + dist.get_rank(), torch.tensor([dist.get_rank()])
    for is_prepared in (False, True):
        accelerator = new_accelerator()
        torch.manual_seed(0)
        model: Any = from_pretrained(folder / "llama", accelerator=accelerator, auto_class=AutoModel, **QUIET)
        criterion: Any = nn.Linear(model.config.hidden_size, 2)
        optimizer: Any = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        if not is_prepared:
            with pytest.raises(ConfigError, match=r"prepare\(model, criterion, optimizer\)"):
                accelerator.prepare(model, optimizer)
            continue
        plain, head = AutoModel.from_pretrained(folder / "llama"), nn.Linear(model.config.hidden_size, 2)
        head.load_state_dict(criterion.state_dict())
        model, criterion, optimizer = accelerator.prepare(model, criterion, optimizer)
        accelerator.backward(nn.functional.cross_entropy(criterion(model(rows).last_hidden_state.mean(1)), target))
        both = torch.stack([torch.arange(3, 15), torch.arange(4, 16)])
        hidden = plain(both).last_hidden_state.mean(1)
        nn.functional.cross_entropy(head(hidden), torch.arange(2)).backward()
        torch.testing.assert_close(full(criterion.weight.grad), head.weight.grad)
        name = "layers.0.mlp.up_proj.weight"
        torch.testing.assert_close(full(model.get_parameter(name).grad), plain.get_parameter(name).grad)


def the_optimizer_of_one_process(folder: Path) -> None:
    """pytorch-lightning#17747."""
    args = arguments(folder / "two", max_steps=2)
    model = from_pretrained(folder / "llama", accelerator=make_accelerator(args), **QUIET)
    trainer = ShardedTrainer(model=model, args=args, train_dataset=make_rows(16))
    with pytest.raises(CheckpointError, match=r"optimizer.pt is that of a run without FSDP") as error:
        trainer.train(resume_from_checkpoint=str(folder / "one" / "checkpoint-1"))
    assert "\n" not in str(error.value)


def test_scripts_and_checkpoints_of_other_tools(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "llama")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    BartForConditionalGeneration(BartConfig(vocab_size=131, **sizes, **heads)).save_pretrained(tmp_path / "bart")
    (tmp_path / "bart" / "generation_config.json").unlink()
    file = tmp_path / "bart" / "config.json"
    older = {"num_beams": 3, "max_length": 17, "min_length": 9, "no_repeat_ngram_size": 2, "forced_bos_token_id": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | older))
    alone = arguments(tmp_path / "one", max_steps=1, save_strategy="steps", save_steps=1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    Trainer(model=plain, args=alone, train_dataset=make_rows(16)).train()
    assert (tmp_path / "one" / "checkpoint-1" / "optimizer.pt").is_file()
    cases = (
        settings_of_generation_in_the_config, a_step_that_is_skipped_on_nan, a_criterion_with_parameters,
        the_optimizer_of_one_process,
    )  # fmt: skip
    run_ranks(run_cases, 2, cases, tmp_path)


LLAMA = "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] | trim }} {% endfor %}"
QWEN = (
    "{% for m in messages %}{% if m.role in ['user', 'system', 'assistant'] %}{{ m.role + ' ' + m.content }} "
    "{% if m.tool_calls %}<call> {{ m.tool_calls[0].function.arguments }} {% endif %}"
    "{% elif m.role == 'tool' %}<response> {{ m.content }} {% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [LLAMA, QWEN])
def test_rows_of_other_tools_are_text_for_templates_of_either_kind(tmp_path: Path, template: str) -> None:
    """LlamaFactory#5735, NeMo-RL#1181."""

    def text(row: dict[str, Any]) -> str:
        script = ScriptArguments(dataset_name=write_lines(tmp_path / f"{len([*tmp_path.iterdir()])}.jsonl", [row] * 4))
        args = SFTConfig(str(tmp_path / "out"), eval_strategy="no", use_cpu=True, bf16=False, report_to=[])
        data, _ = load_splits(script, args, columns=[{"messages"}])
        tokenizer = word_tokenizer()
        tokenizer.chat_template = template
        SFTTrainer(make_model("llama"), args, train_dataset=data, processing_class=tokenizer)
        found: str = tokenizer.apply_chat_template(data[0]["messages"], tokenize=False)
        return found

    parts = {role: [{"type": "text", "text": f"w{n}"}] for n, role in ((4, "user"), (5, "assistant"))}
    assert "{'" not in text({"messages": [{"role": role, "content": content} for role, content in parts.items()]})
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    turns = ("human", "w4"), ("function_call", call), ("observation", "w22"), ("gpt", "w5")
    found = text({"conversations": [{"from": name, "value": value} for name, value in turns], "tools": "[]"})
    assert "observation" not in found and "function_call" not in found
    if template == QWEN:
        assert "{'city': 'Rome'}" in found and "<response> w22" in found


def test_a_recipe_on_tables_and_columns_that_do_not_fit(tmp_path: Path) -> None:
    """transformers#11102; and a set for classification."""
    model = str(make_demo_model(tmp_path / "model", hidden_size=16, num_layers=1, vocab_size=400, max_length=256))
    larger = AutoModelForCausalLM.from_pretrained(model)
    larger.save_pretrained(tmp_path / "larger")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<tool_{n}>" for n in range(20)])
    tokenizer.save_pretrained(tmp_path / "larger")
    labelled = write_lines(tmp_path / "a.jsonl", [{"text": f"row {n}", "labels": n % 2} for n in range(40)])
    tools = write_lines(
        tmp_path / "b.jsonl", [{"prompt": f"q {n} ", "completion": f"a <tool_{n % 20}>"} for n in range(40)]
    )
    words = ["finetune", "--max_length", "64", "--max_steps", "1", *ONCE, "--model_name_or_path"]
    runs = launch_series(
        tmp_path,
        {"labels": [*words, model, "--dataset_name", labelled]},
        refused={"tokens": [*words, str(tmp_path / "larger"), "--dataset_name", tools]},
    )
    assert "a.jsonl: left out next to text: labels" in runs.of("labels")
    assert "tokens, and the model" in runs.error("tokens")
