"""A model of this package beside a plain one: what lines of Python do with both, and what a user then sees of them."""

import copy
import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import hf_fsdp_tools
from hf_fsdp_tools import (
    Float8Policy,
    FSDPPlugin,
    FSDPToolsError,
    ParallelDims,
    add_adapter,
    live_weights,
    load_adapter,
    wait_for_saves,
)
from hf_fsdp_tools.steps import load_weights
from tests._checkpoints import (
    dequantized_by_transformers,
    four_bits,
    full,
    make_quantized,
    randomize,
    stored_tensors,
    tiny_config,
)
from tests._training import new_accelerator, on_device
from tests.api import Held, local_device, steps_in_backward, telling

Tensors = dict[str, torch.Tensor]
Act = tuple[str, ...]
"""The lines of an act."""
ROWS, LR = 4, 1e-2


@dataclass(frozen=True)
class Layout:
    ranks: int
    model_type: str = "llama"
    dims: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_adapter: bool = False
    is_tied: bool = False
    stored: str = ""
    """How a base is stored that stays so, and on which an adapter trains."""
    is_streamed: bool = False
    """Whether optimizers step in the backward pass."""

    @property
    def is_bf16(self) -> bool:
        return self.options.get("mp_policy") == "bf16"

    @property
    def is_float8(self) -> bool:
        return isinstance(self.options.get("mp_policy"), Float8Policy)

    @property
    def is_recurrence(self) -> bool:
        return self.model_type == "qwen3_5_text"

    @property
    def noise(self) -> int:
        """How much rounding there is: none, as in bf16, as in a recurrence in bf16 (a tenth of its gradients), or as in
        one in 8 bits, of whose gradients none is left."""
        if self.is_recurrence:
            return 7 if self.is_float8 else 3 * self.is_bf16
        return int(self.is_float8 or self.is_bf16)

    @property
    def auto_class(self) -> Any:
        kinds = {"t5": AutoModelForSeq2SeqLM, "llava": AutoModelForImageTextToText}
        return kinds.get(self.model_type, AutoModelForCausalLM)


REFUSALS = (
    "belong to no prepared model",
    "PEFT cannot merge adapters into layers or experts that ranks share",
    "training would not go on as it was",  # a state of fewer optimizers than are prepared now
)
"""Words of the refusals that are documented."""

# ---- what the lines of acts mean ----


@cache
def words(number: int) -> torch.Tensor:
    return torch.randint(3, 60, (ROWS, 12), generator=torch.Generator().manual_seed(number))


IMAGE = 130
"""The token that stands for a part of an image; a tower makes 16 of them."""


@cache
def batch_of(model_type: str, number: int) -> dict[str, Any]:
    """The rows of all ranks, with images where the model sees."""
    ids = words(number)
    if model_type != "llava":
        return {"input_ids": ids, "labels": ids, "use_cache": False}
    ids = torch.cat([torch.full((ROWS, 16), IMAGE), ids], dim=1)
    pixels = torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids.where(ids != IMAGE, -100), "pixel_values": pixels, "use_cache": False}


def part_of_rows(value: Any, parts: int, part: int) -> Any:
    return value.chunk(parts)[part] if isinstance(value, torch.Tensor) else value


def adapted(model: Any) -> bool:
    return isinstance(model, PeftModel)


def base(model: Any) -> Any:
    return (model.get_base_model() if adapted(model) else model).model


@contextmanager
def failing(model: Any) -> Iterator[None]:
    """A block in which a pass of the model raises an error in its second layer."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    handle = base(model).layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def opened_folder(layout: Layout, folder: Path) -> Tensors:
    """The weights that transformers opens, or those of adapters by their folders."""
    if (folder / "config.json").exists():
        return layout.auto_class.from_pretrained(folder, dtype="auto").state_dict()
    files = {file.parent for file in folder.rglob("*.safetensors")}
    named = {part.relative_to(folder): stored_tensors(part) for part in sorted(files)}
    return {f"{part} {key}": tensor for part, tensors in named.items() for key, tensor in tensors.items()}


NAMES = (
    "ids", "batch", "load", "load_base", "plain_model", "make_accelerator", "save_pretrained", "opened", "store",
    "restore", "restore_other", "with_adapter", "made_adapter", "load_weights", "clip_grad_norm_", "add_second",
    "early", "streamed",
)  # fmt: skip
FOUR_BITS = "4 bits"


def of_adapter(model_type: str) -> dict[str, Any]:
    return {"r": 4, "target_modules": ["q", "v"] if model_type == "t5" else ["q_proj", "v_proj"]}


def by_torchao(model: Any) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True, pad_inner_dim=True)

    def is_converted(module: nn.Module, name: str) -> bool:
        in_block = ".layers." in name or ".block." in name
        return in_block and not name.endswith(".gate") and all(size % 16 == 0 for size in module.weight.shape)

    return convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


class Side:
    """The names of the lines of acts, for one of the two models."""

    def __init__(self, layout: Layout, files: Path, folder: Path) -> None:
        self.layout, self.files, self.folder, self.count = layout, files, folder, 0
        self.other: Side = self
        self.meshes: dict[str, Any] = {}
        self.env: dict[str, Any] = {"torch": torch, "copy": copy, "base": base, "failing": failing, "optimizer": None}
        self.env |= {name: getattr(self, name) for name in NAMES}
        self.env["folder"] = folder / "accelerate"

    def plain_base(self) -> Any:
        options = {"quantization_config": four_bits()} if self.layout.stored == FOUR_BITS else {}
        model = self.layout.auto_class.from_pretrained(self.files / "base", dtype=torch.float32, **options)
        for module in model.modules():  # a pass on some CPUs would leave rearranged weights behind
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        model = model.to(local_device()).train()
        return by_torchao(model) if self.layout.is_float8 else model

    def plain_model(self) -> Any:
        model = self.plain_base()
        if self.layout.is_adapter:
            model = PeftModel.from_pretrained(model, self.files / "default", is_trainable=True)
        return model.train()

    def add_second(self, model: Any) -> None:
        model.load_adapter(str(self.files / "second"), "second", is_trainable=True, torch_device=local_device().type)

    def new_folder(self) -> Path:
        self.count += 1
        return self.folder / str(self.count)

    def store(self, model: Any, optimizer: Any) -> None:
        self.stored, alone = self.new_folder(), isinstance(self, Plain)
        state = self.state_of(model, optimizer)
        dcp.save(state, checkpoint_id=self.stored, no_dist=alone)

    def restore_other(self, model: Any, optimizer: Any) -> None:
        """The state that the other side has stored: one process's on shards, and shards' in one process."""
        self.stored, self.other.stored = self.other.stored, self.stored
        self.restore(model, optimizer)
        self.stored, self.other.stored = self.other.stored, self.stored

    def restore(self, model: Any, optimizer: Any) -> None:
        state = self.state_of(model, optimizer)
        dcp.load(state, checkpoint_id=self.stored, no_dist=isinstance(self, Plain))
        parts = {"model_state_dict": state["m"], "optim_state_dict": state["o"]}
        has_all = not self.layout.stored and self.layout.model_type != "llava"  # whose tower's last block is not run
        set_state_dict(model, optimizer, **parts, options=StateDictOptions(strict=has_all))

    def state_of(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Without a base that stays as it is stored."""
        options = StateDictOptions(ignore_frozen_params=bool(self.layout.stored))
        weights, moments = get_state_dict(model, optimizer, options=options)
        return {"m": self.trained_of(weights), "o": moments}

    def trained_of(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in weights.items() if not self.layout.stored or "lora_" in name}


class Plain(Side):
    """Of transformers, PEFT and torch, in one process with all rows."""

    clip_grad_norm_ = staticmethod(nn.utils.clip_grad_norm_)

    def ids(self, number: int) -> torch.Tensor:
        return words(number).to(local_device())

    def batch(self, number: int) -> dict[str, Any]:
        return on_device(batch_of(self.layout.model_type, number))

    def load(self, accelerator: Any = None) -> Any:
        return self.plain_model()

    def load_base(self) -> Any:
        return self.plain_base()

    def made_adapter(self, model: Any) -> Any:
        """Initialised as that of the shards was, by chance."""
        model = get_peft_model(model, LoraConfig(**of_adapter(self.layout.model_type)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(self.other.made[name])
        return model

    def early(self, optimizer: Any) -> Any:
        return nullcontext()

    def streamed(self, model: Any) -> Tensors:
        return self.written(model, stored_tensors)

    def with_adapter(self, model: Any) -> Any:
        return PeftModel.from_pretrained(model, self.files / "default", is_trainable=True).eval()

    def load_weights(self, model: Any) -> None:
        model.load_state_dict(self.load().state_dict())

    def make_accelerator(self) -> "Plain":
        self.prepared: dict[bool, Any] = {}  # the optimizer, then the model
        return self

    def written(self, model: Any, read: Callable[[Path], Tensors]) -> Tensors:
        """What is read of the files, which transformers writes on rank 0 alone."""
        folder = self.new_folder()
        model.save_pretrained(folder)
        shared = [read(folder)]
        dist.broadcast_object_list(shared)
        return shared[0]

    def save_pretrained(self, model: Any, blocking: bool = True, again: bool = False) -> None:
        self.saved = self.written(model, partial(opened_folder, self.layout))

    def opened(self) -> Tensors:
        return self.saved

    # As an Accelerator

    def prepare(self, *objects: Any) -> Any:
        self.prepared |= {isinstance(each, nn.Module): each for each in objects}
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def save_state(self, folder: Path) -> None:
        self.state = copy.deepcopy({is_model: each.state_dict() for is_model, each in self.prepared.items()})

    def load_state(self, folder: Path) -> None:
        weights, moments = copy.deepcopy((self.state[True], self.state[False]))
        self.prepared[True].load_state_dict(self.trained_of(weights), strict=not self.layout.stored)
        self.prepared[False].load_state_dict(moments)


class Sharded(Side):
    """Of this package, each rank with its rows."""

    clip_grad_norm_ = staticmethod(hf_fsdp_tools.clip_grad_norm_)

    def ids(self, number: int) -> torch.Tensor:
        return self.own_rows(words(number).to(local_device()))

    def own_rows(self, value: Any) -> Any:
        alike = ParallelDims(**self.layout.dims).ranks_per_row
        return part_of_rows(value, dist.get_world_size() // alike, dist.get_rank() // alike)

    def batch(self, number: int) -> dict[str, Any]:
        batch = on_device(batch_of(self.layout.model_type, number))
        return {name: self.own_rows(value) for name, value in batch.items()}

    def load_base(self) -> Any:
        return self.load(has_adapter=False)

    def made_adapter(self, model: Any) -> Any:
        model = add_adapter(model, LoraConfig(**of_adapter(self.layout.model_type)))
        self.made = {name: full(each).clone() for name, each in model.named_parameters() if each.requires_grad}
        return model

    def early(self, optimizer: Any) -> Any:
        return steps_in_backward(optimizer) if self.layout.is_streamed else nullcontext()

    def streamed(self, model: Any) -> Tensors:
        buckets = live_weights(model).buckets(2**19, to=None)
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.items()}

    def load(self, accelerator: Any = None, has_adapter: bool = True) -> Any:
        options, dims = dict(self.layout.options), ParallelDims(**self.layout.dims).resolve(dist.get_world_size())
        options |= (
            {"mesh": dims.build_mesh(local_device().type)} if accelerator is None else {"accelerator": accelerator}
        )
        has_adapter = has_adapter and self.layout.is_adapter
        files = self.files / ("default" if has_adapter else "stored" if self.layout.stored else "base")
        options |= {"is_trainable": True} if has_adapter else {}
        options |= {"quantization_config": four_bits()} if self.layout.stored == FOUR_BITS else {}
        options |= {"dequantize": False} if self.layout.stored not in ("", FOUR_BITS) else {}
        load_kwargs = {"progress": False}
        model = hf_fsdp_tools.from_pretrained(files, dtype=torch.float32, load_kwargs=load_kwargs, **options).train()
        return model

    def with_adapter(self, model: Any) -> Any:
        return load_adapter(model, self.files / "default", is_trainable=True)

    def load_weights(self, model: Any) -> None:
        load_weights(model, self.files / "base", progress=False)

    def make_accelerator(self) -> Any:
        sizes = dict(self.layout.dims)
        options = {"policy": self.layout.options.get("policy"), "cpu_offload": "offload_policy" in self.layout.options}
        plugin = FSDPPlugin(ep_size=sizes.pop("ep_size", 1), **options)
        shards = dist.get_world_size() // max(sizes.values(), default=1)
        parallelism = ParallelismConfig(**sizes, dp_shard_size=shards) if sizes else None
        precision = "bf16" if self.layout.is_bf16 else "no"
        return new_accelerator(fsdp_plugin=plugin, parallelism_config=parallelism, mixed_precision=precision)

    def save_pretrained(self, model: Any, blocking: bool = True, again: bool = False) -> None:
        self.saved = self.saved if again else self.new_folder()
        hf_fsdp_tools.save_pretrained(model, self.saved, blocking=blocking)

    def opened(self) -> Tensors:
        wait_for_saves()
        return opened_folder(self.layout, self.saved)

    def is_seen(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether a user sees this rank's shard, and not what is gathered in its place between two passes."""
        if dist.get_world_size() == 1:
            return parameter.is_leaf and parameter.dtype == torch.float32
        if not self.meshes:  # just loaded
            self.meshes |= {plain_name(name): mesh_of(each) for name, each in self.env["model"].named_parameters()}
        mesh = self.meshes.get(plain_name(name))
        return mesh_of(parameter) == mesh if plain_name(name) in self.meshes else isinstance(parameter, DTensor)


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def mesh_of(parameter: torch.Tensor) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


# ---- comparing ----


def figures(side: Side, act: Act) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What a user sees of a model after an act, whole: what it is, its name, its value."""
    env, is_compared = side.env, lambda name: not side.layout.stored or "lora_" in name  # else under other names
    states = getattr(env["optimizer"], "state", {})
    for name, parameter in env["model"].named_parameters():
        if not is_compared(name):
            continue
        if isinstance(side, Plain) or side.is_seen(name, parameter):
            yield "weight", name, parameter
            yield "requires_grad", name, torch.tensor(float(parameter.requires_grad))
            if parameter.grad is not None:
                yield "gradient", name, parameter.grad
            for key, value in states.get(parameter, {}).items():
                yield key, name, value
        else:
            yield "hidden", name, torch.zeros(())
    for what in ("kept", "saved"):
        if any(f"{what} = " in line for line in act) and what in env:
            yield from ((what, key, value) for key, value in env[what].items() if is_compared(key))
    for what in ("loss", "norm", "words"):
        if any(f"{what} = " in line for line in act) and what in env:
            yield what, "", env[what]


def listed(side: Side, act: Act) -> dict[tuple[str, str], torch.Tensor]:
    """The figures by what they are and their names, the same on every rank; losses and words of all rows."""
    found = {}
    for what, name, value in figures(side, act):
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        is_of_rows = isinstance(side, Sharded) and what in ("loss", "words")
        found[what, name] = of_all_rows(side, full(tensor)) if is_of_rows else tensor
    if isinstance(side, Sharded):
        seen, every = [(key, mesh_of(value) is None) for key, value in found.items()], [None] * dist.get_world_size()
        dist.all_gather_object(every, seen)
        if every.count(seen) != len(every):
            others = sorted({str(key) for each in every for key in {*each}.symmetric_difference(seen)})
            raise ArithmeticError(f"not the same on every rank: {others[:3]}")
    return found


def this_rank_of(have: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has of a tensor, and the same part of the plain one: nothing is gathered."""
    if not isinstance(have, DTensor):
        return have.double().cpu(), want.double().cpu()  # tensors of torchao move in no other dtype
    if any(placement.is_partial() for placement in have.placements):
        return full(have).double(), want.double().cpu()
    return Held.of(have).memory.double().cpu(), Held.of(have).part_of(want.double().cpu())


def of_all_rows(side: Sharded, value: torch.Tensor) -> torch.Tensor:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    each = every[:: ParallelDims(**side.layout.dims).ranks_per_row]
    return torch.cat(each) if value.dim() else torch.stack(each).mean()


def difference(plain: Side, sharded: Side, act: Act, steps: int) -> str:
    """What differs, or ""."""
    if "model" not in plain.env:
        return ""
    found, expected = listed(sharded, act), listed(plain, act)
    hidden = {name for what, name in found if what == "hidden"}
    largest = max((float(v.abs().max()) for (what, _), v in expected.items() if what == "gradient"), default=0.0)
    problems = []
    for what, name in {**expected, **found}:
        if name in hidden and what not in ("kept", "saved"):
            continue
        have, want = found.get((what, name)), expected.get((what, name))
        if have is None or want is None:  # no gradient is as good as one of zeros
            there = Held.of(have if want is None else want).memory
            if what in ("kept", "saved") or (what != "step" and bool(there.any())):
                problems.append(f"{what} of {name} is {'missing' if have is None else 'there alone'}")
        elif have.shape != want.shape or (have.dtype != want.dtype and what not in ("loss", "norm", "step")):
            problems.append(f"{what} of {name}: {have.dtype} {[*have.shape]} and not {want.dtype} {[*want.shape]}")
        else:
            allowed = bound(what, want, largest, steps, plain.layout)
            mine, theirs = this_rank_of(have, want)
            far = (mine - theirs).abs() if mine.numel() else torch.zeros(1)
            worst, limit = (far.mean(), allowed[1]) if plain.layout.noise else (far.max(), allowed[0])
            if not bool(worst <= limit) or not bool(far.max() <= allowed[0]):
                problems.append(f"{what} of {name}: {float(far.max()):.1e} apart, where {allowed[0]:.1e} is allowed")
    return "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")


def bound(what: str, value: torch.Tensor, largest: float, steps: int, layout: Layout) -> tuple[float, float]:
    """How far the largest and the mean difference of a value may be; where it is rounding that differs, assumed."""
    size, noise = float(value.double().abs().max()) if value.numel() else 0.0, layout.noise
    size = max(size, 1e-2 * largest) if what == "gradient" else size
    if what in ("requires_grad", "step"):
        return 0.0, 0.0
    is_weight = what in ("weight", "kept", "saved")
    if not noise:
        grown = steps * layout.is_recurrence  # rounding grows in it, and where a step divides by small moments
        return 1e-4 * max(1, grown) * size + 1e-2 * LR * grown * is_weight + 1e-7, float("inf")
    if is_weight:
        sign = 2.1 if layout.is_float8 or layout.is_recurrence else 1.5  # whether a first step may have the other one
        return sign * LR * steps + 1e-6, 0.3 * noise * LR * steps + 1e-6
    if what in ("loss", "norm"):
        return noise * ((0.02 if what == "loss" else 0.05) + 0.02 * steps) * size, float("inf")
    if what == "gradient":
        return noise * ((0.3 + 0.2 * steps) * size + 0.05 * largest), float("inf")
    return float("inf"), float("inf")


# ---- one sequence ----


def attempt(side: Side, act: Act) -> BaseException | None:
    in_bf16 = (
        side.layout.is_bf16 and isinstance(side, Plain) and any("ids(" in line or "batch(" in line for line in act)
    )
    with torch.autocast(local_device().type, torch.bfloat16, cache_enabled=False) if in_bf16 else nullcontext():
        try:
            exec("\n".join(act), side.env)
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            return error
    return None


def said_of(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, FSDPToolsError):
        return f"{type(error).__name__}: {error}"
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:300]} ({' < '.join(places[:-4:-1])})"


def all_said(said: str) -> list[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    return every


def outcome(
    plain: Plain, sharded: Sharded, act: Act, steps: int, refusals: Sequence[str] = REFUSALS
) -> tuple[str, str]:
    """The kind of an act, and what was said."""
    error = attempt(sharded, act)
    errors = all_said(said_of(error))
    if len({said.split(":")[0] for said in errors}) > 1:
        return "wrong", "ranks do not agree: " + " | ".join(errors)
    kind = "right"
    if isinstance(error, FSDPToolsError):
        kind = "refused" if len({*errors}) == 1 and any(words in errors[0] for words in refusals) else "wrong"
    else:
        of_plain = attempt(plain, act)
        if (error is None) != (of_plain is None):
            kind = "foreign" if error is not None else "wrong"
            errors[0] = errors[0] or f"no error; the plain model has {said_of(of_plain)}"
    if kind in ("right", "refused"):
        try:
            apart = next(filter(None, all_said(difference(plain, sharded, act, steps))), "")
        except ArithmeticError as unequal:
            apart = str(unequal)
        if apart:
            return "wrong", (f"after a refusal ({errors[0][:100]}) " if kind == "refused" else "") + apart
    return kind, errors[0]


def play(
    layout: Layout, acts: Sequence[Act], files: Path, folder: Path, refusals: Sequence[str] = REFUSALS
) -> list[tuple[str, str]]:
    """On a rank: what became of each act, until one is wrong or foreign."""
    warnings.simplefilter("ignore")
    disable_progress_bar()
    set_verbosity_error()
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # convolutions of fp32, as all else of it
    own = folder / f"plain {dist.get_rank()}"
    plain, sharded, told, steps = Plain(layout, files, own), Sharded(layout, files, folder), [], 0
    plain.other, sharded.other = sharded, plain
    for act in acts:
        steps += any("step()" in line for line in act)
        told.append(outcome(plain, sharded, act, steps, refusals))
        if told[-1][0] in ("wrong", "foreign"):
            break
    wait_for_saves()
    return told


def make_files(layout: Layout, folder: Path) -> Path:
    """The base and two adapters of a layout's model, in a folder that several layouts share."""
    folder = folder / f"{layout.model_type}{' tied' if layout.is_tied else ''} {layout.stored}"
    if folder.exists():
        return folder
    config = telling(tiny_config(layout.model_type, 4))
    text = config.get_text_config()
    if not layout.is_recurrence:  # of which the fourth layer is another
        kinds = {"layer_types": text.layer_types[:2]} if getattr(text, "layer_types", None) else {}
        sizes = ("num_hidden_layers", "num_layers", "num_decoder_layers")
        text.update({name: 2 for name in sizes if hasattr(text, name)} | kinds)
    if layout.stored == FOUR_BITS:  # a kernel for CPUs takes no blocks that end within a row (bitsandbytes 0.50)
        for part in (config, text, getattr(config, "vision_config", text)):
            sizes = ("intermediate_size", "moe_intermediate_size", "d_ff")
            part.update({name: 128 for name in sizes if hasattr(part, name)})
    config.decoder_start_token_id = config.pad_token_id = 0
    if layout.model_type == "llava":
        config.image_token_index = IMAGE
    if layout.model_type != "t5":  # which ties its tables in any case
        config.tie_word_embeddings = layout.is_tied

    def make() -> Any:
        return layout.auto_class.from_config(config)

    if layout.stored in ("", FOUR_BITS):
        randomize(make()).save_pretrained(folder / "base")
        (folder / "stored").symlink_to(folder / "base")
    else:
        make_quantized(layout.stored, folder / "stored", make)
        dequantized_by_transformers(layout.stored, folder / "stored", torch.float32, layout.auto_class).save_pretrained(
            folder / "base"
        )
    for number, name in enumerate(("default", "second")):
        torch.manual_seed(number)
        lora = LoraConfig(**of_adapter(layout.model_type), init_lora_weights=False)
        model = get_peft_model(layout.auto_class.from_pretrained(folder / "base"), lora)
        model.peft_config["default"].base_model_name_or_path = str(folder / "stored")
        model.save_pretrained(folder / name)
    return folder
