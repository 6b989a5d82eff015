"""What recipes share, in one process: options, data in its forms, and each mistake of a user in one line."""

import bz2
import gzip
import json
import lzma
import os
import re
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("trl")

import pyarrow as pa
import pytest
from datasets import Dataset, IterableDataset
from pyarrow import feather, parquet
from transformers import AutoTokenizer
from trl import ScriptArguments, SFTConfig

from hf_fsdp_tools import CheckpointError, ConfigError, scripting
from hf_fsdp_tools.scripting import ModelArguments, data, run
from hf_fsdp_tools.scripting.checks import check_prepared_rows
from tests._documents import blocks
from tests.api import make_demo_model, share_of_stream

pytest.importorskip("trl")

import transformers as hf
from trl.data_utils import prepare_multimodal_messages

from hf_fsdp_tools.scripting import check_before_loading, finish
from hf_fsdp_tools.scripting.formats import with_places_of_images, with_prompt_turns
from tests.api import train_demo_tokenizer

SFT = [{"text"}, {"messages"}, {"prompt", "completion"}]
CHAT = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "!"}]} for n in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"hidden_size": 16, "num_layers": 1, "vocab_size": 400}
    return str(make_demo_model(tmp_path_factory.mktemp("model") / "demo", **sizes, max_length=256))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


DEMO = {"learning_rate": 2e-3, "max_length": 192, "num_train_epochs": 6}


def parsed(monkeypatch, *options: str):
    monkeypatch.setattr(sys, "argv", ["recipe.py", "--use_cpu", "true", *options])
    kinds = (ScriptArguments, SFTConfig, ModelArguments)
    columns = ("text", "messages", "prompt", "completion")
    return scripting.parse_arguments(*kinds, defaults={"output_dir": "outputs/x"}, demo=DEMO, columns=columns)


def called(arguments: str):
    """A turn that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def marked(**mark):
    """A chat of which the first answer has that mark."""
    question = {"role": "user", "content": "?"}
    return {"messages": [question, {"role": "assistant", "content": "BAD"} | mark, question, CHAT[0]["messages"][1]]}


def lines(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def trainer_arguments(**options):
    defaults = {"output_dir": "out", "max_length": 64, "use_cpu": True, "bf16": False, "eval_strategy": "epoch"}
    return SFTConfig(**(defaults | options))


def texts(rows, count: int) -> list[str]:
    return [row["text"] for row in islice(rows, count)]


def splits(name: str, *, dataset_streaming=False, named: dict | None = None, columns=SFT, tokenizer=None, **options):
    script = ScriptArguments(dataset_name=name, dataset_streaming=dataset_streaming)
    script.column_names = dict.fromkeys(sorted(set().union(*columns))) | (named or {})
    return scripting.load_splits(script, trainer_arguments(**options), columns=columns, tokenizer=tokenizer)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--text_column body", "--text_column is for a dataset of your own: add --dataset_name"),
        ("--mixed-precision=bf16", "or the script --bf16 true."),
        ("--max_length -5 --per_device_train_batch_size 0", "length: give at least 2. --per_.*_size: give at least 1."),
        ("--lr 1e-4", "--lr is no option of this recipe: did you mean --learning_rate?"),
        ("--deepspeed ds.json", "--deepspeed is not used: FSDP2 shards here"),
        ("--max_grad_norm -1 --adam_beta2 1.5", "max_grad_norm: give at least 0. --adam_beta2: give less than 1."),
        ("--lr_scheduler_kwargs a", '--lr_scheduler_kwargs: write it as JSON, {"name": value}, and not as a'),
        ("--num_train_epochs nan --adam_epsilon 0", "epsilon: give at least 1e-16. --num_train_epochs nan: give a num"),
        ("--save_steps 0", "--save_steps 0 keeps no checkpoint on the way"),
        ("--load_in_8bit", "8-bit layers cannot be sharded. Use --load_in_4bit"),
        ("--use_peft --load_in_4bit --merge_adapters", "merge into the plain base"),
        ("--merge_adapters", "--merge_adapters needs an adapter: add --use_peft"),
        ("--lora_r 16", "--lora_r is for an adapter: add --use_peft"),
        ("--model_name_or_path x", "--model_name_or_path needs --dataset_name"),
        ("--report_to wandb", "--report_to wandb: .*pip install wandb.*, or leave --report_to out"),
        ("--use_liger_kernel", "--use_liger_kernel needs liger_kernel: pip install liger-kernel"),
        ("--early_stopping_patience 2 --eval_strategy no", "needs evaluations: leave --eval_strategy no out"),
        ("--push_to_hub", "--push_to_hub needs a token"),
        ("--fp16 true", "--fp16 needs a GPU. Use --bf16 true, or neither"),
        ("--config open.yaml", "open.yaml, line [12]: no YAML"),
        ("--config launch.yaml", "launch.yaml: distributed_type goes into the launch file: .* `accelerate launch`"),
    ],
)
def test_a_mistaken_option_is_one_line_with_the_cure(options, message, monkeypatch, tmp_path):
    texts = {"value": "learning_rate: fast", "open": "learning_rate: [", "none": "learning_rate:"}
    texts["launch"] = "learning_rate: 1e-4\ndistributed_type: FSDP\nnum_processes: 2"
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text + "\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None) if "liger" in options else None
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("hf_fsdp_tools.scripting.arguments.get_token", lambda: None)
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(monkeypatch, *options.split())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_options_of_the_command_line_of_a_file_and_of_the_demo(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-4\nmax_steps: 7\nenv: {A_NAME: b}\n")
    options = ["--config", "run.yaml", "--max_steps", "3", "--resume_from_checkpoint", "true", "--eval_strategy", "no"]
    monkeypatch.setenv("A_NAME", "a")
    _, training, model_args = parsed(monkeypatch, *options)
    assert (training.learning_rate, training.max_steps, training.resume_from_checkpoint) == (1e-4, 3, True)
    assert parsed(monkeypatch, "--max_length", "none")[1].max_length is None
    assert (training.max_length, model_args.default_max_length) == (192, SFTConfig.max_length)
    assert training.num_train_epochs == 6 and training.warmup_steps == 10, "the demo's"
    assert not training.eval_on_start and not training.gradient_checkpointing and os.environ["A_NAME"] == "b"
    folders = []
    for number in range(3):
        _, training, _ = parsed(monkeypatch)
        folders.append(training.output_dir)
        (tmp_path / training.output_dir / f"checkpoint-{number}").mkdir(parents=True)
    assert folders == ["outputs/x", "outputs/x-2", "outputs/x-3"]
    assert parsed(monkeypatch, "--resume_from_checkpoint", "true")[1].output_dir == "outputs/x-3"
    assert parsed(monkeypatch, "--output_dir", "outputs/x-2")[1].output_dir == "outputs/x-2", "what was asked for"
    assert parsed(monkeypatch, "--gradient_checkpointing", "true")[1].gradient_checkpointing
    _, training, _ = parsed(monkeypatch, "--early_stopping_patience", "2")
    assert training.load_best_model_at_end and training.save_strategy == "best"
    assert training.restore_callback_states_from_checkpoint, "a resumed run goes on counting"


@pytest.mark.parametrize("way", ["--model_name_or_path", "--model-name-or-path", "--model_name", "--config"])
def test_a_model_of_the_users_own_is_not_trained_with_the_settings_of_the_demo(way, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("model_name_or_path: demo\n")
    _, training, _ = parsed(monkeypatch, way, "run.yaml" if way == "--config" else "demo", "--dataset_name", "a.jsonl")
    assert training.learning_rate < 1e-3 and training.max_length != 192 and training.num_train_epochs == 3


def test_the_help_begins_with_the_recipes_options_and_an_error_or_ctrl_c_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "COMMANDS", {"8x80gb": "--model_name_or_path X"}, raising=False)
    with pytest.raises(SystemExit):
        parsed(monkeypatch, "--help")
    own, _ = capsys.readouterr().out.split("options of TRL and transformers:")
    assert "# eight GPUs of 80 GB, all weights\nhf-fsdp recipe --config_file 8x80gb --model_name_or_path X\n" in own
    with pytest.raises(ConfigError, match=r"--bf16: give a value; a switch takes true or false\.$"):
        parsed(monkeypatch, "--bf16")
    assert "\n  --merge_adapters" in own and "\n  --early_stopping_patience" in own and len(own.splitlines()) < 67
    with pytest.raises(SystemExit, match="1"):
        run(Mock(side_effect=ConfigError("this is wrong")), "finetune")
    assert capsys.readouterr().err == "finetune: error: this is wrong\n"
    with pytest.raises(SystemExit, match="1"):  # a library's, before the first step
        run(lambda: json.loads("{bad"), "finetune")
    said = capsys.readouterr().err
    kept = re.fullmatch(r"finetune: error: JSONDecodeError: .* \(.*\.py:\d+; see (.*)\)\n", said)
    assert kept and "in raw_decode" in Path(kept[1]).read_text()
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("signal.signal", Mock())
    with pytest.raises(SystemExit, match="130"):
        run(Mock(side_effect=KeyboardInterrupt), "finetune")
    assert "finetune: interrupted; --resume_from_checkpoint true goes on" in capsys.readouterr().err


# ---- data ----


def test_rows_of_the_page_on_data_are_what_recipes_train_on(tmp_path, monkeypatch):
    """Each, as a file of its own, becomes what TRL's trainer takes."""
    (block,), found = blocks("docs/data.md", "json"), []
    for row in block.text.splitlines():
        (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 20)
        script, training, _ = parsed(monkeypatch, "--model_name_or_path", "demo", "--dataset_name", "rows.jsonl")
        found.append(sorted(scripting.load_splits(script, training, columns=SFT)[0].column_names))
    assert found == [["messages"], ["messages"], ["completion", "prompt"], ["completion", "prompt"]]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("empty.jsonl", [], "empty.jsonl is empty"),
        ("bad.jsonl", ['{"text": "a"}', '{"text": '], r"bad.jsonl, line 2 is no JSON: .* Mend or delete that row"),
        ("qa.jsonl", [{"q": 1, "a": 2}] * 9, "has the columns a, q; none can be trained on. Needed: `text`; or"),
        ("n.jsonl", [{"text": 7}] * 9, "n.jsonl, line 1: the column `text` must hold text, and is 7"),
        ("m.jsonl", [{"messages": "hello"}] * 9, "`messages` must hold turns, each with `role` and `content`, and"),
        ("x.jsonl,y.jsonl", None, "x.jsonl: no such file"),
        ("d.jsonl", [{"prompt": "b", "completion": "c"}] * 3 + [{"prompt": "b"}], "line 4 has .* no `completion`"),
        ("o.jsonl", [*CHAT, {"messages": [{"role": "user", "text": "a"}]}], "line 41: .* one has `role`, `text`"),
        ("b.jsonl", [{"messages": [*CHAT[0]["messages"], called("{bad")]}] * 9, "calls of tools as JSON.*'{bad'"),
        ("k.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": [], "completion": "b"}] * 4, "line 2: .* text in"),
        ("h.csv", ["Was it good?,yes", "Was it bad?,no"], "The first line is no heading"),
        ("s.csv", ["text;label", "a;b"], "Columns are separated by ';'"),
        ("q.jsonl", [{"d": {"x": CHAT[0]["messages"]}}] * 9, r"Name its turns: --messages_column d\.x"),
        ("label.jsonl", [{"text": "a", "label": 1}] * 8 + [{"text": "b", "label": None}], "line 9 has no `label`"),
        ("w.jsonl", [{**CHAT[0], "images": ["a.png"]}] * 9, "have `images`.*Use vision_language, or remove"),
        ("z.jsonl", [*CHAT, marked(weight=0)], "line 41: .* marked as not to be trained on .*--assistant_only"),
    ],
)
def test_data_that_cannot_be_trained_on_is_named(name, rows, message, tmp_path):
    if rows is not None:
        lines(tmp_path / name, rows)
    with pytest.raises(ConfigError, match=message) as caught:
        splits(name, columns={"label.jsonl": [{"text", "label"}]}.get(name, SFT))
    assert "\n" not in str(caught.value)


def test_empty_rows_are_left_out_and_a_twentieth_is_held_out_unless_nothing_is_evaluated(tmp_path, capsys, monkeypatch):
    (tmp_path / "lines.txt").write_text("one two\n\nthree four\n \t\n" * 20)
    training, held_out = splits("lines.txt")
    assert set(training["text"]) | set(held_out["text"]) == {"one two", "three four"}
    assert "lines.txt: 40 of 80 rows are empty and are left out" in capsys.readouterr().out
    training, held_out = splits(lines(tmp_path / "c.jsonl", [*CHAT, {"messages": []}]))
    assert len(training) + len(held_out) == len(CHAT) and "the assistant says nothing" not in capsys.readouterr().out
    stream, _ = splits("lines.txt", dataset_streaming=True, max_steps=2, eval_strategy="no")
    assert texts(stream, 3) == ["one two", "three four", "one two"]
    data = lines(tmp_path / "text.jsonl", [{"text": str(n)} for n in range(52)])
    training, held_out = splits(data)
    assert (len(training), len(held_out)) == (49, 3) and not set(training["text"]) & set(held_out["text"])
    assert "49 rows to train on, 3 to evaluate" in capsys.readouterr().out
    training, held_out = splits(data, eval_strategy="no")
    assert len(training) == 52 and held_out is None


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path):
    (tmp_path / "old.csv").write_bytes(("text\nplain\n" + "café\n" * 9).encode("latin1"))
    with pytest.raises(ConfigError, match=r"line 3 is not UTF-8 \(byte 0xe9\)\. Convert it: iconv"):
        splits("old.csv")


def test_conversations_are_shown_to_the_chat_template_and_marked_turns_are_masked(model, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(model)
    refuses = AutoTokenizer.from_pretrained(model)
    refuses.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    refuses.chat_template += tokenizer.chat_template
    system = {"messages": [{"role": "system", "content": "s"}, *CHAT[0]["messages"]]}
    data = lines(tmp_path / "0.jsonl", [*CHAT[:17], {"messages": []}, system])
    with pytest.raises(ConfigError, match=r"line 19: .* turns that the chat template takes.*no system"):
        splits(data, tokenizer=refuses, eval_strategy="no")
    refuses.chat_template = "{% for %}"
    with pytest.raises(ConfigError, match="line 1 of the chat template is no Jinja"):
        splits(lines(tmp_path / "j.jsonl", CHAT), tokenizer=refuses)
    refuses.chat_template = "You are an assistant."
    with pytest.raises(ConfigError, match=r"shows no turn of the user: '1\?' becomes 'You are"):
        splits(lines(tmp_path / "c.jsonl", CHAT[1:]), tokenizer=refuses)
    alone = [*CHAT, {"messages": CHAT[0]["messages"][:1]}]
    with pytest.raises(ConfigError, match=r"line 41: .*a turn of the assistant, for --assistant_only_loss"):
        splits(lines(tmp_path / "a.jsonl", alone), tokenizer=tokenizer, assistant_only_loss=True)
    for name, off, on in (("weight", 0, 1), ("train", False, True), ("loss", False, True)):
        row = marked(**{name: off})
        row["messages"][3] = row["messages"][3] | {name: on}
        data = lines(tmp_path / f"{name}.jsonl", [row] * 9)
        training, held_out = splits(data, tokenizer=tokenizer, assistant_only_loss=True)
        for part in (training, held_out):
            trained = tokenizer.decode([label for label in part[0]["labels"] if label != -100])
            assert "!" in trained and "BAD" not in trained, name
            assert "BAD" in tokenizer.decode(part[0]["input_ids"])


def test_files_of_all_endings_are_read_and_folders_of_two_kinds_are_not(tmp_path):
    rows = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(9))
    for name in ("a.ndjson", "a.JSONL"):
        (tmp_path / name).write_text(rows)
    for module, name in ((gzip, "a.jsonl.gz"), (bz2, "a.jsonl.bz2"), (lzma, "a.jsonl.xz")):
        (tmp_path / name).write_bytes(module.compress(rows.encode()))
    (tmp_path / "a.tsv").write_text("text\tx\n" + "row 0\t1\n" * 9)
    table = pa.table({"text": ["row 0"] * 9})
    feather.write_feather(table, tmp_path / "a.arrow")
    parquet.write_table(table, tmp_path / "a.pq")
    for name in sorted(path.name for path in tmp_path.glob("a.*")):
        assert splits(name, eval_strategy="no")[0][0]["text"] == "row 0", name
    for folder, other, reason in (
        ("two", "b.csv", "b.csv: files of one kind are read from a folder"),
        ("more", "b.jsonl", "a.jsonl has the columns text, and b.jsonl more, text"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(rows)
        (tmp_path / folder / other).write_text(rows.replace("{", '{"more": 1, '))
        with pytest.raises(ConfigError, match=reason):
            splits(folder)
    for encoding, text in (("utf-16", rows), ("utf-16-le", "plain\nwords"), ("utf-16-be", "две строки\nслов")):
        (tmp_path / "wide.txt").write_text(text, encoding=encoding)
        with pytest.raises(ConfigError, match=rf"wide.txt is UTF-16.* iconv -f {encoding.replace('6-', '6')} -t"):
            splits("wide.txt")


@pytest.mark.parametrize("streaming", [False, True])
def test_turns_of_other_programs_become_those_of_chat_templates(streaming, tmp_path, capsys):
    def first(*rows):
        data = lines(tmp_path / f"{sum(1 for _ in tmp_path.iterdir())}.jsonl", rows * 2)
        part, _ = splits(data, dataset_streaming=streaming, max_steps=1, eval_strategy="no")
        return [{key: each for key, each in turn.items() if each is not None} for turn in next(iter(part))["messages"]]

    def shared(*turns, **more):
        return {"conversations": [{"from": name, "value": value} for name, value in turns], **more}

    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": '{"b": 2}'}]
    known = ("f", {"a": 1}), ("g", {"b": 2})
    read = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in known]
    turns = ("human", "?"), ("function_call", json.dumps(calls)), ("observation", "3"), ("gpt", "!")
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    called = {"role": "assistant", "content": "", "tool_calls": read}
    assert first(shared(*turns)) == [question, called, {"role": "tool", "content": "3"}, answer]
    assert first(shared(turns[0], turns[3], system="s")) == [{"role": "system", "content": "s"}, question, answer]
    in_parts = [{"type": "text", "text": "?"}, {"type": "text", "text": "!"}]
    assert first({"messages": [{"role": "Human", "content": in_parts}]}) == [question | {"content": "?!"}]
    assert first({"messages": [question, answer], "prompt": "x", "labels": 1}) == [question, answer]
    assert ".jsonl: not used: labels, prompt" in capsys.readouterr().out


def test_rows_of_several_kinds_and_names_are_mixed_and_streams_are_read_in_turn(tmp_path):
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]]}
    alpaca = lines(tmp_path / "a.jsonl", [row] * 40)
    said = [("user", "a"), ("assistant", "b"), ("user", "Add.\n\n1 2"), ("assistant", "3")]
    turns = [{"role": role, "content": content} for role, content in said]
    assert splits(alpaca)[0][0] == {"prompt": turns[:3], "completion": turns[3:]}
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    shared = lines(tmp_path / "s.jsonl", [{"conversations": turns, "id": n} for n in range(40)])
    messages = splits(shared)[0][0]["messages"]
    assert [(turn["role"], turn["content"]) for turn in messages] == [("user", "Hi"), ("assistant", "Ho")]
    chats = lines(tmp_path / "c.jsonl", CHAT)
    mixed, held_out = splits(f"{shared}, {chats}")
    assert mixed.column_names == ["messages"] and len(mixed) + len(held_out) == 80
    with pytest.raises(ConfigError, match="no column in common"):
        splits(f"{alpaca},{chats}")
    plain = lines(tmp_path / "p.jsonl", [{"prompt": "a", "completion": "b"}] * 40)
    with pytest.raises(ConfigError, match=r"cannot be mixed: some of `completion`, `prompt` have other types"):
        splits(f"{plain},{alpaca}")
    names = ",".join(lines(tmp_path / f"{n}.jsonl", [{"text": f"{n}{row}"} for row in range(400)]) for n in "ab")
    with pytest.raises(ConfigError, match="--max_steps"):
        splits(names, dataset_streaming=True)
    training, held_out = splits(names, dataset_streaming=True, max_steps=4)
    assert texts(training, 4) == ["a80", "b80", "a81", "b81"] and len(held_out) == 160


@pytest.mark.parametrize("streaming", [False, True])
def test_columns_of_other_names_get_those_of_the_recipe(streaming, tmp_path, monkeypatch):
    def first(rows, **named):
        data = lines(tmp_path / f"{len(named)}{next(iter(named))}.jsonl", rows * 40)
        training, _ = splits(data, dataset_streaming=streaming, max_steps=1, eval_strategy="no", named=named)
        return next(iter(training))

    assert first([{"body": "a", "id": 1}], text="body") == {"text": "a", "id": 1}
    assert first([{"body": "a"}], text="body") == {"text": "a"}
    exchanged = first([{"prompt": "a", "completion": "b"}], prompt="completion", completion="prompt")
    assert exchanged == {"prompt": "b", "completion": "a"}
    pair = first([{"translation": {"en": "Yes.", "de": "Ja."}}], prompt="translation.en", completion="translation.de")
    assert (pair["prompt"], pair["completion"]) == ("Yes.", "Ja.")


# ---- before the model is loaded ----


def check(model, rows, tokenizer=None, model_options=None, auto_class=None, **options):
    arguments = ModelArguments(model_name_or_path=model, dtype=None, **(model_options or {}))
    arguments.default_max_length = SFTConfig.max_length
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
    data, training = Dataset.from_list(rows), trainer_arguments(**options)
    scripting.check_before_loading(arguments, training, tokenizer, data, auto_class=auto_class)


def test_each_mistake_is_found_before_the_model_is_loaded(model, tmp_path, capsys, monkeypatch):
    text = [{"text": "some words " * 30}] * 8
    check(model, CHAT)
    check(model, CHAT, assistant_only_loss=True)
    check(model, text)
    check(model, text, max_length=SFTConfig.max_length)  # which nobody asked for
    assert "--max_length 256: " in capsys.readouterr().out
    check(model, text, max_length=512)
    assert "has 256 positions, and angles beyond them" in capsys.readouterr().out
    bare = AutoTokenizer.from_pretrained(model)
    bare.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template. Give --chat_template_path"):
        check(model, CHAT, bare)
    bare.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    check(model, CHAT, bare)
    with pytest.raises(ConfigError, match="marks the assistant's turns"):
        check(model, CHAT, bare, assistant_only_loss=True)
    with pytest.raises(ConfigError, match="--assistant_only_loss needs chats"):
        check(model, text, assistant_only_loss=True)
    with pytest.raises(ConfigError, match=r"--completion_only_loss needs `prompt` and `completion`, .* have text"):
        check(model, text, completion_only_loss=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<seen>", "<unseen>"])
    # a token without a row in the model, where a text has it
    text = [{"text": "some words"}] * 200
    check(model, text, tokenizer)
    with pytest.raises(ConfigError, match=r"has 402 tokens, and the model 400 rows .*'<seen>' has none"):
        check(model, [*text, {"text": "a <seen> word"}], tokenizer)
    # adapters that would train nothing
    adapter = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}
    check(model, CHAT, model_options=adapter)
    check(model, CHAT, model_options=adapter | {"lora_target_modules": ["all-linear"]})
    with pytest.raises(ConfigError, match=r"'c_attn'.* not found .*Linear layers of LlamaForCausalLM: q_proj, k_proj"):
        check(model, CHAT, model_options=adapter | {"lora_target_modules": ["c_attn"]})
    with pytest.raises(ConfigError, match=r"modules k_prog: LlamaForCausalLM has none .* did you mean k_proj"):
        check(model, CHAT, model_options=adapter | {"lora_target_modules": ["q_proj", "k_prog"]})
    Path("o").mkdir()
    Path("o/merged").symlink_to(model)
    for name, folder in ((model, model), (model, "o")):
        with pytest.raises(ConfigError, match=r"--model_name_or_path .* is there, and would be destroyed"):
            check(name, CHAT, output_dir=folder)


def test_prepared_rows_are_looked_at_and_lists_of_model_arguments_are_read(capsys):
    args = SimpleNamespace(max_length=3)
    masked = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 4
    for rows in (masked, []):
        with pytest.raises(ConfigError, match=r"All labels of the first rows are masked within --max_length 3"):
            check_prepared_rows(SimpleNamespace(args=args, train_dataset=rows))
    check_prepared_rows(SimpleNamespace(args=args, train_dataset=[{"input_ids": [1], "labels": [2]}] * 15), 40)
    assert "25 of 40 rows have no answer within --max_length 3: 15 are trained on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_free": True}, r"--padding_free true cuts no rows.*64. Use --max_length none .*--packing"),
        ({"optim": "adamw_bnb_8bit"}, r"AdamW of bitsandbytes keeps a state that cannot be resumed here.*AdamW8bit"),
        ({"optim": "grokadamw"}, r"--optim grokadamw: .*pip install grokadamw"),
        ({"resume_from_checkpoint": True}, "out holds no checkpoint"),
    ],
    ids=str,
)
def test_options_that_would_fail_after_loading(model, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        check(model, CHAT, **options)


def test_models_without_a_tokenizer_and_chat_templates_of_files(model, tmp_path, capsys):
    def refused(name, message):
        with pytest.raises(CheckpointError, match=message):
            scripting.load_tokenizer(ModelArguments(model_name_or_path=str(name)), trainer_arguments())

    refused("nope", "'nope'")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "llama"}')
    refused(bare, "has a config and no tokenizer that can be loaded")

    def loaded(path):
        arguments = trainer_arguments(chat_template_path=str(path))
        return scripting.load_tokenizer(ModelArguments(model_name_or_path=model), arguments)

    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert loaded("chat.jinja").chat_template == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"chat.j2: no such file"):
        loaded("chat.j2")
    other = AutoTokenizer.from_pretrained(model)
    other.chat_template = "<|start|>{{ messages }}"
    other.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"uses <\|start\|>, which the tokenizer of the model does not have"):
        loaded(tmp_path / "other")


# ---- streams ----


def stream(files: int, count: int = 7) -> IterableDataset:
    def rows(files: list[int]):
        for file in files:
            for row in range(count):
                yield {"text": f"{file}-{row}"}

    return IterableDataset.from_generator(rows, gen_kwargs={"files": list(range(files))})


def share(monkeypatch, rank: int, ranks: int, whole: IterableDataset, **options) -> IterableDataset:
    monkeypatch.setattr(data, "rank_and_size", lambda: (rank, ranks))
    return share_of_stream(whole, **options)


@pytest.mark.parametrize(("files", "ranks"), [(1, 2), (3, 2), (4, 2), (4, 3)])
def test_each_row_belongs_to_one_rank_and_no_rank_ends(files, ranks, monkeypatch):
    held_out = [{"text": "0-0"}, {"text": "0-3"}]
    whole = stream(files).skip(2)  # as rows are held out of a stream
    shares = []
    for rank in range(ranks):
        endless = texts(share(monkeypatch, rank, ranks, whole, held_out=held_out), 200)
        assert len(endless) == 200
        turn = endless.index(endless[0], 1)
        assert endless[:turn] == endless[turn : 2 * turn], "again in the same order"
        shares.append(set(endless))
    assert sum(map(len, shares)) == len(set.union(*shares)), "no row belongs to two ranks"
    assert not set.union(*shares) & {"0-0", "0-3"}
    sizes = sorted(map(len, shares))
    assert sizes[-1] - sizes[0] <= 3, "nearly as many rows for each"
    assert len(set.union(*shares)) >= 7 * files - 4


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


def check_kind(kind: str, rows: list[dict], tokenizer, folder: Path, *, auto_class=None, length=64, **options) -> None:
    hf.AutoConfig.for_model(kind, **SIZES).save_pretrained(folder / kind)
    model_args = ModelArguments(model_name_or_path=str(folder / kind), **options)
    training = SFTConfig(output_dir=str(folder / "out"), max_length=length, use_cpu=True, bf16=False)
    check_before_loading(model_args, training, tokenizer, rows, auto_class=auto_class)


def test_what_a_kind_of_model_cannot_do_is_named_with_what_helps(tokenizer, tmp_path):
    for kind in ("t5", "bart"):
        said = rf"{kind} is an encoder and a decoder \({kind}\).* Give a causal language m"
        with pytest.raises(ConfigError, match=said):
            check_kind(kind, TEXT, tokenizer, tmp_path)
    classifier = hf.AutoModelForSequenceClassification
    with pytest.raises(ConfigError, match=r"--max_length 256: .*roberta has 254 positions"):
        check_kind("roberta", TEXT, tokenizer, tmp_path, auto_class=classifier, length=256)
    check_kind("roberta", TEXT, tokenizer, tmp_path, auto_class=classifier, length=254)
    check_kind("bert", TEXT, tokenizer, tmp_path, auto_class=classifier, length=256)
    every = {"use_peft": True, "lora_target_modules": ["all-linear"]}
    with pytest.raises(ConfigError, match=r"lora_dropout.* of MixtralForC.*, or use --lora_dropout 0"):
        check_kind("mixtral", TEXT, tokenizer, tmp_path, **every)
    check_kind("mixtral", TEXT, tokenizer, tmp_path, **every, lora_dropout=0.0)
    with pytest.raises(ConfigError, match=r"'out_proj' is incompatible with Mamba.*lm_head\. Name some of them\.$"):
        check_kind("falcon_h1", TEXT, tokenizer, tmp_path, **every)
    classifier = {**every, "lora_task_type": "SEQ_CLS", "auto_class": hf.AutoModelForSequenceClassification}
    with pytest.raises(ConfigError, match=r"modules_to_save cannot be applied .*pre_classifier, classifier\. Name"):
        check_kind("distilbert", TEXT, tokenizer, tmp_path, **classifier)
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
        check_kind("llama", [{"prompt": [ASK], "completion": "This."}] * 8, tokenizer, tmp_path)


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
