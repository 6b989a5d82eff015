"""A run that was interrupted goes on as if it had not been: states and checkpoints of models, adapters and optimizers,
what is in them, and what a resume says of a damaged one. `test_saves.py` has failures and kills in a save."""

import hashlib
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers.distributed import DistributedConfig

from hf_fsdp_tools import (
    CheckpointError,
    ConfigError,
    FSDPPlugin,
    RanksError,
    TrainerSettings,
    export_checkpoint,
    from_pretrained,
    make_accelerator,
    save_pretrained,
    wait_for_saves,
)
from tests._checkpoints import assert_same_tensors, full, lora, plain_model, randomize, refusal
from tests._dist import named, run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, full_states, logged, make_rows, new_accelerator
from tests.api import AVERAGES, MANIFEST, check_dcp, patched, problem_of, using_format
from tests.ranks.test_saves import Folder, moments


class Loop:
    def __init__(self, accelerator, source, *, sharded_before, optimizer=torch.optim.AdamW):
        accelerator.free_memory()
        set_seed(3)
        options = {"experts_implementation": "eager", "attention_dropout": 0.1}
        if sharded_before:
            model = from_pretrained(source, accelerator=accelerator, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(source, **options)
            model.unused = torch.nn.Linear(3, 5)  # trained in name only: no gradient, so no state in Adam
        made = optimizer(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(made, total_iters=20)
        loader = DataLoader(make_rows(48), batch_size=2, shuffle=True)
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model.train(), made, loader, scheduler
        )
        self.batches = iter(self.loader)

    def skip(self, count):
        self.batches = iter(self.accelerator.skip_first_batches(self.loader, count))

    def train(self, steps=2):
        losses = []
        for _ in range(steps):
            loss = self.model(**next(self.batches)).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def whole(self):
        return full_states(self.model, self.optimizer)


def in_this_world(kind, sharded_before, optimizer, sources, folder):
    """Saved before the first step, of which no step may be counted, and after two."""
    accelerator = make_accelerator(cpu=True)
    for steps in (0, 2):
        loop = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
        loop.train(steps)
        accelerator.save_state(folder / f"{steps}")
        saved, expected = loop.whole(), loop.train()
        other = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
        if steps:
            accelerator.backward(other.model(**next(other.batches)).loss)  # gradients are pending
        accelerator.load_state(folder / f"{steps}")
        if steps:
            other.skip(steps)
            other.optimizer.zero_grad()
            assert saved.keys() == other.whole().keys()
        assert other.train() == expected, steps
        assert other.scheduler.get_last_lr() == loop.scheduler.get_last_lr()
        whole, found = loop.whole(), other.whole()
        assert_same_tensors({name: found[name] for name in whole}, whole)
    return saved


def elsewhere(kind, sharded_before, optimizer, saved, sources, folder):
    accelerator = make_accelerator(cpu=True, gradient_accumulation_steps=4)
    accelerator.step = 2 * dist.get_rank()  # as if the ranks had counted differently
    loop = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
    said = pytest.warns(UserWarning, match=rf"saved by 2 process.es. and is read by {dist.get_world_size()}\.")
    with said if dist.get_rank() == 0 else nullcontext():
        accelerator.load_state(folder / "2")
    assert_same_tensors(loop.whole(), saved)
    assert accelerator.step == 0, "every rank accumulates in step with rank 0"
    loop.train()


ROUTES = ("tied", False, torch.optim.AdamW), ("qwen2_moe", True, torch.optim.Adagrad)
"""Checkpoint, whether it is loaded into shards, optimizer: a state that lacks parameters, and empty shards."""


@pytest.mark.parametrize("route", [ROUTES[0], pytest.param(ROUTES[1], marks=pytest.mark.nightly)])
def test_a_state_is_resumed_exactly_and_by_other_numbers_of_ranks(folders, tmp_path, route):
    saved, _ = run_ranks(in_this_world, 2, *route, folders, tmp_path)
    run_ranks(elsewhere, 3, *route, saved, folders, tmp_path)


def rows_of_later_epochs_come_in_their_order(sources, folder):
    """Rows of a script that shuffles, never calls `set_epoch`, and skips as Accelerate's examples do; seeds differ.

    Interrupted in the middle of an epoch, after its last batch, and after the epoch.
    """

    def run(resumed=None, keep=()):
        """Each epoch's rows of all ranks, and what torch draws after it; the rows of one epoch are new to it."""
        accelerator = make_accelerator(cpu=True)
        accelerator.free_memory()
        set_seed(5 if resumed is None else 6, device_specific=True)
        _, loader = accelerator.prepare(
            from_pretrained(sources["llama"], accelerator=accelerator),
            DataLoader(range(24), batch_size=2, shuffle=True),
        )
        step = 0
        if resumed is not None:
            accelerator.load_state(folder / f"step_{resumed}")
            step = resumed
        seen = {}
        for epoch in range(step // 6, 3):
            if resumed is not None and epoch == step // 6 and step % 6:
                loader = accelerator.skip_first_batches(loader, step % 6)  # for good, as in by_feature/checkpointing.py
            for batch in loader:
                seen.setdefault(epoch, []).extend(accelerator.gather(batch).tolist())
                step += 1
                if step in keep and step != 12:
                    accelerator.save_state(folder / f"step_{step}")
            if step in keep and step == 12:
                accelerator.save_state(folder / f"step_{step}")
            seen[epoch].append(torch.rand(1).item())
        return seen

    whole = run(keep=(4, 6, 12))
    assert all(sorted(rows[:-1]) == list(range(24)) for rows in whole.values()), "each row once, though seeds differ"
    assert len({tuple(rows) for rows in whole.values()}) == 3, "each epoch has an order of its own"
    assert run(4, keep=(8,)) == {0: whole[0][16:], 1: whole[1], 2: whole[2]}
    assert run(8) == {1: whole[1][8:], 2: whole[2]}, "resumed twice"
    assert [rows[:-1] for rows in run(6).values()] == [whole[1][:-1], whole[2][:-1]]
    assert [rows[:-1] for rows in run(12).values()] == [whole[2][:-1]]


def the_same_is_saved_in_the_background(sources, out):
    """Every file, but for what names the save itself, while the next steps run; and Accelerate itself reads it."""
    loop = Loop(make_accelerator(cpu=True), sources["llama"], sharded_before=True)
    loop.train(1)
    saved, sync, opened = loop.whole(), os.fsync, threading.Event()
    loop.accelerator.save_state(out / "at once")

    def slowly(descriptor):
        assert threading.current_thread().name != "save" or opened.wait(200), "nobody lets it through"
        sync(descriptor)

    with patch.object(os, "fsync", slowly):
        loop.accelerator.save_state(out / "later", blocking=False)
        assert not (out / "later").exists(), "nobody sees what is not complete"
        loop.train(2)
        opened.set()
        report = wait_for_saves()
    assert report is not None and report.total_bytes > report.bytes_written > 0 and report.copied_bytes
    own = ("optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata")
    at_once, later = ({k: v for k, v in content(out / name).items() if k not in own} for name in ("at once", "later"))
    assert at_once == later and len(later) > 4
    Accelerator.load_state(loop.accelerator, str(out / "later"))
    assert_same_tensors(loop.whole(), saved)


def content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".incomplete", ".json"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def two_models_and_optimizers_in_another_order(sources, out):
    def made():
        accelerator.free_memory()
        models = [from_pretrained(sources[name], accelerator=accelerator) for name in ("llama", "tied")]
        optimizers = [torch.optim.AdamW(models[1].parameters(), lr=1e-2)]
        optimizers.append(torch.optim.SGD(models[0].parameters(), lr=1e-2, momentum=0.9))
        first, second, *optimizers = accelerator.prepare(*models, *optimizers)
        return [first, second], optimizers

    def step():
        rows = make_rows(2)[dist.get_rank()].items()
        for model, optimizer in zip(models, optimizers[::-1], strict=True):
            accelerator.backward(model(**{key: value[None] for key, value in rows}).loss)
            optimizer.step()
            optimizer.zero_grad()
        return [full_states(*each) for each in zip(models, optimizers[::-1], strict=True)]

    accelerator = make_accelerator(cpu=True)
    models, optimizers = made()
    step()
    accelerator.save_state(out)
    expected = step()
    models, optimizers = made()
    accelerator.load_state(out)
    for found, whole in zip(step(), expected, strict=True):
        assert_same_tensors(found, whole)


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def a_state_of_an_adapter_holds_no_frozen_base(sources, out):
    """But where PiSSA has changed it; what it holds is exported as an adapter, and goes into no other one."""
    large = out / "large"
    if dist.get_rank() == 0:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 512}
        randomize(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))).save_pretrained(large)
    dist.barrier()
    base, config = bytes_of(large), lora(target_modules=["q_proj", "down_proj"])
    for name in ("lora", "pissa"):
        accelerator = new_accelerator()
        if name == "pissa":
            model = get_peft_model(plain_model("llama", large), lora(init_lora_weights="pissa"))
        else:
            model = from_pretrained(large, accelerator=accelerator, peft_config=config)
        model = accelerator.prepare(model)
        accelerator.save_state(out / name)
        assert (bytes_of(out / name) > base / 2) == (name == "pissa") != (bytes_of(out / name) < base / 4)
        if name == "lora":
            assert all(".lora_" in key for key in check_dcp(out / name / "pytorch_model_fsdp_0"))
            save_pretrained(model, out / "saved")
            export_checkpoint(out / name, out / "exported")
            of_both = (load_file(out / each / "adapter_model.safetensors") for each in ("exported", "saved"))
            assert_same_tensors(*of_both)
    shape, lacks = r"holds in another shape 'base_model\..*lora_A", r"lacks 'base_model\..*v_proj"
    for said, config in ((shape, {"r": 3}), (lacks, {"target_modules": ["q_proj", "down_proj", "v_proj"]})):
        accelerator = new_accelerator()
        other = lora(**{"target_modules": ["q_proj", "down_proj"], **config})
        accelerator.prepare(from_pretrained(large, accelerator=accelerator, peft_config=other))
        found = refusal(partial(accelerator.load_state, out / "lora"), CheckpointError)
        assert re.search(said, found) and found.endswith("as in the run that saved it."), found


def accuracy(prediction):
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def trainer_of(model, folder: Path, kind=ShardedTrainer, ours=None, callbacks=None, **settings) -> Any:
    defaults = {
        "max_steps": 2, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    args, rows = arguments(folder, **{**defaults, **settings}), make_rows(64)
    data = {"train_dataset": rows, "eval_dataset": rows[:8], "compute_metrics": accuracy}
    return kind(model=model, args=args, callbacks=callbacks, fsdp_settings=TrainerSettings(**(ours or {})), **data)


def model_of(source, *, sharded_before=True):
    options = {"attention_dropout": 0.1}
    if sharded_before:
        return from_pretrained(source, accelerator=make_accelerator(cpu=True), **options)
    return AutoModelForCausalLM.from_pretrained(source, **options)


def equal(model, other) -> bool:
    whole = {name: full(parameter) for name, parameter in model.named_parameters()}
    return all(torch.equal(whole[name], parameter) for name, parameter in other.named_parameters())


def life(sources, out):
    source = sources["tied"]
    first = trainer_of(model_of(source), out, save_total_limit=2)
    first.train()
    assert equal(first.model, AutoModelForCausalLM.from_pretrained(out / "checkpoint-2")), "opens as it is"
    held = {path.name for path in (out / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "optimizer_0", "scheduler.pt", "trainer_state.json", "rng_state_1.pth"} <= held
    assert not any(name.startswith("pytorch_model") for name in held), "the weights are there once"
    # the same after step 1, in another process's place: while step 2 was being saved
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "checkpoint-2" / "trainer_state.json").unlink()
    dist.barrier()
    said = r"checkpoint-2' has no readable trainer_state.json.*from the last complete one"
    with pytest.raises(CheckpointError, match=said):
        trainer_of(model_of(source), out).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    for wanted in (True, str(out / "checkpoint-1")):
        second = trainer_of(model_of(source, sharded_before=wanted is True), out, save_strategy="no")
        second.train(resume_from_checkpoint=wanted)
        for key in ("loss", "grad_norm"):
            assert logged(second, key)[-1:] == logged(first, key)[-1:], wanted
        assert equal(second.model, AutoModelForCausalLM.from_pretrained(out / "checkpoint-2"))


class GrowsWorse(TrainerCallback):
    """Makes every evaluation worse than the first, so that the best checkpoint is not the last."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step > 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()


def best(settings, sources, out):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "load_best_model_at_end": True}
    options = {"metric_for_best_model": "loss", "callbacks": [GrowsWorse()], **evaluated, **settings}
    trainer = trainer_of(model_of(sources["llama"]), out, **options)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-1")
    assert equal(trainer.model, AutoModelForCausalLM.from_pretrained(out / "checkpoint-1"))
    trainer.save_model(out / "final")
    assert equal(trainer.model, AutoModelForCausalLM.from_pretrained(out / "final"))
    if "save_only_model" in settings:
        later = trainer_of(model_of(sources["llama"]), out, max_steps=3)
        (out / "checkpoint-1" / "optimizer.pt").touch()  # as a Trainer without FSDP leaves it
        said = r"optimizer in shards \(optimizer.pt is that of a run without.*scheduler.*random states.*allow_"
        with pytest.raises(CheckpointError, match=said):
            later.train(resume_from_checkpoint=True)
        later.fsdp_settings.allow_incomplete = True
        with pytest.warns(UserWarning, match=r"lacks the optimizer.*anew") if dist.get_rank() == 0 else nullcontext():
            later.train(resume_from_checkpoint=True)


class AsAccelerateSaves(ShardedTrainer):
    _save_optimizer_and_scheduler = Trainer._save_optimizer_and_scheduler

    def save_model(self, output_dir=None, _internal_call=False):
        os.makedirs(output_dir, exist_ok=True)


def foreign(state_dict_type, sources, folder):
    first = trainer_of(model_of(sources["llama"]), folder, kind=AsAccelerateSaves)
    with using_format(first.accelerator.state.fsdp_plugin, folder, state_dict_type):
        first.train()
    held = {path.name for path in (folder / "checkpoint-1").iterdir()}
    assert ("optimizer_0" in held) == (state_dict_type == "SHARDED_STATE_DICT") and "model.safetensors" not in held
    second = trainer_of(model_of(sources["llama"]), folder, save_strategy="no")
    second.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert logged(second)[-1:] == logged(first)[-1:]


def goes_on(make, folder, **settings):
    """Two steps with checkpoints, and the last again by another trainer; both must be the same."""
    first = trainer_of(make(), folder, **settings)
    first.train()
    second = trainer_of(make(), folder, save_strategy="no")
    second.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert len(logged(second)) == 2 and logged(second)[-1:] == logged(first)[-1:]
    return first


def adapted(sources, out):
    def make():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_pretrained(sources["llama"], attention_dropout=0.1)
        return get_peft_model(model, lora(target_modules="all-linear"))

    first, checkpoint = goes_on(make, out), out / "checkpoint-2"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["adapter_model.safetensors"]
    assert equal(first.model, PeftModel.from_pretrained(plain_model("llama", sources["llama"]), checkpoint))


def sharded_elsewhere(sources, out):
    """By transformers, over ranks that share layers or by FSDP2, and by a script."""
    plan = {"model.layers.*.self_attn.o_proj": "rowwise"}  # the head's 131 rows cannot be split everywhere
    for sizes in ({"fsdp_size": 2}, {"tp_size": 2, "tp_plan": plan}, None):
        accelerator = make_accelerator(cpu=True)
        config = {} if sizes is None else {"distributed_config": DistributedConfig(**sizes)}
        model = AutoModelForCausalLM.from_pretrained(sources["llama"], **config)
        if sizes is None:
            fully_shard(model.model.layers[0])
            fully_shard(model)
        for prepare in (accelerator.prepare, partial(trainer_of, folder=out)):
            with pytest.raises(ConfigError, match=r"sharded already, and not by hf_fsdp_tools.*from_pretrained\("):
                prepare(model)
    model = from_pretrained(sources["llama"], accelerator=new_accelerator())
    accelerator = new_accelerator(fsdp_plugin=FSDPPlugin(fsdp_version=1))
    with pytest.raises(ConfigError, match=r"sharded by FSDP2 already.*fsdp_version 2"):
        accelerator.prepare(model, torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))


def fsdp1_resumes_and_saves(sources, out):
    os.environ |= {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    first, prompt = goes_on(partial(model_of, sources["llama"], sharded_before=False), out), torch.tensor([[3, 4]])
    with torch.no_grad():
        text = first.model.generate(prompt, max_new_tokens=4, do_sample=False)
    first.save_model(out / "final")
    reopened = AutoModelForCausalLM.from_pretrained(out / "final")
    assert torch.equal(text, reopened.generate(prompt, max_new_tokens=4, do_sample=False))


class FailsAlone(ShardedTrainer):
    """On one rank something fails before the collectives of a save, in code that is not the package's."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if dist.get_rank() == 1:
            raise ValueError("a mistake of mine")
        super()._save_optimizer_and_scheduler(output_dir)


def what_a_save_needs(sources, out):
    with pytest.raises(ValueError if dist.get_rank() == 1 else RanksError, match="a mistake of mine"):
        trainer_of(model_of(sources["llama"]), out, kind=FailsAlone).train()
    assert not list(out.glob("checkpoint-*"))
    # Each node has a disk of its own: said before the first step, not after an hour at the first save.
    trainer = trainer_of(model_of(sources["llama"]), out / f"{dist.get_rank()}")
    with patched(_APPEARS_S=0.5), pytest.raises(CheckpointError, match=r"1 of 2 ranks(.|\n)*that all ranks share"):
        trainer.train()
    assert trainer.state.global_step == 0


LOOPS = named(
    rows_of_later_epochs_come_in_their_order,
    the_same_is_saved_in_the_background,
    two_models_and_optimizers_in_another_order,
    a_state_of_an_adapter_holds_no_frozen_base,
)
TRAINERS = named(life, adapted, sharded_elsewhere, what_a_save_needs)
TRAINERS |= {"only": partial(best, {"save_only_model": True, "save_total_limit": 1})}
TRAINERS |= {"SHARDED": partial(foreign, "SHARDED_STATE_DICT"), "fsdp1": fsdp1_resumes_and_saves}
MORE = {"best": partial(best, {"save_strategy": "best"}), "FULL": partial(foreign, "FULL_STATE_DICT")}


@pytest.mark.parametrize(
    "runs", [LOOPS, TRAINERS, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["0", "1", "more"]
)
def test_a_run_goes_on_exactly(folders, tmp_path, runs):
    for name in runs:
        (tmp_path / name).mkdir()
    run_ranks(run_cases, 2, {name: partial(case, folders, tmp_path / name) for name, case in runs.items()})


class Remembers(TrainerCallback):
    def __init__(self) -> None:
        self.contents: dict[str, dict[str, str]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait_for_saves()
        name = f"checkpoint-{state.global_step}"
        self.contents[name] = content(Path(args.output_dir, name))


def moments_of_a_trainer(limit, blocking, source, out):
    target, remembers = Folder(out), Remembers()
    target.place = out / "run"
    settings = {"max_steps": 3, "save_total_limit": limit, "ours": {"blocking": blocking, "ema_decay": 0.5}}
    seen = moments(trainer_of(model_of(source), target.place, callbacks=[remembers], **settings).train, target)
    if dist.get_rank() != 0:
        return
    assert sorted(remembers.contents) == [f"checkpoint-{step}" for step in (1, 2, 3)]
    assert all(f"{AVERAGES}/__0_0.distcp" in each for each in remembers.contents.values())
    begun = False
    for moment in seen:
        complete = [path for path in sorted(moment.glob("checkpoint-*")) if not problem_of(path)]
        begun |= bool(complete)
        assert begun == bool(complete), f"{moment}: a complete checkpoint was there, and none is"
        for path in complete:
            assert content(path) == remembers.contents[path.name], path
    assert len(seen) > 20 and begun
    assert {path.name for path in target.place.iterdir()} == {f"checkpoint-{step}" for step in range(4 - limit, 4)}


@pytest.mark.parametrize(("limit", "blocking"), [(1, True), pytest.param(2, False, marks=pytest.mark.nightly)])
def test_at_each_moment_of_a_training_a_whole_state_is_there_and_nothing_else_counts_as_one(
    folders: dict[str, Path], tmp_path: Path, limit: int, blocking: bool
) -> None:
    run_ranks(moments_of_a_trainer, 2, limit, blocking, folders["llama"], tmp_path)


Damage = Callable[[Path], object]
CODE = "cos\nsystem\n(S'true'\ntR."


def gone(name: str) -> Damage:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def cut(name: str) -> Damage:
    return lambda folder: os.truncate(folder / name, 50)


def written(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def flipped(name: str) -> Damage:
    def damage(folder: Path) -> None:
        text = bytearray((folder / name).read_bytes())
        text[len(text) // 2] ^= 1
        (folder / name).write_bytes(text)

    return damage


SHARD = "optimizer_0/__1_0.distcp"
OF_TRAINER: dict[str, tuple[Damage, str]] = {
    "optimizer gone": (gone("optimizer_0"), r"optimizer_0"),
    "metadata garbage": (written("optimizer_0/.metadata", "garbage"), r"\.metadata"),
    "shard gone": (gone(SHARD), r"__1_0\.distcp"),
    "shard cut": (cut(SHARD), r"__1_0\.distcp"),
    "scheduler cut": (cut("scheduler.pt"), r"scheduler\.pt"),
    "random states gone": (gone("rng_state_1.pth"), r"rng_state_1\.pth"),
    "random states malicious": (written("rng_state_1.pth", CODE), r"rng_state_1\.pth"),
    "weights cut": (cut("model.safetensors"), r"model\.safetensors"),
    "trainer state {}": (written("trainer_state.json", "{}"), r"trainer_state\.json"),
}
"""Damage, and what the error names."""
OF_STATE: dict[str, tuple[Damage, str]] = {
    "model gone": (gone("pytorch_model_fsdp_0"), r"pytorch_model_fsdp_0"),
    "scheduler cut": (cut("scheduler.bin"), r"scheduler\.bin"),
    "random states malicious": (written("random_states_1.pkl", CODE), r"random_states_1\.pkl"),
    "an object that runs code": (written("custom_checkpoint_0.pkl", CODE), r"custom_check"),
    "flipped bit": (flipped(SHARD), r"__1_0\.distcp' have another checksum"),
}
NEED_MANIFEST = ("random states gone", "flipped bit")  # without the list it is as if fewer ranks had saved, or no sums


def refused(load: Callable[[str], Any], good: Path, damages: dict[str, Any]) -> None:
    """Each damage is one short error on every rank, with the list of files or, each second one, without it."""
    for number, (name, (damage, says)) in enumerate(damages.items()):
        bad = good.with_name(f"bad-{number}")
        if dist.get_rank() == 0:
            damage(shutil.copytree(good, bad))
            if name not in NEED_MANIFEST and number % 2:
                (bad / MANIFEST).unlink()
        dist.barrier()
        with warnings.catch_warnings(), pytest.raises(CheckpointError, match=says) as caught:
            warnings.simplefilter("ignore")
            load(str(bad))
        assert len(str(caught.value)) < 1500 and str(bad) in str(caught.value), name


class NoStep(TrainerCallback):
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail("a step was trained")


def damaged_checkpoints(sources: dict[str, Path], out: Path) -> None:
    source, good = sources["llama"], out / "checkpoint-1"
    trainer_of(model_of(source), out, max_steps=1).train()
    trainer = trainer_of(model_of(source), out / "later", save_strategy="no", callbacks=[NoStep()])
    refused(lambda bad: trainer.train(resume_from_checkpoint=bad), good, OF_TRAINER)
    trainer = trainer_of(model_of(source), out / "on", save_strategy="no", ours={"allow_incomplete": True})
    dist.barrier()
    if dist.get_rank() == 0:
        (good / "scheduler.pt").unlink()
    dist.barrier()
    with pytest.warns(UserWarning, match="the scheduler.*anew") if dist.get_rank() == 0 else nullcontext():
        trainer.train(resume_from_checkpoint=str(good))
    assert {int(state["step"]) for state in trainer.optimizer.state.values()} == {2}, "the optimizer went on"


def damaged_states(sources: dict[str, Path], out: Path) -> None:
    loop = Loop(make_accelerator(cpu=True), sources["llama"], sharded_before=True)
    loop.train(1)
    good, before = loop.accelerator.save_state(out / "good", checksums=True), loop.whole()
    loop.train(1)
    other = loop.whole()
    refused(loop.accelerator.load_state, good, OF_STATE)
    assert_same_tensors(loop.whole(), other, "nothing was read")
    loop.accelerator.load_state(good)
    assert_same_tensors(loop.whole(), before)


def test_a_damaged_state_is_one_error_before_anything_is_read(folders: Any, tmp_path: Path) -> None:
    cases = named(damaged_checkpoints, damaged_states)
    run_ranks(run_cases, 2, {name: partial(case, folders, tmp_path / name) for name, case in cases.items()})
