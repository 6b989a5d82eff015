"""Refuse pickles that take endless time to load, although nothing in them runs."""

import pickle
import pickletools

__all__ = ["refuse_endless_tuples"]

_MOST_VALUES = 1_000
"""Values in one tuple, with those of tuples in it: paths of tensors have some ten. (assumed)"""


_TO_MARK = {"TUPLE", "LIST", "DICT", "SETITEMS", "APPENDS", "ADDITEMS", "FROZENSET", "POP_MARK"}
"""Operations of a pickle that take all values down to a mark."""

_INTO_TARGET = {"SETITEMS", "APPENDS", "ADDITEMS"}
"""Of these, the ones that put the values into what lies below the mark; `POP_MARK` leaves nothing, others a value."""

_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "SETITEM": 2, "APPEND": 1, "BUILD": 1, "POP": 1}
"""How many values other operations take; tuples are put in their place, and nothing by the rest."""

_CALLS = {"BINPERSID": 1, "REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "STACK_GLOBAL": 2}
"""How many values calls take, whose result is put in their place."""


def refuse_endless_tuples(text: bytes) -> None:
    """Refuse tuples that hold the same tuples twice, and these others twice, and so on.

    A dict hashes its keys, and a tuple's hash visits its values each time: 40 such levels never end. Nothing can end
    this from outside, so the sizes of all tuples are followed first, without building any.

    Args:
        text: a pickle.

    Raises:
        pickle.UnpicklingError: tuples hold too many values, or an operation occurs that no pickler writes. A damaged
            pickle can raise anything.
    """
    mark = -1
    stack: list[int] = []
    memo: dict[int, int] = {}
    for operation, argument, _ in pickletools.genops(text):
        name, number = operation.name, argument if isinstance(argument, int) else None
        if name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            memo[len(memo) if number is None else number] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[-1 if number is None else number])
        elif name == "MARK":
            stack.append(mark)
        elif name == "DUP":
            stack.append(stack[-1])
        elif name in _TO_MARK:
            start = len(stack) - 1 - stack[::-1].index(mark)
            values = stack[start + 1 :]
            del stack[start:]
            if name == "TUPLE":
                stack.append(_size(values))
            elif name not in _INTO_TARGET and name != "POP_MARK":
                stack.append(1)
        elif name in _TAKEN:
            values = stack[-_TAKEN[name] :]
            del stack[-_TAKEN[name] :]
            if name.startswith("TUPLE"):
                stack.append(_size(values))
        elif name in _CALLS:
            del stack[-_CALLS[name] :]
            stack.append(1)
        elif len(operation.stack_after) == 1 and not operation.stack_before:
            stack.append(1)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise pickle.UnpicklingError(f"operation {name} is none that a pickler writes")


def _size(values: list[int]) -> int:
    """How many values a tuple holds, with those of tuples in it."""
    size = 1 + sum(values)
    if size > _MOST_VALUES:
        raise pickle.UnpicklingError(f"tuples in tuples hold more than {_MOST_VALUES:,} values")
    return size
