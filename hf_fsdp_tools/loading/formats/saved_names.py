"""Understand the names in a training state: what wrappers put into them, and which tensors are the model's.

A training job saves the model beside optimizer and progress (`{"model": …, "optim": …}`), through whatever is around
it: FSDP, DDP, `torch.compile`, checkpoint wrappers, PEFT, a class with a value head, a module of the user's own.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.modeling.module_tree import ADAPTED, WRAPPED, plain_name
from hf_fsdp_tools.text import listed, quoted

SavedPath = tuple[str, ...]
"""Where a tensor lies in a saved state dict: keys from the outermost dict to the tensor's own."""

_DDP = "module."
"""How names begin in DDP and DataParallel."""

_PEFT, _PEFT_TUNER = "base_model.", "base_model.model."
"""How names begin in a `PeftModel`: of any method, and of those that put wrappers into the model (PEFT 0.21)."""

_PROMPTS = ("prompt_encoder.", "prompt_embeddings")
"""How names of prompt methods begin that lie outside the base (PEFT 0.21)."""

_VALUE_HEAD = ("pretrained_model.", "v_head.")
"""How names begin in TRL's classes with a value head (0.7 to 0.23; source: trl/models/modeling_value_head.py)."""

_DEEPEST_PREFIX = 6
"""Modules around the model that are looked through. (assumed)"""

_TITAN = "tok_embeddings.weight"
"""A name in torchtitan's and Meta's own layout of models, which transformers' models do not have."""

_Tensor = TypeVar("_Tensor")


def is_wrapped(names: Collection[str]) -> bool:
    """Whether names of a file show that a model was saved with a wrapper around it, so that they are not its own."""
    outer = (_DDP, _PEFT, *_PROMPTS, *_VALUE_HEAD)
    inside = any(not set(WRAPPED).isdisjoint(name.split(".")) for name in names)
    return inside or (bool(names) and all(name.startswith(outer) for name in names))


def model_part(tensors: Mapping[SavedPath, _Tensor], model_keys: Collection[str], where: str) -> dict[str, _Tensor]:
    """The tensors of the model among all saved tensors, by their names in the model.

    The model is the part of the saved state dict with most names in common with `model_keys`, whatever the part is
    called and whatever modules are around the model. All tensors of the part are returned, also those that the model
    does not know.
    """
    suffixes = {suffix for key in model_keys for suffix in _suffixes(key)}
    votes = Counter(path[:-1] for path in tensors if not suffixes.isdisjoint(_suffixes(_of_module(path[-1]))))
    if not votes or (any(path[-1] == _TITAN for path in tensors) and _TITAN not in suffixes):
        raise _other_names(where, tensors, model_keys)
    part = _chosen(votes, where)
    unwrapped = {_unwrapped(path[-1]): tensor for path, tensor in tensors.items() if path[:-1] == part}
    peft = _peft_names(unwrapped)
    named = unwrapped if peft is None else {peft[0].get(name, name): t for name, t in unwrapped.items()}
    prefix = _prefix(named, model_keys)
    return {name.removeprefix(prefix): tensor for name, tensor in named.items()}


def _chosen(votes: Counter[SavedPath], where: str) -> SavedPath:
    """The part of a saved state dict that is the model: of parts that are alike, the one that is called so."""
    most = [part for part, count in votes.items() if count == max(votes.values())]
    best = [part for part in most if part[-1:] == ("model",)] or most
    shortest = [part for part in best if len(part) == min(map(len, best))]
    if len(shortest) > 1:
        names = listed(quoted(".".join(part)) for part in shortest)
        raise CheckpointError(
            f"{where!r} holds {len(shortest)} parts that fit the model equally well: {names}, and none is called "
            "'model'. Save the one to load alone, or call it so."
        )
    return shortest[0]


def _prefix(names: Collection[str], model_keys: Collection[str]) -> str:
    """What modules around the model put before its names; "" where the names as they are fit best."""
    known = set(model_keys)
    votes = Counter({"": sum(name in known for name in names)})
    for name in names:
        parts = name.split(".")
        for i in range(1, min(len(parts), _DEEPEST_PREFIX)):
            if ".".join(parts[i:]) in known:
                votes[".".join(parts[:i]) + "."] += 1
    best = max(votes, key=lambda prefix: (votes[prefix], -len(prefix)))
    stripped = {name.removeprefix(best) for name in names}
    return best if len(stripped) == len(names) else ""


def _other_names(where: str, paths: Iterable[SavedPath], model_keys: Collection[str]) -> CheckpointError:
    names = [".".join(path) for path in paths]
    cure = "Use the config of the model that was saved; of an own naming, rename the tensors to the model's names once."
    if any(path.endswith(_TITAN) for path in names):
        cure = (
            "These are torchtitan's own names. Convert it once by torchtitan's scripts/checkpoint_conversion/"
            "convert_to_hf.py, or let torchtitan save it so (last_save_in_hf=True)."
        )
    fact = f"holds {len(names)} tensors, as {quoted(min(names))}" if names else "holds no tensors"
    return CheckpointError(
        f"{where!r}: {fact}, which are not named as the model's are, as {quoted(min(model_keys, default=''))}. {cure}"
    )


def _suffixes(key: str) -> Iterator[str]:
    """Yield a dotted name without its first 0, 1, … parts; not the last part alone, which many modules share."""
    parts = key.split(".")
    return (".".join(parts[i:]) for i in range(max(1, len(parts) - 1)))


def _unwrapped(name: str) -> str:
    """A name without what torch's wrappers put into it; DDP's prefix stays unless a `PeftModel` is in it."""
    plain = plain_name(name)
    return plain.removeprefix(_DDP) if plain.startswith(_DDP + _PEFT) else plain


def _of_module(name: str) -> str:
    """A name without what torch's wrappers put into it, and in a `PeftModel` PEFT's."""
    name = _unwrapped(name)
    return plain_name(name, adapters=True) if name.startswith(_PEFT) else name


# ---- PEFT ----


def peft_part(
    tensors: Mapping[SavedPath, _Tensor], marks: Callable[[], tuple[str, ...]]
) -> tuple[dict[SavedPath, _Tensor], dict[str, _Tensor]] | None:
    """The base and the adapter in the saved state of a `PeftModel`; None for any other state."""
    votes = Counter(path[:-1] for path in tensors if _unwrapped(path[-1]).startswith((_PEFT, *_PROMPTS)))
    if not votes:
        return None
    part = max(votes, key=lambda p: (votes[p], -len(p)))
    names = {_unwrapped(path[-1]): path for path in tensors if path[:-1] == part}
    sorted_names = _peft_names(names, marks())
    assert sorted_names is not None
    base, adapter, holds_base = sorted_names
    if not holds_base:
        return {}, {name: tensors[path] for name, path in names.items()}
    return {names[name]: tensors[names[name]] for name in base}, {name: tensors[names[name]] for name in adapter}


def _peft_names(names: Collection[str], marks: tuple[str, ...] = ()) -> tuple[dict[str, str], set[str], bool] | None:
    """The base's names in a saved `PeftModel`, as saved and as the base alone has them; the adapter's, as saved; and
    whether all of the base was saved. None for any other model.

    PEFT keeps an adapted module as `base_layer` or `original_module` beside what it adds. So where a name goes on
    otherwise than into these, it is the adapter's. A state of an adapter alone has names without a base beside them.
    """
    if not any(name.startswith((_PEFT, *_PROMPTS)) for name in names):
        return None
    split = {name: name.split(".") for name in names}
    homes = {tuple(p[:i]) for p in split.values() for i, part in enumerate(p) if part in ADAPTED}
    prompts = not homes and any(name.startswith(_PROMPTS) for name in names)
    prefix = _PEFT if prompts else _PEFT_TUNER
    base: dict[str, str] = {}
    unadapted: list[str] = []
    for name, parts in split.items():
        depth = max((i for i in range(1, len(parts)) if tuple(parts[:i]) in homes), default=None)
        if name.startswith(prefix) and (depth is None or parts[depth] in ADAPTED):
            base[name] = plain_name(name, adapters=True).removeprefix(prefix)
            if depth is None:
                unadapted.append(name)
    alone = [name for name in unadapted if any(part.startswith(marks) for part in split[name])] if marks else []
    holds_base = bool(homes or prompts) and bool(unadapted) and not alone
    return base, split.keys() - base.keys(), holds_base
