"""What is known of a training before it runs: batch, precision, optimizer, sharding, machines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from hf_fsdp_tools.axes import SHARING, OfAxes, product, size_names, spread_problem, with_degrees
from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.timing.hardware import Gpu, gpu_named
from hf_fsdp_tools.planning.policy import WrapPolicy, as_policy
from hf_fsdp_tools.sharding.recompute import Recompute, as_recompute
from hf_fsdp_tools.text import did_you_mean

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # The dtypes of a `TrainingSetup`
_ALWAYS_SAID = (
    "mixed_precision", "master_dtype", "reduce_dtype", "optimizer", "activation_checkpointing", "compile", "loss",
    "attn_implementation",
)  # fmt: skip
_SAID_APART = (
    "num_processes",
    "gpu",
    "gpus_per_node",
    "images",
    "per_device_train_batch_size",
    "max_length",
    "gradient_accumulation_steps",
    "policy",
)


def setting_words(values: Mapping[str, Any]) -> str:
    """Fields with their values: "without activation_checkpointing, per_device_train_batch_size 2"."""
    texts = []
    for name, value in values.items():
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        is_switch = isinstance(value, bool) or value == ()
        texts.append(f"with{'' if value else 'out'} {name}" if is_switch else f"{name} {shown}")
    return ", ".join(texts)


@dataclass(frozen=True, kw_only=True)
class TrainingSetup(OfAxes):
    """One training as a value, for `estimate_memory`, `estimate_throughput` and `recommend_config`, which take its
    fields by name too. `dataclasses.replace` gives a changed one. Checked when it is made.

    Raises:
        ConfigError: a number is below 1, a name is unknown, values contradict each other, or nothing would be trained.
        MeshError: the copies do not divide the GPUs.

    Example:
        >>> setup = TrainingSetup(num_processes=8, gpu="a100-80gb", max_length=32, activation_checkpointing=True)
        >>> estimate_memory("checkpoint", setup).fits
        True
    """

    num_processes: int = 1  #: Processes over all machines, one per GPU
    gpu: str | Gpu = "h100-80gb"  #: Name in the table of GPUs (`hardware`), or a `Gpu` of one's own
    gpus_per_node: int = 8  #: GPUs that share a machine and its fast links
    network_gbit_s: float | None = None  #: All cards of a machine together; None takes the GPU's usual one
    link_gb_s: float | None = None
    """GB/s between the GPUs of a machine, as nccl-tests' `all_gather_perf` has them; None takes the GPU's usual ones,
    which PCIe with few or shared lanes does not reach."""
    dp_replicate_size: int = 1  #: Copies of the sharded model (HSDP)
    cp_size: int = 1  #: GPUs that share each row (context parallelism), neighbours; weights are sharded over them too
    tp_size: int = 1  #: GPUs that share each layer, and the rows (tensor parallelism), neighbours
    sequence_parallel: bool = False  #: Between layers that GPUs share (`tp_size`), each holds its own tokens alone
    ep_size: int = 1  #: GPUs of a copy that share the experts (expert parallelism), neighbours
    per_device_train_batch_size: int = 1
    """Sequences per micro-batch and GPU, or group of GPUs with the same rows (`cp_size`, `tp_size`)."""
    rows_per_example: int = 1  #: Rows that each of these is: two of a pair of answers (DPO, rewards)
    max_length: int = 4096  #: Tokens per sequence
    images: int | None = None  #: Per sequence, of a model that takes some; None is one where the sequence has room
    image_size: tuple[int, int] | None = None
    """Height and width of each, before the image processor; None takes those that the vision tower was made for."""
    gradient_accumulation_steps: int = 1
    sync_each_batch: bool = True  #: False keeps gradients whole on each GPU and reduces them after the last micro-batch
    mixed_precision: Literal["bf16", "fp16", "fp32"] = "bf16"  #: Dtype of computation and of gathered parameters
    master_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  #: Dtype of the shards that the optimizer updates
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"  #: Dtype in which gradients are reduced
    optimizer: str = "adamw"  #: (fused), `adamw_foreach`, `adamw_8bit` (torchao's), `muon`, `sgd`, `sgd_momentum`
    max_grad_norm: float | None = 1.0  #: Whether gradients are clipped, which takes memory and time
    clip_by_last_norm: bool = False  #: By the norm of the step before, which offloaded units need not wait for
    lora_r: int | None = None  #: Rank of LoRA adapters; None trains all parameters
    lora_target_modules: str | tuple[str, ...] | None = "all-linear"  #: None takes PEFT's own for the model
    lora_dropout: float = 0.0  #: Above 0, each adapted layer keeps an input of its own and a mask (TRL's default: 0.05)
    freeze_vision_tower: bool = False  #: The image encoder is not trained; what leads from it to the text is
    load_in_4bit: bool = False  #: NF4 base (QLoRA)
    dequantize: bool = True  #: False: the base of LoRA stays as its checkpoint's quantization_config says (FP8, …)
    frozen_models: tuple[str, ...] = ()
    """Hub names or folders of models that are kept next to this one in shards of `mixed_precision` and not trained: a
    reference (the same name once more), a teacher. Their forward passes are not timed."""
    untimed: str = ""  #: What else takes time in a step, such as a reference's pass: tokens/s are not estimated then
    activation_checkpointing: bool = False  #: Recompute each block's activations in the backward pass
    activation_checkpointing_every_n_layers: int = 1  #: The first of so many blocks recomputes, the others do not
    activation_checkpointing_offload: bool = False  #: Keep the inputs of blocks that recompute in host memory
    activation_checkpointing_save_ops: tuple[str, ...] = ()  #: "matmul", "attention", or torch's names are not repeated
    reshard_after_forward: bool = True  #: False keeps gathered parameters until the backward pass
    wrapping: Literal["plan", "root", "none"] = "plan"  #: root: one unit; none: every rank holds all (DDP)
    policy: WrapPolicy = field(default_factory=WrapPolicy)
    offload_params: bool = False  #: Keep shards, gradients and optimizer state in host memory
    expandable_segments: bool = False  #: PYTORCH_ALLOC_CONF=expandable_segments:True: the allocator's segments grow
    compile: bool = False  #: `torch.compile` per block
    loss: Literal["full", "chunked", None] = None
    """`chunked`: logits are made and freed in chunks, as the recipes, TRL's trainers and Liger do; `full`: whole, as by
    transformers' `Trainer`. None takes `chunked` where a decoder predicts the next word, else `full`."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"

    @classmethod
    def of(cls, setup: "TrainingSetup | None" = None, /, **values: Any) -> "TrainingSetup":
        """A setup, or the default one, with other values of some fields."""
        known = {each.name for each in fields(with_degrees(cls))}
        for name in values.keys() - known:
            raise ConfigError(f"A training has no setting {name!r}{did_you_mean(name, known)}")
        return cls(**values) if setup is None else replace(setup, **values)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            value = getattr(self, name)
            is_count = hint is int or (name == "lora_r" and value is not None)
            if is_count and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number, at least 1.")
            if get_origin(hint) is Literal and value not in get_args(hint):
                raise ConfigError(f"{name} is {value!r}; use {', '.join(filter(None, get_args(hint)))}.")
        object.__setattr__(self, "policy", as_policy(self.policy) or WrapPolicy())
        for name, unit in (("network_gbit_s", "Gbit/s"), ("link_gb_s", "GB/s")):
            if (rate := getattr(self, name)) is not None and not 0 < rate < math.inf:
                raise ConfigError(f"{name} is {rate:g}; give {unit} above 0, or leave it out.")
        if self.mixed_precision == "bf16" and (gpu := gpu_named(self.gpu)).bf16 == gpu.fp32:
            raise ConfigError(f"{gpu} does not compute in bf16; give mixed_precision fp16, or no (fp32).")
        if self.images is not None and self.images < 0:
            raise ConfigError(f"images is {self.images}; use 0 for text alone, or how many images a sequence has.")
        if self.image_size is not None and (len(self.image_size) != 2 or min(self.image_size) < 1):
            raise ConfigError(f"image_size is {self.image_size}; give height and width, such as (512, 512).")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout is {self.lora_dropout:g}; give a share from 0 to below 1.")
        for name, freezes in (("load_in_4bit", self.load_in_4bit), ("dequantize=False", not self.dequantize)):
            if freezes and self.lora_r is None:
                raise ConfigError(f"{name} freezes the base, so nothing would be trained; give lora_r, such as 16.")
        if not self.dequantize and self.load_in_4bit:
            raise ConfigError("load_in_4bit quantises a plain base, dequantize=False keeps a quantised one. Give one.")
        if as_recompute(self._of_recompute) != Recompute() and not self.activation_checkpointing:
            raise ConfigError("activation_checkpointing is off: turn it on, or leave out what says how it is done.")
        self.dims.resolve(self.num_processes)
        if self.sequence_parallel and (problem := spread_problem(self)):
            raise ConfigError(f"{problem}.")
        if self.wrapping == "none" and (self.offload_params or self.shares):
            names = ", ".join(("offload_params", *size_names(*SHARING)))
            raise ConfigError(f"{names} need FSDP; leave them or wrapping='none' out.")
        if self.max_length < self.cp_size:
            raise ConfigError(
                f"max_length {self.max_length} is shorter than cp_size {self.cp_size}; use fewer GPUs per row."
            )

    @property
    def words(self) -> str:
        """All that an estimate assumes: optimizer, dtypes, loss, kernels, and what is not as by default."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return setting_words(
            {
                name: value
                for name, (value, default) in values.items()
                if value is not None and (name in _ALWAYS_SAID or (name not in _SAID_APART and value != default))
            }
        )

    @property
    def _of_recompute(self) -> dict[str, Any]:
        return {name: getattr(self, f"activation_checkpointing_{name}") for name in vars(Recompute())}

    @property
    def recompute(self) -> Recompute | None:
        """Which blocks recompute their activations, and what they keep; None where none do."""
        return as_recompute(self.activation_checkpointing and self._of_recompute)

    @property
    def dims(self) -> ParallelDims:
        """The degrees of parallelism."""
        return ParallelDims(**{name: getattr(self, name) for name in size_names()})

    @property
    def shares(self) -> bool:
        """Whether GPUs of a copy share rows, layers or experts."""
        return any(getattr(self, name) > 1 for name in size_names(*SHARING))

    @property
    def is_plain(self) -> bool:
        """Whether the model stays a plain one: without FSDP, and where one GPU holds all of it."""
        return self.wrapping == "none" or (self.num_processes == 1 and not self.offload_params)

    def dtype_in_memory(self, *, is_trained: bool) -> torch.dtype:
        """The dtype in which a weight lies between its uses: that of the optimizer's updates, or of a frozen base."""
        is_loaded_as_trained = self.freeze_vision_tower and self.lora_r is None  # LoRA's base is loaded in `precision`
        return DTYPES[self.master_dtype if is_trained or is_loaded_as_trained else self.mixed_precision]

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that share one replica."""
        return 1 if self.wrapping == "none" else self.num_processes // self.num_copies

    @property
    def dp_shard_size(self) -> int:
        """GPUs over which FSDP shards a weight, those of context parallelism among them."""
        return self.gpus_per_copy // product(self, size_names("divide", of_rows=True))

    @property
    def expert_shard_size(self) -> int:
        """GPUs over which FSDP shards an expert."""
        return self.gpus_per_copy // self.ep_size

    @property
    def rows_at_once(self) -> int:
        """GPUs, or groups of GPUs with the same rows: each has a micro-batch of its own."""
        return self.num_processes // self.ranks_per_row

    @property
    def row_words(self) -> str:
        """What has a micro-batch of its own, in words: "8 GPUs", "4 groups of 2 GPUs"."""
        shared = self.ranks_per_row
        own = f"{self.num_processes} GPU{'s' * (self.num_processes > 1)}"
        return own if shared == 1 else f"{self.rows_at_once} group{'s' * (self.rows_at_once > 1)} of {shared} GPUs"
