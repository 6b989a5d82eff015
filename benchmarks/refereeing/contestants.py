"""What is compared with one process: each contestant trains two steps of a tiny checkpoint on 2 CPU ranks, as its own
documents say, and leaves a state and a saved model.

Accelerate takes FSDP up on GPUs only: its state is told here that it has (`_accelerate`), and what follows is its own.
Every rank has as many tokens as the others, so that a mean over ranks is the mean over tokens.
"""

import json
import os
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from peft import PeftConfig, PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from transformers.distributed import DistributedConfig, load_optimizer_distributed, save_optimizer_distributed
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trl import SFTConfig, SFTTrainer

from benchmarks.measuring import OURS, Row
from hf_fsdp_tools import FSDPPlugin, FSDPTrainerMixin, from_pretrained, make_accelerator, save_pretrained
from hf_fsdp_tools.proof.case import telling, tiny_case, with_adapter
from hf_fsdp_tools.proof.compare import TOLERANCE, apart, worst
from hf_fsdp_tools.proof.plain import Case, Tensors, forward, load_plain, loss_of
from hf_fsdp_tools.testing import forget_accelerate

RANKS, STEPS = 2, 2
KINDS = ("IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM")
"""Heads that a type is tried with, the first that it has first."""
_ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.0}
"""Steps that are seen in the weights; no gradient of zero steps by the sign of its rounding."""


# ---- one process ----


def model_classes(model_type: str) -> list[Any]:
    """The classes that a tiny model of a type is tried with; none for a type without such heads."""
    names = (getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(model_type) for kind in KINDS)
    flat = chain.from_iterable((name,) if isinstance(name, str) else name or () for name in names)
    return [getattr(transformers, name) for name in dict.fromkeys(flat)]


def prepare(model_type: str, folder: Path, wanted: Collection[str]) -> None:
    """A tiny checkpoint of a type, and what one process computes of the rows that contestants take."""
    folder.mkdir()
    options: dict[str, Any] = {"num_batches": RANKS * STEPS, "is_training": True, "tp_size": RANKS}
    try:
        config = telling(CONFIG_MAPPING[model_type]())
        case, facts = tiny_case(config, model_classes(model_type), folder / "checkpoint", **options)
        words = Tokenizer(WordLevel({str(i): i for i in range(131)}, unk_token="0"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(case.folder)
        rows = case.batches["rows"]
        own = [rows[RANKS * step : RANKS * (step + 1)] for step in range(STEPS)]
        made: dict[str, Any] = {"own": (case, plain_run(case, own))}
        if "shared" in wanted:
            made["shared"] = case, plain_run(case, [[batch] for batch in rows[:STEPS]])
    except Exception as error:
        (folder / "error.txt").write_text(f"{type(error).__name__}: {error}"[:300])
        return
    # TRL takes words alone; PEFT finds no linear layer in some, or does not know the type.
    with suppress(Exception):
        if "trl" in wanted:
            made["trl"] = case, plain_sft(case, folder / "trl")
    with suppress(Exception):
        if "adapter" in wanted:
            adapter = with_adapter(case)
            made["adapter"] = adapter, plain_run(adapter, own)
    (folder / "facts.json").write_text(json.dumps(facts))
    torch.save(made, folder / "plain.pt")


@dataclass(frozen=True)
class Plain:
    """What one process computes."""

    losses: list[list[float]]
    """By step and rank."""
    gradients: Tensors
    """Of the first step."""
    weights: Tensors
    """After the last step."""


def plain_run(case: Case, steps: list[list[dict[str, Any]]]) -> Plain:
    """Steps over the batches of all ranks: the gradient is the mean of theirs."""
    model = load_plain(case).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **_ADAM)
    losses: list[list[float]] = []
    gradients: Tensors = {}
    for batches in steps:
        optimizer.zero_grad()
        losses.append([])
        for batch in batches:
            loss = loss_of(forward(model, batch))
            (loss / len(batches)).backward()
            losses[-1].append(float(loss.detach()))
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Plain(losses, gradients, {name: parameter.detach() for name, parameter in model.named_parameters()})


# ---- one rank ----


@dataclass(kw_only=True)
class Job:
    """One contestant's run on this rank, and what is seen of it."""

    case: Case
    plain: Plain
    out: Path
    part: str
    state: Path | None
    """From which a run is resumed after its first step."""
    seen: Row = field(default_factory=lambda: {"stage": "load"})

    @property
    def source(self) -> Path:
        return self.case.folder

    def note(self, **seen: Any) -> None:
        """Keep what is seen, for whatever comes next may end the process."""
        self.seen |= seen
        (self.out / f"{self.part}.{dist.get_rank()}.json").write_text(json.dumps(self.seen))

    def batch(self, step: int) -> dict[str, Any]:
        """This rank's rows of a step."""
        shared = len(self.plain.losses[0]) == 1
        batch: dict[str, Any] = self.case.batches["rows"][step if shared else RANKS * step + dist.get_rank()]
        return batch

    def see_loss(self, step: int, loss: float) -> None:
        """Compare a loss of this rank."""
        plain = self.plain.losses[step][dist.get_rank() % len(self.plain.losses[0])]
        found = worst(apart({"loss": torch.tensor(loss)}, {"loss": torch.tensor(plain)}, (), TOLERANCE["fp32"]))
        former = self.seen.get("loss", (0.0, ""))
        self.note(loss=max(found, former))

    def see_gradients(self, model: nn.Module) -> None:
        """Compare the gradients of the first step, by this rank's shards."""
        found = {plain_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.note(gradients=worst(apart(found, self.plain.gradients, (), TOLERANCE["fp32"], absent_is_zero=True)))

    def see_weights(self, model: nn.Module) -> None:
        """Compare the weights of a resumed run with those of one that was not interrupted."""
        found = {plain_name(name): p.detach() for name, p in model.named_parameters()}
        weights = {name: value for name, value in self.plain.weights.items() if name in self.plain.gradients}
        self.note(resumed=worst(apart(found, weights, (), 10 * TOLERANCE["fp32"], is_part=True)))

    def see_saved(self) -> None:
        """Compare the saved model, opened by transformers (an adapter by PEFT), with what one process has trained."""
        opened = dict(load_plain(self.case, self.out / "model").named_parameters())
        self.note(saved=worst(apart(opened, self.plain.weights, (), 10 * TOLERANCE["fp32"], is_part=True)))


def plain_name(name: str) -> str:
    return re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name)


def contest(name: str, folder: Path, out: Path, parts: Sequence[str]) -> None:
    """Run a contestant on this rank; what is seen, and the error that ends it, lie in `out`."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.simplefilter("ignore")
    contestant = CONTESTANTS[name]
    made = torch.load(folder / "plain.pt", weights_only=False)
    case, plain = made.get(contestant.rows, made["own"])
    for part in parts:
        job = Job(
            case=case, plain=plain, out=out, part=part, state=out / contestant.state if part == "resumed" else None
        )
        job.note()
        try:
            if contestant.rows not in made:
                raise NotTakenError("one process does not train it so")
            with patch.dict(os.environ):
                contestant.run(job) if part != "saved" else job.see_saved() if dist.get_rank() == 0 else None
            job.note(stage="done")
        except BaseException as error:
            places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            kinds = [each.__name__ for each in type(error).__mro__]
            said = re.sub(r'File "[^"]*/', 'File "', " ".join(str(error).split()))  # no path of one machine
            if len(said) >= 300:  # torch's checkpoints end with the cause
                said = f"{said[:100]} … {said[-200:]}"
            job.note(error={"kinds": kinds, "said": said, "place": places[-1]})
            raise
        forget_accelerate()


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop of one contestant."""

    model: Any
    optimizer: Any
    save_state: Callable[[Path], Any]
    save: Callable[[Path], Any]
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward


def run_loop(job: Job, *, start: Callable[[Job], Loop]) -> None:
    """Two steps, with a state after the first; or the second one alone, from that state."""
    loop = start(job)
    loop.model.train()
    for step in range(STEPS) if job.state is None else (1,):
        job.note(stage="train")
        loss = loss_of(forward(loop.model, job.batch(step)))
        loop.backward(loss)
        job.see_loss(step, float(loss.detach()))
        if step == 0:
            job.see_gradients(loop.model)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if step == 0:
            job.note(stage="save the state")
            loop.save_state(job.out / "state")
    if job.state is not None:
        return job.see_weights(loop.model)
    job.note(stage="save")
    return loop.save(job.out / "model")


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """One for all that the class trains; transformers makes trainable what it loads."""
    for name, parameter in model.named_parameters() if not case.is_adapter else ():
        parameter.requires_grad_(plain_name(name) not in case.frozen and parameter.is_floating_point())
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **_ADAM)


# ---- Accelerate ----


def _accelerate(*, is_efficient: bool = True) -> FullyShardedDataParallelPlugin:
    """Accelerate's state under FSDP2, on CPUs too; rank 0 alone loads, or every rank."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(is_efficient)
    settings = {"auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=is_efficient, **settings)
    own: dict[str, Any] = {"fsdp_plugin": plugin, "dynamo_plugin": TorchDynamoPlugin()}
    state = AcceleratorState(cpu=True, _from_accelerator=True, **own)
    for each in (state, PartialState()):
        each.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = plugin
    return plugin


def accelerate_loop(job: Job, *, is_efficient: bool = True) -> Loop:
    """Accelerate's FSDP2 as in its guides: `prepare`, `save_state`, `get_state_dict`."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=_accelerate(is_efficient=is_efficient))
    base, options = job.source, {"dtype": torch.float32}
    if job.case.is_adapter:
        base = PeftConfig.from_pretrained(str(job.source)).base_model_name_or_path
    model = job.case.model_class.from_pretrained(base, **options)
    if job.case.is_adapter:
        model = PeftModel.from_pretrained(model, str(job.source), is_trainable=True)
    model, optimizer = accelerator.prepare(model, optimizer_of(model, job.case))
    if job.state is not None:
        accelerator.load_state(str(job.state))

    def save(folder: Path) -> None:
        whole = accelerator.get_state_dict(model)
        options = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
        accelerator.unwrap_model(model).save_pretrained(str(folder), state_dict=whole, **options)
        accelerator.wait_for_everyone()

    return Loop(
        model=model, optimizer=optimizer, save=save, backward=accelerator.backward,
        save_state=lambda folder: accelerator.save_state(str(folder)),
    )  # fmt: skip


# ---- transformers ----


def transformers_loop(job: Job, **sizes: int) -> Loop:
    """A model that transformers has sharded by its own plans, with its checkpoints."""
    options: dict[str, Any] = {"dtype": torch.float32, "distributed_config": DistributedConfig(**sizes)}
    model = job.case.model_class.from_pretrained(job.state or job.source, **options)
    optimizer = optimizer_of(model, job.case)
    if job.state is not None:
        load_optimizer_distributed(model, optimizer, str(job.state / "optimizer"))

    def save_state(folder: Path) -> None:
        model.save_pretrained(folder, distributed_checkpoint=True)
        save_optimizer_distributed(model, optimizer, str(folder / "optimizer"))

    return Loop(model=model, optimizer=optimizer, save_state=save_state, save=model.save_pretrained)


# ---- this package ----


def our_loop(job: Job, ep_size: int = 1, **parallelism: int) -> Loop:
    sizes: dict[str, Any] = {"parallelism_config": ParallelismConfig(**parallelism)} if parallelism else {}
    accelerator = make_accelerator(cpu=True, fsdp_plugin=FSDPPlugin(ep_size=ep_size), **sizes)
    options: dict[str, Any] = {"dtype": torch.float32, "is_trainable": job.case.is_adapter}
    options |= {"auto_class": job.case.model_class, "load_kwargs": {"progress": False}}
    model = from_pretrained(job.source, accelerator=accelerator, **options)
    model, optimizer = accelerator.prepare(model, optimizer_of(model, job.case))
    if job.state is not None:
        accelerator.load_state(str(job.state))
    return Loop(
        model=model, optimizer=optimizer, save=partial(save_pretrained, model), backward=accelerator.backward,
        save_state=lambda folder: accelerator.save_state(str(folder)),
    )  # fmt: skip


# ---- TRL ----


class _Gradients(TrainerCallback):
    """Shows the gradients of the first step."""

    def __init__(self, see: Callable[[nn.Module], Any]) -> None:
        self.see = see

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 0:
            self.see(given["model"])


def sft(case: Case, out: Path, see: Callable[[nn.Module], Any], *, ranks: int, kind: str) -> Any:
    """TRL's trainer of rows of words, on one process with the rows of both ranks one after the other, or sharded."""
    batches = case.batches["rows"]
    if set(batches[0]) - {"input_ids", "labels", "attention_mask"} or "labels" not in batches[0]:
        raise NotTakenError("it takes more than words")
    ids = torch.cat([batch["input_ids"] for batch in batches])
    arguments = SFTConfig(
        output_dir=str(out), per_device_train_batch_size=ids.shape[0] // len(batches), max_steps=STEPS,
        gradient_accumulation_steps=RANKS // ranks, learning_rate=_ADAM["lr"], adam_epsilon=_ADAM["eps"],
        weight_decay=0.0, lr_scheduler_type="constant", max_grad_norm=0.0, optim="adamw_torch", use_cpu=True,
        bf16=False, save_steps=1, report_to=[], disable_tqdm=True, train_sampling_strategy="sequential",
        max_length=None, logging_steps=1, gradient_checkpointing=False, save_strategy="no" if ranks == 1 else "steps",
    )  # fmt: skip
    if kind == OURS:
        options: dict[str, Any] = {"auto_class": case.model_class, "load_kwargs": {"progress": False}}
        accelerator = make_accelerator(arguments)
        model = from_pretrained(case.folder, accelerator=accelerator, dtype=torch.float32, **options)
    else:
        if ranks > 1:
            _accelerate()
        model = case.model_class.from_pretrained(case.folder, dtype=torch.float32)
    trainer = type("Trainer", (FSDPTrainerMixin, SFTTrainer), {}) if kind == OURS else SFTTrainer
    rows = datasets.Dataset.from_dict({"input_ids": ids.tolist()})
    made = trainer(model=model, args=arguments, train_dataset=rows, callbacks=[_Gradients(see)])
    made.remove_callback(PrinterCallback)
    return made


def losses_of(trainer: Any) -> list[float]:
    """Those that a trainer has logged, by step; of a resumed run with those before."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def plain_sft(case: Case, out: Path) -> Plain:
    """What TRL computes in one process."""
    seen: Tensors = {}

    def see(model: nn.Module) -> None:
        seen.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    trainer = sft(case, out, see, ranks=1, kind="plain")
    trainer.train()
    weights = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
    return Plain([[loss] for loss in losses_of(trainer)], seen, weights)


def run_trl(job: Job, *, kind: str) -> None:
    """TRL's SFTTrainer, with a checkpoint after each step."""
    trainer = sft(job.case, job.out, job.see_gradients, ranks=RANKS, kind=kind)
    job.note(stage="train")
    trainer.train(resume_from_checkpoint=None if job.state is None else str(job.state))
    for step, loss in enumerate(losses_of(trainer)):
        job.see_loss(step, loss)
    if job.state is not None:
        return job.see_weights(trainer.model)
    job.note(stage="save")
    if kind != OURS:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # as transformers' guide says
    return trainer.save_model(str(job.out / "model"))


class NotTakenError(Exception):
    """The model takes what the contestant is not made for, or is not given here."""


# ---- all ----


@dataclass(frozen=True)
class Contestant:
    """How one is run, and which rows of `prepare` it is compared with."""

    run: Callable[[Job], Any]
    rows: str = "own"
    state: str = "state"


def _loops(start: Callable[..., Loop], **sizes: int) -> Callable[[Job], None]:
    return partial(run_loop, start=partial(start, **sizes))


CONTESTANTS: Mapping[str, Contestant] = {
    f"{OURS} fsdp": Contestant(_loops(our_loop)),
    "accelerate fsdp2": Contestant(_loops(accelerate_loop)),
    "accelerate fsdp2, every rank loads": Contestant(_loops(accelerate_loop, is_efficient=False)),
    "transformers fsdp": Contestant(_loops(transformers_loop, fsdp_size=RANKS)),
    f"{OURS} tp": Contestant(_loops(our_loop, tp_size=RANKS), "shared"),
    "transformers tp": Contestant(_loops(transformers_loop, tp_size=RANKS), "shared"),
    f"{OURS} ep": Contestant(_loops(our_loop, ep_size=RANKS)),
    "transformers ep": Contestant(_loops(transformers_loop, fsdp_size=RANKS, ep_size=RANKS)),
    f"{OURS} cp": Contestant(_loops(our_loop, cp_size=RANKS), "shared"),
    f"{OURS} TRL": Contestant(partial(run_trl, kind=OURS), "trl", "checkpoint-1"),
    "TRL on accelerate fsdp2": Contestant(partial(run_trl, kind="accelerate"), "trl", "checkpoint-1"),
    f"{OURS} PEFT": Contestant(_loops(our_loop), "adapter"),
    "PEFT on accelerate fsdp2": Contestant(_loops(accelerate_loop), "adapter"),
}
