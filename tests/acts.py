"""The machine of acts: what users do with a model, in any order, on shards and on one plain process.

    python -m tests.acts --seed 7                              # one sequence in each layout
    python -m tests.acts --layout "2 ranks" --minutes 10       # new seeds for so long, in a layout
    python -m tests.acts --without "pass" --seed 7             # no act whose name has the word

A sequence is a script of plain lines, drawn by a seed. Each act, of one line or a few, runs on the sharded model, where
each rank has its rows of the batch, and on the plain model of transformers and PEFT, which has all rows. After each act
what a user sees is compared: losses, gradients, weights, the optimizer's states, state dicts, saved files. An act is

    right     both did the same, or both raised an error;
    refused   the package says, on every rank alike, that it does not do this: the plain model does not either;
    wrong     they differ, or ranks do, or a refusal is none that is documented (`REFUSALS`);
    foreign   an error of somebody else, or no answer, where the plain model has none.

A sequence ends at the first act that is wrong or foreign, and prints itself as a script to paste, made shorter while it
still ends so.
"""

import argparse
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from hf_fsdp_tools import WrapPolicy
from tests._dist import hide_gpus, run_ranks
from tests.behaviour.behaviours import QUIET, SAVE, STATE, WORDS
from tests.behaviour.features import made
from tests.behaviour.sides import Act, Layout, make_files, play

WHOLE = WrapPolicy(replicate=("model.norm.weight", "model.layers.1.input_layernorm.weight"))
KEPT = WrapPolicy(reshard_after_forward={"*": False})
untied = partial(replace, model_type="qwen3")
LAYOUTS = {
    "one rank": made("one rank"),
    "one rank bf16": made("one rank", "bf16"),
    "one rank lora": untied(made("one rank", "LoRA")),
    "2 ranks": made(),
    "2 ranks bf16": untied(made("bf16")),
    "tied": made("tied"),
    "tied one rank bf16": made("tied", "one rank", "bf16"),
    "hsdp": made("HSDP"),
    "cp": made("cp"),
    "tp": made("tp"),
    "ep": made("mixture", "ep"),
    "mixture": replace(made(), model_type="mixtral"),
    "offload": made("offload"),
    "kept": replace(made(), options={"policy": KEPT}),
    "whole": replace(made(), options={"policy": WHOLE}),
    "lora": untied(made("LoRA")),
    "lora bf16": untied(made("LoRA", "bf16")),
}
# ---- the acts ----

PASS = "loss = model(input_ids=ids({n}), labels=ids({n}), use_cache=False).loss"
BASE = "loss = base(model)(input_ids=ids({n}), use_cache=False).last_hidden_state.pow(2).mean()"
GENERATE = f"words = model.generate(input_ids=ids({{n}})[:, :4], {WORDS})"
CHANGES = (
    QUIET + "[p.mul_(0.9) for p in model.parameters()]",
    "[p.data.mul_(0.9) for p in model.parameters()]",
    QUIET + "[p.add_(0.01) for name, p in model.named_parameters() if 'norm' in name]",
    QUIET + "[p.mul_(1.1) for name, p in model.named_parameters() if 'embed_tokens' in name or 'lm_head' in name]",
)
FREEZES = tuple(
    f"[p.requires_grad_(False) for name, p in model.named_parameters() if {which}]"
    for which in ("'norm' in name", "'embed_tokens' in name", "'layers.0.' in name", "'lm_head' not in name")
)
OPTIMIZERS = (
    "torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)",
    "torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, weight_decay=0.0)",
    "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)",
)
ACCELERATOR = "accelerator = make_accelerator()"


class Rule:
    """Acts of one kind, of which one is drawn; `needs`, `forbids`, `gives` and `takes` are facts about the script."""

    def __init__(self, weight: int, *acts: str | Act, **facts: str) -> None:
        self.weight, self.acts = weight, [(act,) if isinstance(act, str) else act for act in acts]
        sets = (frozenset(facts.get(name, "").split()) for name in ("needs", "forbids", "gives", "takes"))
        self.needs, self.forbids, self.gives, self.takes = sets


PREPARED = tuple(f"model, optimizer = accelerator.prepare(model, {made})" for made in OPTIMIZERS)
RULES = {
    "pass, backward": Rule(8, (PASS, "loss.backward()"), forbids="accelerator"),
    "pass, backward by Accelerate": Rule(8, (PASS, "accelerator.backward(loss)"), needs="accelerator prepared"),
    "pass with gradients": Rule(3, PASS),
    "pass without gradients": Rule(2, QUIET + PASS),
    "base pass, backward": Rule(2, (BASE, "loss.backward()")),
    "base pass with gradients": Rule(2, BASE),
    "base pass without gradients": Rule(1, QUIET + BASE),
    "evaluation": Rule(2, ("model.eval()", QUIET + PASS), ("model.eval()", QUIET + PASS, "model.train()")),
    "mode": Rule(1, "model.eval()", "model.train()"),
    "generate": Rule(2, GENERATE),
    "optimizer": Rule(6, *(f"optimizer = {made}" for made in OPTIMIZERS), forbids="accelerator", gives="optimizer"),
    "accelerator": Rule(2, ACCELERATOR, forbids="accelerator", gives="accelerator"),
    "prepare": Rule(3, "model = accelerator.prepare(model)", needs="accelerator", gives="prepared", forbids="prepared"),
    "prepare both": Rule(4, *PREPARED, needs="accelerator", gives="optimizer prepared", forbids="prepared"),
    "prepare optimizer": Rule(
        3, *(f"optimizer = accelerator.prepare({made})" for made in OPTIMIZERS), needs="accelerator prepared",
        gives="optimizer",
    ),
    "step": Rule(6, "optimizer.step()", needs="optimizer"),
    "step, zero": Rule(4, ("optimizer.step()", "optimizer.zero_grad()"), needs="optimizer"),
    "zero": Rule(2, "model.zero_grad()", "model.zero_grad(set_to_none=False)"),
    "zero by optimizer": Rule(
        2, "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", needs="optimizer"
    ),
    "clip": Rule(2, "norm = clip_grad_norm_(model.parameters(), 0.5)"),
    "clip by Accelerate": Rule(1, "norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)", needs="prepared"),
    "freeze": Rule(3, *FREEZES),
    "unfreeze": Rule(2, "[p.requires_grad_(True) for p in model.parameters()]", forbids="adapter"),
    "unfreeze adapter": Rule(
        2, "[p.requires_grad_('lora_' in name) for name, p in model.named_parameters()]", needs="adapter"
    ),
    "change": Rule(3, *CHANGES),
    "state dict": Rule(3, STATE, gives="kept"),
    "load state dict": Rule(2, "model.load_state_dict(kept)", needs="kept"),
    "load weights": Rule(1, "load_weights(model)", forbids="adapter"),
    "save": Rule(2, SAVE),
    "save in the background": Rule(1, "save_pretrained(model, blocking=False)", gives="pending"),
    "open": Rule(2, "saved = opened()", needs="pending"),
    "store state": Rule(2, "store(model, optimizer)", needs="optimizer", gives="stored"),
    "restore state": Rule(3, "restore(model, optimizer)", needs="optimizer stored"),
    "save_state": Rule(2, "accelerator.save_state(folder)", needs="prepared optimizer", gives="saved"),
    "load_state": Rule(3, "accelerator.load_state(folder)", needs="prepared optimizer saved"),
    "copy": Rule(2, "model = copy.deepcopy(model)", forbids="adapter", takes="prepared optimizer saved"),
    "copy adapted": Rule(1, "model = copy.deepcopy(model)", needs="adapter", takes="prepared optimizer saved"),
    "checkpointing": Rule(1, "model.gradient_checkpointing_enable()"),
    "failing pass": Rule(1, PASS.replace("ids({n})", "ids({n}) + 999"), "with failing(model): " + PASS),
    "adapter": Rule(
        2, "model = with_adapter(model)", forbids="adapter", gives="adapter",
        takes="prepared optimizer saved kept stored",
    ),
    "second adapter": Rule(
        1, "add_second(model)", needs="adapter", forbids="second merged", gives="second", takes="kept stored saved"
    ),
    "set adapter": Rule(
        2, "model.set_adapter('second')", "model.set_adapter('default')", needs="second", forbids="merged"
    ),
    "delete adapter": Rule(
        1, ("model.set_adapter('default')", "model.delete_adapter('second')"), needs="second", forbids="merged",
        takes="second kept stored saved",
    ),
    "disabled": Rule(2, "with torch.no_grad(), model.disable_adapter(): " + PASS, needs="adapter", forbids="merged"),
    "disabled, merged": Rule(
        2, "with torch.no_grad(), model.disable_adapter(): " + PASS, needs="merged fp32", takes="merged"
    ),  # PEFT unmerges in the pass, under autocast with a rounded product
    "merge": Rule(1, "model.merge_adapter()", needs="adapter", forbids="merged", gives="merged"),
    "unmerge": Rule(4, "model.unmerge_adapter()", needs="merged", takes="merged"),
}  # fmt: skip


def drawn(layout: Layout, seed: object, without: Sequence[str] = ()) -> list[Act]:
    """A sequence of 6 to 15 acts between one that loads the model, and a training pass that shows what became of it."""
    chance = random.Random(f"{seed}")
    facts = ({"adapter"} if layout.is_adapter else set()) | (set() if layout.is_bf16 else {"fp32"})
    made = chance.choice([("model = load()",)] * 3 + [(ACCELERATOR, "model = load(accelerator)"), ()])
    frozen = chance.choice([(), *((each,) for each in FREEZES)]) if not facts else ()
    acts: list[Act] = [made or (ACCELERATOR, "model = plain_model()", *frozen, "model = accelerator.prepare(model)")]
    facts |= {"accelerator"} if len(made) != 1 else set()
    facts |= {"prepared"} if not made else set()
    rules = {name: each for name, each in RULES.items() if not any(word in name for word in without)}
    for _ in range(chance.randint(6, 15)):
        allowed = [each for each in rules.values() if each.needs <= facts and not each.forbids & facts]
        chosen = chance.choices(allowed, [each.weight for each in allowed])[0]
        facts = (facts - chosen.takes) | chosen.gives
        acts.append(tuple(line.replace("{n}", str(chance.randrange(4))) for line in chance.choice(chosen.acts)))
    last = PASS.replace("{n}", "9")
    backward = "accelerator.backward(loss)" if "prepared" in facts else "loss.backward()"
    step = [("optimizer.step()",)] if "optimizer" in facts else []
    return [*acts, (last, backward), *step, (QUIET + last,), STATE]


# ---- many sequences ----


def played(layout: Layout, acts: Sequence[Act], folder: Path) -> list[tuple[str, str]]:
    """What became of the acts, on ranks of their own."""
    files = make_files(layout, folder)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            return run_ranks(play, layout.ranks, layout, acts, files, Path(own), timeout_s=100)[0]
        except AssertionError as error:
            return [("foreign", f"ranks ended: {error}")]


def signature(told: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """What two failures have alike that are the same one: the kind, and what was said without numbers and names."""
    kind, said = told[-1]
    return kind, re.sub(r" of [\w.]+|\d[\d.e+-]*|;.*", "", said)[:60]


def shortened(layout: Layout, acts: Sequence[Act], told: Sequence[tuple[str, str]], folder: Path) -> list[Act]:
    """The acts without those that a failure does not need."""
    kept, wanted = list(acts[: len(told)]) if len(told) > 1 else list(acts), signature(told)
    for place in range(len(kept) - 1, 0, -1):
        fewer = kept[:place] + kept[place + 1 :]
        again = played(layout, fewer, folder)
        if signature(again) == wanted:
            kept = fewer[: len(again)] if len(again) > 1 else fewer
    return kept


def script(name: str, acts: Sequence[Act], seed: object, said: str) -> str:
    """The acts as plain lines to paste."""
    lines = [f"# seed {seed}: {said}"[:1000], "from tests.acts import replay", f'replay("{name}", """']
    return "\n".join([*lines, *(line for act in acts for line in act), '""")'])


def acts_of(text: str) -> list[Act]:
    return [(line,) for line in text.splitlines() if line.strip()]


def replay(name: str, text: str) -> None:
    """Run a script that was printed, and print what became of each line."""
    hide_gpus()
    acts = acts_of(text)
    with tempfile.TemporaryDirectory() as folder:
        for act, (kind, said) in zip(acts, played(LAYOUTS[name], acts, Path(folder)), strict=False):
            print(f"{kind:<8} {act[0]}\n         {said}" if said else f"{kind:<8} {act[0]}")


def search(names: Sequence[str], seeds: Iterator[object], until: float, without: Sequence[str] = ()) -> list[str]:
    """Play sequences until that time, once at least; print counts by layout; return scripts of what failed."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    scripts: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="acts-") as folder:
        for seed in seeds:
            for name in names:
                acts = drawn(LAYOUTS[name], f"{name} {seed}", without)
                told = played(LAYOUTS[name], acts, Path(folder))
                counts[name].update(kind for kind, _ in told)
                for act, (kind, said) in zip(acts, told, strict=False):
                    if kind == "refused":
                        print(f"refused, {name} {seed}, {act}: {said[:200]}", flush=True)
                if told[-1][0] in ("wrong", "foreign"):
                    key = signature(told)
                    if (name, *key) in scripts:
                        print(f"again, {name} {seed}: {key}", flush=True)
                        continue
                    fewer = shortened(LAYOUTS[name], acts, told, Path(folder))
                    scripts[name, *key] = script(name, fewer, seed, " ".join(told[-1]))
                    print(scripts[name, *key], flush=True)
            if time.monotonic() > until:
                break
    kinds = ("right", "refused", "wrong", "foreign")
    print(f"{'layout':<20}" + "".join(f"{kind:>9}" for kind in kinds))
    for name, count in counts.items():
        print(f"{name:<20}" + "".join(f"{count[kind]:>9}" for kind in kinds))
    return [*scripts.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acts", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="may be given several times")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--without", action="append", default=[], metavar="WORD", help="of names of acts to leave out")
    given = parser.parse_args(arguments)
    hide_gpus()
    disable_progress_bar()
    set_verbosity_error()
    until = time.monotonic() + 60 * given.minutes
    seeds = iter(range(given.seed, given.seed + 10**6))
    return 1 if search(given.layout or list(LAYOUTS), seeds, until, given.without) else 0


if __name__ == "__main__":
    raise SystemExit(main())
