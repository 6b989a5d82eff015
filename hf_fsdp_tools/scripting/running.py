"""From a checkpoint to a trained one: load, train, save, print a summary, and end."""

import atexit
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path
from tempfile import NamedTemporaryFile
from typing import Any, NoReturn

import torch.distributed as dist
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from torch.distributed.distributed_c10d import _get_default_store
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

from hf_fsdp_tools import TrainerSettings
from hf_fsdp_tools.distributed.agreement import wait_for_all_ranks
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import FSDPToolsError
from hf_fsdp_tools.scripting.arguments import ModelArguments, parse_arguments
from hf_fsdp_tools.scripting.aside import Aside
from hf_fsdp_tools.scripting.checks import check_documents_apart, check_prepared_rows
from hf_fsdp_tools.scripting.demo import make_demo
from hf_fsdp_tools.scripting.progress import Progress
from hf_fsdp_tools.scripting.recipes import RECIPES
from hf_fsdp_tools.scripting.setups import SAVING, check_generates, machine_of, setup_of
from hf_fsdp_tools.scripting.tokenizer import class_options, hub_options
from hf_fsdp_tools.text import dtype_name, first_line, listed

_recipe = ""  # The name that `run` was given
_estimate = Aside()  # That of the model that is loaded, begun on the first rank of GPUs

_FIRST_SAYS_S = 30.0
"""How long the first process of a machine may take to say an error after another has met it. (assumed)"""


def start(recipe: str, script: type, training: type, model_args: type | None = None) -> tuple[Any, Any, Any, Any]:
    """What a recipe begins with: its arguments, an Accelerator, and model or data of the demo where none are given.

    `recipe` is the name of one of the package ("dpo"), whose options, columns and demo these are; the others are
    dataclasses as of `parse_arguments`, by default with `ModelArguments`. Returns (script, training, model_args,
    accelerator). What a dataclass of the script has for TRL's trainers (`max_length`, `trust_remote_code`), the
    arguments of others are given. Every rank must call; errors are those of `parse_arguments` and `make_demo`.

    Example:
        >>> script, training, model_args, accelerator = start("finetune", ScriptArguments, SFTConfig)
        >>> script.dataset_name, model_args.is_demo
        ('rows.jsonl', False)
    """
    from hf_fsdp_tools import make_accelerator

    parsed = parse_arguments(script, training, model_args or ModelArguments, recipe=recipe)
    of_script, of_training, of_model = parsed
    for name in ("max_length", "trust_remote_code"):
        if hasattr(of_script, name) and not hasattr(of_training, name):
            setattr(of_training, name, getattr(of_script, name))
    accelerator = make_accelerator(of_training)
    if of_model.model_name_or_path is None:
        of_model.is_demo = True
        of_model.model_name_or_path, of_script.dataset_name = make_demo(accelerator, RECIPES[recipe].demo)
    elif of_script.dataset_name is None:
        _, of_script.dataset_name = make_demo(accelerator, RECIPES[recipe].demo, of_model.model_name_or_path)
    return of_script, of_training, of_model, accelerator


def load_model(
    model_args: Any, training: Any, accelerator: Any, *, auto_class: Any = None, frozen: bool = False, **keywords: Any
) -> Any:
    """The sharded model, with a new adapter where the arguments ask for one; prints its units and the load report.

    `auto_class` is the `AutoModelFor…` class, or a model class; `frozen` means a reference or a teacher: no fp32
    masters, and each unit is freed after its forward pass. `keywords` of `from_pretrained` go before what follows from
    the arguments. Every rank must call; errors and what is communicated are those of `from_pretrained`.

    Example:
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> model = load_model(model_args, training, make_accelerator(cpu=True))
        LlamaForCausalLM: 16.7 K parameters in 4 units
        ...
    """
    from trl import get_peft_config, get_quantization_config

    from hf_fsdp_tools import WrapPolicy, describe_sharding, from_pretrained

    computed = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
    options = {
        "accelerator": accelerator,
        "peft_config": get_peft_config(model_args),
        "dtype": model_args.dtype,
        "dequantize": model_args.dequantize,
        **hub_options(model_args, training),
        "load_kwargs": {"seed": training.seed},
        **class_options(model_args, auto_class),
    }
    if model_args.load_in_4bit:
        options["quantization_config"] = get_quantization_config(replace(model_args, dtype=computed or "float32"))
    if frozen:
        options |= {"dtype": computed or model_args.dtype, "policy": WrapPolicy(reshard_after_forward={"*": True})}
    else:
        _begin_estimate(model_args, training, accelerator)
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(hide := lambda record: "LOAD REPORT" not in record.getMessage())  # the report below has it too
    try:
        model, report = from_pretrained(model_args.model_name_or_path, output_loading_info=True, **(options | keywords))
    finally:
        logger.removeFilter(hide)
    if frozen:
        check_generates(model.config, model_args.model_name_or_path)
        size = sum(parameter.numel() for parameter in model.requires_grad_(False).parameters())
        kind = dtype_name(model.dtype)
        accelerator.print(f"not trained: {model_args.model_name_or_path}, {size:,} parameters in {kind}, sharded\n")
    else:
        accelerator.print(f"\n{describe_sharding(model)}\n\n{report}\n")
        if report.initialized_keys:
            names = listed(report.initialized_keys)
            end = "; it is trained whole, and saved with the adapter" if hasattr(model, "peft_config") else ""
            accelerator.print(f"newly initialised (not in the checkpoint): {names}{end}\n")
    return model


def _begin_estimate(model_args: Any, training: Any, accelerator: Any) -> None:
    """Have the memory that a recipe needs on its GPUs estimated aside and printed, or the reason why it is not known,
    which keeps no run from training. Rank 0 alone has it done."""
    if accelerator.device.type == "cpu" or not accelerator.is_main_process or _recipe not in RECIPES:
        return
    name, arguments = model_args.model_name_or_path, (training, model_args, *model_args.others)
    saving = [f"--{word}" for word in SAVING if any(getattr(each, word, False) for each in arguments)]
    try:
        setup = setup_of(_recipe, *arguments, **machine_of(accelerator))
    except Exception as error:
        print(f"no estimate of the peak: {first_line(error)}", flush=True)
        return
    words = f"hf-fsdp search {name} --recipe {_recipe} --gpu {setup.gpu} --num-processes {setup.num_processes}"
    kwargs = {"auto_class": RECIPES[_recipe].auto_class, **hub_options(model_args, training)}
    _estimate.begin(name, setup, kwargs, less=" and ".join(saving), cure=f"`{words}` finds what does")


class _Bar(ProgressCallback):  # type: ignore[misc]  # transformers is not typed
    """The Trainer's bar, above which `Progress` writes."""

    on_log = TrainerCallback.on_log  # which prints no dictionary


def train(trainer: Any, training: Any, model_args: Any = None) -> tuple[float | None, float | None]:
    """Train, and return the evaluation loss before and after; None where nothing is evaluated.

    A trainer that logs rewards returns these. A resumed run goes on with the log of its checkpoint, so that the loss
    before is that of the beginning. A stream of `load_splits` stays this rank's share.

    `--early_stopping_patience` and the settings of the mixin are those of `model_args`. Every rank must call.

    Raises:
        ConfigError: no token of the rows counts in the loss, or the model sees other documents in a packed row.

    Example:
        >>> class MyTrainer(FSDPTrainerMixin, SFTTrainer):
        ...     "TRL's trainer on shards."
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> data, held_out = load_splits(script, training, columns=[{"text"}])
        rows.jsonl: 19 rows to train on, 1 to evaluate
        >>> model = from_pretrained("checkpoint", accelerator=make_accelerator(cpu=True))
        >>> tokenizer = load_tokenizer(model_args, training)
        >>> trainer = MyTrainer(model, training, train_dataset=data, eval_dataset=held_out, processing_class=tokenizer)
        >>> before, after = train(trainer, training, model_args)
        step 0 of 2: evaluation loss ...
        step 2 of 2: evaluation loss ...
    """
    trainer.fsdp_settings = model_args or TrainerSettings(streams_are_shares=True)
    trainer.estimated = _estimate
    check_prepared_rows(trainer, getattr(model_args, "rows", None))
    has_bar = sys.stderr.isatty() and not training.disable_tqdm
    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    progress = Progress(has_bar=has_bar, estimate=_estimate)
    trainer.callback_handler.callbacks.insert(0, progress)  # before those that report logs
    if has_bar:
        trainer.add_callback(_Bar())
    if (patience := getattr(model_args, "early_stopping_patience", None)) is not None:
        trainer.add_callback(EarlyStoppingCallback(patience))
    if getattr(training, "packing", False) or getattr(training, "padding_free", False):
        check_documents_apart(trainer)
    resume = training.resume_from_checkpoint
    training.eval_on_start = training.eval_on_start and not resume and trainer.eval_dataset is not None
    has_bars = not are_progress_bars_disabled()
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        if (steps := trainer.state.global_step) > 0:
            error.add_note(f"{steps:,} steps were trained: --resume_from_checkpoint true goes on from a checkpoint")
        raise
    if not has_bars:  # with push_to_hub the Trainer switches the hub's bars on when it ends
        disable_progress_bars()
    if trainer.eval_dataset is None or training.eval_strategy == "no":
        return None, None
    state, logged = trainer.state, _logged(trainer, "eval_loss")
    keeps_best = training.load_best_model_at_end and state.best_metric is not None
    try:
        if not keeps_best and not (logged and logged[-1][0] == state.global_step):
            trainer.evaluate()
        if trainer.ema is not None:
            with trainer.ema.applied():
                trainer.evaluate(metric_key_prefix="ema")
    except FSDPToolsError:
        raise
    except Exception as error:  # of a metric: what was trained is to be saved all the same
        trainer.accelerator.print(f"no evaluation after the training: {type(error).__name__}: {first_line(error)}")
    if patience is not None and state.global_step < state.max_steps:
        kept = state.best_model_checkpoint or "the last weights"
        reason = f"no lower evaluation loss {patience} times in a row"
        trainer.accelerator.print(f"stopped early at step {state.global_step:,}: {reason}; kept {kept}")
    return _evaluations(trainer)[1:]


def _evaluations(trainer: Any) -> tuple[str, float | None, float | None]:
    """The value that evaluations are about, in words, and its values before and after the training."""
    rewards, losses = _logged(trainer, "eval_reward"), _logged(trainer, "eval_loss")
    values: list[float | None] = [value for _, value in rewards or losses]
    if values and not rewards and trainer.args.load_best_model_at_end and trainer.state.best_metric is not None:
        values[-1] = trainer.state.best_metric
    before, after = values[0] if len(values) > 1 else None, values[-1] if values else None
    return "evaluation reward" if rewards else "evaluation loss", before, after


def _opener(model: Any) -> str:
    """The class that opens the checkpoint of a model that writes text: `AutoModelForCausalLM`, or that of its kind."""
    config = model.config
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "AutoModelForCausalLM"
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return "AutoModelForImageTextToText" if has_images else str(config.architectures[0])


def _logged(trainer: Any, name: str) -> list[tuple[int, float]]:
    """(step, value) of each log that holds it."""
    return [(entry["step"], float(entry[name])) for entry in trainer.state.log_history if name in entry]


def finish(
    trainer: Any,
    training: Any,
    model_args: Any,
    tokenizer: Any,
    *,
    lines: Mapping[str, str | Callable[[], str]] | None = None,
) -> None:
    """Save the model, the log of the run and its picture, and print a summary.

    In the output folder: the model or adapter, `trainer_state.json` with all that was logged, `loss.png` (or
    `reward.png`) where matplotlib is installed, `merged/` with `--merge_adapters`, `ema/` with `--ema_decay`. With
    `--push_to_hub` the folder is uploaded.

    `lines` are further ones of the summary, by their names, or others for "checkpoint". A function that gives one is
    called by every rank once the model is saved: generating may fail, and must not cost the model. Every rank must
    call; errors are those of `save_pretrained`.

    Example:
        >>> class MyTrainer(FSDPTrainerMixin, SFTTrainer):
        ...     "TRL's trainer on shards."
        >>> script, training, model_args = parse_arguments(ScriptArguments, SFTConfig, ModelArguments)
        >>> training.eval_strategy = "no"
        >>> data, _ = load_splits(script, training, columns=[{"text"}])
        rows.jsonl: 20 rows to train on
        >>> model, tokenizer = from_pretrained("checkpoint"), load_tokenizer(model_args, training)
        >>> trainer = MyTrainer(model, training, train_dataset=data, processing_class=tokenizer)
        >>> train(trainer, training)
        hf_fsdp_tools: LlamaForCausalLM is trained whole on one rank
        step 2 of 2: loss ...
        (None, None)
        >>> finish(trainer, training, model_args, tokenizer)
        evaluation loss  not evaluated
        checkpoint       outputs/mine (open it with AutoModelForCausalLM.from_pretrained)
        log              outputs/mine/trainer_state.json...
    """
    from hf_fsdp_tools import save_pretrained

    folder = Path(training.output_dir)
    trainer.save_model()  # before all that can fail
    trainer.save_state()
    title, before, after = _evaluations(trainer)
    said = "not evaluated" if after is None else f"{after:.3f} after"
    if after is None and trainer.eval_dataset is not None and training.eval_strategy != "no":
        said += ": fewer rows are held out than all processes take at once (--per_device_eval_batch_size)"
    if after is not None and before is not None:
        end = ", which is no better" if title == "evaluation loss" and after >= before else ""
        said = f"{before:.3f} before, {said}{end}"
    summary: dict[str, str | Callable[[], str]] = {
        title: said,
        "checkpoint": lambda: f"{folder} (open it with {_opener(trainer.model)}.from_pretrained)",
        **(lines or {}),
        "log": lambda: f"{folder / 'trainer_state.json'}{_picture(trainer, folder)}",
    }
    if trainer.ema is not None:
        with trainer.ema.applied():
            trainer.save_model(str(folder / "ema"), _internal_call=True)
        of_averages = [f" (evaluation loss {loss:.3f})" for _, loss in _logged(trainer, "ema_loss")]
        summary["averages"] = f"{folder / 'ema'}{''.join(of_averages)}"
    if getattr(model_args, "merge_adapters", False):
        save_pretrained(trainer.model, folder / "merged", processing_class=tokenizer, merge_adapters=True)
        summary["merged"] = f"{folder / 'merged'} (opens without PEFT)"
    if training.push_to_hub:
        summary["uploaded"] = f"{constants.ENDPOINT}/{trainer.hub_model_id}"
    texts = {name: line if isinstance(line, str) else _said(line) for name, line in summary.items()}
    width = max(map(len, texts)) + 2
    trainer.accelerator.print("\n" + "\n".join(f"{name:{width}}{text}" for name, text in texts.items()))
    wait_for_all_ranks()
    trainer.accelerator.end_training()


def _said(line: Callable[[], str]) -> str:
    """A line of the summary, or why there is none: the model is saved, and the rest of the summary follows."""
    try:
        return line()
    except Exception as error:  # of a template, a font, or whatever a recipe has written
        return f"could not be made: {type(error).__name__}: {first_line(error)}"


def _picture(trainer: Any, folder: Path) -> str:
    """Draw the losses or rewards of the run, on rank 0; return the picture's place for the summary."""
    quantity = "reward" if _logged(trainer, "reward") else "loss"
    runs = {"training": _logged(trainer, quantity), "evaluation": _logged(trainer, f"eval_{quantity}")}
    runs = {name: points for name, points in runs.items() if points}
    if not runs or find_spec("matplotlib") is None:
        return ""
    if trainer.accelerator.is_main_process:
        from hf_fsdp_tools.plots import draw_losses, save

        args = trainer.args
        setting = f"{args.world_size} processes, learning rate {args.learning_rate:g}, {trainer.state.max_steps} steps"
        save(draw_losses(runs, quantity=quantity, setting=setting), folder / f"{quantity}.png")
    return f", {folder / quantity}.png"


def _first_has_ended() -> bool:
    """Wait for the first process, which says the same error; False where it goes on, and the error is this one's alone.

    A launcher ends all when one has ended: not before the first has said why. Without one, the store that the first
    process has made is gone with it; where there is none yet, the error is of the command line, which all have.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    has_launcher, end_s = "TORCHELASTIC_RUN_ID" in os.environ, time.monotonic() + _FIRST_SAYS_S
    while time.monotonic() < end_s:
        if not has_launcher and not dist.is_initialized():
            return True
        try:
            has_launcher or _get_default_store().check(["a key"])
        except RuntimeError:  # as torch says that a store does not answer
            return True
        time.sleep(0.2)
    return False


_OWN, _OF_LIBRARIES = str(Path(__file__).parents[1]), ("<frozen", *map(get_path, ("stdlib", "purelib", "platlib")))


def _line_of(error: Exception, place: traceback.FrameSummary, name: str) -> str:
    """What an error says in one line; where it is a library's, whose options it is mostly about, also its place."""
    if isinstance(error, FSDPToolsError):
        return str(error)
    with NamedTemporaryFile("w", prefix=f"{name}-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return f"{type(error).__name__}: {first_line(error)} ({Path(place.filename).name}:{place.lineno}; see {file.name})"


def run(main: Callable[[], object], name: str) -> NoReturn:
    """Run a recipe's `main` and end the process; Ctrl-C, an error of this package, or of a library before the first
    step (mostly about an option), whose traceback is kept in a file, is one line on each machine.

    The process ends without tearing the interpreter down: threads of gloo and Arrow may still ask for it then, and now
    and then that aborts the process after hours of good work (pytorch issues 190489 and 179291, arrow issue 45017).

    Example:
        >>> def main() -> None:
        ...     raise ConfigError("--max_length 9 cuts every row. Give more.")
        >>> run(main, "mine")  # prints "mine: error: --max_length 9 cuts every row. Give more."
        Traceback (most recent call last):
        SystemExit: 1
    """
    global _recipe
    _recipe = name.replace("_", "-")
    # one line, without the place in a recipe; checkpoints of one second are sorted by their numbers, which is right
    warnings.formatwarning = lambda message, *_, **__: f"{name}: warning: {message}\n"
    logging.getLogger("transformers.trainer_utils").addFilter(lambda record: "mtime may" not in record.getMessage())
    try:
        main()
    except Exception as error:  # mostly the same on every rank, so one of each node says it
        place = traceback.extract_tb(error.__traceback__)[-1]
        of_library = place.filename.startswith(_OF_LIBRARIES) and not place.filename.startswith(_OWN)
        if not isinstance(error, FSDPToolsError) and (not of_library or hasattr(error, "__notes__")):
            raise
        if rank_on_node()[0] == 0 or not _first_has_ended():
            print(f"{name}: error: {_line_of(error, place, name)}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends it once more
        if rank_on_node()[0] == 0:
            after = "--resume_from_checkpoint true goes on from the last checkpoint"
            print(f"\n{name}: interrupted; {after}", file=sys.stderr)
        os._exit(130)
    atexit._run_exitfuncs()  # trackers write their last lines here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
