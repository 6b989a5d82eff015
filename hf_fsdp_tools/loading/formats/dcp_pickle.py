"""Unpickle the metadata of DCP in bounded time: only DCP's own plain records are built, and nothing runs."""

import io
import pickle
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from hf_fsdp_tools.modeling.pickles import refuse_endless
from hf_fsdp_tools.text import quoted


def load_metadata(text: bytes) -> Any:
    """What was pickled, of records of DCP and plain values; anything may be wrong with it."""
    refuse_endless(text)
    return _Unpickler(io.BytesIO(text)).load()


class _Sealed(type):
    """The class of classes on which nothing can be set: a pickle may set attributes on whatever it was given."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"the file sets {cls.__name__}.{name}")


def _sealed(kind: type) -> _Sealed:
    return _Sealed(kind.__name__, (kind,), {})


class _Index(dcp.MetadataIndex, metaclass=_Sealed):
    """Where a chunk's place is filed; without values whose own hash has no bound."""

    def __hash__(self) -> int:
        if not all(isinstance(value, (str, int, tuple, type(None))) for value in vars(self).values()):
            raise pickle.UnpicklingError(f"{quoted(vars(self))} is no key that DCP writes")
        return super().__hash__()


_RECORDS = {
    **{(dcp.__name__, name): _sealed(kind) for name in dcp.__all__ if isinstance(kind := getattr(dcp, name), type)},
    (_StorageInfo.__module__, "_StorageInfo"): _sealed(_StorageInfo),
    (dcp.__name__, "MetadataIndex"): _Index,
}
"""The records of DCP's metadata, by module and name."""

_PATH = _sealed(PurePosixPath)


class _Unpickler(pickle.Unpickler):
    """Builds the records that DCP writes, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the few classes of DCP's metadata; any other name would run code that the file chooses."""
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if (module, name) == (dcp.__name__, "_MEM_FORMAT_ENCODING"):
            return lambda value: dcp._MEM_FORMAT_ENCODING(value)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: _get_layout(layout)  # type: ignore[no-untyped-call]
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return _PATH
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that DCP writes")
