"""Whether the documents of a packed row are apart for a model: seen by running it."""

from typing import Any

import torch

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import first_line

_TOKENS = 16
"""Of each of the two documents."""

_NOISE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Of logits, relative to their spread; what mixtures of experts change by rounding is 1e-5. Models that leak: 0.02 to 6
(measured over 60 architectures)."""

_NOISE_16_BITS = 3e-2
"""The same for computation in bf16 and fp16. (assumed: a few times the rounding of one operation)"""


def check_documents_apart(trainer: Any) -> None:
    """Refuse a model whose logits for a document depend on the document before it in a packed row.

    The trainer's own collator packs two documents twice, with another first document the second time, and the model
    runs forward on both. Some architectures make their attention mask without regard to positions (GPT-OSS, OPT,
    Falcon), and recurrent ones carry their state on (Mamba): reading their code does not tell all of them.

    Every rank must call: the forward passes gather the units. All ranks compute the same.
    """
    model = trainer.model
    option = "--packing" if trainer.args.packing else "--padding_free"
    ids = [3 + number % (model.config.get_text_config().vocab_size - 3) for number in range(3 * _TOKENS)]
    first, other, second = ids[:_TOKENS], ids[_TOKENS : 2 * _TOKENS], ids[2 * _TOKENS :]
    was_training = model.training
    model.eval()
    try:
        found, changed = (_logits_of_second(trainer, before, second) for before in (first, other))
    except (ValueError, NotImplementedError) as error:  # how recurrent models of transformers say it
        raise ConfigError(
            f"{option}: {type(model).__name__} cannot run on packed rows: {first_line(error)}. Or leave {option} out."
        ) from error
    model.train(was_training)
    noise = _NOISE.get(found.dtype, _NOISE_16_BITS)
    found, changed = found.float(), changed.float()
    apart = ((found - changed).pow(2).mean().sqrt() / found.std()).item()
    if not apart < noise:
        raise ConfigError(
            f"{option}: {type(model).__name__} with the attention implementation "
            f"{model.config._attn_implementation!r} sees the documents before its own in a packed row (its logits "
            f"change by {apart:.0%} of their spread). Use --attn_implementation flash_attention_2 where the model has "
            f"it, or leave {option} out."
        )


@torch.no_grad()
def _logits_of_second(trainer: Any, first: list[int], second: list[int]) -> torch.Tensor:
    row = {"input_ids": first + second, "seq_lengths": [len(first), len(second)]}
    batch = {name: value for name, value in trainer.data_collator([row]).items() if name != "labels"}
    device = trainer.accelerator.device
    moved = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    with trainer.compute_loss_context_manager():
        logits: torch.Tensor = trainer.model(**moved, use_cache=False).logits[0, len(first) :]
    return logits
