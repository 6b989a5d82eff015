"""A run that was interrupted goes on as if it had not been: states, checkpoints, and what an interruption leaves
behind."""

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration, set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.distributed import DistributedConfig

from hf_fsdp_tools import CheckpointError, ConfigError, FSDPPlugin, from_pretrained, make_accelerator
from tests._checkpoints import no_space
from tests._dist import run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, full_states, logged, make_rows, new_accelerator
from tests.api import all_ranks, local_device, using_format

ON_CPU = local_device().type == "cpu"
# Another number of ranks adds the same numbers in another order; over a few AdamW steps that grows to about 1e-5
# (measured).
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


@pytest.fixture
def checkpoints(folders: dict[str, Path]) -> dict[str, Path]:
    return {kind: folders[kind] for kind in ("llama", "tied", "qwen2_moe")}


# ---- a plain loop ----


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


ROUTES = (("qwen2_moe", True, torch.optim.Adagrad), ("tied", False, torch.optim.AdamW))
"""Checkpoint, whether it is loaded into shards, optimizer: one with empty shards, and one with a state that lacks
parameters."""


def _in_this_world(kind, sharded_before, optimizer, sources, folder):
    accelerator = make_accelerator(cpu=ON_CPU)
    loop = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
    loop.train()
    accelerator.save_state(folder / kind)
    saved = full_states(loop.model, loop.optimizer)
    expected = loop.train()
    other = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
    accelerator.backward(other.model(**next(other.batches)).loss)  # gradients are pending
    accelerator.load_state(folder / kind)
    other.skip(2)
    other.optimizer.zero_grad()
    assert saved.keys() == full_states(other.model, other.optimizer).keys()
    assert other.train() == expected
    assert other.scheduler.get_last_lr() == loop.scheduler.get_last_lr()
    resumed = full_states(other.model, other.optimizer)
    for name, tensor in full_states(loop.model, loop.optimizer).items():
        assert torch.equal(tensor, resumed[name]), name
    return saved


def _elsewhere(kind, sharded_before, optimizer, saved, sources, folder):
    accelerator = make_accelerator(cpu=ON_CPU, gradient_accumulation_steps=4)
    accelerator.step = 2 * dist.get_rank()  # as if the ranks had counted differently
    loop = Loop(accelerator, sources[kind], sharded_before=sharded_before, optimizer=optimizer)
    said = pytest.warns(UserWarning, match=rf"saved by 2 process.es. and is read by {dist.get_world_size()}\.")
    with said if dist.get_rank() == 0 else nullcontext():
        accelerator.load_state(folder / kind)
    for name, tensor in full_states(loop.model, loop.optimizer).items():
        assert torch.equal(tensor, saved[name]), name
    assert accelerator.step == 0, "every rank accumulates in step with rank 0"
    loop.train()


def rows_of_later_epochs_come_in_their_order(source, folder):
    """Rows of a script that shuffles, never calls `set_epoch`, and skips as Accelerate's examples do; seeds differ.

    Interrupted in the middle of an epoch, after its last batch, and after the epoch.
    """

    def run(resumed=None, keep=None):
        """Each epoch's rows of all ranks, and what torch draws after it; the rows of one epoch are new to it."""
        accelerator = make_accelerator(cpu=ON_CPU)
        accelerator.free_memory()
        set_seed(5 if resumed is None else 6, device_specific=True)
        _, loader = accelerator.prepare(
            from_pretrained(source, accelerator=accelerator), DataLoader(range(24), batch_size=2, shuffle=True)
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
                if step in (keep or ()) and step != 12:
                    accelerator.save_state(folder / f"step_{step}")
            if step in (keep or ()) and step == 12:
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


@pytest.mark.parametrize("route", [ROUTES[1], pytest.param(ROUTES[0], marks=pytest.mark.nightly)])
def test_a_state_is_resumed_exactly_and_by_other_numbers_of_ranks(checkpoints, tmp_path, route):
    saved, _ = run_ranks(_in_this_world, 2, *route, checkpoints, tmp_path)
    run_ranks(_elsewhere, 3, *route, saved, checkpoints, tmp_path)


# ---- the Trainer ----


def _accuracy(prediction):
    hits = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(hits.mean())}


def _trainer(model, folder: Path, kind=ShardedTrainer, **settings) -> Trainer:
    defaults = {
        "max_steps": 3, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 1,
        "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    callbacks = settings.pop("callbacks", None)
    args = arguments(folder, **{**defaults, **settings})
    rows = make_rows(64)
    return kind(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        compute_metrics=_accuracy,
        callbacks=callbacks,
    )


def _model(source, *, sharded_before=True):
    options = {"attention_dropout": 0.1}
    if sharded_before:
        return from_pretrained(source, accelerator=make_accelerator(cpu=ON_CPU), **options)
    return AutoModelForCausalLM.from_pretrained(source, **options)


def _equal(model, other) -> bool:
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return all(torch.equal(whole[name], parameter) for name, parameter in other.named_parameters())


def _life(source, out):
    first = _without_interruption(source, out)
    # the same after step 1, in another process's place: while step 2 was being saved
    dist.barrier()
    if dist.get_rank() == 0:
        (out / "checkpoint-2" / "trainer_state.json").unlink()
    dist.barrier()
    said = r"checkpoint-2' has no readable trainer_state.json.*from the last complete one"
    with pytest.raises(CheckpointError, match=said):
        _trainer(_model(source), out).train(resume_from_checkpoint=str(out / "checkpoint-2"))
    for wanted in (True, str(out / "checkpoint-1")):
        model = _model(source, sharded_before=wanted is True)
        second = _trainer(model, out, max_steps=2, save_strategy="no", eval_strategy="no")
        second.train(resume_from_checkpoint=wanted)
        for key in ("loss", "grad_norm"):
            assert logged(second, key)[-1:] == logged(first, key)[-1:], wanted
        assert _equal(second.model, AutoModelForCausalLM.from_pretrained(out / "checkpoint-2"))


def _without_interruption(source, out):
    trainer = _trainer(_model(source), out, max_steps=2, save_total_limit=2, eval_strategy="no")
    trainer.train()
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert _equal(trainer.model, AutoModelForCausalLM.from_pretrained(out / "checkpoint-2")), "opens as it is"
    held = {path.name for path in (out / "checkpoint-2").iterdir()}
    assert {"model.safetensors", "optimizer_0", "scheduler.pt", "trainer_state.json", "rng_state_1.pth"} <= held
    assert not any(name.startswith("pytorch_model") for name in held), "the weights are there once"
    return trainer


WRITE_DATA = "torch.distributed.checkpoint.filesystem.{}.write_data"
FAULTS = (
    (1, "hf_fsdp_tools.saving.save.write_transfers", True),  # weights
    (0, "pathlib.Path.unlink", True),  # what rank 0 does alone before the Trainer's own collectives
    (1, WRITE_DATA.format("_FileSystemWriter"), False),
)
"""A rank, what fails on it alone in the middle of saving, and whether that is at once."""
MORE_FAULTS = (
    (1, "numpy.random.get_state", True),  # random states
    (0, "hf_fsdp_tools.saving.manifest.write_durably", True),  # the list of files, last of all
    (1, WRITE_DATA.format("FileSystemWriter"), True),  # optimizer
    (0, "transformers.trainer_callback.TrainerState.save_to_json", True),  # what declares a checkpoint complete
    (0, "transformers.trainer.Trainer._save_scaler", True),  # what rank 0 does alone before others save random states
    (1, "hf_fsdp_tools.saving.manifest.sync", True),  # bringing all to disk
    (1, "os.pwritev", False),
    (0, "hf_fsdp_tools.saving.manifest.write_durably", False),
)


def _faults(faults, source, out):
    settings = {"save_total_limit": 1, "eval_strategy": "no"}
    _trainer(_model(source), out, max_steps=1, **settings).train()
    good = _content(out / "checkpoint-1")
    for rank, target, blocking in faults:
        often = {"max_steps": 2} if blocking else {"max_steps": 60, "save_steps": 2}
        trainer = _trainer(_model(source), out, **settings, **often)
        trainer.fsdp_settings.blocking = blocking
        broken = patch(target, no_space) if dist.get_rank() == rank else nullcontext()
        with broken, pytest.raises(Exception if blocking else CheckpointError, match="No space left on device"):
            trainer.train(resume_from_checkpoint=str(out / "checkpoint-1"))
        assert len(set(all_ranks(trainer.state.global_step))) == 1, target
        dist.barrier()
        assert _content(out / "checkpoint-1") == good, target
        assert blocking or not (out / "checkpoint-2").exists(), target
        dist.barrier()
    trainer = _trainer(_model(source), out, max_steps=2, **settings)
    with pytest.raises(CheckpointError, match="checkpoint-2"):
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    # besides the empty file that rank 0 could not unlink
    left = [path.name for path in out.iterdir() if not path.name.startswith(".seen-by-all")]
    assert left == ["checkpoint-2"], "the older one is deleted now"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _numbered_states(source, out):
    project = ProjectConfiguration(project_dir=str(out), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = make_accelerator(cpu=ON_CPU, project_config=project)
    loop = Loop(accelerator, source, sharded_before=True)
    loop.train(1)
    folder = accelerator.save_state()
    saved = full_states(loop.model, loop.optimizer)
    loop.train(1)
    broken = patch("random.getstate", no_space) if dist.get_rank() == 1 else nullcontext()
    with broken, pytest.raises(Exception, match="No space left on device"):
        accelerator.save_state()
    accelerator.load_state()
    loaded = full_states(loop.model, loop.optimizer)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    later = accelerator.save_state()
    dist.barrier()
    assert later.is_dir() and not folder.exists(), "the older one goes when the new one is there"
    dist.barrier()
    if dist.get_rank() == 0:
        later.rename(later.with_name(f".{later.name}.former"))  # as between the two renames of a save that was killed
    dist.barrier()
    with pytest.raises(CheckpointError, match=rf"Rename '.*/\.{later.name}\.former'"):
        accelerator.load_state(later)


class GrowsWorse(TrainerCallback):
    """Makes every evaluation worse than the first, so that the best checkpoint is not the last."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step > 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()


BEST = {"only": {"save_only_model": True, "save_total_limit": 1}, "best": {"save_strategy": "best"}}


def _best(name, source, out):
    out = out / name
    trainer = _trainer(
        _model(source), out, load_best_model_at_end=True, metric_for_best_model="loss", callbacks=[GrowsWorse()],
        **BEST[name],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(out / "checkpoint-1")
    assert _equal(trainer.model, AutoModelForCausalLM.from_pretrained(out / "checkpoint-1"))
    close(trainer.evaluate()["eval_loss"], min(logged(trainer, "eval_loss")))
    trainer.save_model(out / "final")
    assert _equal(trainer.model, AutoModelForCausalLM.from_pretrained(out / "final"))
    if name == "only":
        later = _trainer(_model(source), out, max_steps=3)
        (out / "checkpoint-1" / "optimizer.pt").touch()  # as a Trainer without FSDP leaves it
        said = (
            r"lacks the optimizer in shards \(optimizer.pt is that of a run without.*scheduler.*random states.*allow_"
        )
        with pytest.raises(CheckpointError, match=said):
            later.train(resume_from_checkpoint=True)
        later.fsdp_settings.allow_incomplete = True
        with pytest.warns(UserWarning, match=r"lacks the optimizer.*anew") if dist.get_rank() == 0 else nullcontext():
            later.train(resume_from_checkpoint=True)


class AsAccelerateSaves(ShardedTrainer):
    _save_optimizer_and_scheduler = Trainer._save_optimizer_and_scheduler

    def save_model(self, output_dir=None, _internal_call=False):
        os.makedirs(output_dir, exist_ok=True)


def _foreign(state_dict_type, source, out):
    folder = out / state_dict_type
    first = _trainer(_model(source), folder, kind=AsAccelerateSaves, max_steps=2)
    with using_format(first.accelerator.state.fsdp_plugin, state_dict_type, out):
        first.train()
    held = {path.name for path in (folder / "checkpoint-1").iterdir()}
    assert ("optimizer_0" in held) == (state_dict_type == "SHARDED_STATE_DICT") and "model.safetensors" not in held
    second = _trainer(_model(source), folder, max_steps=2, save_strategy="no")
    second.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert logged(second)[-1:] == logged(first)[-1:]


RUNS = {
    "life": (_life, "tied"),
    "rows": (rows_of_later_epochs_come_in_their_order, "llama"),
    "numbered": (_numbered_states, "llama"),
    "faults": (partial(_faults, FAULTS), "llama"),
    **{f"best: {name}": (partial(_best, name), "llama") for name in BEST},
    "SHARDED_STATE_DICT": (partial(_foreign, "SHARDED_STATE_DICT"), "llama"),
}
MORE = {"faults": (partial(_faults, MORE_FAULTS), "llama")}
MORE["FULL_STATE_DICT"] = (partial(_foreign, "FULL_STATE_DICT"), "llama")


@pytest.mark.parametrize("runs", [RUNS, pytest.param(MORE, marks=pytest.mark.nightly)])
def test_an_interrupted_save_destroys_nothing_and_a_killed_trainer_goes_on_exactly(checkpoints, tmp_path, runs):
    cases = {}
    for name, (case, kind) in runs.items():
        (tmp_path / name).mkdir()
        cases[name] = partial(case, checkpoints[kind], tmp_path / name)
    run_ranks(run_cases, 2, cases)


# ---- other models ----


LORA = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")


def _adapted(source):
    torch.manual_seed(5)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(source, attention_dropout=0.1), LORA)


def _goes_on(make, folder, **settings):
    """Three steps with a checkpoint at the second, and the last again by another trainer; both must be the same."""
    first = _trainer(make(), folder, save_steps=2, eval_steps=2, **settings)
    first.train()
    second = _trainer(make(), folder, save_strategy="no", eval_strategy="no")
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert len(logged(second)) == 3 and logged(second)[-1:] == logged(first)[-1:]
    return first


def adapted(sources, out):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    first = _goes_on(partial(_adapted, sources["llama"]), out / "lora", **best)
    checkpoint = out / "lora" / "checkpoint-2"
    assert first.state.best_model_checkpoint == str(checkpoint)
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["adapter_model.safetensors"]
    reopened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sources["llama"]), checkpoint)
    assert _equal(first.model, reopened), "the best step's adapter, whole"


def sharded_elsewhere(sources, out):
    """By transformers, over ranks that share layers or by FSDP2, and by a script."""
    plan = {"model.layers.*.self_attn.o_proj": "rowwise"}  # the head's 131 rows cannot be split everywhere
    for sizes in ({"fsdp_size": 2}, {"tp_size": 2, "tp_plan": plan}, None):
        accelerator = make_accelerator(cpu=ON_CPU)
        config = {} if sizes is None else {"distributed_config": DistributedConfig(**sizes)}
        model = AutoModelForCausalLM.from_pretrained(sources["llama"], **config)
        if sizes is None:
            fully_shard(model.model.layers[0])
            fully_shard(model)
        for prepare in (accelerator.prepare, partial(_trainer, folder=out / "elsewhere")):
            with pytest.raises(ConfigError, match=r"sharded already, and not by hf_fsdp_tools.*from_pretrained\("):
                prepare(model)
    model = from_pretrained(sources["llama"], accelerator=new_accelerator())
    accelerator = new_accelerator(fsdp_plugin=FSDPPlugin(fsdp_version=1))
    with pytest.raises(ConfigError, match=r"sharded by FSDP2 already.*fsdp_version 2"):
        accelerator.prepare(model, torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))


def _as_fsdp1():
    os.environ |= {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


def fsdp1_resumes_saves_and_generates(sources, out):
    _as_fsdp1()
    out = out / "fsdp1"
    first = _goes_on(partial(_model, sources["llama"], sharded_before=False), out)
    prompt = torch.tensor([[3, 4]])
    with torch.no_grad():
        text = first.model.generate(prompt, max_new_tokens=4, do_sample=False)
    first.save_model(out / "final")
    reopened = AutoModelForCausalLM.from_pretrained(out / "final")
    assert torch.equal(text, reopened.generate(prompt, max_new_tokens=4, do_sample=False))
    checkpoint = AutoModelForCausalLM.from_pretrained(out / "checkpoint-2")
    assert not torch.equal(checkpoint.lm_head.weight, reopened.lm_head.weight)


def fsdp1_saves_an_adapter(sources, out):
    _as_fsdp1()
    trainer = _trainer(_adapted(sources["llama"]), out / "fsdp1 lora", max_steps=1, eval_strategy="no")
    trainer.train()
    base = AutoModelForCausalLM.from_pretrained(sources["llama"])
    reopened = PeftModel.from_pretrained(base, out / "fsdp1 lora" / "checkpoint-1").state_dict()
    with FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False):
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, reopened[name]), name


OTHERS = (adapted, sharded_elsewhere, fsdp1_resumes_saves_and_generates, fsdp1_saves_an_adapter)


def test_models_sharded_elsewhere_adapted_or_under_fsdp1_are_resumed_and_saved_whole(checkpoints, tmp_path):
    run_ranks(run_cases, 2, OTHERS, checkpoints, tmp_path)
