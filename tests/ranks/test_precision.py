"""Mixed precision casts what the model computes with, and nothing else: not counts, labels, or the edge of masks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_fsdp_tools import FSDPTrainerMixin, from_pretrained, make_accelerator, make_wrap_plan, shard_model
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.fsdp1.wrap import wrap_fsdp1
from hf_fsdp_tools.integrations.accelerator import ShardedAccelerator
from tests._checkpoints import make_checkpoint, randomize
from tests._dist import run_cases, run_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IDS = torch.randint(3, 131, (5, 60), generator=torch.Generator().manual_seed(0))


class ShardedTrainer(FSDPTrainerMixin, Trainer):
    """As a user writes it."""


def counts_are_exact(folder):
    """transformers' Trainer gives its token count as a float; 511 is 512 in bf16."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = from_pretrained(folder, mp_policy=BF16)
    count = torch.tensor(511.0)
    with torch.no_grad():
        expected = plain(IDS, labels=IDS, num_items_in_batch=count).loss
        assert torch.equal(model(IDS, labels=IDS, num_items_in_batch=count).loss, expected)
        assert torch.equal(model(IDS, labels=IDS, num_items_in_batch=count.long()).loss, expected)


def counts_beyond_fp16_are_finite(folder):
    model = from_pretrained(folder, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    with torch.no_grad():
        float_, int_ = (model(IDS, labels=IDS, num_items_in_batch=n).loss for n in (torch.tensor(70000.0), 70000))
    assert float_ > 0 and torch.equal(float_, int_)


def labels_of_a_regression_are_not_rounded(folder):
    model = from_pretrained(
        folder, mp_policy=BF16, auto_class=AutoModelForSequenceClassification, num_labels=1, pad_token_id=0
    )
    _check_regression(model)


def _check_regression(model):
    labels = torch.tensor([1001.7, -1001.7])
    with torch.no_grad():
        output = model(IDS[:2], labels=labels)
        exact = torch.nn.functional.mse_loss(output.logits.squeeze().float(), labels)
    torch.testing.assert_close(output.loss.float(), exact, rtol=1e-6, atol=0)


def the_edge_of_a_mask_stays_a_number(folder):
    """A row that may attend to nothing is uniform, and not NaN, as in the plain model."""
    model = from_pretrained(folder, mp_policy=BF16)
    logits, seen = _attended(model, model.model.layers[0])
    assert logits.isfinite().all() and all(mask.isfinite().all() for mask in seen) and seen


def _attended(model, layer):
    """Logits under a mask with a row that may attend to nothing, and the masks that reach a layer's attention."""
    mask = torch.full((5, 1, 60, 60), torch.finfo(torch.float32).min).triu(1)
    mask[:, :, 0] = torch.finfo(torch.float32).min
    seen = []
    layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        return model(IDS, attention_mask=mask).logits, seen


def _vision():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    return randomize(transformers.ViTForImageClassification(config)).eval()


def pixels_are_cast_where_they_are_computed_with(folder):
    """The patch embedding lies in the root unit of a small vision model."""
    plain, model = _vision(), _vision()
    shard_model(model, make_wrap_plan(model), mesh=ParallelDims().build_mesh("cpu"), mp_policy=BF16)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain.to(torch.bfloat16)(pixels.to(torch.bfloat16)).logits
        assert torch.equal(model(pixels).logits, expected)


def fsdp1_casts_no_more(folder):
    def wrapped(model):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return wrap_fsdp1(model, make_wrap_plan(model), mixed_precision=precision, use_orig_params=False).eval()

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = wrapped(AutoModelForCausalLM.from_pretrained(folder))
    count = torch.tensor(511.0)
    with torch.no_grad():
        expected = plain(IDS, labels=IDS, num_items_in_batch=count).loss
        assert torch.equal(model(IDS, labels=IDS, num_items_in_batch=count).loss, expected)
    _, (mask,) = _attended(model, model.module.model.layers[0])
    assert mask.isfinite().all()
    scored = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=0)
    _check_regression(wrapped(scored))
    images, pixels = _vision(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = _vision().to(torch.bfloat16)(pixels.to(torch.bfloat16)).logits
        assert torch.equal(wrapped(images)(pixels).logits, expected)


CASES = (
    fsdp1_casts_no_more,
    counts_are_exact,
    counts_beyond_fp16_are_finite,
    labels_of_a_regression_are_not_rounded,
    the_edge_of_a_mask_stays_a_number,
    pixels_are_cast_where_they_are_computed_with,
)


def _cast_nothing_else(folder):
    run_cases({case.__name__: lambda case=case: case(folder) for case in CASES})


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_what_is_computed_with_is_cast(tmp_path, ranks):
    run_ranks(_cast_nothing_else, ranks, make_checkpoint("llama", tmp_path))


class _Rows(Dataset):
    """Rows of 20 to 60 tokens."""

    def __len__(self):
        return 88

    def __getitem__(self, index):
        row = IDS[index % 5, : 20 + 5 * (index % 9)]
        return {"input_ids": row, "labels": row}


def _pad(rows):
    from torch.nn.utils.rnn import pad_sequence

    padded = {key: pad_sequence([row[key] for row in rows], batch_first=True) for key in ("input_ids", "labels")}
    mask = pad_sequence([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    return {**padded, "attention_mask": mask, "labels": padded["labels"].masked_fill(mask == 0, -100)}


def _trainer(folder, out, kind, **plugin):
    args = TrainingArguments(
        output_dir=str(out), bf16=True, use_cpu=True, max_steps=4, per_device_train_batch_size=11,
        per_device_eval_batch_size=11, learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True, max_grad_norm=1.0, dataloader_pin_memory=False, **plugin,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = kind(model=model, args=args, train_dataset=_Rows(), eval_dataset=_Rows(), data_collator=_pad)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


def _batches():
    """The batches of this rank, as the Trainer deals them out; each with its number of trained tokens on all ranks."""
    for step in range(4):
        rows = [[_Rows()[22 * step + 11 * rank + n] for n in range(11)] for rank in range(2)]
        both = [_pad(each) for each in rows]
        yield both[dist.get_rank()], sum((each["labels"][:, 1:] != -100).sum() for each in both) / 2


def _looped(model, optimizer, backward):
    """Losses of four steps and of an evaluation; counts are floats, as a script of one's own has them."""
    losses = []
    for batch, count in _batches():
        loss = model(**batch, num_items_in_batch=count).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    model.eval()
    with torch.no_grad():
        losses += [model(**batch, num_items_in_batch=count).loss.float() for batch, count in _batches()]
    means = torch.stack(losses)
    dist.all_reduce(means)
    return (means / 2).tolist()


def _accelerate_loop(folder, accelerator):
    ours = isinstance(accelerator, ShardedAccelerator)
    model = from_pretrained(folder, accelerator=accelerator) if ours else AutoModelForCausalLM.from_pretrained(folder)
    model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3))
    return _looped(model, optimizer, accelerator.backward)


def _own_loop(folder):
    model = from_pretrained(folder, mp_policy=BF16).train()
    return _looped(model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.Tensor.backward)


def _hosts(folder, out):
    fsdp1 = {"fsdp": True, "fsdp_config": {"version": 1, "use_orig_params": True}}
    return run_cases({
        "trainer": lambda: _trainer(folder, out, ShardedTrainer),
        "trainer, fsdp1": lambda: _trainer(folder, out, ShardedTrainer, **fsdp1),
        "loop": lambda: _accelerate_loop(folder, make_accelerator(cpu=True, mixed_precision="bf16")),
        "own loop": lambda: _own_loop(folder),
    })  # fmt: skip


def _plain_hosts(folder, out):
    """DDP under autocast."""
    return run_cases({
        "trainer": lambda: _trainer(folder, out, Trainer),
        "loop": lambda: _accelerate_loop(folder, Accelerator(cpu=True, mixed_precision="bf16")),
    })  # fmt: skip


@pytest.mark.filterwarnings("ignore:FSDP1:FutureWarning")
def test_every_host_in_bf16_equals_the_plain_one_under_autocast_and_ddp(tmp_path):
    folder = make_checkpoint("llama", tmp_path / "model")
    ours = run_ranks(_hosts, 2, folder, tmp_path / "ours")[0]
    plain = run_ranks(_plain_hosts, 2, folder, tmp_path / "plain")[0]
    near = partial(pytest.approx, rel=3e-4)  # 2e-5 and 8e-5 as measured; token counts in bf16 made it 2e-3
    for host in ("trainer", "trainer, fsdp1"):
        assert ours[host] == near(plain["trainer"]), host
    for host in ("loop", "own loop"):
        assert ours[host] == near(plain["loop"]), host
