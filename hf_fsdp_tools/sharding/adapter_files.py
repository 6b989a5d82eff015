"""The files of a PEFT adapter, checked before PEFT reads them: nothing in them is trusted."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError, library_errors
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.modeling.pickles import load_pickled
from hf_fsdp_tools.modeling.untrusted import read_json_object
from hf_fsdp_tools.text import first_line, quoted

ADAPTER_CONFIG = "adapter_config.json"

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""In the order in which PEFT looks for them."""

_PATTERNS = re.compile(r"\w+_pattern|\w+_modules|modules_to_save|target_parameters")
"""Entries of `adapter_config.json` that PEFT (0.21) matches as regular expressions; of dictionaries, the keys."""

_SIZES = ("encoder_hidden_size", "init_r", "n_frequency", "num_layers", "num_virtual_tokens", "r", "token_dim")
"""Entries that are dimensions of tensors which PEFT (0.21) makes."""

_MOST_ENTRIES = 100_000
"""In one list or dictionary of the config: several for each expert of each layer of the largest models. (assumed)"""

_COPY = "Copy or download the adapter again."


def open_adapter(peft: Any, name: str, module_names: Sequence[str], hub_kwargs: dict[str, Any]) -> tuple[str, Any]:
    """The local folder of an adapter, and PEFT's config of it; one on the hub is fetched.

    All of its files are read, so that whatever is wrong with them shows here, where the ranks exchange errors, and not
    when PEFT reads them again.

    No rank communicates.
    """
    subfolder = hub_kwargs.get("subfolder") or ""
    path = local_path(name)
    folder = fetch(name, "adapter_*", **hub_kwargs)[0] if path is None else path / subfolder
    config = open_adapter_config(peft, folder, module_names)
    if config is None:
        raise CheckpointError(
            f"No adapter_config.json in {name!r}{f', folder {subfolder!r}' if subfolder else ''}. Give a folder that "
            "save_pretrained wrote for an adapter, or a hub name."
        )
    _check_weights(peft, folder, read_adapter_config(folder) or {})
    return str(folder), config


def open_adapter_config(peft: Any, folder: Path, module_names: Sequence[str]) -> Any:
    """PEFT's config of the adapter in a folder; None where it has none. No rank communicates."""
    written = read_adapter_config(folder)
    if written is None:
        return None
    file = folder / ADAPTER_CONFIG
    for key, value in written.items():
        if _PATTERNS.fullmatch(key):
            is_whole = isinstance(value, str) and key.endswith("_modules")  # other ones are looked for inside of names
            patterns = value if isinstance(value, (list, dict)) else [value]
            refuse_endless_patterns(file, patterns, module_names, within=not is_whole)
    with library_errors(f"{file}: cannot be used by PEFT", _COPY):
        return peft.PeftConfig.from_pretrained(str(folder))


def read_adapter_config(folder: Path) -> Mapping[str, Any] | None:
    """The `adapter_config.json` of a folder, with base and revision as texts; None where it has none."""
    file = folder / ADAPTER_CONFIG
    with watched(file):
        if not file.is_file():
            return None
    written = read_json_object(file)
    for key in ("base_model_name_or_path", "revision"):
        if not isinstance(written.get(key), (str, type(None))):
            raise CheckpointError(
                f"{file}: {key} is {quoted(written[key])}, expected a name. Copy the adapter again, or write it there."
            )
    for key, value in written.items():
        if isinstance(value, (list, dict)) and len(value) > _MOST_ENTRIES:
            raise CheckpointError(
                f"{file}: {key} has {len(value):,} entries, expected at most {_MOST_ENTRIES:,}. {_COPY}"
            )
    if written.get("megatron_core") not in (None, "megatron.core"):  # PEFT imports what is written there
        raise CheckpointError(
            f"{file}: megatron_core is {quoted(written['megatron_core'])}, expected 'megatron.core'. {_COPY}"
        )
    return written


def _check_weights(peft: Any, folder: Path, written: Mapping[str, Any]) -> None:
    """Read the weights of an adapter as PEFT does, and compare their number with the sizes in its config."""
    weights = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f"No weights in {str(folder)!r}: expected {' or '.join(_WEIGHTS)}. {_COPY}")
    if weights.suffix == ".bin":
        load_pickled(weights)
    with watched(weights), library_errors(f"{weights}: cannot be read as the weights of an adapter", _COPY):
        held = sum(tensor.numel() for tensor in peft.load_peft_weights(str(folder), device="cpu").values())
    ranks = written.get("rank_pattern")
    sizes = [written.get(key) for key in _SIZES] + list(ranks.values() if isinstance(ranks, dict) else ())
    if large := [size for size in sizes if isinstance(size, (int, float)) and size > held]:
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: a dimension is {quoted(large[0])}, and {weights.name} holds {held:,} values. "
            f"{_COPY}"
        )


# ---- patterns ----

_MOST_STEPS = 100_000
"""Of one match, at 10 to 20 ns a step 2 ms. (measured)"""

_MOST_PATTERNS = 200
"""That are no plain names; each is followed through all names, 0.2 s for a large model. (measured)"""


def refuse_endless_patterns(file: Path, patterns: Iterable[Any], names: Iterable[str], *, within: bool = True) -> None:
    """Refuse regular expressions of a file that take endless time with some name, as `(a+)+b` does with `aaa…`.

    Nothing ends such a match within a process, so every way in which Python's `re` could match a name is counted first.
    """
    branching = [p for p in patterns if isinstance(p, str) and any(sign in p for sign in "*+?{(|[")]
    if len(branching) > _MOST_PATTERNS:
        raise CheckpointError(
            f"{file}: holds {len(branching):,} regular expressions as {quoted(branching[0])}, expected at most "
            f"{_MOST_PATTERNS}. Write the names of the modules there instead."
        )
    shapes = sorted({re.sub(r"\d", "0", name) for name in names})  # a pattern's digits match any digit below
    for pattern in branching:
        try:
            re.compile(pattern)
            parsed = re._parser.parse(rf".*(?:{pattern})(?:$|\..*)" if within else pattern)  # type: ignore[attr-defined]
            for shape in shapes:
                _Match(shape).ends(parsed, {0: 1})
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: {quoted(pattern)} is no regular expression that can be used: {first_line(error)}. Correct it "
                "there, or write the names of the modules instead."
            ) from error


class _Match:
    """The ways in which a backtracking matcher can follow a parsed pattern through a name, all of them counted.

    What depends on more than a single character of the pattern is counted as if it matched.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps = 0

    def ends(self, parsed: Iterable[Any], starts: Mapping[int, int]) -> Mapping[int, int]:
        """The positions where a pattern can end, each with the number of ways, for those where it can start."""
        for operation, argument in parsed:
            self._count(starts)
            starts = self._after(str(operation), argument, starts)
        return starts

    def _count(self, starts: Mapping[int, int]) -> None:
        self._steps += sum(starts.values())
        if self._steps > _MOST_STEPS:
            raise re.error(f"it takes more than {_MOST_STEPS:,} steps to match {self._name}")

    def _after(self, operation: str, argument: Any, starts: Mapping[int, int]) -> Mapping[int, int]:
        """The same of one part of a pattern."""
        if operation in ("ANY", "IN", "LITERAL", "NOT_LITERAL"):
            wanted = chr(argument).lower() if operation == "LITERAL" else ""
            wanted = "0" if wanted.isdigit() else wanted
            return {
                at + 1: ways
                for at, ways in starts.items()
                if at < len(self._name) and (not wanted or self._name[at].lower() == wanted)
            }
        if operation == "AT":
            return starts
        if operation == "SUBPATTERN":
            return self.ends(argument[-1], starts)
        found: Counter[int] = Counter()
        if operation == "BRANCH":
            for branch in argument[1]:
                found.update(self.ends(branch, starts))
            return found
        if operation in ("ASSERT", "ASSERT_NOT"):
            direction, inside = argument
            back = inside.getwidth()[0] if direction < 0 else 0
            self.ends(inside, {max(0, at - back): ways for at, ways in starts.items()})
            return starts
        if operation in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inside = argument
            for count in range(min(most, least + len(self._name)) + 1):
                self._count(starts)
                if count >= least:
                    found.update(starts)
                if not (starts := self.ends(inside, starts)):
                    break
            return found
        raise re.error(f"{operation} is not supported")
