"""The weights of a model under the names of its checkpoint while it trains: whole in buckets, or own parts."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.distributed.shards import Box, Held, refuse_ended
from hf_fsdp_tools.doors import load_extension
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import persistent_tensors, saved_tensors
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.tree_copy import is_adapted
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units
from hf_fsdp_tools.streaming.exchange import HeldParts, deliver, holders_among
from hf_fsdp_tools.streaming.held import Part, parts_of, shares
from hf_fsdp_tools.streaming.merging import Merging, with_merged
from hf_fsdp_tools.streaming.outgoing import SavedTensor, outgoing_tensors, refuse_empty
from hf_fsdp_tools.streaming.routes import Bucket, Spread, plan_buckets, spread_of
from hf_fsdp_tools.text import listed

BUCKET_BYTES = 2**30
"""Bytes of a bucket unless the caller says how many, as of a buffer of vLLM's packed transfer. (assumed)"""


def live_weights(
    model: nn.Module, *, dtype: torch.dtype | str | None = None, merge_adapters: bool = False
) -> "LiveWeights":
    """The weights of a model as the tensors of the Hugging Face checkpoint that `save_pretrained` would write.

    Names, shapes and dtypes are the checkpoint's: experts one by one, fused matrices apart, tied weights once. This
    call copies and gathers nothing; make it once, and use the result after every step, for the values of that moment.
    Heads that the model has no modules for are left out: they do not change.

    Args:
        model: sharded by FSDP2 (with replicas, tensor and expert parallelism too), by FSDP1, or not at all. A PEFT
            model gives its adapters, by PEFT's names.
        dtype: of floating-point tensors as they go out; None keeps the model's.
        merge_adapters: of a PEFT model, the base with the active adapters merged into it, bit for bit as PEFT does.
            Each pass over the weights then merges anew, a few modules at a time, and every rank must take part in it.

    Every rank of the default process group must call. The ranks compare arguments and names.

    Raises:
        ConfigError: adapters that cannot be merged, or have no tensors; arguments or names that differ between ranks.
        CheckpointError: a tensor is on meta, or is computed, not only moved, on its way to the checkpoint.
        RanksError: the process group has ended.

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> weights = live_weights(model, dtype=torch.bfloat16)
        >>> weights.tensors["lm_head.weight"].shape == tuple(model.lm_head.weight.shape)
        True
        >>> sum(part.num_bytes for part in weights.parts()) == weights.num_bytes  # on one rank
        True
    """
    return LiveWeights(model, as_dtype(dtype), merge_adapters)


class LiveWeights:
    """The weights of a model as tensors of its checkpoint; made by `live_weights`."""

    tensors: Mapping[str, SavedTensor]
    """Every tensor of the checkpoint by name, with `shape`, `dtype` and `num_bytes`; the same on every rank."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, merge_adapters: bool) -> None:
        doing = "reading the names of the weights"
        with agreed(doing):
            refuse_ended(model)
            reshard_units(model)
            if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
                model = load_extension("fsdp1.flat_shards").plain_view(model)
            self._model, self._merging = model, Merging(model) if merge_adapters else None
            self._standing_for: dict[int, nn.Parameter] = {}
            """Parameters of the base by what stands for them until they are merged, by its identity."""
            self._group_of: dict[nn.Parameter, int] = {}
            if self._merging is not None:
                olds = {old: i for i, group in enumerate(self._merging.groups) for old in self._merging.olds(group)}
                places = {
                    old: nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device="meta"), requires_grad=False)
                    for old in olds
                }
                self._model, self._group_of = with_merged(self._merging.base, places), olds
                self._standing_for = {id(place): old for old, place in places.items()}
            self.tensors = outgoing_tensors(self._model, dtype)
            self._refuse_unready()
        names = repr([(name, tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()])
        same_on_all_ranks(
            doing, dtype=dtype, merge_adapters=merge_adapters, tensors=hashlib.sha256(names.encode()).hexdigest()
        )
        self._plans: dict[tuple[int, tuple[int, ...]], list[Bucket]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, whole."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    # ---- what this rank holds ----

    def parts(self) -> Iterator[Part]:
        """Yield this rank's parts of all tensors, as views of its shards: `name`, `box`, `data` and `dtype`.

        The parts of all ranks make up each tensor exactly once; replicas of a shard have a share each. Nothing is
        communicated or copied, unless adapters are merged: then every rank must iterate to the end.
        """
        for name, state in zip(self.tensors, self._states([[name] for name in self.tensors]), strict=True):
            for _, parts in parts_of({name: self.tensors[name]}, state):
                yield from shares(parts)

    def of_a_model(self, consumer: str) -> "LiveWeights":
        """These weights, for a consumer that loads the tensors of a model.

        Raises:
            ConfigError: they are those of an adapter alone.
        """
        if self._merging is None and is_adapted(self._model):
            raise ConfigError(
                f"These are tensors of an adapter alone, which {consumer} does not take for those of a model: give "
                "live_weights(model, merge_adapters=True), or let the server load a folder of save_pretrained."
            )
        return self

    # ---- whole tensors ----

    def buckets(
        self,
        bucket_bytes: int = BUCKET_BYTES,
        *,
        to: Collection[int] | None = (0,),
        device: torch.device | str | None = None,
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield whole tensors by name, a bucket at a time, on the ranks `to`, and empty ones on the others.

        Args:
            bucket_bytes: what a rank gets and gives at a time, at most; half of it, where no tensor is larger than
                that, so that the next bucket travels while this one is used.
            to: ranks of the default process group that get all tensors; None: every rank.
            device: of the tensors; by default that of the model's mesh.

        Every rank must iterate to the end, whatever happens to it; `send` sees to that. Shards go from a rank that
        holds them straight to each of `to`, in the dtype asked for. Tensors that are quantised as stored are given as
        the bytes of the checkpoint.

        Raises:
            ConfigError: a tensor is larger than `bucket_bytes`; arguments differ between ranks.
            RanksError: a rank does not come to the next bucket.
        """
        yield from self._deliveries(to, bucket_bytes, device, lambda: None)

    def send(
        self,
        use: Callable[[dict[str, torch.Tensor]], None],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        to: Collection[int] | None = (0,),
        device: torch.device | str | None = None,
    ) -> None:
        """Do `use` each bucket on the ranks `to` (see `buckets`); an error there stops all ranks with the same error.

        Every rank must call. The rank that failed, and all others, are in step again when this raises.
        """
        failure: list[Exception] = []
        for bucket in self._deliveries(to, bucket_bytes, device, lambda: failure[0] if failure else None):
            try:
                if (to is None or rank_and_size()[0] in to) and not failure:
                    use(bucket)
            except Exception as error:  # raised on all ranks where they meet next
                failure.append(error)

    def _deliveries(
        self,
        to: Collection[int] | None,
        bucket_bytes: int,
        device: torch.device | str | None,
        failed: Callable[[], Exception | None],
    ) -> Iterator[dict[str, torch.Tensor]]:
        doing, size = "planning what is sent", rank_and_size()[1]
        ranks = tuple(range(size) if to is None else sorted(set(to)))
        same_on_all_ranks(doing, bucket_bytes=bucket_bytes, to=ranks)
        if (bucket_bytes, ranks) not in self._plans:
            spread = self.spread()
            with agreed(doing):
                if outside := [rank for rank in ranks if not 0 <= rank < size]:
                    raise ConfigError(f"rank {outside[0]} is to get weights; there are ranks 0 to {size - 1}.")
                whole = {name: (Box.whole(t.symbol.shape), t.element) for name, t in self.tensors.items()}
                self._plans = {(bucket_bytes, ranks): plan_buckets(ranks, whole, spread, size, bucket_bytes)}
        buckets = self._plans[bucket_bytes, ranks]
        on = torch.device(device) if device is not None else self.device
        for arrived in deliver(buckets, self.held(buckets), on, bucket_bytes, failed):
            yield {name: self.tensors[name].as_stored(tensor) for name, tensor in arrived.items()}

    def held(self, buckets: Sequence[Bucket]) -> Iterator[HeldParts]:
        """This rank's parts of the tensors in each bucket, for `deliver`; as `parts`, but all that this rank has."""
        steps = [list(dict.fromkeys(arrival.name for arrival in bucket.arrivals)) for bucket in buckets]
        for names, state in zip(steps, self._states(steps), strict=True):
            yield dict(parts_of({name: self.tensors[name] for name in names}, state, every_replica=True))

    def spread(self) -> Callable[[str], Spread]:
        """Who holds what. Every rank must call: tensors of which each rank knows only its own boxes are asked for."""
        state = {key: self._standing_for.get(id(t), t) for key, t in saved_tensors(self._model).items()}
        held = holders_among(state)
        return cache(lambda name: spread_of(self.tensors[name], held))

    @property
    def device(self) -> torch.device:
        """Where buckets arrive: that of the model's mesh."""
        tensors = [self._standing_for.get(id(t), t) for t in persistent_tensors(self._model).values()]
        return next((own.device for own in map(Held.of, tensors) if own.mesh), tensors[0].device)

    # ---- values ----

    def _states(self, steps: Sequence[Collection[str]]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield the model's tensors for each step of a pass, of some tensors of the checkpoint each.

        Merged parameters are made at the first step that needs them, on every rank, and dropped after the last.
        """
        reshard_units(self._model if self._merging is None else self._merging.base)
        state = saved_tensors(self._model)
        if self._merging is None:
            yield from (state for _ in steps)
            return
        needed = [
            {
                self._group_of[old]: None
                for name in step
                for key in sorted(self.tensors[name].symbol.sources)
                if (old := self._standing_for.get(id(state[key]))) is not None
            }
            for step in steps
        ]
        last = {group: i for i, groups in enumerate(needed) for group in groups}
        merged: dict[int, Mapping[nn.Parameter, nn.Parameter]] = {}
        for i, groups in enumerate(needed):
            for group in groups:
                if group not in merged:
                    merged[group] = self._merge(group)
            shards: dict[nn.Parameter, nn.Parameter] = {}
            for each in merged.values():
                shards |= each
            yield {key: shards.get(self._standing_for.get(id(t), t), t) for key, t in state.items()}  # type: ignore[call-overload]
            merged = {group: each for group, each in merged.items() if last[group] > i}

    def _merge(self, group: int) -> Mapping[nn.Parameter, nn.Parameter]:
        assert self._merging is not None
        failure: Exception | None = None
        merged: Mapping[nn.Parameter, nn.Parameter] = {}
        try:
            merged = self._merging.merge(self._merging.groups[group])
        except Exception as error:
            failure = error
        with agreed("merging the adapters"):
            if failure is not None:
                raise failure
        return merged

    def _refuse_unready(self) -> None:
        if not self.tensors:
            raise ConfigError(
                f"{type(self._model).__name__} has no tensors to stream: its adapter works next to the base, as "
                "prompts do. Save it as an adapter."
            )
        state = saved_tensors(self._model)
        refuse_empty({k: t for k, t in state.items() if id(t) not in self._standing_for}, "its weights are streamed")
        if computed := [name for name, tensor in self.tensors.items() if tensor.is_computed]:
            raise CheckpointError(
                f"{len(computed)} tensors are computed, not only moved, on their way to the checkpoint: "
                f"{listed(computed)}. save_pretrained gathers and writes them; they cannot be streamed."
            )
