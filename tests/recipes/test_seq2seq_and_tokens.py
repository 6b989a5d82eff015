"""`seq2seq` and `tokens` as a user trains with them: on two ranks, with adapters, and beside one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.api import demo_rows, make_demo_model
from tests.recipes._launch import ONCE, Series, launch_series, refused_runs, write_lines, write_split

pytest.importorskip("trl")

TAGS = ["O", "B-code", "I-code"]

STEPS = 2

CHATS, NER = "--dataset_name {chats}", "--dataset_name {ner}"
REFUSED = {
    "sound": ("seq2seq", f"{{whisper}} {CHATS}", "whisper, which does not read text"),
    "decoder": ("seq2seq", f"{{llama}} {CHATS}", "is a llama, which has no encoder and decoder. Use finetune"),
    "absent": ("seq2seq", "{t5} --dataset_name {answers} --prompt_column pair.txt", "--prompt_column pair.txt: "),
    "stream": ("tokens", f"{{llama}} {NER} --dataset_streaming --max_steps 2", "--dataset_streaming: the classes are"),
    "uneven": ("tokens", "{llama} --dataset_name {uneven}", ", line 1 has not one class for each word"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("runs")
    answers, tags = demo_rows("answers")[:512:32], short_sentences()
    rows: dict[str, list[dict[str, Any]]] = {
        "answers": [{"pair": {"text": row["prompt"], "group": row["completion"]}} for row in answers],
        "chats": [{"prompt": [{"role": "user", "content": row["prompt"]}], "completion": [
            {"role": "assistant", "content": row["completion"]}]} for row in answers],
        "words": [{"words": row["tokens"], "classes": row["tags"]} for row in tags],
        "ner": [{"tokens": row["tokens"], "ner_tags": [TAGS.index(tag) for tag in row["tags"]]} for row in tags],
        "uneven": [{"tokens": ["a", "b"], "tags": ["O"]}] * 8,
    }  # fmt: skip
    data = {name: ["--dataset_name", write_split(folder / f"{name}_rows", part)] for name, part in rows.items()}
    t5, llama = without_dropout(folder)
    options = ["--per_device_train_batch_size", "2", "--logging_steps", "1", "--lr_scheduler_type", "constant", *ONCE]
    seq2seq = ["seq2seq", *options, "--max_length", "64", "--max_target_length", "8", "--model_name_or_path"]
    tokens = ["tokens", *options, "--max_length", "128", "--model_name_or_path"]
    pairs = [*data["answers"], "--prompt_column", "pair.text", "--completion_column", "pair.group"]
    words = [*data["words"], "--tokens_column", "words", "--tags_column", "classes"]

    runs = {"seq2seq": [*seq2seq, t5, *pairs, "--max_steps", "20", "--learning_rate", "1e-2"]}
    runs["tokens"] = [*tokens, llama, *words, "--max_steps", "20", "--learning_rate", "1e-2"]
    once = ["--gradient_accumulation_steps", "2", "--max_steps", str(STEPS), "--learning_rate", "1e-2"]
    once += ["--eval_strategy", "no"]
    few = {name: ["--dataset_name", write_lines(folder / f"{name}.jsonl", rows[name][:8])] for name in ("chats", "ner")}
    runs["seq2seq-parts"] = [*seq2seq, t5, *few["chats"], *once]
    runs["tokens-parts"] = [*tokens, llama, *few["ner"], *once]

    whisper = folder / "whisper"
    hf.WhisperConfig(vocab_size=2048).save_pretrained(whisper)
    hf.AutoTokenizer.from_pretrained(t5).save_pretrained(whisper)
    places = {"whisper": whisper, "t5": t5, "llama": llama} | {name: data[name][1] for name in data}
    refused = refused_runs(REFUSED, {"seq2seq": seq2seq, "tokens": tokens}, **places)
    return launch_series(folder, runs, refused=refused)


def short_sentences() -> list[dict[str, Any]]:
    rows = [{name: values[:24] for name, values in row.items()} for row in demo_rows("tags")[::4]]
    return [row for row in rows if row["tags"].count("B-code") > 1][:16]


def without_dropout(folder: Path) -> tuple[str, str]:
    """A T5 and a classifier of words, as one process and two would draw dropout differently."""
    t5 = make_demo_model(folder / "drawn_t5", "seq2seq_model", hidden_size=64, num_layers=2)
    llama = make_demo_model(folder / "drawn_llama", hidden_size=64, num_layers=2, max_length=256)
    model = hf.T5ForConditionalGeneration.from_pretrained(t5, dropout_rate=0.0)
    torch.manual_seed(0)
    labels = {"num_labels": 3, "id2label": dict(enumerate(TAGS)), "label2id": {tag: n for n, tag in enumerate(TAGS)}}
    config = hf.AutoConfig.from_pretrained(llama, **labels)
    config.classifier_dropout = 0.0
    words = hf.LlamaForTokenClassification.from_pretrained(llama, config=config)
    for source, one, name in ((t5, model, "t5"), (llama, words, "llama")):
        one.save_pretrained(folder / name)
        hf.AutoTokenizer.from_pretrained(source).save_pretrained(folder / name)
    return str(folder / "t5"), str(folder / "llama")


@pytest.mark.parametrize("run", REFUSED)
def test_errors_come_before_the_model(runs, run):
    assert REFUSED[run][-1] in runs.error(run)


def test_seq2seq_learns_to_write(runs):
    losses = runs.log("seq2seq", "eval_loss")
    exact = runs.log("seq2seq", "eval_exact_match")
    assert losses[-1] < 0.3 * losses[0] and exact[0] == 0 and exact[-1] > 0.4
    assert f"written exactly  0% before, {exact[-1]:.0%} after" in runs.of("seq2seq")
    assert runs.log("seq2seq", "eval_word_f1")[-1] >= exact[-1]
    runs.check_opened("seq2seq", hf.AutoModelForSeq2SeqLM.from_pretrained(runs.folder / "seq2seq"))


def test_a_classifier_of_words_learns_and_opens_as_a_pipeline(runs):
    f1, accuracy = runs.log("tokens", "eval_f1"), runs.log("tokens", "eval_accuracy")
    assert f1[-1] > f1[0] + 0.2 and accuracy[-1] > 0.8
    assert "classes          O, B-code, I-code\n" in runs.of("tokens")
    folder = runs.folder / "tokens"
    runs.check_opened("tokens", hf.AutoModelForTokenClassification.from_pretrained(folder))
    find = hf.pipeline("token-classification", str(folder), aggregation_strategy="simple", device="cpu")
    found = [each["entity_group"] for row in short_sentences() for each in find(" ".join(row["tokens"]))]
    assert set(found) == {"code"} and len(found) >= 16


@pytest.mark.parametrize("name", ["seq2seq", "tokens"])
def test_a_step_is_the_mean_over_the_tokens_of_all_ranks_and_micro_batches(runs, name):
    """Eight rows are one step of two ranks, two rows and two micro-batches; their lengths differ."""
    if name == "seq2seq":
        folder, auto_class, data = runs.folder / "t5", hf.AutoModelForSeq2SeqLM, "chats.jsonl"
    else:
        folder, auto_class, data = runs.folder / "llama", hf.AutoModelForTokenClassification, "ner.jsonl"
    tokenizer, model = hf.AutoTokenizer.from_pretrained(folder), auto_class.from_pretrained(folder).train()
    rows = [json.loads(line) for line in (runs.folder / data).read_text().splitlines()]
    batch = written_batch(rows, tokenizer) if name == "seq2seq" else words_batch(rows, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses, norms = [], []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert runs.log(f"{name}-parts", "loss") == pytest.approx(losses, rel=1e-4)
    assert runs.log(f"{name}-parts", "grad_norm") == pytest.approx(norms, rel=1e-3)


def written_batch(rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, torch.Tensor]:
    prompts, answers = ([row[name][0]["content"] for row in rows] for name in ("prompt", "completion"))
    batch = tokenizer(prompts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    labels = tokenizer(answers, padding=True, truncation=True, max_length=8, return_tensors="pt")["input_ids"]
    return {**batch, "labels": labels.masked_fill(labels == tokenizer.pad_token_id, -100)}


def words_batch(rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, torch.Tensor]:
    texts = [" ".join(row["tokens"]) for row in rows]
    cut = {"padding": True, "truncation": True, "max_length": 128}
    batch = tokenizer(texts, **cut, return_offsets_mapping=True, return_tensors="pt")
    offsets = batch.pop("offset_mapping").tolist()
    labels = torch.full_like(batch["input_ids"], -100)
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        begun = -1
        for place, (start, end) in enumerate(offsets[number]):
            word = text[:end].count(" ")
            if end > start and word > begun:
                labels[number, place] = row["ner_tags"][word]
                begun = word
    return {**batch, "labels": labels}
