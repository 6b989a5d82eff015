"""Weights for vLLM: a `WeightSource` for its trainer engines, and a stream for TRL's trainers."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from queue import Full, Queue
from threading import Thread
from typing import Any

import torch

from hf_fsdp_tools.distributed.agreement import agreed, announced, rank_and_size, wait_for_all_ranks
from hf_fsdp_tools.distributed.rounds import GIVE_UP_S, StoppedElsewhere, patience_for_collectives
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError, library_errors
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.saving.save import save_pretrained
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.streaming.live import BUCKET_BYTES, LiveWeights, live_weights
from hf_fsdp_tools.text import first_lines


def weight_source(weights: LiveWeights, *, to: Collection[int] | None = (0,), bucket_bytes: int = BUCKET_BYTES) -> Any:
    """A vLLM `WeightSource`, for `trainer_init(…, source=…)` of its engines: `metadata`, `iter_full`, `iter_local`.

    Names, shapes and dtypes are the checkpoint's. Both iterators yield whole tensors, gathered in buckets, which are
    declared replicated on the ranks `to`.

    Args:
        weights: of a model; of a PEFT model, with its adapters merged.
        to: ranks that get whole tensors. Rank 0 for the engine `nccl`, None (every rank) for `ipc`, `sharded_rdt` and
            `nccl_m2n`.
        bucket_bytes: as in `LiveWeights.buckets`.

    Every rank must call, and iterate each pass to the end, as vLLM's engines do; `update_vllm` sees to that. vLLM is
    imported here.

    Raises:
        ConfigError: vLLM cannot be imported; the weights are those of an adapter alone.
    """
    weights.of_a_model("vLLM")
    with agreed("importing vLLM"), library_errors("vLLM's WeightSource cannot be imported", "Install vLLM 0.33."):
        from vllm.distributed.weight_transfer import base
    size = rank_and_size()[1]
    owners = tuple(range(size)) if to is None else tuple(sorted(to))
    if not owners or not 0 <= owners[0] <= owners[-1] < size:
        raise ConfigError(f"to={to}: weights go to some of the ranks 0 to {size - 1}, or to all of them with None.")

    class LiveSource(base.WeightSource):  # type: ignore[misc]
        @cached_property
        def metadata(self) -> list[Any]:
            return [base.ParamMeta(n, t.dtype, t.shape, owners=owners) for n, t in weights.tensors.items()]

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in weights.buckets(bucket_bytes, to=owners):
                yield from bucket.items()

        def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
            return self.iter_full()

    return LiveSource()


def update_vllm(engine: Any) -> None:
    """`engine.send_weights()` of one of vLLM's trainer engines; what fails on one rank stops all. Every rank must call.

    Raises:
        ConfigError: vLLM's engine failed on this rank.
        RanksError: it failed on another, which is named.
    """
    with announced(_SENDING), _errors_of_vllm():
        engine.send_weights()


_SENDING = "sending the weights to vLLM"


@contextmanager
def _errors_of_vllm() -> Iterator[None]:
    """A block of calls of vLLM and TRL, whose errors become one of this package."""
    try:
        yield
    except (FSDPToolsError, StoppedElsewhere):
        raise
    except Exception as error:
        raise ConfigError(
            f"vLLM did not take the weights: {type(error).__name__}: {first_lines(error)}. Its server must be up, "
            "serve the model that is trained, and take updates: look at its log. Training can go on."
        ) from error


# ---- TRL's trainers ----


def stream_to_vllm(trainer: Any) -> None:
    """Let a TRL trainer (1.16) that sends weights to vLLM, by any of its three ways, send those of shards as a stream.

    TRL gathers each parameter on every rank and sends it under the name of the module, which vLLM does not know where
    transformers has fused it; adapters it merges into shards. AsyncGRPO and AsyncDistillation gather on a thread of
    rank 0, between the sends to vLLM, and more than two ranks wait for each other forever (trl#6798, trl#7103). Here
    names are the checkpoint's, whole tensors go to rank 0 alone (server) or to every rank (colocate), all ranks
    communicate on the threads that call, and what fails on rank 0 is one error on all.
    """
    if (generation := vars(trainer).get("vllm_generation")) is not None:  # GRPO, RLOO, GOLD, SDFT, …
        generation.sync_weights = partial(_Stream(trainer, generation).sync, generation.sync_weights)
    if hasattr(trainer, "_move_model_to_vllm_inner"):  # OnlineDPO
        one_by_one = _OneByOne(trainer)
        trainer._move_model_to_vllm = partial(one_by_one.sync, trainer._move_model_to_vllm)
        trainer._move_model_to_vllm_inner = partial(one_by_one.send, trainer._move_model_to_vllm_inner)
    if hasattr(trainer, "_sync_weight_merged"):  # AsyncGRPO, AsyncDistillation
        behind = _Behind(trainer)
        for name in ("_sync_weight_merged", "_sync_weight_lora"):
            setattr(trainer, name, partial(behind.sync, getattr(trainer, name)))


class _Outgoing:
    """The weights of a trainer's policy on their way to its vLLM."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._weights: LiveWeights | None = None

    @property
    def weights(self) -> LiveWeights | None:
        """The weights in the dtype in which the policy computes, adapters merged; None where it has no shards. The
        first time every rank must ask, once the policy is sharded."""
        model = self.trainer.model
        if self._weights is None and (sharding := sharding_of(model)) is not None:
            merges, dtype = hasattr(model, "peft_config"), sharding.mp_policy.param_dtype
            self._weights = live_weights(model, dtype=dtype, merge_adapters=merges)
        return self._weights

    @property
    def metadata(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each tensor, in the order in which they are sent."""
        assert self.weights is not None
        tensors = self.weights.tensors.items()
        return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors]

    @property
    def bucket_bytes(self) -> int:
        """What a rank gets and gives at a time."""
        assert self.weights is not None
        return max(BUCKET_BYTES, 4 * max(tensor.num_bytes for tensor in self.weights.tensors.values()))


class _Stream(_Outgoing):
    """By TRL's `VLLMGeneration`, which iterates over the weights."""

    def __init__(self, trainer: Any, generation: Any) -> None:
        super().__init__(trainer)
        self.generation = generation
        self.named: Iterator[tuple[str, torch.Tensor]] | None = None
        """What is being sent; every rank must iterate to its end."""

    def sync(self, send: Callable[[], object]) -> None:
        """Send the weights by TRL's own method, whose error is that of all ranks. Every rank must call."""
        if self.weights is None:
            send()  # TRL's own way
            return
        self.generation._weight_metadata, self.generation._iter_named_params = self.metadata, self.begin
        failure: Exception | None = None
        self.named = None
        try:
            send()
        except Exception as error:
            failure = error
        for _ in self.named or self.begin():
            pass
        with agreed(_SENDING), _errors_of_vllm():
            if failure is not None:
                raise failure

    def begin(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stands for TRL's `_iter_named_params`."""
        self.named = self._named()
        return self.named

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.weights is not None
        to = (0,) if self.generation.mode == "server" else None
        for bucket in self.weights.buckets(self.bucket_bytes, to=to):
            yield from bucket.items()


class _OneByOne(_Outgoing):
    """By OnlineDPO, which gives vLLM one tensor after the other."""

    def sync(self, plain: Callable[[], object]) -> None:
        """TRL's `_move_model_to_vllm`, which begins and ends an update on rank 0. Every rank must call."""
        with agreed(_SENDING), _errors_of_vllm():
            plain()

    def send(self, plain: Callable[[], object]) -> None:
        """Stands for `_move_model_to_vllm_inner`. Every rank must call."""
        trainer, weights = self.trainer, self.weights
        if weights is None:
            plain()
            return
        is_server = trainer.vllm_mode == "server"

        def give(bucket: dict[str, torch.Tensor]) -> None:
            with _errors_of_vllm():
                for name, tensor in bucket.items():
                    if is_server:
                        trainer.vllm_client.update_named_param(name, tensor)
                    else:
                        model = trainer.llm.llm_engine.model_executor.driver_worker.model_runner.model
                        model.load_weights([(name, tensor)])

        weights.send(give, self.bucket_bytes, to=(0,) if is_server else None)


class _Behind(_Outgoing):
    """By AsyncGRPO and its kin: rank 0 sends on a thread of its own, behind what the ranks communicate."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.open: Callable[[], object] | None = None
        """TRL's handshake of rank 0 with the server, put off to the first sync: it asks for the dtype of the weights,
        and the other ranks do not know that it takes minutes."""
        if (transfer := trainer.weight_transfer) is not None:
            self.open, transfer.init_weight_transfer = transfer.init_weight_transfer, lambda: None

    def sync(self, plain: Callable[[float], Any], started: float) -> Any:
        """TRL's `_sync_weight_merged`, or `_sync_weight_lora` with an adapter's folder. Every rank must call."""
        trainer, transfer, model = self.trainer, self.trainer.weight_transfer, self.trainer.model
        is_sharded = self.weights is not None
        with patience_for_collectives(), agreed(_SENDING), _errors_of_vllm(), ExitStack() as stack:
            if is_sharded:
                homes = (sys.modules.get(kind.__module__) for kind in type(trainer).__mro__)
                home = next(home for home in homes if hasattr(home, "save_lora_adapter"))
                stack.enter_context(replaced(home, save_lora_adapter=_save_adapter))
                stack.enter_context(replaced(trainer.accelerator, wait_for_everyone=wait_for_all_ranks))
                stack.enter_context(replaced(trainer, _streaming_iter=self._take_part))
                if hasattr(model, "merge_adapter"):  # merged on the way
                    stack.enter_context(replaced(model, merge_adapter=lambda: None, unmerge_adapter=lambda: None))
            if transfer is not None and is_sharded:
                send = transfer.send_weights
                stack.enter_context(replaced(transfer, send_weights=lambda _: self._send(_Sender(send))))
                if hasattr(transfer, "_weight_update_info"):
                    names, dtypes, shapes = map(list, zip(*self.metadata, strict=True))
                    transfer._weight_update_info.update(names=names, dtype_names=dtypes, shapes=shapes)
            if self.open is not None:
                self.open()
                self.open = None
            return plain(started)

    def _take_part(self) -> Iterator[Any]:
        """Stands for TRL's `_streaming_iter`, which ranks without a server iterate over."""
        assert self.weights is not None
        self.weights.send(lambda _: None, self.bucket_bytes)
        yield from ()

    def _send(self, sender: "_Sender") -> None:
        """Give all tensors to rank 0, while the others take part, and wait until they are sent."""
        assert self.weights is not None
        self.weights.send(sender.give, self.bucket_bytes)
        sender.finish()


class _Sender:
    """TRL's `send_weights` on a thread, which may wait for vLLM as long as it likes."""

    def __init__(self, send: Callable[[Iterator[tuple[str, torch.Tensor]]], object]) -> None:
        self._buckets: Queue[dict[str, torch.Tensor] | None] = Queue(1)
        self._failure: BaseException | None = None
        self._given = self._taken = 0  # tensors
        self._thread = Thread(target=self._run, args=(send,), name="weights for vLLM", daemon=True)
        self._thread.start()

    def _run(self, send: Callable[[Iterator[tuple[str, torch.Tensor]]], object]) -> None:
        try:
            send(self._named())
        except BaseException as error:
            self._failure = error

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        while (bucket := self._buckets.get()) is not None:
            for named in bucket.items():
                self._taken += 1
                yield named

    def give(self, bucket: dict[str, torch.Tensor] | None) -> None:
        """Hand a bucket over once its values are there, or None behind the last; as soon as the one before is sent."""
        if bucket and (device := next(iter(bucket.values())).device).type != "cpu":
            torch.accelerator.current_stream(device).synchronize()  # the thread sends on streams of its own
        self._given += len(bucket or ())
        clock = self._clock()
        while self._thread.is_alive():
            try:
                self._buckets.put(bucket, timeout=0.1)
                break
            except Full:
                next(clock)
        self._raise()

    def _clock(self) -> Iterator[None]:
        """Refuse to wait for a vLLM that has taken no tensor for as long as ranks wait for each other."""
        taken, since_s = self._taken, time.monotonic()
        while time.monotonic() < since_s + GIVE_UP_S:
            yield
            if self._taken > taken:
                taken, since_s = self._taken, time.monotonic()
        raise ConfigError(f"vLLM has taken no weight for {GIVE_UP_S:.0f} s. Look at its log, and start it again.")

    def finish(self) -> None:
        """Return when all is sent."""
        self.give(None)
        clock = self._clock()
        while self._thread.is_alive():
            self._thread.join(0.1)
            next(clock)
        self._raise()
        if self._taken < self._given:
            said = f"The way to vLLM ended after {self._taken} of {self._given} weights"
            raise ConfigError(f"{said}, so it holds old ones. Look at its log, and at its group of processes.")

    def _raise(self) -> None:
        if self._failure is not None:
            with _errors_of_vllm():
                raise self._failure


def _save_adapter(model: Any, accelerator: Any, name: str, folder: str) -> None:
    """Stands for TRL's `save_lora_adapter`. Every rank must call."""
    save_pretrained(model, folder)
