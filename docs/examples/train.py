"""A script of one's own: a Trainer on the documentation of Python, as it comes with Python."""

from pydoc_data.topics import topics

from transformers import AutoTokenizer, Trainer, TrainingArguments

from hf_fsdp_tools import FSDPTrainerMixin, from_pretrained, make_accelerator  # 1: what is new


class ShardedTrainer(FSDPTrainerMixin, Trainer):  # 2: saves, resumes and clips shards
    pass


arguments = TrainingArguments(
    output_dir="tuned",
    max_steps=20,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_steps=5,
    save_steps=10,
    report_to="none",
    disable_tqdm=True,
)
tokenizer = AutoTokenizer.from_pretrained("start")
texts = [text for text in topics.values() if len(text) > 500]
rows = [tokenizer(text, truncation=True, max_length=128, padding="max_length") for text in texts]
rows = [row | {"labels": row["input_ids"]} for row in map(dict, rows)]
accelerator = make_accelerator(arguments)
model = from_pretrained("start", accelerator=accelerator)  # 3: was AutoModelForCausalLM.from_pretrained("start")
trainer = ShardedTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_model("tuned")
