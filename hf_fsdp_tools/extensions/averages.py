"""Moving averages of a model's trained parameters, as shards next to them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import plain_name
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units
from hf_fsdp_tools.text import listed


class ParameterEMA:
    """Exponential moving averages of the parameters that are trained: `average = decay * average + (1 - decay) * value`
    after each step, by torch's own `get_ema_multi_avg_fn`, shard by shard.

        ema = ParameterEMA(model, decay=0.999)          # after sharding, and after adapters are added
        for batch in loader:
            ...
            optimizer.step()
            ema.step()
        with ema.applied():                             # the model is the averages
            save_pretrained(model, "out/ema")

    Each rank averages its own shards, so nothing is communicated, and averages are those of a single process bit for
    bit. In a model with adapters only these are averaged. A `Trainer` with `FSDPTrainerMixin` does all of this by
    `TrainerSettings(ema_decay=…)`.

    Args:
        model: sharded or plain, with its weights loaded. Its parameters of this moment are the first averages.
        decay: at least 0 and below 1; half of an average is from the last `0.69 / (1 - decay)` steps.
        dtype: of the averages; None is each parameter's own. In bf16, a decay above 0.99 loses most changes.
        device: where the averages are; None is each parameter's own. "cpu" keeps them in host memory, to which each
            step copies the parameters.

    Raises:
        ConfigError: the decay is no such number, the dtype is none of floats, nothing of the model is trained, or
            parameters are on meta.

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> ema = ParameterEMA(model, decay=0.9)
        >>> weight = model.model.norm.weight
        >>> before = weight.detach().clone()
        >>> _ = weight.detach().zero_()
        >>> ema.step()
        >>> with ema.applied():
        ...     torch.allclose(weight, 0.9 * before)
        True
        >>> weight.detach().any()
        tensor(False)
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.999,
        *,
        dtype: torch.dtype | None = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay!r}; give a number of at least 0 and below 1, usually 0.99 to 0.9999.")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"dtype is {dtype}; averages are floats. Use torch.float32.")
        trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ConfigError(f"{type(model).__name__} trains nothing, so there is nothing to average.")
        if empty := [name for name, parameter in trained.items() if parameter.is_meta]:
            raise ConfigError(f"{listed(empty)} are on meta: load the model before its averages are made.")
        self.decay = float(decay)
        self._model, self._trained, self._is_applied = model, trained, False
        self._average = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]  # torch's own
        self._averages = {
            name: Held.of(parameter).memory.to(device=device, dtype=dtype, copy=True)
            for name, parameter in trained.items()
        }

    def step(self) -> None:
        """Take the parameters into the averages, once after each step of the optimizer. Nothing is communicated."""
        self._check("step")
        for name, average in self._averages.items():  # one at a time: a cast takes the memory of one shard
            value = Held.of(self._trained[name]).memory.to(device=average.device, dtype=average.dtype)
            self._average([average], [value], 0)

    def _gone(self) -> list[str]:
        held = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        return [name for name, parameter in self._trained.items() if held.get(name) is not parameter]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A block in which the model's parameters are the averages: to evaluate, to generate, or to save.

        Afterwards the parameters are as before. For the time of the block, values of the parameters lie in the place of
        the averages; where the two differ in dtype, in further memory of one shard of the model, on the averages'
        device. Every rank must call, for units are resharded; nothing is communicated.
        """
        self._check("be applied")
        reshard_units(self._model)
        kept: dict[str, torch.Tensor] = {}
        self._exchange(kept)
        self._is_applied = True
        try:
            yield
        finally:
            reshard_units(self._model)
            self._exchange(kept)
            self._is_applied = False

    def _exchange(self, kept: dict[str, torch.Tensor]) -> None:
        """Exchange averages and parameters; `kept` has the parameters of another dtype than their averages."""
        for name, average in self._averages.items():
            parameter = Held.of(self._trained[name]).memory
            if name in kept:
                parameter.copy_(kept.pop(name))
                continue
            former = parameter.to(average.device, copy=True)
            parameter.copy_(average)
            if former.dtype == average.dtype:
                average.copy_(former)
            else:
                kept[name] = former

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The averages themselves by name, sharded as the parameters are, for `torch.distributed.checkpoint` (DCP).

        `dcp.save({"ema": ema}, checkpoint_id=folder)` and `dcp.load` take the whole object, on any number of ranks.
        """
        self._check("be saved or loaded")
        return {name: Held.of(self._trained[name].data).around(average) for name, average in self._averages.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take averages of the same names, shapes and shards.

        Raises:
            ConfigError: names differ from those of the parameters that are trained.
        """
        own = self.state_dict()
        if other := sorted(own.keys() ^ state.keys()):
            raise ConfigError(
                f"The averages are not of what is trained now: {listed(other)} are in one of the two alone. Train the "
                "same parameters, or make new averages."
            )
        for name, average in self._averages.items():
            average.copy_(Held.of(state[name]).memory)

    def _check(self, doing: str) -> None:
        if self._is_applied:
            raise ConfigError(f"The averages cannot {doing} while they are applied. Leave the block of applied().")
        if self._gone():
            reshard_units(self._model)  # of a unit that is gathered, the model has another parameter
            if gone := self._gone():
                raise ConfigError(
                    f"{listed(gone)} of the averages are no parameters of {type(self._model).__name__} any more: it "
                    "was resized or sharded since. Make ParameterEMA(model) after that."
                )
