"""Record the events of operations on fake tensors: memory that comes and goes, and the work of every kernel."""

import re
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import COLLECTIVES, Alloc, Event, Free, Gradient, Kind, Mark, Phase, Work
from hf_fsdp_tools.foresight.tracing.kernels import MAKES_NOTHING, counted, run_on, scratch, tensors_in
from hf_fsdp_tools.modeling.packed_weight import chunks_once

_MOST_EVENTS = 400_000
"""More than any model has but those that loop over tokens: a minute's work, several times what 100 blocks have."""

_IN_BLOCK = re.compile(r"\.\d+(\.|$)")


@dataclass(eq=False)
class _Pass:
    """A pass of one of the plan's modules that has begun."""

    module: str
    unit: str
    is_again: bool = False  # Whether activation checkpointing runs it, inside the backward pass
    is_over: bool = False


@dataclass(eq=False)
class _Block:
    """Memory that is in use."""

    place: int  # Index of its `Alloc` in the list of events
    made_in: _Pass
    watch: Any  # The weak reference to the storage, which must live as long as the storage


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Sees every operation while it is active; the events are in `events`, in the order of their issue."""

    def __init__(
        self,
        units: dict[str, str],
        on_cuda: bool = True,
        compiled: bool = False,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.events: list[Event] = []
        self.phase: Phase = "forward"
        self.in_loss = False  # Whether what is taken now is logits, or made of them
        self.last_operation = ""
        self.again = False  # Whether a backward pass without modules computes what its forward pass did
        self.of_gradients: Kind = "whole gradients"
        self.times = 1.0  # How often what runs now is run
        self.modules: list[str] = []  # Fqns of the modules whose forward pass runs, the innermost last
        self._units = units
        self.on_cuda, self._compiled = on_cuda, compiled
        self._sizes = sizes or {}  # Ranks of the groups that exchange what they compute, by name
        self._root = _Pass("", "")
        self._passes = [self._root]
        self._blocks: dict[int, _Block] = {}  # By address of the storage
        self._known: set[int] = set()  # Addresses of storages that are no events: parameters and buffers
        self._kept: list[torch.Tensor] = []  # Gradients, which stay until FSDP has reduced them
        self._next = 0

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the memory of tensors that live longer than the list of events: parameters and buffers."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def enter(self, module: str, *_: object) -> None:
        self.modules.append(module)

    def leave(self, *_: object) -> None:
        self.modules.pop()

    def begin(self, module: str) -> None:
        again = self.phase == "backward"
        self.events.append(Mark("before_forward", module, again))
        self._passes.append(_Pass(module, self._units.get(module, self._passes[-1].unit), again))

    def end(self, module: str) -> None:
        self.events.append(Mark("after_forward", module, self.phase == "backward"))
        while len(self._passes) > 1:
            (over := self._passes.pop()).is_over = True
            if over.module == module:
                break

    def begin_backward(self, module: str) -> None:
        self.events.append(Mark("before_backward", module))
        while len(self._passes) > 1:
            outer = self._passes[-1]  # passes of checkpointing are over where one begins
            if not outer.is_again and (outer.module == module or module.startswith(f"{outer.module}.")):
                break
            self._passes.pop().is_over = True
        if self._passes[-1].module != module:
            self._passes.append(_Pass(module, self._units.get(module, self._passes[-1].unit)))

    def end_backward(self, module: str) -> None:
        self.events.append(Mark("after_backward", module))
        if any(each.module == module for each in self._passes[1:]):
            while self._passes.pop().module != module:
                pass

    def keep_gradient(self, name: str, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete; it is taken from the parameter and never freed."""
        gradient = parameter.grad
        assert gradient is not None
        block = self._blocks[gradient.untyped_storage()._cdata]
        self._change(block, kind=self.of_gradients)
        self.events.append(Gradient(name, self._alloc(block).block))
        self._kept.append(gradient)
        parameter.grad = None

    def copy_input(self, operation: Literal["device_to_host", "host_to_device"], num_bytes: int) -> None:
        """A copy of a block's input, next to the computation."""
        unit = self._passes[-1].unit
        self.events.append(Work(operation, 0.0, float(num_bytes), unit, self.phase, "activations"))

    def chunks_once(self) -> AbstractContextManager[None]:
        """A block in which the first of the chunks in which a weight is dequantised stands for all of them."""
        return chunks_once(partial(setattr, self, "times"), on_accelerator=self.on_cuda)

    def close(self) -> None:
        """Note nothing more: what is freed from now on outlives the micro-batch."""
        self._blocks.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # autograd asks several times for each operation
            return args[0].device
        self.last_operation = str(func)
        if len(self.events) > _MOST_EVENTS:
            raise ConfigError(
                f"{self.modules[-1] if self.modules else 'The model'} loops over tokens, and operations of a row are "
                "too many to be followed. Give far fewer tokens, such as max_length 128, and count upwards from that."
            )
        kwargs = kwargs or {}
        if func is torch.ops.aten.add.Tensor and self.phase == "backward" and not torch.is_grad_enabled():
            # autograd's sum of two gradients, which lies in the memory of the first
            func = torch.ops.aten.add_.Tensor if args[0].shape == getattr(args[1], "shape", ()) else func
        result = run_on(func, args, kwargs, on_cuda=self.on_cuda)
        made = tensors_in(result)
        # the copy of a trained weight in the dtype of computation
        is_cast = func is torch.ops.aten._to_copy.default and args[0].is_leaf and args[0].requires_grad
        new = [tensor for tensor in made if self.take(tensor, "gathered parameters" if is_cast else None)]
        if self._compiled and self.modules and _IN_BLOCK.search(self.modules[-1]):
            self._fuse(func.overloadpacket.__name__, args, made)
        is_view = not new and not func._schema.is_mutable
        if is_view or func.overloadpacket.__name__ in MAKES_NOTHING:
            return result
        self._work(func, args, kwargs, result, made)
        taken = [self._append(size, "temporaries") for size in scratch(func, args, on_cuda=self.on_cuda) if size]
        self.events += [Free(number) for number in reversed(taken)]
        return result

    def _fuse(self, name: str, inputs: Any, made: list[torch.Tensor]) -> None:
        """Count what `torch.compile` keeps of a block: AOTAutograd's cut recomputes the result of an activation
        function that is multiplied on, and of a copy in another dtype keeps the narrower side. (So were two blocks of
        Llama measured on an H200: I + 4 H per token less, with LoRA I + 2 H.)"""
        makers = {"_to_copy": ("_to_copy",), "mul": ("silu", "gelu")}.get(name, ())
        for tensor in made if name == "_to_copy" else tensors_in(inputs) if makers else ():
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is None or self._alloc(block).kind == "gathered parameters":
                continue
            if self._alloc(block).source.rpartition("aten.")[2].partition(".")[0] not in makers:
                continue
            narrow = inputs[0].nbytes if name == "_to_copy" and tensor.nbytes > inputs[0].nbytes else 0
            self._change(block, num_bytes=narrow)

    def _alloc(self, block: _Block) -> Alloc:
        taken = self.events[block.place]
        assert isinstance(taken, Alloc)
        return taken

    def _change(self, block: _Block, **changes: Any) -> None:
        self.events[block.place] = replace(self._alloc(block), **changes)

    def _work(self, func: Any, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor]) -> None:
        operation, flops, model_flops = counted(func, args, kwargs, result)
        read, unit = tensors_in((args, kwargs)), self._passes[-1].unit
        if operation in COLLECTIVES:
            axis = next(each for each in reversed(args) if each in self._sizes)
            num_bytes, ranks = float((made if operation == "all_gather" else read)[0].nbytes), self._sizes[axis]
            self.events.append(Work(operation, 0.0, num_bytes, unit, self.phase, "exchange", ranks=ranks, axis=axis))
            return
        # an autograd function of a model runs without gradients, also where its module is recomputed
        again = self.phase == "backward" and (self.again or bool(self.modules) or torch.is_grad_enabled())
        self.events.append(
            Work(
                operation=operation,
                flops=self.times * flops,
                num_bytes=self.times * float(sum(map(_touched, read)) + sum(map(_touched, made))),
                unit=unit,
                phase="loss" if self.in_loss and self.phase == "forward" else self.phase,
                dtype_bytes=next((t.element_size() for t in read if t.is_floating_point()), 2),
                again=again,
                model_flops=0.0 if again else self.times * model_flops,
            )
        )

    def take(self, tensor: torch.Tensor, kind: Kind | None = None) -> bool:
        """Note the memory of a tensor; whether it is new."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._known or address in self._blocks or not num_bytes:
            return False
        number = self._append(num_bytes, kind or ("logits and loss" if self.in_loss else "activations"))
        watch = weakref.ref(storage, lambda _: self._give_back(address, number))
        self._blocks[address] = _Block(len(self.events) - 1, self._passes[-1], watch)
        return True

    def _append(self, num_bytes: int, kind: Kind) -> int:
        self._next += 1
        unit = self._passes[-1].unit
        module = (self.modules[-1] if self.modules else unit).removeprefix(unit).removeprefix(".")
        source = re.sub(r"\b\d+\b", "*", module) + " " + self.last_operation.removesuffix(".default")
        self.events.append(Alloc(self._next, num_bytes, kind, unit, source=source.lstrip()))
        return self._next

    def _give_back(self, address: int, number: int) -> None:
        if (block := self._blocks.pop(address, None)) is None:
            return
        is_short = not block.made_in.is_over and block.made_in is not self._root
        if is_short and self._alloc(block).kind == "activations":
            self._change(block, kind="temporaries")
        self.events.append(Free(number))


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel reads or writes; those of an expanded one count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
