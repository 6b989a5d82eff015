"""Train an embedding model under FSDP2: texts that belong together come close to each other (sentence-transformers).

Nothing to download: a small Llama learns which lines of CPython's own documentation come from one passage. On two CPU
processes the right lines of 51 are found first for 13 % of the held-out ones before, for 40 % after, in two minutes.

Each text is compared with those of all processes (`MultipleNegativesRankingLoss(gather_across_devices=True)`), as if
one process had them all. A model with `modules.json` keeps its pooling; any other gets the mean of its tokens. What is
saved opens with `SentenceTransformer(folder)`. Columns are a text, one that belongs to it, then others that do not.
"""

import warnings
from dataclasses import dataclass, field
from functools import partial

import datasets

try:
    from sentence_transformers import SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as TrainingArguments
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
except ModuleNotFoundError as error:
    raise SystemExit(f"embed: error: {error}. pip install sentence-transformers (the extra `embed`).") from None
from transformers import AutoModel
from trl import ScriptArguments

from hf_fsdp_tools import ConfigError, scripting
from hf_fsdp_tools.integrations.embedders import EmbedderMixin, load_embedder


@dataclass
class DataArguments(ScriptArguments):
    """TRL's options for data, and which columns they are in."""

    dataset_columns: str = field(
        default="anchor,positive",
        metadata={"help": "Columns: a text, one that belongs to it, then others that do not."},
    )
    max_length: int = field(default=512, metadata={"help": "Tokens at which a text is cut."})
    temperature: float = field(default=0.05, metadata={"help": "By which cosines are divided in the loss."})


class Trainer(EmbedderMixin, SentenceTransformerTrainer):
    """sentence-transformers' trainer on our shards."""


def main() -> Trainer:
    warnings.filterwarnings("ignore", message="torch.distributed.nn.functional.all_gather is deprecated")

    # 1. The settings and the data
    script, training, model_args, accelerator = scripting.start("embed", DataArguments, TrainingArguments)
    if model_args.merge_adapters:
        raise ConfigError("--merge_adapters: merge later, hf-fsdp export BASE OUT --adapter ADAPTER.")
    columns = [name for name in script.dataset_columns.split(",") if name]
    data, held_out = (
        part and part.select_columns(columns)
        for part in scripting.load_splits(script, training, columns=[set(columns)])
    )
    tokenizer = scripting.load_tokenizer(model_args, training)

    # 2. Checks of what would fail later
    scripting.check_before_loading(model_args, training, tokenizer, data, held_out, auto_class=AutoModel)

    # 3. The model, straight into shards, inside that of sentence-transformers
    model = load_embedder(
        partial(scripting.load_model, model_args, training, accelerator, auto_class=AutoModel),
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        device=str(accelerator.device),
        is_adapted=model_args.use_peft,
    )
    model.max_seq_length = training.max_length

    # 4. Train
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data,
        eval_dataset=held_out,
        loss=MultipleNegativesRankingLoss(model, scale=1 / script.temperature, gather_across_devices=True),
        evaluator=retrieval_of(held_out, columns) if held_out is not None else None,
    )
    scripting.train(trainer, training, model_args)

    # 5. A folder that SentenceTransformer opens
    found = [log["eval_cosine_accuracy@1"] for log in trainer.state.log_history if "eval_cosine_accuracy@1" in log]
    lines = {
        "found first": f"{found[0]:.0%} before, {found[-1]:.0%} after" if found else "not evaluated",
        "checkpoint": f"{training.output_dir} (open it with sentence_transformers.SentenceTransformer)",
    }
    scripting.finish(trainer, training, model_args, tokenizer, lines=lines)
    return trainer


def retrieval_of(rows: datasets.Dataset, columns: list[str]) -> InformationRetrievalEvaluator:
    """For how many first texts the one that belongs to it is the nearest of all second ones."""
    names = [str(number) for number in range(len(rows))]
    first, second = (dict(zip(names, rows[column], strict=True)) for column in columns[:2])
    relevant = {name: {name} for name in names}
    return InformationRetrievalEvaluator(first, second, relevant, write_csv=False, accuracy_at_k=[1, 5])


if __name__ == "__main__":
    scripting.run(main, "embed")
