"""The demo checkpoint is what a hub checkpoint looks like, its text is real, and both are the same each time."""

import json
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.scripting import demo
from hf_fsdp_tools.scripting.demo import demo_split, demo_text, make_demo_model
from hf_fsdp_tools.scripting.demo_data import demo_rows, write_demo_dataset
from hf_fsdp_tools.scripting.demo_images import write_demo_images

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_key_value_heads": 1, "vocab_size": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_demo_model(tmp_path_factory.mktemp("demo") / "new" / "model", **SMALL, max_shard_size="20KB")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_opens_with_transformers(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.num_hidden_layers == 2 and model.config.num_key_value_heads == 1
    assert len(list(folder.glob("*.safetensors"))) >= 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())


def test_tokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert len(tokenizer) == config.vocab_size == 400
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert ids == (0, 1, 2) == (config.pad_token_id, config.bos_token_id, config.eos_token_id)
    for text in (*demo_text()[:3], "für 日本 🙂"):
        tokens = tokenizer(text).input_ids
        assert tokens[0] == tokenizer.bos_token_id
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert len(tokenizer(demo_text()[0]).input_ids) < 0.7 * len(demo_text()[0])


def test_chat_template_marks_what_the_assistant_says(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A statement."}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|bos|><|user|>\nWhat is it?<|eos|>\n<|assistant|>\nA statement.<|eos|>\n"
    )
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|assistant|>\n")
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == "A statement.<|eos|>"


def test_the_same_arguments_give_the_same_bytes(folder, tmp_path):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    again = make_demo_model(tmp_path / "again", **SMALL, max_shard_size="20KB")
    assert contents(again) == contents(folder)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_another_seed_gives_other_weights(folder, tmp_path):
    other = contents(make_demo_model(tmp_path / "other", **SMALL, seed=1, max_shard_size="20KB"))
    differing = {name for name, data in contents(folder).items() if other[name] != data}
    assert {name for name in differing if not name.endswith(".safetensors")} == {"demo_model.json"}
    assert len(differing) > 1


def test_making_it_twice_leaves_it_as_it_is(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert make_demo_model(folder, **SMALL, max_shard_size="20KB") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_nothing_is_overwritten(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"made with other arguments.*name a new folder or delete this one"):
        make_demo_model(folder, **SMALL, seed=3)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no demo model.*name a new folder or delete this one"):
        make_demo_model(tmp_path, **SMALL)
    with pytest.raises(ConfigError, match="name a new folder"):
        make_demo_model(tmp_path / "config.json", **SMALL)
    assert contents(tmp_path) == {"config.json": b"{}"}


def test_a_failure_leaves_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="ask for less"):
        make_demo_model(tmp_path / "model", **{**SMALL, "vocab_size": 1_000_000})
    assert list(tmp_path.iterdir()) == []


def test_impossible_sizes_are_all_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        make_demo_model(tmp_path / "x", hidden_size=30, num_heads=4, num_key_value_heads=3, vocab_size=3)
    for fact in ("use a multiple of 8", "num_key_value_heads 3 does not divide", "need at least 262"):
        assert fact in str(caught.value)
    with pytest.raises(ConfigError, match="num_layers is 0; it must be at least 1"):
        make_demo_model(tmp_path / "x", num_layers=0)


def test_text_is_split_without_overlap():
    train, held_out = demo_split()
    assert sorted(train + held_out) == sorted(demo_text())
    assert len(train) + len(held_out) > 300
    assert 0.08 < len(held_out) / len(train) < 0.13
    paragraphs = [set("\n\n".join(part).split("\n\n")) for part in (train, held_out)]
    shared = {paragraph for paragraph in paragraphs[0] & paragraphs[1] if len(paragraph) > 80}
    assert not shared
    assert max(map(len, train)) < 2000
    assert any('The "while" statement' in passage for passage in demo_text())


def test_dataset_files(tmp_path):
    paths = write_demo_dataset(tmp_path / "data")
    assert [path.name for path in paths] == ["train.jsonl", "eval.jsonl"]
    for path, passages in zip(paths, demo_split(), strict=True):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert rows == [{"text": passage} for passage in passages]
    before = contents(tmp_path / "data")
    assert write_demo_dataset(tmp_path / "data") == paths
    assert contents(tmp_path / "data") == before


def test_python_without_the_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ConfigError, match="use a full CPython"):
        demo_text()


def test_it_learns(folder):
    """A few steps lower the loss on held-out text: the checkpoint is trainable as it is."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    train, held_out = demo_split()

    def batch(passages):
        ids = [token for passage in passages for token in tokenizer(passage).input_ids]
        return torch.tensor(ids[: len(ids) // 64 * 64]).view(-1, 64)

    evaluation = batch(held_out[:8])
    with torch.no_grad():
        before = model(input_ids=evaluation, labels=evaluation).loss.item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for rows in batch(train[:100]).split(16)[:20]:
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = model(input_ids=evaluation, labels=evaluation).loss.item()
    assert after < before - 0.5


def test_instructions_preferences_and_classes_are_made_of_the_same_passages():
    passages = demo_text()
    told = demo_rows("instructions")
    assert [row["messages"][1]["content"] for row in told] == passages
    assert len({row["messages"][0]["content"] for row in told}) == len(told), "no two questions are the same"
    pairs = demo_rows("preferences")
    assert [row["chosen"][0]["content"] for row in pairs] == passages
    worse = [row["rejected"][0]["content"] for row in pairs]
    shuffled = [sorted(one.split()) == sorted(passage.split()) for one, passage in zip(worse, passages, strict=True)]
    strange = [one in passages and one != passage for one, passage in zip(worse, passages, strict=True)]
    assert all(one or other for one, other in zip(shuffled, strange, strict=True))
    for split in (slice(0, None, 10), slice(None)):  # the rows held out, and all
        assert 0.3 < sum(shuffled[split]) / len(shuffled[split]) < 0.7
    labels = [row["label"] for row in demo_rows("classes")]
    counts = {label: labels.count(label) for label in set(labels)}
    assert len(counts) == 4 and min(counts.values()) > len(labels) / 8, counts
    assert demo_rows("preferences") == pairs, "the same each time"
    with pytest.raises(ConfigError, match="'poems'; choose text"):
        demo_rows("poems")


@pytest.fixture
def rank_1_of_2():
    """The process that comes first on a second machine."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def test_the_first_rank_of_each_machine_writes_all_of_it(tmp_path, folder, rank_1_of_2):
    made = make_demo_model(tmp_path / "model", **SMALL, max_shard_size="20KB")
    assert set(contents(made)) == set(contents(folder))
    assert write_demo_images(tmp_path / "vision", tmp_path / "images") is None
    assert {"config.json", "model.safetensors"} <= set(contents(tmp_path / "vision"))


def test_two_machines_with_one_disk_make_one_demo(tmp_path, folder, monkeypatch):
    train = demo.train_demo_tokenizer

    def late(*arguments, **sizes):  # the other machine is ready while this one works
        shutil.copytree(folder, tmp_path / "model")
        return train(*arguments, **sizes)

    monkeypatch.setattr(demo, "train_demo_tokenizer", late)
    made = make_demo_model(tmp_path / "model", **SMALL, max_shard_size="20KB")
    assert contents(made) == contents(folder) and [path.name for path in tmp_path.iterdir()] == ["model"]
