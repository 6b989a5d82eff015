"""A mixin that runs the Trainer and its subclasses on shards: precision, saving, resuming, TRL's frozen models."""

import math
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.trainer import Trainer

from hf_fsdp_tools.axes import shared_rows
from hf_fsdp_tools.background import wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.averages import ParameterEMA
from hf_fsdp_tools.extensions.context_parallel import whole_outputs
from hf_fsdp_tools.extensions.liger import refuse_liger
from hf_fsdp_tools.extensions.muon.muon import make_muon, wants_muon
from hf_fsdp_tools.extensions.streamed import ELEMENTWISE, last_norm_of, steps_in_backward
from hf_fsdp_tools.integrations.accelerator import ShardedAccelerator
from hf_fsdp_tools.integrations.checkpoints import Averaging, Checkpoints
from hf_fsdp_tools.integrations.hooks import check_hooks
from hf_fsdp_tools.integrations.model import refuse_sharded_elsewhere
from hf_fsdp_tools.integrations.reporting import Report
from hf_fsdp_tools.integrations.state import make_dynamo_plugin, start_state
from hf_fsdp_tools.integrations.streams import Stream
from hf_fsdp_tools.integrations.trainer_settings import TrainerSettings
from hf_fsdp_tools.integrations.training_arguments import (
    agree_with_arguments,
    group_options,
    plugin_of,
    precision_of,
    use_one_device,
)
from hf_fsdp_tools.integrations.trl import REWARDING, FrozenModels, homes_of, made_on_shards
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.sharding.checks import check_optimizers
from hf_fsdp_tools.sharding.fsdp2_internals import make_root
from hf_fsdp_tools.sharding.sharding import Sharded, sharded_module

_OVER_OWN_ROWS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
"""Losses of transformers (5.23) that are means over a rank's own rows. The Trainer takes them for means over the whole
step, because these models take any keyword, and would multiply them by the number of processes."""


TrainerBase: Any = object  # of which a checker of types takes all methods of a Trainer


class FSDPTrainerMixin(TrainerBase):  # type: ignore[misc]  # transformers is not typed
    """Gives a `Trainer` or a subclass of it this package's sharding, precision, saving and resuming.

        class MyTrainer(FSDPTrainerMixin, Trainer): ...

        accelerator = make_accelerator(arguments)  # TrainingArguments
        trainer = MyTrainer(model=from_pretrained(name, accelerator=accelerator), args=arguments, ...)

    The model may also be plain and equal on every rank; it is then sharded by the same policy when training starts.
    Settings come from `TrainingArguments(fsdp=True, fsdp_config=…)` where given, else from `accelerate launch`. Every
    rank must call each method.

    `save_model` writes a normal Hugging Face checkpoint from all ranks at once. A `checkpoint-N` folder is such a
    checkpoint too, in the precision of the master weights, with the optimizer's shards (`optimizer_0`, a DCP folder)
    and the Trainer's own files next to it; another number of ranks can resume from it. It is complete with its
    `checkpoint_manifest.json`: `train(resume_from_checkpoint=True)` passes over a folder that is not complete.

    TRL's reference and teacher models (`ref_model`, `teacher_model`) are frozen and sharded by the same policy when
    they are set, which every rank must do. TRL's online trainers generate with the weights gathered once for each batch
    where they fit, else unit by unit, as with `ds3_gather_for_generation=False` (`unsharded`); a reward function
    that fails on some rank is one `ConfigError` on all; vLLM gets the weights in buckets (`live_weights`), also from
    AsyncGRPO and AsyncDistillation, which take a model in the place of its name here.

    `fsdp_settings`, of the class or given to a trainer, are `TrainerSettings`: saves in the background, checksums, what
    a resumed run may lack, moving averages (`trainer.ema`, a `ParameterEMA` in fp32, saved with each `checkpoint-N`),
    and a file for what was estimated and what was measured. Where a loss is NaN or infinite, all ranks stop when it is
    logged, unless `allow_nan` is set there.

    Raises:
        ConfigError: when a trainer class is defined: the mixin stands after the Trainer, or this version of
            transformers lacks a method that is overridden here. When a frozen model is set: it is sharded as one unit.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> class MyTrainer(FSDPTrainerMixin, Trainer): ...
        >>> arguments = TrainingArguments("run", max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
        >>> rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
        >>> model = from_pretrained("checkpoint", accelerator=make_accelerator(cpu=True))
        >>> trainer = MyTrainer(model, arguments, train_dataset=rows)
        >>> trained = trainer.train()
        hf_fsdp_tools: LlamaForCausalLM is trained whole on one rank
        ...
        >>> trainer.save_model("trained")
    """

    fsdp_settings: TrainerSettings = TrainerSettings()
    """Given by keyword to a trainer, they take the place of those of its class."""
    ema: ParameterEMA | None = None
    estimated: Any = None  # Has the estimate of a recipe as `values`, on rank 0
    """The estimate for `report_estimate` where there is one already; None makes one when the training has ended."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check for each trainer class that transformers still has the methods that are overridden here."""
        if issubclass(cls, Trainer):
            if cls.__mro__.index(Trainer) < cls.__mro__.index(FSDPTrainerMixin):
                bases = [base.__name__ for base in cls.__bases__]
                ordered = ["FSDPTrainerMixin", *(base for base in bases if base != "FSDPTrainerMixin")]
                raise ConfigError(
                    f"class {cls.__name__}({', '.join(bases)}): the Trainer stands first, so that nothing of the mixin "
                    f"would run. Write class {cls.__name__}({', '.join(ordered)})."
                )
            check_hooks(FSDPTrainerMixin, super())
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        *args: Any,
        optimizers: tuple[Any, Any] = (None, None),
        fsdp_settings: TrainerSettings | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the Trainer; `optimizers` are set afterwards, because the Trainer refuses them under FSDP. Here they get
        the shards of a plain model in `prepare`."""
        self.fsdp_settings = copy(fsdp_settings or self.fsdp_settings)
        self._frozen, self._stream = FrozenModels(self), Stream(self)
        self._checkpoints, self._report = Checkpoints(self), Report(self)
        if kwargs.get("model_init") is not None or kwargs.get("optimizer_cls_and_kwargs") is not None:
            kwargs["optimizers"] = optimizers  # the Trainer takes only one of them, and says so
        with made_on_shards(self):
            super().__init__(*args, **kwargs)
        is_own = getattr(self, "loss_is_scaled_for_ga", None) is None  # a subclass with another loss sets it
        if is_own and getattr(base_of(self.model), "loss_type", None) in _OVER_OWN_ROWS:
            self.model_accepts_loss_kwargs = False
        if (is_gathered := getattr(self.args, "ds3_gather_for_generation", None)) is not None:
            Sharded.put(base_of(self.model), gathered=None if is_gathered else False)
        self._tp_size = 1  # by which TRL divides its tokens; `gather_for_metrics` has counted shared rows once
        if "optimizers" not in kwargs and any(part is not None for part in optimizers):
            if not self.accelerator.is_fsdp2:
                raise ConfigError(
                    "optimizers=(…) needs FSDP2: version 1 makes new parameters when training starts. Use "
                    "optimizer_cls_and_kwargs or create_optimizer, or fsdp_version 2."
                )
            check_optimizers([optimizers[0]] if optimizers[0] is not None else [], [self.model])
            self.optimizer, self.lr_scheduler = optimizers

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; TRL's reference and teacher models are sharded then, so all ranks must set them."""
        super().__setattr__(name, value)
        if name in (*FrozenModels.NAMES, "model") and "_frozen" in vars(self):  # of subclasses some come before
            self._frozen.shard()

    def create_accelerator_and_postprocess(self) -> None:
        """Start Accelerate's state with FSDP, then let the Trainer make its Accelerator; called by its `__init__`."""
        args, model = self.args, getattr(self, "model", None)
        if getattr(args, "use_transformers_continuous_batching", False):
            raise ConfigError(
                "use_transformers_continuous_batching=True casts the weights that are trained, and each rank runs as "
                "many forward passes as its own rows need. Leave it out, or use use_vllm=True."
            )
        if isinstance(model, nn.Module):
            refuse_sharded_elsewhere(model)
        plugin, precision = plugin_of(args), precision_of(args, model)
        agree_with_arguments(plugin, args, model)
        dynamo = make_dynamo_plugin(args.torch_compile_backend, args.torch_compile_mode)
        options = {"cpu": args.use_cpu, "parallelism_config": args.parallelism_config, "group": group_options(args)}
        start_state(plugin, mixed_precision=precision, dynamo_plugin=dynamo, **options)
        if AcceleratorState().fsdp_plugin.activation_checkpointing:
            # TRL's arguments ask for it by default, too; the Trainer refuses both.
            args.activation_checkpointing = args.gradient_checkpointing = False
        use_one_device(args)
        homes = [home for home in homes_of(self) if "Accelerator" in vars(home)]
        hidden = replaced(
            args,
            fsdp_plugin_args=None,  # of which it would make a second plugin
            save_only_model=False,  # which it refuses under FSDP, as weights in its own format cannot be opened
            mixed_precision=precision,
            ddp_find_unused_parameters=bool(args.ddp_find_unused_parameters),  # None means True to it
        )
        with hidden, replaced(accelerate, *homes, Accelerator=ShardedAccelerator):
            super().create_accelerator_and_postprocess()
        if hasattr(args, "model_init_kwargs"):
            # Under FSDP, TRL 1.16 loads reference and reward models with device_map="auto": from each rank onto GPU 0.
            args.model_init_kwargs = {"device_map": None, **(args.model_init_kwargs or {})}
        if not isinstance(self.accelerator, ShardedAccelerator):
            raise ConfigError(
                f"{type(self).__name__} makes a {type(self.accelerator).__name__}, which prepares and saves models by "
                "Accelerate's own rules. Let create_accelerator_and_postprocess call super(), and change "
                "trainer.accelerator after that."
            )
        if (args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", True):
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

    def get_tp_size(self) -> int:
        """As the Trainer's, with the ranks of context parallelism: they too have one batch and the whole loss of it."""
        return int(super().get_tp_size()) * int(super().get_cp_size())

    def get_cp_size(self) -> int:
        """1: to the Trainer, no rank has a part of a batch."""
        return 1

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the Trainer's; but of a mixture's auxiliary loss the mean over the micro-batches of all processes counts.

        A model of transformers (5.23) adds it to a loss that is divided by the tokens of the whole step, and the
        Trainer multiplies both by the number of processes: it would be the sum over all micro-batches. TRL's trainers
        (1.16), which have losses of their own, take the mean.
        """
        plain: Any = super().compute_loss
        given = {"num_items_in_batch": num_items_in_batch}
        is_another = getattr(plain, "__func__", None) is not Trainer.compute_loss
        if is_another or self.label_smoother or self.compute_loss_func or num_items_in_batch is None:
            return plain(model, inputs, return_outputs=return_outputs, **given)
        loss, outputs = plain(model, inputs, return_outputs=True, **given)
        auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        if auxiliary is not None and (coefficient := _router_coefficient(base_of(self.model))):
            spread = self.args.average_tokens_across_devices
            times = self.accelerator.num_processes // self.get_tp_size() if spread else 1
            steps = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + coefficient * auxiliary.to(loss) * (1 / steps - times)
        return (loss, outputs) if return_outputs else loss

    def _update_auto_batch_size(self, batch_size: int) -> None:
        """Reshard units that a step left gathered when it ran out of memory (`auto_find_batch_size`).

        All ranks must run out of memory in the same step; a rank that does so alone leaves the others waiting.
        """
        first = batch_size == self._train_batch_size
        super()._update_auto_batch_size(batch_size)
        root: Any = sharded_module(self.model) or self.model  # the base, of a PEFT model
        if isinstance(root, FSDPModule) and not first:
            if not hasattr(root, "reset_iter_state"):
                raise ConfigError(
                    "auto_find_batch_size needs torch 2.13, which can drop a broken-off step; this is "
                    f"{torch.__version__}."
                )
            # Memory may have run out before the first forward pass, which does this.
            make_root(root)  # type: ignore[arg-type]  # a module too
            root.reset_iter_state()
            self.model.zero_grad()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's.

        With `args.optim = "muon"` it is `hf_fsdp_tools.Muon`, and rank 0 prints which parameters are matrices.

        Its groups are those of a single process: transformers (5.23) parts them by mesh, so that a state would not go
        on in another layout. `step_kinds_apart` parts them for the time of a step.
        """
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None and wants_muon(self.args):
            self.optimizer = make_muon(self.model, self.args, is_fsdp2=self.accelerator.is_fsdp2)
            if self.accelerator.is_main_process:
                print(f"{self.optimizer}\n")
            return self.optimizer
        parts = hasattr(transformers.trainer, "has_mixed_dtensor")  # since transformers 5.21
        with replaced(transformers.trainer, has_mixed_dtensor=lambda _: False) if parts else nullcontext():
            return super().create_optimizer(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """As the Trainer's; of a stream with state, a loader that goes on where the checkpoint ends."""
        return self._stream.loader_of(super().get_train_dataloader)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip parameters of all meshes together; the Trainer itself would not divide by the loss scale before."""
        if self.fsdp_settings.clip_by_last_norm:
            return last_norm_of(self.optimizer)
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of all gradients, clipped or not."""
        return self.accelerator.clip_grad_norm_(model.parameters(), math.inf) if grad_norm is None else grad_norm

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's; offloaded units are stepped in the backward pass of the last micro-batch, unless a norm of
        all gradients is to be known before."""
        limit, by_last = self.args.max_grad_norm or None, self.fsdp_settings.clip_by_last_norm
        is_last = self.accelerator.sync_gradients and self.accelerator.scaler is None and (by_last or limit is None)
        steps = is_last and (by_last or type(getattr(self.optimizer, "optimizer", None)) in ELEMENTWISE)
        rows = self._report.look(inputs)
        with steps_in_backward(self.optimizer, limit) if steps else nullcontext():
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._report.keep(loss, rows)
        return loss

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._report.begin_epoch():
            super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; a mean loss of all ranks that is NaN or infinite stops all of them (see `allow_nan`)."""
        super().log(logs, *args, **kwargs)
        self._report.check(logs)

    def evaluation_loop(self, *positional: Any, **kwargs: Any) -> Any:
        """As the Trainer's (`evaluate`, `predict`), for every rank: a call by some ranks alone is named.

        What an evaluation draws (TRL's trainers write in it) leaves the random state as it was: a run that is resumed
        after an evaluation goes on as the other did.
        """
        all_ranks(None, "evaluating")
        if ranks_per_row() > 1:
            _refuse_counted_again(self)
            self.gather_function = self.accelerator.gather_for_metrics  # also where it would be `gather`
        device = self.accelerator.device
        drawing = [device] if device.type != "cpu" else []
        drawn = torch.random.fork_rng(drawing, device_type=device.type if drawing else "cuda")
        args = self.args  # in which full evaluation means autocast here: transformers would cast the shards
        is_asked, dtype = args.bf16_full_eval or args.fp16_full_eval, (torch.bfloat16, torch.float16)
        cast = torch.autocast(device.type, dtype[args.fp16_full_eval], enabled=is_asked)
        with drawn, replaced(args, bf16_full_eval=False, fp16_full_eval=False), cast:
            return super().evaluation_loop(*positional, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """As the Trainer's; outputs for metrics are those of whole rows, also where several ranks share a row."""
        with nullcontext() if prediction_loss_only else whole_outputs(self.model):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model, tokenizer and training arguments as a normal Hugging Face folder. Every rank must call."""
        self._checkpoints.save_model(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _get_output_dir(self, *args: Any, **kwargs: Any) -> str:
        return self._checkpoints.output_dir(partial(super()._get_output_dir, *args, **kwargs))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._checkpoints.save(partial(super()._save_checkpoint, model, trial), trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._checkpoints.save_optimizer(Path(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        self._checkpoints.save_random_states(Path(output_dir), partial(super()._save_rng_state, output_dir))

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, before training; where the hub refuses, all ranks stop. Every rank learns the full name."""
        self._checkpoints.uploads.open(partial(super().init_hf_repo, *args, **kwargs))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model to `output_dir` and upload that folder, with the Trainer's card. Every rank must call."""
        return self._checkpoints.uploads.push(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's model card, or TRL's, of which some words are not true of every model."""
        self._checkpoints.uploads.write_card(partial(super().create_model_card, *args, **kwargs))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Do nothing: the checkpoint is not complete yet; its upload begins when it is (`Checkpoints.save`)."""

    def _finish_current_push(self) -> None:
        self._checkpoints.uploads.finish()

    # ---- resuming ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; `True` resumes from the last complete checkpoint. Every rank must call.

        Raises:
            CheckpointError: the checkpoint asked for is incomplete or damaged, no checkpoint is complete, or it lacks
                what this run goes on with (see `allow_incomplete`); or checkpoints are to be saved to a folder that the
                ranks do not share; the same on every rank, before the first step.
        """
        wait_for_saves()
        if self.args.use_liger_kernel:
            refuse_liger(self.accelerator.device.type, shares=ranks_per_row() > 1)
        if self.fsdp_settings.clip_by_last_norm and (self.args.fp16 or not self.args.max_grad_norm):
            raise ConfigError("clip_by_last_norm needs max_grad_norm above 0, and bf16 or fp32: fp16 scales gradients.")
        if ranks_per_row() > 1:
            _refuse_counted_again(self)
        resume_from_checkpoint = self._checkpoints.choose(resume_from_checkpoint)
        self._report = Report(self)
        self._report.open()
        self.ema = None
        if self.fsdp_settings.ema_decay is not None:
            self.add_callback(Averaging(self))
        self.args.logging_nan_inf_filter &= self.fsdp_settings.allow_nan
        try:
            with self._stream.beginning_at(None if self.args.ignore_data_skip else self._checkpoints.resumed):
                result = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.remove_callback(Averaging)
        wait_for_saves()  # whose error belongs to this training
        self._report.write()
        return result

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder, plain = Path(resume_from_checkpoint), super()._load_from_checkpoint
        self._checkpoints.load_weights(folder, model if model is not None else self.model, plain)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._checkpoints.load_optimizer(Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As the Trainer's; a rank whose random states cannot be restored stops all of them."""
        with agreed("restoring the random states", checkpoint or ""):
            super()._load_rng_state(checkpoint)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; TRL's sampler of repeated prompts (1.16) draws the order of each epoch after that of the
        one before, and a run that resumes would begin with that of the first."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if hasattr(sampler, "mini_repeat_count") and getattr(sampler, "seed", None) is not None and sampler.shuffle:

            def draw_to(epoch: int) -> None:
                sampler.generator.manual_seed(sampler.seed)
                for _ in range(epoch):
                    torch.randperm(sampler.num_samples, generator=sampler.generator)

            sampler.set_epoch = draw_to
        return sampler

    def _load_best_model(self) -> None:
        self._checkpoints.load_best()


def _router_coefficient(model: Any) -> float:
    """By what a mixture of transformers multiplies its auxiliary loss; 0 where no attribute of the usual names says."""
    owners, names = (model, model.config.get_text_config()), ("router_aux_loss_coef", "aux_loss_coef")
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next((float(value) for value in found if isinstance(value, int | float)), 0.0)


def _refuse_counted_again(trainer: Any) -> None:
    """Refuse what would count the rows that several ranks share once for each of them."""
    if "get_tp_size" not in Trainer.compute_loss.__code__.co_names:
        raise ConfigError(
            f"The Trainer of transformers {transformers.__version__} multiplies losses by {shared_rows(' and ')} "
            "(transformers#45994). Use a newer one (5.23 is right), or a loop of your own."
        )
    if not trainer.args.average_tokens_across_devices:
        raise ConfigError(
            f"With {shared_rows()}, set average_tokens_across_devices=True: tokens are counted over all ranks."
        )
    if any(hasattr(trainer, name) for name in REWARDING):
        raise ConfigError(
            f"{type(trainer).__name__} counts the completions of each process for itself, and with {shared_rows()} "
            "would compare texts with copies of themselves. Leave them out; other degrees share no rows."
        )
    if trainer.args.eval_use_gather_object:
        raise ConfigError(
            f"With {shared_rows()}, leave eval_use_gather_object out: rows are gathered as tensors, each once."
        )
