"""Reading transfers at once, beside the package's `write_transfers`."""

from collections.abc import Iterable

from tests.api import Reader, Transfer, TransferStats, side_stream_for


def read_transfers(transfers: Iterable[Transfer], *, staging_bytes: int) -> TransferStats:
    """Fill the memory of every transfer from its file, once, as a load does."""
    transfers = list(transfers)
    side = side_stream_for(transfer.memory for transfer in transfers)
    with Reader(staging_bytes=staging_bytes, side=side) as reader:
        return reader.read(transfers)
