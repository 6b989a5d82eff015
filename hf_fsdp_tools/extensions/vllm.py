"""Weights for vLLM: a `WeightSource` for its trainer engines."""

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch

from hf_fsdp_tools.distributed.agreement import agreed, announced, rank_and_size
from hf_fsdp_tools.distributed.rounds import StoppedElsewhere
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError, library_errors
from hf_fsdp_tools.streaming.live import BUCKET_BYTES, LiveWeights
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
    with announced("sending weights to vLLM"):
        try:
            engine.send_weights()
        except (FSDPToolsError, StoppedElsewhere):
            raise
        except Exception as error:
            raise ConfigError(
                f"vLLM has not taken the weights: {first_lines(error)}. Its server is to be there, with the same "
                "model, and to take updates: look at its log, and make the engine anew. Training can go on."
            ) from error
