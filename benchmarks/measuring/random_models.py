"""Checkpoints with random weights in the shapes of real models, made on the GPU within seconds; and their adapters.

    python -m benchmarks.measuring.random_models 8b FOLDER [--small]

writes FOLDER (bf16, several safetensors files) and, where PEFT is installed, FOLDER-adapter: a new LoRA adapter on all
linear layers, so that two programs can begin with the same one. "demo" is the quick start's own model, in fp32.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
import transformers as hf

from hf_fsdp_tools.scripting.demo import make_demo_model

# Shapes of meta-llama/Llama-3.2-1B, Qwen/Qwen3-4B and meta-llama/Llama-3.1-8B, from their configs on the hub.
_LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
_LLAMA_1B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
_QWEN_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151936}
_QWEN_4B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
_LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
_LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}

SHAPES: dict[str, tuple[type[hf.PreTrainedConfig], dict[str, int | bool]]] = {
    "1b": (hf.LlamaConfig, _LLAMA_1B),
    "4b": (hf.Qwen3Config, _QWEN_4B),
    "8b": (hf.LlamaConfig, _LLAMA_8B),
}
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 512, "head_dim": 32}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def make_model(name: str, folder: Path, small: bool) -> None:
    """Write the checkpoint and its adapter; it appears in one step."""
    part = folder.with_name(f"{folder.name}.part")
    if name == "demo":
        make_demo_model(part)
        model = hf.AutoModelForCausalLM.from_pretrained(part)
    else:
        kind, shape = SHAPES[name]
        config = kind(**(shape | _SMALL if small else shape))
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(part, max_shard_size="4GB" if not small else "1MB")
    if importlib.util.find_spec("peft") is not None:
        from peft import LoraConfig, get_peft_model

        model.name_or_path = model.config.name_or_path = str(folder)  # what the adapter will name as its base
        torch.manual_seed(1)
        lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        get_peft_model(model, lora).save_pretrained(f"{folder}-adapter", save_embedding_layers=False)
    part.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=["demo", *SHAPES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true", help="the architecture, with tiny sizes")
    options = parser.parse_args()
    make_model(options.name, options.folder, options.small)


if __name__ == "__main__":
    main()
