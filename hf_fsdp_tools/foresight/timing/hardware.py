"""What GPUs can do at best, and how they are linked: figures of data sheets, each with its source.

How much of a peak training reaches is a matter of software and is fitted (`efficiency`); nothing here is.
"""

import re
from dataclasses import dataclass
from typing import Literal

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU as `torch.cuda` sees it (a GCD of an MI250X is one). One of your own is a value of
    `TrainingSetup.gpu`: `dataclasses.replace(GPUS["a100-40gb"], name="half", memory_bytes=20 * 2**30)`."""

    name: str
    """Key in `GPUS`; of another GPU any word."""
    title: str
    """Name that a person knows."""
    family: str
    """Generation, such as `h100`: says which shares of its peaks it reaches (`efficiency`), and cuBLAS' workspace."""
    fp32: float
    """Peak flop/s of fp32 without TF32, which is torch's default for matmuls."""
    bf16: float
    """Peak dense flop/s of bf16 with fp32 accumulation; that of fp32 where there is none (V100)."""
    fp16: float
    """Peak dense flop/s of fp16 with fp32 accumulation."""
    fp8: float
    """Peak dense flop/s of fp8; that of fp16 where there is none."""
    memory_bytes: int
    """What the driver reports as total memory (`torch.cuda.get_device_properties`): below the number in the name, since
    ECC and the driver take their part."""
    memory_bandwidth: float
    """Bytes per second of the GPU's memory."""
    link: Literal["nvlink", "pcie"]
    """What joins the GPUs of one machine; AMD's Infinity Fabric counts as NVLink."""
    link_bandwidth: float
    """Bytes per second that one GPU sends to the others of its machine, in one direction."""
    network_gbit_s: float
    """Gbit/s of the usual network per GPU, in one direction."""
    host_bandwidth: float
    """Bytes per second between GPU and host memory in one direction (PCIe, or NVLink-C2C)."""
    host_memory_bandwidth: float
    """Bytes per second of host memory, per GPU of a usual machine: bounds an optimizer on the CPU."""
    source: str
    """Where the figures are from."""

    def peak(self, dtype_bytes: int, precision: str = "bf16") -> float:
        """Peak flop/s of matmuls whose inputs have elements of `dtype_bytes`."""
        if dtype_bytes >= 4:
            return self.fp32
        if dtype_bytes == 1:
            return self.fp8
        return self.fp16 if precision == "fp16" else self.bf16

    def __str__(self) -> str:
        return self.name


_SOURCES = {
    "v100-16gb": "NVIDIA V100 data sheet (2020), SXM2; NVLink 300 GB/s both ways; network: AWS p3dn.24xlarge 100 Gb/s",
    "v100-32gb": "NVIDIA V100 data sheet (2020), SXM2; NVLink 300 GB/s both ways; network: AWS p3dn.24xlarge 100 Gb/s",
    "a10-24gb": "NVIDIA A10 data sheet (2021); network: 100 Gb/s for 8 GPUs, as A10G",
    "a10g-24gb": "NVIDIA A10G data sheet (2021); network: AWS g5.48xlarge 100 Gb/s",
    "a100-40gb": "NVIDIA A100 data sheet (2021), SXM4 40 GB; NVLink 600 GB/s both ways; network: DGX A100 8 x 200 Gb/s",
    "a100-80gb": "NVIDIA A100 data sheet (2021), SXM4 80 GB; NVLink 600 GB/s both ways; network: DGX A100 8 x 200 Gb/s",
    "a100-40gb-pcie": "NVIDIA A100 data sheet (2021), PCIe; NVLink only between pairs; 400 Gb/s for 8 (assumed)",
    "a100-80gb-pcie": "NVIDIA A100 data sheet (2021), PCIe; NVLink only between pairs; 400 Gb/s for 8 (assumed)",
    "l4-24gb": "NVIDIA L4 data sheet (2023), half the rates with sparsity; network: Google g2-standard-96 100 Gb/s",
    "l40s-48gb": "NVIDIA L40S data sheet (2023), rates without sparsity; network: AWS g6e.48xlarge 400 Gb/s",
    "rtx-3090": "NVIDIA GA102 white paper (2021), fp32 accumulation; no peer copies; 10 Gb/s for 4 (assumed)",
    "rtx-4090": "NVIDIA Ada white paper (2023), fp32 accumulation; no peer copies; 10 Gb/s for 4 (assumed)",
    "rtx-5090": "NVIDIA RTX Blackwell white paper (2025), fp32 accumulation; no peer copies; 10 Gb/s for 4 (assumed)",
    "h100-80gb": "NVIDIA H100 data sheet (2024), SXM5, half the rates with sparsity; network: DGX H100 8 x 400 Gb/s",
    "h100-80gb-pcie": "NVIDIA H100 data sheet (2022), PCIe; NVLink only between pairs; 800 Gb/s for 8 (assumed)",
    "h100-nvl": "NVIDIA H100 data sheet (2024), NVL; NVLink only between pairs; 800 Gb/s for 8 (assumed)",
    "h100-96gb": "torchtitan docs/performance.md (HBM2e, 500 W, 400 Gb/s per GPU); Tflop/s as the SXM5's (assumed)",
    "h200-141gb": "NVIDIA H200 data sheet (2024), SXM, half the rates with sparsity; network: DGX H200 8 x 400 Gb/s",
    "b200-180gb": "NVIDIA DGX B200 data sheet, an eighth, without sparsity; memory: github.com/pytorch/ao/pull/4002",
    "a40-48gb": "NVIDIA A40 data sheet (2020), PCIe 4; network: 100 Gb/s for 8 GPUs (assumed)",
    "rtx-a5000": "NVIDIA RTX A5000 data sheet (2021), PCIe 4; 10 Gb/s for 4 (assumed)",
    "rtx-a6000": "NVIDIA RTX A6000 data sheet (2020), PCIe 4; 10 Gb/s for 4 (assumed)",
    "rtx-6000-ada": "NVIDIA RTX 6000 Ada data sheet (2022), half the rates with sparsity; 10 Gb/s for 4 (assumed)",
    "rtx-pro-6000": "NVIDIA RTX PRO 6000 Blackwell data sheet (2025), without sparsity; 10 Gb/s for 4 (assumed)",
    "b300-268gb": "NVIDIA DGX B300 data sheet (2025), an eighth, without sparsity; 8 x 800 Gb/s; memory assumed",
    "gb200-186gb": "NVIDIA GB200 NVL72 data sheet (2024), a 72nd, without sparsity; a whole rack is gpus_per_node=72",
    "gb300-279gb": "NVIDIA GB300 NVL72 data sheet (2025), a 72nd, without sparsity; a whole rack is gpus_per_node=72",
    "gh200-96gb": "NVIDIA GH200 data sheet (2023), HBM3; C2C 900 GB/s both ways; links between GPUs: CSCS Alps",
    "mi250x": "AMD MI250X data sheet (2021), half a card; 50 GB/s per fabric link (rocm.docs.amd.com); Frontier",
    "mi300x": "AMD MI300X data sheet (2023), without sparsity; Infinity Fabric 7 x 64 GB/s; network: 8 x 400 Gb/s",
    "mi325x": "AMD MI325X data sheet (2024), without sparsity; Infinity Fabric 7 x 64 GB/s; network: 8 x 400 Gb/s",
    "mi355x": "AMD MI355X data sheet (2025), without sparsity; Infinity Fabric 7 x 76.8 GB/s; network: 8 x 400 Gb/s",
}
"""Where a row's rates, bandwidths and network are from. For all rows:

- Total memory: as PyTorch's out-of-memory messages give it ("GPU 0 has a total capacity of 79.10 GiB"), of the usual
  figures the lowest.
- Link to the host: PCIe x16 in one direction, generation 3 16 GB/s, 4 32 GB/s, 5 64 GB/s (PCI-SIG). Cards without peer
  copies send what they exchange through host memory, so that each byte crosses PCIe twice: half of it.
- Host memory, per GPU: two sockets' channels over 8 GPUs. DGX-1 2 x 6 DDR4-2666, DGX A100 2 x 8 DDR4-3200, DGX H100
  2 x 8 DDR5-4800, DGX B200 2 x 8 DDR5-5600 (data sheets of the systems and their processors); Frontier 205 GB/s over 8;
  GH200 500 GB/s (data sheet); other machines as the DGX A100 (assumed).
"""

_TABLE = """
name           family   fp32  bf16   fp16   fp8    GiB    GB/s link   GB/s Gbit/s host memory title
v100-32gb      v100     15.7  -      125    -      31.74   900 nvlink  150   12.5   16     32 V100 SXM2 32 GB
v100-16gb      v100     15.7  -      125    -      15.77   900 nvlink  150   12.5   16     32 V100 SXM2 16 GB
a10-24gb       a10      31.2  125    125    -      21.98   600 pcie     32   12.5   32     51 A10 24 GB
a10g-24gb      a10      35    70     70     -      21.98   600 pcie     32   12.5   32     51 A10G 24 GB
a100-80gb      a100     19.5  312    312    -      79.15  2039 nvlink  300  200     32     51 A100 SXM 80 GB
a100-40gb      a100     19.5  312    312    -      39.39  1555 nvlink  300  200     32     51 A100 SXM 40 GB
a100-80gb-pcie a100     19.5  312    312    -      79.15  1935 pcie     32   50     32     51 A100 PCIe 80 GB
a100-40gb-pcie a100     19.5  312    312    -      39.39  1555 pcie     32   50     32     51 A100 PCIe 40 GB
l4-24gb        ada      30.3  121    121    242.5  21.96   300 pcie     32   12.5   32     51 L4 24 GB
l40s-48gb      ada      91.6  362    362    733    44.39   864 pcie     32   50     32     51 L40S 48 GB
a40-48gb       ga102    37.4  149.7  149.7  -      44.35   696 pcie     32   12.5   32     51 A40 48 GB
rtx-a6000      ga102    38.7  154.8  154.8  -      47.53   768 pcie     32    2.5   32     51 RTX A6000 48 GB
rtx-a5000      ga102    27.8  111.1  111.1  -      23.68   768 pcie     32    2.5   32     51 RTX A5000 24 GB
rtx-6000-ada   ada      91.1  364.2  364.2  728.5  47.50   960 pcie     32    2.5   32     51 RTX 6000 Ada 48 GB
rtx-pro-6000   blackwell 125   503.8  503.8 1007.6  94.97  1792 pcie     64    2.5   64     51 RTX PRO 6000 96 GB
rtx-3090       rtx-3090  35.6  71     71     -      23.68   936 pcie     16    2.5   32     51 RTX 3090 24 GB
rtx-4090       rtx-4090  82.6  165.2  165.2  330.3  23.64  1008 pcie     16    2.5   32     51 RTX 4090 24 GB
rtx-5090       blackwell 104.8 209.5  209.5  419    31.36  1792 pcie     32    2.5   64     51 RTX 5090 32 GB
h100-80gb      h100     67   989.4  989.4 1978.9  79.10  3350 nvlink  450  400     64     77 H100 SXM 80 GB
h100-80gb-pcie h100     51   756    756   1513    79.10  2039 pcie     64  100     64     77 H100 PCIe 80 GB
h100-nvl       h100     60   835.5  835.5 1670.5  93.02  3938 pcie     64  100     64     77 H100 NVL 94 GB
h100-96gb      h100     67   989.4  989.4 1978.9  95.04  2400 nvlink  450  400     64     77 H100 HBM2e 96 GB
h200-141gb     h100     67   989.4  989.4 1978.9 139.72  4800 nvlink  450  400     64     77 H200 SXM 141 GB
b200-180gb     b200     75  2250   2250   4500   178.35  7672 nvlink  900  400     64     90 B200 180 GB
b300-268gb     b200     75   2250   2250   4500   267.7   8000 nvlink  900  800     64     90 B300 288 GB
gb200-186gb    b200     80   2500   2500   5000   184.3   8000 nvlink  900  400    225    256 GB200 186 GB
gb300-279gb    b200     80   2500   2500   5000   276.6   8000 nvlink  900  800    225    256 GB300 279 GB
gh200-96gb     h100     67   989.4  989.4 1978.9  94.50  4000 nvlink  150  200    450    500 GH200 96 GB
mi250x         mi250x   47.9  191.5  191.5   -      63.98  1638 nvlink  150  100     36     26 MI250X (one GCD)
mi300x         mi300x  163.4 1307.4 1307.4 2614.9 191.69  5325 nvlink  448  400     64     77 MI300X 192 GB
mi325x         mi300x  163.4 1307.4 1307.4 2614.9 255.69  6000 nvlink  448  400     64     77 MI325X 256 GB
mi355x         mi355x  157.3 2516.6 2516.6 5033.2 287.69  8000 nvlink  537  400     64     77 MI355X 288 GB
"""
"""Peak rates in Tflop/s, "-" where the GPU has none; memory in GiB and GB/s; the link inside a machine per GPU in one
direction; the usual network per GPU; the link to the host in one direction and host memory per GPU, in GB/s.
Of alike names the usual GPU stands first: it is the one that a short name means."""


def _gpu(row: str) -> Gpu:
    """The GPU of a row of the table."""
    name, family, *figures, title = row.split(maxsplit=13)
    link = figures.pop(6)
    fp32, bf16, fp16, fp8, gib, *rest = (0.0 if figure == "-" else float(figure) for figure in figures)
    bandwidth, link_bandwidth, network, host, host_memory = rest
    return Gpu(
        name=name,
        title=title,
        family=family,
        fp32=fp32 * 1e12,
        bf16=(bf16 or fp32) * 1e12,
        fp16=fp16 * 1e12,
        fp8=(fp8 or fp16) * 1e12,
        memory_bytes=int(gib * 2**30),
        memory_bandwidth=bandwidth * 1e9,
        link="nvlink" if link == "nvlink" else "pcie",
        link_bandwidth=link_bandwidth * 1e9,
        network_gbit_s=network,
        host_bandwidth=host * 1e9,
        host_memory_bandwidth=host_memory * 1e9,
        source=_SOURCES[name],
    )


GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in map(_gpu, _TABLE.strip().splitlines()[1:])}
"""The GPUs that are known, by name. The source of each row's figures stands in its `source`."""


def gpu_named(name: str | Gpu) -> Gpu:
    """The GPU of a name: as in `GPUS`, or in any usual spelling ("H100", "NVIDIA A100-SXM4-80GB", "rtx4090")."""
    if isinstance(name, Gpu):
        return name
    words = _words(name)
    matches = [gpu for known, gpu in GPUS.items() if words and words <= _words(known)]
    if matches:
        return matches[0]
    end = did_you_mean(re.sub(r"[\s_]+", "-", name.lower()), GPUS)
    raise ConfigError(f"GPU {name!r} is not in the table{end}")


def _words(name: str) -> set[str]:
    """What distinguishes a name: "NVIDIA A100-SXM4-80GB" as {"a100", "80gb"}.

    Makers, forms and kinds of memory are left out, and what the driver adds to a GH200 (its host memory).
    """
    kinds = r"generation|blackwell|(workstation|server) edition|sxm\d?|hbm\d?e?|oam|\bgpu\b|480gb"
    text = re.sub(rf"nvidia|amd|instinct|geforce|tesla|rtx|{kinds}", " ", name.lower())
    return set(re.findall(r"[a-z0-9]+", re.sub(r"\b(\d+) ?gi?b\b", r"\1gb", text)))
