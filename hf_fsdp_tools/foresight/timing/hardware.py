"""What GPUs can do at best, and how they are linked: figures of data sheets, each with its source."""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU as `torch.cuda` sees it (a GCD of an MI250X is one). One of your own is a value of
    `TrainingSetup.gpu`: `dataclasses.replace(GPUS["a100-40gb"], name="half", memory_bytes=20 * 2**30)`."""

    name: str  # Key in `GPUS`; of another GPU any word
    title: str
    family: str  # Generation, such as `h100`: says which shares of its peaks it reaches, and cuBLAS' workspace
    fp32: float  # Peak flop/s of fp32 without TF32, which is torch's default for matmuls
    bf16: float  # Peak dense flop/s of bf16 with fp32 accumulation; that of fp32 where there is none (V100)
    fp16: float  # Peak dense flop/s of fp16 with fp32 accumulation
    fp8: float  # Peak dense flop/s of fp8; that of fp16 where there is none
    memory_bytes: int  # What the driver reports as total: below the number in the name, since it takes its part
    memory_bandwidth: float  # Bytes per second of the GPU's memory, as the other bandwidths
    link: Literal["nvlink", "pcie"]  # What joins the GPUs of one machine; AMD's Infinity Fabric counts as NVLink
    link_bandwidth: float  # That one GPU sends to the others of its machine, in one direction
    network_gbit_s: float  # Gbit/s of the usual network per GPU, in one direction
    host_bandwidth: float  # Between GPU and host memory in one direction (PCIe, or NVLink-C2C)
    host_memory_bandwidth: float  # Per GPU of a usual machine: bounds an optimizer on the CPU
    source: str
    skypilot: str = ""  # What `sky gpus list` calls it (its documentation, docs/source/compute/show-gpus-all.txt)
    hf_flavors: str = ""  # Of `hf jobs run --flavor` by number of GPUs, as "1:l4x1 4:l4x4". (huggingface_hub 2.4)

    def peak(self, dtype_bytes: int, precision: str = "bf16") -> float:
        """Peak flop/s of matmuls whose inputs have elements of `dtype_bytes`."""
        if dtype_bytes >= 4:
            return self.fp32
        if dtype_bytes == 1:
            return self.fp8
        return self.fp16 if precision == "fp16" else self.bf16

    def __str__(self) -> str:
        return self.name


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a table next to this file."""
    with Path(__file__).with_name(name).open(newline="", encoding="utf-8") as file:
        return [dict(row) for row in csv.DictReader(file)]


def _read_gpus() -> Iterator[Gpu]:
    """Yield the GPU of each row of `gpus.csv`: rates in Tflop/s, empty where the GPU has none; memory in GiB; links
    in GB/s, per GPU and direction. The usual GPU of alike names stands first: it is the one that a short name means.

    - Total memory: the lowest of what PyTorch's out-of-memory messages say ("has a total capacity of 79.10 GiB").
    - Link to the host: PCIe x16 of generation 3, 4, 5 (PCI-SIG); half of it to GPUs for cards without peer copies.
    - Host memory: two sockets' channels over 8 GPUs (data sheets of the systems); others as the DGX A100 (assumed).
    """
    for values in rows_of("gpus.csv"):
        fp32, bf16, fp16, fp8 = (float(values.pop(name) or 0) * 1e12 for name in ("fp32", "bf16", "fp16", "fp8"))
        bandwidths = {"link": "link_gb_s", "host": "host_gb_s", "host_memory": "host_memory_gb_s", "memory": "gb_s"}
        values |= {f"{name}_bandwidth": float(values.pop(own)) * 1e9 for name, own in bandwidths.items()}
        values |= {"memory_bytes": int(float(values.pop("gib")) * 2**30)}
        values |= {"network_gbit_s": float(values["network_gbit_s"])}
        yield Gpu(fp32=fp32, bf16=bf16 or fp32, fp16=fp16, fp8=fp8 or fp16, **values)


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _read_gpus()}


def gpu_named(name: str | Gpu) -> Gpu:
    """The GPU of a name: as in `GPUS`, or in any usual spelling ("H100", "NVIDIA A100-SXM4-80GB", "rtx4090")."""
    if isinstance(name, Gpu):
        return name
    if name in GPUS:  # a search asks thousands of times
        return GPUS[name]
    words = _words(name)
    matches = [gpu for known, gpu in GPUS.items() if words and words <= _words(known)]
    if matches:
        return matches[0]
    end = did_you_mean(re.sub(r"[\s_]+", "-", name.lower()), GPUS)
    raise ConfigError(f"GPU {name!r} is not in the table{end}")


def _words(name: str) -> set[str]:
    """What distinguishes a name: "NVIDIA A100-SXM4-80GB" as {"a100", "80gb"}, a GH200 without its host memory."""
    kinds = r"generation|blackwell|(workstation|server) edition|sxm\d?|hbm\d?e?|oam|\bgpu\b|480gb"
    text = re.sub(rf"nvidia|amd|instinct|geforce|tesla|rtx|{kinds}", " ", name.lower())
    return set(re.findall(r"[a-z0-9]+", re.sub(r"\b(\d+) ?gi?b\b", r"\1gb", text)))
