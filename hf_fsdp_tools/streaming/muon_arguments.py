"""Muon by a Trainer's arguments: `optim` "muon", and the options in `optim_args`."""

from inspect import signature
from typing import Any

import yaml
from torch import nn

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.streaming.muon import Muon
from hf_fsdp_tools.text import did_you_mean, first_line

MUON = "muon"
"""The name in `TrainingArguments.optim`, which that class itself does not know (transformers 5.23): a recipe's parser
takes it, and `arguments.optim = "muon"` sets it."""

_BY_ARGUMENTS = ("model", "betas", "adamw_eps", "weight_decay")
"""Parameters of Muon that other arguments of a Trainer give, or that are none of its options."""


def wants_muon(arguments: Any) -> bool:
    """Whether a Trainer's arguments ask for Muon."""
    return str(getattr(arguments.optim, "value", arguments.optim)) == MUON


def muon_options(arguments: Any) -> dict[str, Any]:
    """The options of Muon of a Trainer's arguments: learning rate, weight decay and AdamW's betas and epsilon are
    theirs, and `optim_args` ("momentum=0.9,adamw_lr=1e-4") has the others.

    Raises:
        ConfigError: an option is unknown, or has no value that can be read.
    """
    options: dict[str, Any] = {
        "lr": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "adamw_eps": arguments.adam_epsilon,
    }
    known = [name for name in signature(Muon).parameters if name not in _BY_ARGUMENTS]
    for word in filter(None, (arguments.optim_args or "").replace(" ", "").split(",")):
        name, equals, text = word.partition("=")
        if name not in known:
            raise ConfigError(f"optim_args: {name!r} is no option of Muon{did_you_mean(name, known)}")
        try:
            value = yaml.safe_load(text)
            options[name] = float(value) if isinstance(value, str) and name != "adjust_lr_fn" else value
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"optim_args: {word!r} cannot be read: {first_line(error)}.") from error
        if not equals or value is None:
            raise ConfigError(f"optim_args: {word!r} has no value: write {name}=VALUE.")
    return options


def make_muon(model: nn.Module, arguments: Any, *, is_fsdp2: bool = True) -> Muon:
    """Muon of a Trainer's model and arguments."""
    if not is_fsdp2:
        raise ConfigError("optim 'muon' needs fsdp_version 2: version 1 of FSDP has flat parameters, and no matrices.")
    return Muon(model, **muon_options(arguments))
