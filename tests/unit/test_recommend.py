"""`recommend_config`: the search finds the fastest setting that fits, with few estimates, and says what it rejected.

The searches here price settings by a small formula, so that every setting can be priced for comparison.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest

from hf_fsdp_tools import ConfigError, TrainingSetup
from hf_fsdp_tools.foresight import recommend
from tests.api import EVERY, GAIN, ON_HOST, Cost, gpu_named

GPU = gpu_named("h100-80gb").memory_bytes


class Toy:
    """Prices of a training: bytes and seconds by a formula that has what FSDP has."""

    def __init__(
        self,
        params=8e9,
        *,
        activation=4e5,
        gather=0.05,
        latency=0.1,
        shares_rows=False,
        most_experts=1,
        stored=None,
        hosted=0.1,
    ):
        self.params, self.activation, self.gather, self.latency = params, activation, gather, latency
        self.asked, self.shares_rows, self.most_experts = [], shares_rows, most_experts
        self.hosted = hosted  # Part of the activations that is left where blocks' inputs are on the host
        self.stored = stored  # How much longer a step takes on weights that stay quantised

    def __call__(self, setup):
        self.asked.append(setup)
        trained = self.params / 400 if setup.lora_r else self.params
        if not setup.dequantize and self.stored is None:
            raise ConfigError("holds no quantised weights")
        base = (0.5 if setup.load_in_4bit or not setup.dequantize else 4) * (
            self.params - trained if setup.lora_r else 0
        )
        shards = ((16 if setup.master_dtype == "fp32" else 6) * trained + base) / setup.dp_shard_size
        shards = 0 if setup.offload_params else shards
        gathered = 2 * self.params * (0.05 if setup.reshard_after_forward else 1) / setup.ep_size
        if setup.tp_size > 1 or (setup.cp_size > 1 and not self.shares_rows) or setup.ep_size > self.most_experts:
            raise ConfigError("cannot be divided so")
        tokens = setup.per_device_train_batch_size * setup.max_length // setup.cp_size
        part = setup.activation_checkpointing / setup.activation_checkpointing_every_n_layers
        kept = (
            self.activation
            * tokens
            * (1 - part + part * (self.hosted if setup.activation_checkpointing_offload else 0.1))
        )
        floor = 6 * self.params / 4e14 * (tokens + 500) * (1 + part / 3)
        floor *= 1 if setup.dequantize else self.stored
        links = self.gather * (2 if setup.reshard_after_forward else 1) / setup.dp_replicate_size
        links /= max(1, setup.ep_size / 8)  # within a machine all traffic between machines stays
        links += self.latency * (setup.dp_replicate_size > 1) + 1.5 * setup.offload_params
        micro, steps = max(floor, links) + 0.2 * links, setup.gradient_accumulation_steps
        seconds = steps * micro
        if steps > 1 and not setup.sync_each_batch:
            gathered += 4 * self.params
            seconds = micro + (steps - 1) * (max(floor, 0.6 * links) + 0.12 * links)
        return Cost(int(shards + gathered + kept), seconds, steps * floor)


def choose(setup, toy, *, fixed=(), **options):
    given = {name: getattr(setup, name) for name in fixed}
    with patch.object(recommend, "_pricing", return_value=toy):
        return recommend.recommend_config("toy", setup, **given, **options)


LEAN = {"master_dtype": "bf16", "optimizer": "adamw_8bit"}


def settings(setup, global_batch_size, replicas=(1,)):
    ways = [(False, 1, False), *product((True,), (1, 2, 3, 4), (False, True))]
    names = ("activation_checkpointing", EVERY, ON_HOST)
    others = ("offload_params", "reshard_after_forward", "sync_each_batch", "dp_replicate_size")
    for way, *values in product(ways, (False, True), (True, False), (True, False), replicas):
        rest = global_batch_size // setup.num_processes
        for batch in (n for n in range(1, rest + 1) if rest % n == 0):
            changes = dict(zip(names, way, strict=True)) | dict(zip(others, values, strict=True))
            if rest > batch or changes["sync_each_batch"]:
                yield replace(
                    setup, per_device_train_batch_size=batch, gradient_accumulation_steps=rest // batch, **changes
                )


def rate(setup, cost):
    return setup.per_device_train_batch_size * setup.gradient_accumulation_steps / cost.step_seconds


@pytest.mark.parametrize("models", [4, pytest.param(25, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("global_batch_size", [None, 512])
def test_the_fastest_that_fits_is_found_with_few_estimates(global_batch_size, models):
    """Against every setting of the space, over models from small to larger than the machines."""
    draw = random.Random(0)
    found, shares = 0, []
    for _ in range(models):
        toy = Toy(
            10 ** draw.uniform(8, 11),
            activation=10 ** draw.uniform(3.5, 6.5),
            gather=10 ** draw.uniform(-3, 1),
            latency=10 ** draw.uniform(-3, 0),
            hosted=draw.choice((0.02, 0.1)),
        )
        setup, size = TrainingSetup(num_processes=32, max_length=2048), global_batch_size or 128
        every = [(one, toy(one)) for one in settings(setup, size, replicas=(1, 2, 4))]
        lean = [(one, toy(one)) for one in settings(replace(setup, **LEAN), size, replicas=(1, 2, 4))]
        # What changes less is taken first, and offload is for what does not fit without.
        ways = [
            [each for each in some if each[1].peak_bytes <= 0.9 * GPU and each[0].offload_params == offload]
            for offload in (False, True)
            for some in (every, lean)
        ]
        plain = [
            [each for each in way if getattr(each[0], ON_HOST) == on_host] for way in ways for on_host in (False, True)
        ]
        fitting = next(filter(None, plain), [])
        toy.asked.clear()
        if not fitting:
            with pytest.raises(ConfigError, match="fits on 32 x h100-80gb at no setting"):
                choose(setup, toy, global_batch_size=global_batch_size)
            continue
        found += 1
        best = choose(setup, toy, global_batch_size=global_batch_size)
        most = max(rate(*one) for one in fitting)
        shares.append(len(toy.asked) / len(every))
        assert best.global_batch_size == size
        assert best.cost.peak_bytes == toy(best.setup).peak_bytes <= 0.9 * GPU
        assert rate(best.setup, toy(best.setup)) * (1 + GAIN) ** 3 >= most
    assert found > models // 2 and sum(shares) / found < 0.15 and max(shares) < 0.35


def test_every_nth_block_recomputes_where_memory_allows():
    """n as large as it may be, found with few further estimates."""
    toy, setup = Toy(8e9, activation=1.2e7, gather=1e-3), TrainingSetup(num_processes=8, max_length=8192)
    best = choose(setup, toy, fixed=("per_device_train_batch_size",))
    assert len(toy.asked) < 20
    chosen = best.setup
    assert chosen.activation_checkpointing and chosen.activation_checkpointing_every_n_layers == 2
    more, less = (replace(chosen, activation_checkpointing_every_n_layers=n) for n in (1, 3))
    assert toy(less).peak_bytes > 0.9 * GPU and toy(more).step_seconds > toy(chosen).step_seconds
    fixed = choose(
        replace(setup, activation_checkpointing=True),
        toy,
        fixed=("per_device_train_batch_size", "activation_checkpointing"),
    )
    assert fixed.setup.activation_checkpointing_every_n_layers == 2, "where it is asked for, too"


def test_faster_settings_that_nobody_asked_for_are_named():
    """What changes how numbers are rounded, or what a step learns from, is proposed and never chosen. Compiled blocks
    are chosen on any number of GPUs where they are faster."""

    def toy(setup, gather=30.0):
        cost = Toy(1e9, gather=gather, stored=1.0)(setup)
        links = cost.step_seconds - cost.floor_seconds
        halved = links / 2 if setup.reduce_dtype == "bf16" else links
        return replace(cost, step_seconds=cost.floor_seconds * (0.8 if setup.compile else 1) + halved, loss="chunked")

    setup = TrainingSetup(num_processes=16, max_length=512)
    best = choose(setup, toy, fixed=("sync_each_batch",), global_batch_size=4096)
    assert best.setup.compile and best.setup.reduce_dtype == "fp32" and best.setup.sync_each_batch
    gain = best.cost.step_seconds / toy(replace(best.setup, reduce_dtype="bf16")).step_seconds - 1
    (line,) = best.proposals
    assert line.startswith(f"reduce_dtype bf16: {100 * gain:.0f} % faster") and line in str(best)
    assert best.setup.loss == "chunked"
    (line,) = choose(setup, partial(toy, gather=1e-3), fixed=("compile",)).proposals
    assert line.startswith("with compile: ")
    assert not choose(replace(setup, compile=True, reduce_dtype="bf16"), toy, global_batch_size=16).proposals


def test_weights_in_bf16_with_8_bits_and_4_bits_come_before_offload():
    """The first that fits of: as asked, less memory of weights and optimizer, offload with its caution."""
    setup = TrainingSetup(num_processes=1, max_length=4096)
    lean = choose(setup, Toy())
    assert {name: getattr(lean.setup, name) for name in LEAN} == LEAN and not lean.setup.offload_params
    assert "chosen    per_device_train_batch_size" in str(lean)
    assert choose(setup, Toy(), fixed=("optimizer",)).setup.offload_params, "not where another is asked for"
    adapter = replace(setup, num_processes=2, lora_r=16)
    assert not choose(adapter, Toy(1e10)).setup.load_in_4bit
    four = choose(adapter, Toy(7e10)).setup
    assert four.load_in_4bit and not four.offload_params
    assert choose(adapter, Toy(7e10), fixed=("load_in_4bit",)).setup.offload_params


def test_settings_are_compared_with_the_error_of_a_comparison():
    """Within it what takes less memory wins, then what changes less; the next best is never said to be faster."""

    def toy(gain, saved=0):
        def price(setup):
            cost, is_kept = Toy(1e9, gather=1e-3)(setup), not setup.reshard_after_forward
            seconds = cost.floor_seconds * (1 - gain * is_kept) * (1 - gain * setup.compile)
            return replace(cost, step_seconds=seconds, peak_bytes=int(4e10 + 1e10 * is_kept - saved * setup.compile))

        return price

    setup, fixed = TrainingSetup(num_processes=8), ("per_device_train_batch_size", "activation_checkpointing")
    plain = choose(setup, toy(0.015), fixed=fixed)
    assert plain.setup.reshard_after_forward and not plain.setup.compile
    assert "as fast (within 4 %, the error of a comparison)" in plain.next_best and not plain.proposals
    assert choose(setup, toy(0.015, saved=1), fixed=fixed).setup.compile, "which takes less"
    fast = choose(setup, toy(0.1), fixed=fixed)
    assert not fast.setup.reshard_after_forward and fast.setup.compile and "slower" in fast.next_best


def test_what_fits_with_segments_that_grow_alone_is_taken_and_said():
    """And not given up for what is slower, or offloads."""
    limit, setup = int(0.9 * GPU), TrainingSetup(num_processes=8)

    def toy(setup):
        cost = Toy(1e9)(setup)
        more = not setup.activation_checkpointing and not setup.expandable_segments
        return replace(cost, peak_bytes=limit + more, expandable_bytes=limit - 10**9 if more else 0)

    best = choose(setup, toy)
    assert not best.setup.activation_checkpointing and best.expandable_bytes == limit - 10**9
    lines = " ".join(str(best).split())
    assert "memory 75.4 GB of 84.9 GB per GPU, 11 % free" in lines
    assert "without PYTORCH_ALLOC_CONF=expandable_segments:True 76.4 GB" in lines
    others = choose(replace(setup, reshard_after_forward=False), toy, fixed=("reshard_after_forward",))
    assert "takes 75.4 GB with PYTORCH_ALLOC_CONF=expandable_segments:True" in f"{others.next_best}{best.next_best}"


def test_an_answer_has_a_sensible_batch_what_is_next_and_what_would_break_it():
    best = choose(TrainingSetup(num_processes=8, max_length=4096), Toy(activation=8e6))
    assert best.tokens_per_step == 2**18 and best.setup.gradient_accumulation_steps > 1
    assert best.next_best.count("fits, ") == 1 and f"next best {best.next_best}" in str(best)
    assert "max_length 8192 (" in best.breaks or "per_device_train_batch_size" in best.breaks
    assert "one row per step trains badly" in str(choose(TrainingSetup(), Toy(1e9), global_batch_size=1))
    assert "above 2,000,000" in str(choose(TrainingSetup(num_processes=512), Toy(), global_batch_size=512))
    assert not any(word in str(best) for word in ("trains badly", "above 2,000,000"))


@pytest.mark.parametrize(
    ("params", "changes", "given", "cures"),
    [
        (7e10, {"wrapping": "none"}, (), ["lora_r 16"]),
        (
            1e11,
            {"per_device_train_batch_size": 256, "max_length": 16384, "num_processes": 64},
            ("per_device_train_batch_size",),
            ["per_device_train_batch_size 1."],
        ),
        (3e9, {"num_processes": 2, "max_length": 2_000_000}, (), ["max_length 1000000", "gpu h100-nvl"]),
    ],
)
def test_where_nothing_fits_the_nearest_that_does_is_named(params, changes, given, cures):
    setup = TrainingSetup(**changes)
    with pytest.raises(ConfigError, match=r"fits on .* at no setting: it takes .* per GPU at least") as error:
        choose(setup, Toy(params), fixed=given)
    assert "\n" not in str(error.value)
    for cure in cures:
        assert cure in str(error.value)


def test_rows_are_shared_where_nothing_else_fits():
    setup = TrainingSetup(num_processes=8, max_length=16_384)
    best = choose(setup, Toy(activation=6e7, shares_rows=True))
    assert best.setup.cp_size == 2 and not best.setup.offload_params, "the fewest GPUs that make it fit"
    assert best.global_batch_size == 16
    assert "4 groups of 2 GPUs x 1 x 4 accumulation steps" in str(best)
    whole = choose(setup, Toy(activation=4e6, shares_rows=True))
    assert whole.setup.cp_size == 1
    with pytest.raises(ConfigError, match="at no setting"):
        choose(setup, Toy(activation=6e7))
    assert (
        choose(replace(setup, cp_size=4), Toy(activation=6e7, shares_rows=True), fixed=("cp_size",)).setup.cp_size == 4
    )


def test_experts_are_shared_where_gpus_wait_for_gathers_and_not_where_they_are_hidden():
    setup = TrainingSetup(num_processes=32, max_length=1024)
    slow = Toy(gather=20, most_experts=16)
    best = choose(setup, slow, fixed=("dp_replicate_size",))
    assert best.setup.ep_size == 16, "sizes inside a machine save nothing, and one beyond does"
    alone = choose(setup, slow, fixed=("ep_size", "dp_replicate_size"))
    assert alone.setup.ep_size == 1
    assert alone.tokens_per_second_per_gpu < best.tokens_per_second_per_gpu
    assert choose(replace(setup, ep_size=8), slow, fixed=("ep_size",)).setup.ep_size == 8
    quick = Toy(gather=1e-4, latency=0, most_experts=16)
    assert choose(setup, quick).setup.ep_size == 1 and all(one.ep_size == 1 for one in quick.asked)


def test_a_global_batch_or_a_margin_that_cannot_be():
    with pytest.raises(ConfigError, match="100 sequences cannot be made by 8 GPUs; use 96 or 104"):
        choose(TrainingSetup(num_processes=8), Toy(), global_batch_size=100)
    # fewer rows than GPUs: these share them, as few as need be, or a larger number where memory wants it
    few = TrainingSetup(num_processes=8, max_length=1024)
    best = choose(few, Toy(shares_rows=True), global_batch_size=2)
    assert best.setup.cp_size == 4 and best.global_batch_size == 2
    assert choose(few, Toy(activation=3e9, shares_rows=True), global_batch_size=2).setup.cp_size == 8
    with pytest.raises(ConfigError, match="2 sequences cannot be made by 8 GPUs; use 8"):
        choose(few, Toy(shares_rows=True), fixed=("cp_size",), global_batch_size=2)
    fixed = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match="2 GPUs x micro-batch 2 x 2 steps; use 8"):
        choose(TrainingSetup(num_processes=2, **fixed), Toy(), fixed=tuple(fixed), global_batch_size=16)
    # a margin is a part
    with pytest.raises(ConfigError, match=r"use 0\.1 for 10 %"):
        choose(TrainingSetup(), Toy(), margin=10)
    assert choose(TrainingSetup(), Toy(1e9), margin=0.5).cost.peak_bytes <= 0.5 * GPU
