"""Records of memory as Markdown: what was measured, what was foreseen, and what other tools say."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.foreseeing.cases import SIZES

__all__ = ["render"]

_MIB = 2**20


def render(records: Sequence[dict[str, Any]]) -> str:
    """All records as Markdown.

    Args:
        records: from `benchmarks/foresight.py memory`.
    """
    lines = ["# Memory: foreseen beside measured", ""]
    cpu = [record for record in records if record["device"] == "cpu"]
    cuda = [record for record in records if record["device"] == "cuda"]
    if cpu:
        lines += _on_cpus(cpu)
    for device in dict.fromkeys(record["measured"]["device"] for record in cuda):
        lines += _on_device(device, [record for record in cuda if record["measured"]["device"] == device])
    lines += [
        "Peers: `accelerate estimate-memory` (training with Adam) knows neither sharding nor activations; DeepSpeed's "
        "`estimate_zero3_model_states_mem_needs` knows no activations. Both are per GPU.",
        "",
    ]
    return "\n".join(lines)


def _on_cpus(records: Sequence[dict[str, Any]]) -> list[str]:
    worst = max(abs(_error(record, "peak")) for record in records)
    lines = [
        f"## Real ranks over gloo: at most {worst:.4%} off in {len(records)} cases",
        "",
        "A step after the first of a real training on CPUs, every allocation and free counted: the peak on rank 0, "
        "without what gloo takes for itself (the gathered bytes twice for each all-gather, the input once for each "
        f"reduce-scatter). PyTorch {_versions(records)}.",
        "",
        "| training | ranks | parameters | measured MiB | foreseen MiB | error | accelerate | DeepSpeed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for record in records:
        real, peers = record["measured"], record["peers"]
        cells = [record["case"], str(record["gpus"]), f"{real['parameters'] / 1e6:.1f} M", _mib(real["peak"])]
        cells += [_mib(record["foreseen"]["peak"]), f"{_error(record, 'peak'):+.4%}"]
        cells += [_mib(peers["accelerate"]), _mib(peers["DeepSpeed"])]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _on_device(device: str, records: Sequence[dict[str, Any]]) -> list[str]:
    errors = {key: [abs(_error(record, key)) for record in records] for key in ("allocated", "reserved")}
    found = ", ".join(
        f"{key} {statistics.median(each):.2%} off in the median and {max(each):.2%} at most"
        for key, each in errors.items()
    )
    is_stand_in = "Fake" in device
    name = "An H100's stand-in under PyTorch's caching allocator" if is_stand_in else device
    what = "The device is a stand-in for the CUDA runtime: sizes are real, kernels do nothing. " if is_stand_in else ""
    lines = [
        f"## {name}: {found}",
        "",
        "The fourth step of a real training on one device, which is rank 0 of so many: `max_memory_allocated` and "
        f"`max_memory_reserved` in MiB. {what}PyTorch {_versions(records)}.",
        "",
        "| training | GPUs | parameters | tokens | allocated | foreseen | error | reserved | foreseen | error "
        "| accelerate | DeepSpeed |",
        f"| --- {'| ---: ' * 11}|",
    ]
    for record in records:
        real, peers = record["measured"], record["peers"]
        cells = [record["case"], str(record["gpus"]), f"{real['parameters'] / 1e6:.0f} M"]
        cells += ["{} × {:,}".format(SIZES[record["size"]].batch_size, SIZES[record["size"]].seq_len)]
        for key in ("allocated", "reserved"):
            cells += [_mib(real[key]), _mib(record["foreseen"][key]), f"{_error(record, key):+.2%}"]
        cells += [_mib(peers["accelerate"]), _mib(peers["DeepSpeed"])]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _error(record: dict[str, Any], key: str) -> float:
    return float(record["foreseen"][key] / record["measured"][key] - 1)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f}"


def _versions(records: Sequence[dict[str, Any]]) -> str:
    return ", ".join(sorted({record["measured"]["torch"] for record in records}))
