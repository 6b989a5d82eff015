"""What a user does with a model: a function for each behaviour, which gives the acts for a layout.

An act is a few lines of Python, which run on the sharded model and on the plain one (`tests.behaviour.sides` has the
names that they may use); after each act, all that a user sees of the two is the same.
"""

from collections.abc import Callable

from tests.behaviour.sides import Act, Layout

QUIET = "with torch.no_grad(): "
WORDS = "min_new_tokens=3, max_new_tokens=3, do_sample=False"
LOAD = ("model = load()",)
BASE = ("model = load_base()",)
STATE = ("kept = {key: value.clone() for key, value in model.state_dict().items()}",)
SAVE = ("save_pretrained(model)", "saved = opened()")
OPTIMIZER = (
    "trained = [p for p in model.parameters() if p.requires_grad]",
    "optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, weight_decay=0.0)",
)


def given(number: int) -> str:
    return f"loss = model(**batch({number})).loss"


def passed(number: int, share: str = "") -> Act:
    return given(number), f"(loss{share}).backward()"


def stepped(number: int, share: str = "") -> list[Act]:
    """The last pass of a step, and the step, of which a part may be done in the pass."""
    return [(given(number), f"with early(optimizer): (loss{share}).backward()", "optimizer.step()")]


def one_step(number: int) -> list[Act]:
    return [*stepped(number), ("optimizer.zero_grad()",)]


def seen(number: int = 9) -> Act:
    return (QUIET + given(number),)


def equal_step(layout: Layout) -> list[Act]:
    return [LOAD, OPTIMIZER, *stepped(0), seen(), STATE]


def accumulated_and_clipped(layout: Layout) -> list[Act]:
    """Gradients of streamed steps are used before there is a norm of all."""
    clip = [] if layout.is_streamed else [("norm = clip_grad_norm_(model.parameters(), 0.5)",)]
    last = [(given(2), "(loss / 2).backward()"), *clip, ("optimizer.step()",)]
    steps = [passed(1, " / 2"), *(stepped(2, " / 2") if layout.is_streamed else last), ("optimizer.zero_grad()",)]
    return [LOAD, OPTIMIZER, *steps, *steps, seen()]


def prepared_by_accelerate(layout: Layout) -> list[Act]:
    prepare = ("model, optimizer = accelerator.prepare(model, optimizer)",)
    backward = (given(0), "with early(optimizer): accelerator.backward(loss)", "optimizer.step()")
    steps = [backward, ("optimizer.zero_grad()",)]
    made = ("accelerator = make_accelerator()", "model = load(accelerator)")
    state = [("accelerator.save_state(folder)",), *steps, ("accelerator.load_state(folder)",)]
    return [made, OPTIMIZER, prepare, *steps, *state, *steps, seen()]


def adapter_made(layout: Layout) -> list[Act]:
    return [BASE, ("model = made_adapter(model)",), OPTIMIZER, *one_step(0), seen(), SAVE]


def adapter_loaded(layout: Layout) -> list[Act]:
    return [BASE, ("model = with_adapter(model)",), ("model.train()",), OPTIMIZER, *one_step(0), seen(), SAVE]


def adapter_merged(layout: Layout) -> list[Act]:
    adapt = [BASE, ("model = with_adapter(model)",)]
    return [*adapt, ("model.merge_adapter()",), seen(), ("model.unmerge_adapter()",), seen(), passed(0)]


def saved_and_opened(layout: Layout) -> list[Act]:
    return [LOAD, OPTIMIZER, *stepped(0), SAVE]


def saved_twice(layout: Layout) -> list[Act]:
    """The second into the folder of the first, which is written in the background while a step is taken."""
    again = ("save_pretrained(model, again=True)", "saved = opened()")
    return [LOAD, OPTIMIZER, ("save_pretrained(model, blocking=False)",), *one_step(0), again, *one_step(1), again]


def resumed(layout: Layout) -> list[Act]:
    state = [("store(model, optimizer)",), *one_step(1), ("restore(model, optimizer)",)]
    return [LOAD, OPTIMIZER, *one_step(0), *state, *one_step(2), STATE]


def resumed_elsewhere(layout: Layout) -> list[Act]:
    """One process's state goes on in shards, and that of shards in one process."""
    state = [("store(model, optimizer)",), *one_step(1), ("restore_other(model, optimizer)",)]
    return [LOAD, OPTIMIZER, *one_step(0), *state, *one_step(2), STATE]


def copied(layout: Layout) -> list[Act]:
    """What becomes of the original is nothing to the copy."""
    copy = ("original = model", "model = copy.deepcopy(model)")
    spoil = ("[p.data.zero_() for p in original.parameters() if p.is_floating_point()]",)
    return [LOAD, passed(0), copy, spoil, seen(), OPTIMIZER, *one_step(1), SAVE, STATE]


def generated(layout: Layout) -> list[Act]:
    generate = ("model.eval()", f"words = model.generate(input_ids=ids(1)[:, :4], {WORDS})")
    return [LOAD, generate, ("model.train()",), passed(0), generate]


def frozen_and_unfrozen(layout: Layout) -> list[Act]:
    """A part, after a step, and all of it again; of an adapter, what it trains."""
    part = "'lora_A' in name" if layout.is_adapter else "'norm' in name or 'embed' in name or 'shared' in name"
    trained = "'lora_' in name" if layout.is_adapter else "True"
    freeze = (f"[p.requires_grad_(False) for name, p in model.named_parameters() if {part}]",)
    unfreeze = (f"[p.requires_grad_(True) for name, p in model.named_parameters() if {trained}]",)
    return [LOAD, OPTIMIZER, *one_step(0), freeze, *one_step(1), unfreeze, *one_step(2), STATE]


def evaluated_and_recomputed(layout: Layout) -> list[Act]:
    """An evaluation before the first step, and activation checkpointing for the next."""
    enable = ("model.gradient_checkpointing_enable()",)
    return [LOAD, ("model.eval()", *seen(1), "model.train()"), OPTIMIZER, *one_step(0), enable, *one_step(1), seen()]


def streamed(layout: Layout) -> list[Act]:
    """Live weights, between two steps."""
    return [LOAD, OPTIMIZER, ("kept = streamed(model)",), *one_step(0), ("kept = streamed(model)",), *one_step(1)]


BEHAVIOURS: dict[str, Callable[[Layout], list[Act]]] = {
    "equal step": equal_step,
    "accumulated and clipped steps": accumulated_and_clipped,
    "Accelerate's loop": prepared_by_accelerate,
    "adapter made": adapter_made,
    "adapter loaded": adapter_loaded,
    "adapter merged": adapter_merged,
    "saved and opened plainly": saved_and_opened,
    "saved twice": saved_twice,
    "resumed": resumed,
    "resumed elsewhere": resumed_elsewhere,
    "copied": copied,
    "generated": generated,
    "frozen and unfrozen": frozen_and_unfrozen,
    "evaluated and recomputed": evaluated_and_recomputed,
    "live weights": streamed,
}
