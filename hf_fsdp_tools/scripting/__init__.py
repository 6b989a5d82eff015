"""What the recipes share: arguments, demo, data, checks before loading, progress, and what a run leaves behind."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; a test compares it with the table below
    from hf_fsdp_tools.scripting.arguments import DataArguments as DataArguments
    from hf_fsdp_tools.scripting.arguments import ModelArguments as ModelArguments
    from hf_fsdp_tools.scripting.arguments import parse_arguments as parse_arguments
    from hf_fsdp_tools.scripting.checks import check_before_loading as check_before_loading
    from hf_fsdp_tools.scripting.data import load_splits as load_splits
    from hf_fsdp_tools.scripting.demo import make_demo as make_demo
    from hf_fsdp_tools.scripting.losses import mean_over_tokens as mean_over_tokens
    from hf_fsdp_tools.scripting.rewards import load_rewards as load_rewards
    from hf_fsdp_tools.scripting.running import finish as finish
    from hf_fsdp_tools.scripting.running import load_model as load_model
    from hf_fsdp_tools.scripting.running import run as run
    from hf_fsdp_tools.scripting.running import start as start
    from hf_fsdp_tools.scripting.running import train as train
    from hf_fsdp_tools.scripting.tokenizer import load_tokenizer as load_tokenizer
else:  # a type checker that saw it would let every name pass

    def __getattr__(name: str) -> Any:
        """Load the module that owns a name when the name is first used: `trl` and `datasets` come only then."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has: {', '.join(__all__)}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


_NAMES_OF = {
    "arguments": ("DataArguments", "ModelArguments", "parse_arguments"),
    "checks": ("check_before_loading",),
    "data": ("load_splits",),
    "demo": ("make_demo",),
    "losses": ("mean_over_tokens",),
    "rewards": ("load_rewards",),
    "running": ("finish", "load_model", "run", "start", "train"),
    "tokenizer": ("load_tokenizer",),
}

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
__all__ = sorted(_MODULE_OF)  # a list of names, made from the table


def __dir__() -> list[str]:
    return list(__all__)
