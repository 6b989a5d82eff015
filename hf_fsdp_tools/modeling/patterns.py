"""Regular expressions that come out of files, matched in bounded time.

Nothing ends a match of Python's `re` within a process, and `(a+)+b` takes endless time with a name such as `aaa…`.
"""

import re
import sys
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import regex

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.text import first_line, quoted

_MATCH_S = 1.0
"""CPU seconds that one match may take. (assumed)"""

_MOST_REPEATS, _MOST_CHARACTERS = 1000, 10_000
"""The product of the counts (`{3,5}`) in a pattern, which `regex` unrolls, and its length. (assumed)"""


def matched(pattern: str, name: str, *, how: str = "match", where: object = "quantization_config") -> Any:
    """The match of a pattern of a file with a name, as `re.match` (or `how`: "fullmatch", "search") gives it, or None.

    Raises:
        CheckpointError: the pattern is none, or takes too long; `where` it was found is named.
    """
    counts = [max(map(int, re.findall(r"\d+", each))) for each in re.findall(r"\{[\s,]*\d[\d\s,]*\}", pattern)]
    try:
        if prod(counts) > _MOST_REPEATS or len(pattern) > _MOST_CHARACTERS:
            raise regex.error("it is too long, with its counts")
        return getattr(regex, how)(pattern, name, timeout=_MATCH_S)
    except (regex.error, TimeoutError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{where}: {quoted(pattern)} is no regular expression that can be used: {first_line(error)}. Write the "
            "names of the modules there instead."
        ) from error


def matched_in(library: str, where: object) -> AbstractContextManager[None]:
    """A block in which the modules of an imported library, which reads patterns of a file, match by `matched`."""
    bounded = {how: partial(matched, how=how, where=where) for how in ("match", "fullmatch", "search")}
    modules: list[Any] = [m for name, m in sys.modules.items() if name.startswith(f"{library}.")]
    modules = [module for module in modules if vars(module).get("re") is re]
    return replaced(*modules, re=SimpleNamespace(**vars(re) | bounded))
