"""Gradients that every rank holds whole: of parameters that a plan replicates, and of models without FSDP."""

from collections.abc import Sequence

from hf_fsdp_tools.foresight.build import DTYPES
from hf_fsdp_tools.foresight.events import EventWriter, Parameter
from hf_fsdp_tools.foresight.setup import TrainingSetup

_REDUCED_ALONE = 2**22  # Elements from which `sharding/whole.py` reduces a gradient where it lies
_FIRST_BUCKET = 2**20  # Bytes of DDP's first bucket (`_DEFAULT_FIRST_BUCKET_BYTES` of torch.distributed)
_BUCKET = 25 * 2**20  # Bytes of its other buckets (`bucket_cap_mb=25` of `DistributedDataParallel`)


class _Gradients:
    """Gradients that stay until the end of the step."""

    def __init__(self, writer: EventWriter, parameters: Sequence[Parameter], setup: TrainingSetup) -> None:
        self._writer, self._ranks = writer, setup.num_gpus
        self.reduces = True  # False inside of DDP's `no_sync`; `sharding/whole` averages after each backward pass
        self._parameters = {parameter.fqn: parameter for parameter in parameters}
        self._gradients: dict[str, int] = {}

    def end_step(self) -> None:
        """Gradients are set to None."""
        self._writer.free(*self._gradients.values())
        self._gradients.clear()


class AveragedGradients(_Gradients):
    """Gradients of replicated parameters beside shards: `sharding/whole` averages them after each backward pass."""

    _pending: tuple[Parameter, ...] = ()

    def gradient(self, name: str, block: int) -> None:
        """The gradient of this micro-step is complete."""
        parameter = self._parameters[name]
        self._pending += (parameter,)
        if name not in self._gradients:
            self._gradients[name] = block
            return
        self._writer.work("memory", 3 * parameter.num_bytes)
        self._writer.free(block)

    def end_backward(self) -> None:
        """All gradients of a backward pass are sent at its end, small ones together in fp32."""
        writer, ranks = self._writer, self._ranks
        pending, self._pending = self._pending, ()
        if not pending or ranks == 1:
            return
        small = [each for each in pending if each.numel < _REDUCED_ALONE]
        for each in pending:
            if each.numel >= _REDUCED_ALONE:
                writer.work("all_reduce", each.num_bytes, dtype_bytes=each.dtype.itemsize, ranks=ranks)
                writer.work("memory", 2 * each.num_bytes)
        if not small:
            return
        copies = [writer.take(4 * each.numel, "reduce buffers") for each in small if each.dtype.itemsize < 4]
        num_bytes = 4 * sum(each.numel for each in small)
        joined = writer.take(num_bytes, "reduce buffers")
        writer.work("memory", 2 * num_bytes)
        writer.free(*copies)
        writer.work("all_reduce", num_bytes, dtype_bytes=4, ranks=ranks)
        writer.work("memory", 4 * num_bytes)
        writer.free(joined)


class BucketedGradients(_Gradients):
    """Gradients of a model that every rank holds whole, as `DistributedDataParallel` with `gradient_as_bucket_view` has
    them: copied into buckets that are there from the beginning, none on one GPU.

    Parameters that are computed with in another dtype are cast once in a forward pass; autograd keeps the copies until
    the gradient is there.
    """

    def __init__(self, writer: EventWriter, parameters: Sequence[Parameter], setup: TrainingSetup) -> None:
        super().__init__(writer, parameters, setup)
        self._buckets: list[list[Parameter]] = [[]]
        for parameter in reversed([each for each in parameters if each.requires_grad]):
            limit = _FIRST_BUCKET if len(self._buckets) == 1 else _BUCKET
            if sum(kept_bytes(each, setup) for each in self._buckets[-1]) >= limit:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
        self._bucket_of = {each.fqn: at for at, bucket in enumerate(self._buckets) for each in bucket}
        self._kept = {each.fqn: kept_bytes(each, setup) for each in parameters}
        self._missing: list[int] = []
        self._copies: dict[str, int] = {}

    def resident(self) -> list[int]:
        return [] if self._ranks == 1 else [self._bytes_of(bucket) for bucket in self._buckets]

    def begin_forward(self) -> None:
        """Parameters are cast."""
        for name, parameter in self._parameters.items():
            if self._kept[name] != parameter.num_bytes:
                self._copies[name] = self._writer.take(parameter.num_bytes, "gathered parameters")
                self._writer.work("memory", self._kept[name] + parameter.num_bytes)

    def gradient(self, name: str, block: int) -> None:
        """The gradient of a parameter is complete; a bucket whose gradients are all there is sent."""
        writer, kept = self._writer, self._kept[name]
        is_cast = name in self._copies
        if is_cast:
            writer.free(self._copies.pop(name))
        if self._ranks == 1:
            if name in self._gradients:
                writer.work("memory", 3 * kept)
                writer.free(block)
            elif is_cast:
                self._gradients[name] = writer.take(kept, "gradients")
                writer.work("memory", 2 * kept)
                writer.free(block)
            else:
                self._gradients[name] = block
            return
        self._missing = self._missing or [len(bucket) for bucket in self._buckets]
        writer.work("memory", 2 * kept)
        writer.free(block)
        bucket = self._bucket_of[name]
        self._missing[bucket] -= 1
        if not self._missing[bucket] and self.reduces:
            num_bytes = self._bytes_of(self._buckets[bucket])
            writer.wait_stream("all_reduce", "compute")
            size = kept // self._parameters[name].numel
            writer.work("all_reduce", num_bytes, "all_reduce", dtype_bytes=size, ranks=self._ranks)

    def end_backward(self) -> None:
        """The compute stream waits for the reductions; copies of frozen parameters are freed."""
        self._writer.free(*self._copies.values())
        self._copies.clear()
        if self._missing:
            self._writer.wait_stream("compute", "all_reduce")
            self._missing = []

    def _bytes_of(self, bucket: Sequence[Parameter]) -> int:
        return sum(self._kept[each.fqn] for each in bucket)


def kept_bytes(parameter: Parameter, setup: TrainingSetup) -> int:
    """Bytes of a parameter of a model without FSDP, in the dtype that the optimizer updates."""
    is_master = parameter.requires_grad and parameter.dtype.is_floating_point
    return parameter.numel * (DTYPES[setup.master_dtype] if is_master else parameter.dtype).itemsize
