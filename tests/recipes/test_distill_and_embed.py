"""`distill` and `embed` as a user trains with them, on two ranks; both equal one process of the library alone."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

from tests._training import arguments, logged
from tests.api import demo_rows, make_demo_model
from tests.recipes._launch import ONCE, Series, launch_series, refused_runs, write_split

pytest.importorskip("trl")
if find_spec("sentence_transformers") is None:  # which only the worker that runs these tests imports
    pytest.skip("sentence-transformers is not installed", allow_module_level=True)

STEPS = 2


REFUSED = {
    "teacherless": ("pair", "--dataset_name {prompts}", "--teacher_model_name_or_path is missing"),
    "other-words": ("pair", "--teacher_model_name_or_path {stranger} --dataset_name {prompts}", "different tokenizers"),
    "long": ("pair", "--teacher_model_name_or_path {teacher} --dataset_name {long}", "--max_completion_length 8 are"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Series:
    folder = tmp_path_factory.mktemp("runs")
    prompts, pairs = demo_rows("beginnings")[:512:32], demo_rows("pairs")[:480:30]
    data = {
        name: ["--dataset_name", write_split(folder / f"{name}_rows", rows)]
        for name, rows in {
            "prompts": prompts,
            "pairs": pairs,
            "long": [{"prompt": "word " * 300}] * 8,
        }.items()
    }
    sizes = {"vocab_size": 512, "max_length": 256}
    model = str(make_demo_model(folder / "model", hidden_size=64, num_layers=2, **sizes))
    teacher = str(make_demo_model(folder / "teacher", "teacher", hidden_size=96, **sizes))
    stranger = str(make_demo_model(folder / "stranger", hidden_size=32, num_layers=1, vocab_size=400))
    options = ["--model_name_or_path", model, "--per_device_train_batch_size", "2", "--logging_steps", "1"]
    options += ["--lr_scheduler_type", "constant", "--learning_rate", "3e-3", *ONCE]
    lora = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear"]

    places = {name: words[1] for name, words in data.items()}
    pair = ["distill", *options, "--max_completion_length", "8"]
    distill = [*pair, "--teacher_model_name_or_path", teacher, *data["prompts"], "--beta", "0"]
    runs = {"distill": [*distill, "--ema_decay", "0.5", "--max_steps", "6"]}
    runs["distill-lora"] = [*distill, *lora, "--max_steps", "2", "--merge_adapters"]
    embed = ["embed", *options, "--max_length", "64", "--temperature", "0.1"]
    runs["embed"] = [*embed, *data["pairs"], "--max_steps", "8", "--learning_rate", "1e-3"]
    runs["encoder"] = [*embed, *data["pairs"], "--model_name_or_path", saved_bert(model, folder / "bert")]
    runs["encoder"] += ["--max_steps", str(STEPS), "--eval_strategy", "no"]
    refused = refused_runs(REFUSED, {"pair": pair}, **places, stranger=stranger, teacher=teacher)
    return launch_series(folder, runs, refused=refused)


def saved_bert(model: str, target: Any) -> str:
    """An encoder as sentence-transformers saves it, with a pooling of its own, and a normalisation behind it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    plain = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes, **dropout), add_pooling_layer=False)
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)
    modules = [Transformer(str(target)), Pooling(32, pooling_mode="max"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(target))
    return str(target)


@pytest.mark.parametrize("run", REFUSED)
def test_errors_come_before_the_model(runs, run):
    assert REFUSED[run][-1] in runs.error(run)


def test_a_student_learns_from_a_teacher_on_shards(runs):
    losses = runs.log("distill", "eval_loss")
    assert losses[-1] < losses[0] - 0.3
    assert "parameters in float32, sharded\n" in runs.of("distill")
    runs.check_opened("distill", AutoModelForCausalLM.from_pretrained(runs.folder / "distill"))
    before, after = runs.log("distill-lora", "eval_loss")
    assert after < before
    runs.check_opened("distill-lora", AutoModelForCausalLM.from_pretrained(runs.folder / "distill-lora" / "merged"))


def test_averages_are_evaluated_and_saved_beside_the_weights(runs):
    averages = runs.weights("distill/ema")
    assert averages and any(not torch.equal(value, averages[key]) for key, value in runs.weights("distill").items())
    (loss,) = runs.log("distill", "ema_loss")
    assert f"(evaluation loss {loss:.3f})" in runs.of("distill")


def test_an_embedding_model_learns_and_opens_with_sentence_transformers(runs):
    from sentence_transformers import SentenceTransformer

    losses = runs.log("embed", "eval_loss")
    assert losses[-1] < losses[0] - 0.1 and "found first" in runs.of("embed")
    for name in ("embed", "encoder"):
        opened = SentenceTransformer(str(runs.folder / name), device="cpu")
        check_embeddings(runs, name, opened)
    assert [type(module).__name__ for module in opened] == ["Transformer", "Pooling", "Normalize"]


def check_embeddings(runs: Series, name: str, opened: Any) -> None:
    ids = torch.tensor(runs.probe["input_ids"])
    with torch.no_grad():
        found = opened.eval()({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"]
    torch.testing.assert_close(found, runs.logits(name), rtol=1e-4, atol=1e-5)


def test_negatives_of_two_ranks_give_the_losses_of_one_process_with_all_rows(runs, tmp_path):
    import sentence_transformers
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    found = runs.log("encoder", "loss")
    model = sentence_transformers.SentenceTransformer(str(runs.folder / "bert"), device="cpu")
    model.max_seq_length = 64
    settings = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "max_steps": STEPS, "max_grad_norm": 1.0}
    kind = sentence_transformers.SentenceTransformerTrainingArguments
    args = arguments(tmp_path, kind, **settings, batch_sampler="no_duplicates")
    trainer = sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(demo_rows("pairs")[:480:30]),
        loss=MultipleNegativesRankingLoss(model, scale=10.0),
    )
    trainer.train()
    assert len(found) == STEPS and found == pytest.approx(logged(trainer), rel=1e-5)
