"""TRL's SFTTrainer on a model that transformers itself shards while it loads it (`DistributedConfig`).

Its options are those of TRL's `sft` script.
"""

import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main() -> None:
    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    training.device  # noqa: B018  # starts the process group
    sharded = AutoModelForCausalLM.from_pretrained(
        model.model_name_or_path,
        dtype=model.dtype,
        distributed_config=DistributedConfig(fsdp_size=int(os.environ.get("WORLD_SIZE", "1"))),
    )
    trainer = SFTTrainer(
        model=sharded,
        args=training,
        train_dataset=load_dataset(script.dataset_name)[script.dataset_train_split],
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
    )
    trainer.train()


if __name__ == "__main__":
    main()
