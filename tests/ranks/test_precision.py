"""Mixed precision casts what the model computes with, and nothing else: not counts, labels, or the edge of masks."""

import copy
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer

from hf_fsdp_tools import ParallelDims, from_pretrained
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import RELEASE, full, make_checkpoint, make_model, randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._rounding import assert_near, with_rounding
from tests._training import ShardedTrainer, arguments, logged

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
IDS = torch.randint(3, 131, (5, 60), generator=torch.Generator().manual_seed(0))


def counts_are_exact(folder):
    """transformers' Trainer gives its token count as a float; 511 is 512 in bf16."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = from_pretrained(folder, mp_policy=BF16)
    count = torch.tensor(511.0)
    with torch.no_grad():
        expected = plain(IDS, labels=IDS, num_items_in_batch=count).loss
        assert torch.equal(model(IDS, labels=IDS, num_items_in_batch=count).loss, expected)
        assert torch.equal(model(IDS, labels=IDS, num_items_in_batch=count.long()).loss, expected)
    model = from_pretrained(folder, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    with torch.no_grad():
        float_, int_ = (model(IDS, labels=IDS, num_items_in_batch=n).loss for n in (torch.tensor(70000.0), 70000))
    assert float_ > 0 and torch.equal(float_, int_)


def labels_of_a_regression_are_not_rounded(folder):
    model = from_pretrained(
        folder, mp_policy=BF16, auto_class=AutoModelForSequenceClassification, num_labels=1, pad_token_id=0
    )
    labels = torch.tensor([1001.7, -1001.7])
    with torch.no_grad():
        output = model(IDS[:2], labels=labels)
        exact = torch.nn.functional.mse_loss(output.logits.squeeze().float(), labels)
    torch.testing.assert_close(output.loss.float(), exact, rtol=1e-6, atol=0)


def the_edge_of_a_mask_stays_a_number(folder):
    """A row that may attend to nothing is uniform, and not NaN, as in the plain model."""
    model = from_pretrained(folder, mp_policy=BF16)
    mask = torch.full((5, 1, 60, 60), torch.finfo(torch.float32).min).triu(1)
    mask[:, :, 0] = torch.finfo(torch.float32).min
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with torch.no_grad():
        assert model(IDS, attention_mask=mask).logits.isfinite().all()
    assert seen and all(mask.isfinite().all() for mask in seen)


def pixels_are_cast_where_they_are_computed_with(folder):
    """The patch embedding lies in the root unit of a small vision model."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    plain, model = (randomize(transformers.ViTForImageClassification(config)).eval() for _ in range(2))
    shard_model(model, make_wrap_plan(model), mesh=ParallelDims().build_mesh("cpu"), mp_policy=BF16)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = plain.to(torch.bfloat16)(pixels.to(torch.bfloat16)).logits
        assert torch.equal(model(pixels).logits, expected)


def _heads():
    """A model of each kind of head, its batch, and its loss of its own outputs in fp32."""
    entropy = torch.nn.functional.cross_entropy
    ids = IDS[:4, :16].contiguous()
    rows = {"input_ids": ids}
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    bert = tiny_config("bert")
    bert.vocab_size = 131
    classes = torch.tensor([0, 1, 1, 0])
    yield (
        transformers.BertForSequenceClassification(bert), {**rows, "labels": classes},
        lambda out: entropy(out.logits, classes),
    )  # fmt: skip
    yield (
        transformers.BertForQuestionAnswering(bert), {**rows, "start_positions": classes, "end_positions": classes + 5},
        lambda out: (entropy(out.start_logits, classes) + entropy(out.end_logits, classes + 5)) / 2,
    )  # fmt: skip
    yield (
        make_model("t5"), {**rows, "decoder_input_ids": ids[:, :7], "labels": ids[:, :7].contiguous()},
        lambda out: entropy(out.logits.flatten(0, 1), ids[:, :7].flatten()),
    )  # fmt: skip
    clip = tiny_config("clip")
    clip.vision_config.image_size, clip.text_config.vocab_size = 32, 131
    own = torch.arange(4)
    yield (
        transformers.CLIPModel(clip), {**rows, "pixel_values": pixels, "return_loss": True},
        lambda out: (entropy(out.logits_per_text, own) + entropy(out.logits_per_image, own)) / 2,
    )  # fmt: skip


def outputs_under_autocast(plain, batch, is_on):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
        output = plain(**batch)
    return {key: output[key].detach().float() for key in output if "logits" in key}


def losses_of_all_heads_are_those_of_autocast(folder):
    """In fp32, of logits as under autocast; a loss in bf16 would be up to 4e-3 off."""
    for model, batch, loss_of in _heads():
        name = type(model).__name__
        plain = randomize(model).eval()
        sharded = copy.deepcopy(plain)
        shard_model(sharded, make_wrap_plan(sharded), mesh=ParallelDims().build_mesh("cpu"), mp_policy=BF16)
        for is_training in (True, False):
            with torch.set_grad_enabled(is_training):
                output = sharded(**batch)
                expected = with_rounding(*(partial(outputs_under_autocast, plain, batch, on) for on in (True, False)))
            assert output.loss.dtype == torch.float32, name
            exact = loss_of(SimpleNamespace(**{key: v.float() for key, v in output.items() if torch.is_tensor(v)}))
            torch.testing.assert_close(output.loss, exact, rtol=1e-5, atol=0, msg=name)
            assert_near({key: output[key].float() for key in expected[0]}, *expected, name)
        assert not torch.is_autocast_enabled("cpu")


def outputs_are_fp32_where_a_script_computes_its_own_loss(folder):
    words = from_pretrained(folder, mp_policy=BF16)
    assert words(IDS).logits.dtype == words(IDS, return_dict=False)[0].dtype == torch.float32
    assert words(IDS, labels=IDS).logits.dtype == torch.bfloat16  # a copy for each word of the vocabulary
    asked = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    assert from_pretrained(folder, mp_policy=asked)(IDS).logits.dtype == torch.bfloat16


def routers_that_transformers_keeps_compute_in_fp32(folder):
    """As in plain bf16, whatever dtype is stored: FSDP2 would gather all of a unit in the dtype of computation."""
    ids, config = IDS % 90, tiny_config("ernie4_5_moe")
    if dist.get_rank() == 0:
        randomize(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(folder / "ernie")
    dist.barrier()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "ernie", dtype=torch.bfloat16).train()
    plain(ids, labels=ids).loss.backward()
    router = "model.layers.1.mlp.gate.weight"
    for dtype in (torch.bfloat16, torch.float32):
        model = from_pretrained(folder / "ernie", dtype=dtype, mp_policy=BF16).train()
        model(ids, labels=ids).loss.backward()
        found, expected = full(model.get_parameter(router).grad), plain.get_parameter(router).grad
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def what_models_compute_in_fp32_is_so(folder):
    """Residual streams of Mamba and Zaya, and DeepSeek-V4's last module, which lies in the root: the bits of bf16."""
    kinds = [kind for kind in ("mamba", "zaya", "deepseek_v4") if kind in transformers.CONFIG_MAPPING]
    if RELEASE <= (5, 17):  # whose own DeepSeek-V4 does not run in bf16
        kinds.remove("deepseek_v4")
    for kind in kinds:
        if dist.get_rank() == 0:
            randomize(transformers.AutoModelForCausalLM.from_config(tiny_config(kind))).save_pretrained(folder / kind)
        dist.barrier()
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.bfloat16).eval()
        for name, weight in transformers.AutoModelForCausalLM.from_pretrained(folder / kind).named_parameters():
            if name.endswith("A_log"):
                plain.get_parameter(name).data = weight.data
        model = from_pretrained(folder / kind, dtype=torch.float32, mp_policy=BF16).eval()
        with torch.no_grad():
            assert torch.equal(model(IDS % 90).logits, plain(IDS % 90).logits.float()), kind


CASES = (
    counts_are_exact, labels_of_a_regression_are_not_rounded, the_edge_of_a_mask_stays_a_number,
    pixels_are_cast_where_they_are_computed_with, losses_of_all_heads_are_those_of_autocast,
    outputs_are_fp32_where_a_script_computes_its_own_loss, routers_that_transformers_keeps_compute_in_fp32,
    what_models_compute_in_fp32_is_so,
)  # fmt: skip


def test_only_what_is_computed_with_is_cast(tmp_path):
    run_ranks(run_cases, 2, CASES, make_checkpoint("llama", tmp_path))


def smoothed(out, kind, bf16=True):
    """Losses of two steps and of an evaluation, with label smoothing, which the Trainer computes of logits."""
    inputs = ("input_ids", "decoder_input_ids", "labels")
    rows = [dict.fromkeys(inputs, IDS[i % 5, :20]) for i in range(44)]
    args = arguments(
        out, max_steps=2, per_device_train_batch_size=11, per_device_eval_batch_size=11, learning_rate=1e-3,
        lr_scheduler_type="linear", max_grad_norm=1.0, bf16=bf16, label_smoothing_factor=0.1,
    )  # fmt: skip
    trainer = kind(model=make_model("t5"), args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return [*logged(trainer), trainer.evaluate()["eval_loss"]]


def smoothed_with_rounding(*args):
    return with_rounding(partial(smoothed, *args), partial(smoothed, *args, bf16=False))


def test_a_trainer_in_bf16_equals_the_plain_one_under_autocast_and_ddp(tmp_path):
    ours = run_ranks(smoothed, 2, tmp_path / "ours", ShardedTrainer)[0]
    assert_near(ours, *run_ranks(smoothed_with_rounding, 2, tmp_path / "plain", Trainer)[0])
