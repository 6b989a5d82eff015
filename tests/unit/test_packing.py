"""Documents in a packed row know nothing of each other, or the model is refused; on plain models of one process."""

from contextlib import nullcontext
from itertools import chain, cycle, islice, product
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from datasets import Dataset
from packaging.version import Version
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.scripting.checks import check_documents_apart
from tests.api import pack_full

SIZES = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

APART = ("llama", "qwen3", "gpt2", "gemma3_text", "mixtral")
"""Their masks follow from positions that begin anew."""

TOGETHER = ("gpt_oss", "opt", *(("falcon",) if Version(hf.__version__) < Version("5.24") else ()), "mamba")
"""Those before the last make masks without positions, though they have them; the last carries its state on."""


def trainer(kind: str, *, dtype: torch.dtype = torch.float32, **options: object) -> SimpleNamespace:
    config = type(hf.AutoConfig.for_model(kind))(**SIZES)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, **options).to(dtype).train()
    return SimpleNamespace(
        model=model,
        args=SimpleNamespace(packing=True),
        data_collator=DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True),
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        compute_loss_context_manager=nullcontext,
    )


def logits_of(one: SimpleNamespace, *documents: list[int]) -> torch.Tensor:
    row = {"input_ids": list(chain(*documents)), "seq_lengths": [len(document) for document in documents]}
    batch = {name: value for name, value in one.data_collator([row]).items() if name != "labels"}
    with torch.no_grad():
        return one.model.eval()(**batch, use_cache=False).logits[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_document_has_the_logits_that_it_has_alone(attention):
    one = trainer("llama", attn_implementation=attention)
    before, document, after = list(range(3, 12)), list(range(40, 55)), list(range(90, 101))
    packed = logits_of(one, before, document, after)[len(before) : len(before) + len(document)]
    torch.testing.assert_close(packed, logits_of(one, document), rtol=1e-5, atol=1e-6)
    together = logits_of(one, before + document)[len(before) :]
    assert (together - packed).abs().max() > 1e-2, "without its own positions, it sees what stands before it"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*product(APART + TOGETHER, [torch.float32]), *product(("llama", "mixtral", "gpt_oss", "mamba"), [torch.bfloat16])],
)
def test_models_that_see_the_documents_before_are_refused(kind, dtype):
    one = trainer(kind, dtype=dtype)
    message = r"--packing: \w+ForCausalLM with .* sees the documents before"
    with pytest.raises(ConfigError, match=message) if kind in TOGETHER else nullcontext() as caught:
        check_documents_apart(one)
    if kind in ("opt", "mamba"):  # of which the second has no attention
        assert ("flash_attention_2" in str(caught.value)) == (kind == "opt")
    assert one.model.training, "as it was"


@pytest.mark.parametrize("is_stream", [False, True])
def test_long_rows_are_packed_full(is_stream: bool) -> None:
    """TRL packs a thousand documents at once, which do not fill a long row; a short row is packed as by TRL."""
    documents = [{"input_ids": [1] * length} for length in islice(cycle((3, 9, 18)), 6000)]
    rows = Dataset.from_list(documents)
    rows = rows.to_iterable_dataset() if is_stream else rows
    share = {}
    for length in (64, 16_384):
        for pack in (pack_dataset, lambda *args: pack_full(pack_dataset, *args)):
            lengths = [len(row["input_ids"]) for row in pack(rows, length, "bfd_split", {})]
            assert sum(lengths) == sum(len(each["input_ids"]) for each in documents)
            share.setdefault(length, []).append(sum(lengths) / len(lengths) / length)
    (short, own_short), (plain, full) = share.values()
    assert short == own_short and plain < 0.65 and full > 0.8
