"""What a model may be, how it is stored, divided and computed: a maker for each feature.

A maker takes a layout and returns it with the feature. Features of one axis exclude one another; the first of each axis
is what a user has who asks for nothing.
"""

from collections.abc import Callable
from dataclasses import replace

from hf_fsdp_tools import Float8Policy
from tests.behaviour.sides import FOUR_BITS, Layout

Maker = Callable[[Layout], Layout]


def _as_it_is(layout: Layout) -> Layout:
    return layout


def _kind(model_type: str, *, is_tied: bool = False) -> Maker:
    return lambda layout: replace(layout, model_type=model_type, is_tied=is_tied)


def _divided(ranks: int, **dims: int) -> Maker:
    return lambda layout: replace(layout, ranks=ranks, dims=dims)


def _stored(kind: str) -> Maker:
    """A base that stays as it is stored: adapters train on it."""
    return lambda layout: replace(layout, stored=kind, is_adapter=True)


def _spread(layout: Layout) -> Layout:
    asked = {"enable_sequence_parallel": True}
    return replace(_with(distributed_config=asked)(layout), ranks=2, dims={"tp_size": 2})


def _with(**options: object) -> Maker:
    return lambda layout: replace(layout, options={**layout.options, **options})


def _mxfp4(layout: Layout) -> Layout:
    return replace(_stored("mxfp4")(layout), model_type="gpt_oss")  # the one type that is stored so


def _streamed(layout: Layout) -> Layout:
    return replace(_with(offload_policy=True)(layout), is_streamed=True)


AXES: dict[str, dict[str, Maker]] = {
    "model": {
        "dense": _kind("llama"),
        "tied": _kind("qwen3", is_tied=True),
        "mixture": _kind("qwen3_moe"),
        "VLM": _kind("llava"),
        "encoder-decoder": _kind("t5"),
        "recurrence": _kind("qwen3_5_text"),
    },
    "weights": {
        "all weights": _as_it_is,
        "LoRA": lambda layout: replace(layout, is_adapter=True),
        "FP8 base": _stored("fp8"),
        "MXFP4 base": _mxfp4,
        "int4 base": _stored("compressed int4 experts"),
        "4-bit base": _stored(FOUR_BITS),
    },
    "division": {
        "FSDP2": _divided(2),
        "one rank": _divided(1),
        "HSDP": _divided(4, dp_replicate_size=2),
        "tp": _divided(2, tp_size=2),
        "sequence parallelism": _spread,
        "ep": _divided(2, ep_size=2),
        "tp and ep": _divided(2, tp_size=2, ep_size=2),
        "cp": _divided(2, cp_size=2),
    },
    "precision": {
        "fp32": _as_it_is,
        "bf16": _with(mp_policy="bf16"),
        "FP8": _with(mp_policy=Float8Policy(param_dtype=None)),
    },
    "memory": {
        "on the device": _as_it_is,
        "offload": _with(offload_policy=True),
        "streamed steps": _streamed,
    },
}


def made(*names: str) -> Layout:
    """The layout that has these features, in the order of their axes, and of each other axis the first."""
    unknown = {*names} - {name for makers in AXES.values() for name in makers}
    assert not unknown, f"no axis has {unknown}"
    layout = Layout(2)
    for makers in AXES.values():
        layout = makers[next((name for name in names if name in makers), next(iter(makers)))](layout)
    return layout
