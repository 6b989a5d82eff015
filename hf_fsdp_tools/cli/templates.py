"""Files that start a launch command on machines of others: SLURM, SkyPilot, Kubernetes, Hugging Face Jobs.

Their texts lie in `templates/*.j2`, for jinja2.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.text import comment

if TYPE_CHECKING:
    from hf_fsdp_tools import LaunchConfig


_CPUS_PER_PROCESS = 8
"""CPU cores that are asked for per process: the process itself, its loader's workers, NCCL's threads. (assumed)"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be started, and with what."""

    config: "LaunchConfig"
    launch: Sequence[str]
    """Words of the launch command on one machine, which name a launch file or a preset."""
    path: Path
    """That file, next to which the template's file lies."""
    text: str
    """What it holds."""
    command: str
    """The command line that makes both."""
    gpu: str | None
    """Name of the GPUs in `GPUS`; None where none was given, and for CPUs."""

    @property
    def kind(self) -> str:
        """The recipe, or `train` for a script of the user's."""
        words = list(self.launch)
        return words[words.index("hf-fsdp") + 1] if "hf-fsdp" in words else "train"

    @property
    def name(self) -> str:
        """A name that a machine can have too: the recipe and the launch file."""
        return f"{self.kind}-{re.sub('[^a-z0-9]+', '-', self.path.stem.lower()).strip('-') or 'run'}"[:50].rstrip("-")

    @property
    def devices(self) -> int:
        """Processes, and GPUs, of one machine."""
        return self.config.num_processes // self.config.num_machines

    @property
    def cpus(self) -> int:
        """CPU cores of one machine."""
        return _CPUS_PER_PROCESS * self.devices

    def line(self, file: str, rank: str, port: str | None = None) -> str:
        """The launch command as a shell reads it: its file where it will lie, this machine's rank and the port
        at MAIN_ADDRESS as the shell has them, and arguments of the shell's own."""
        at = next(at for at, word in enumerate(self.launch) if word in ("--config_file", "--preset"))
        place = ""
        if self.config.num_machines > 1:
            port = port or str(self.config.main_process_port)
            place = f'--machine_rank "{rank}" --main_process_ip "$MAIN_ADDRESS" --main_process_port "{port}" '
        before, after = shlex.join(self.launch[:at]), shlex.join(self.launch[at + 2 :])
        return f'{before} {self.launch[at]} {shlex.quote(file)} {place}{after} "$@"'


@dataclass(frozen=True, kw_only=True)
class Template:
    """A kind of file that starts a job."""

    about: str
    file: str
    """Name of its text in `templates/`."""
    suffix: str
    """End of the file's name, after that of the launch file."""
    start: str
    """The command that starts `{file}`."""

    def path(self, launch_file: Path) -> Path:
        """Where the file lies: next to the launch file."""
        return launch_file.with_suffix(self.suffix)

    def start_command(self, launch_file: Path) -> str:
        """The command that starts the job, without arguments of the user's own."""
        return self.start.format(file=shlex.quote(str(self.path(launch_file))))

    def make(self, job: Job, file: str) -> str:
        """The text, given the file's name."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).with_name("templates")),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters |= {"quote": shlex.quote, "comment": comment}
        return environment.get_template(self.file).render(job=job, file=file, rented=_rented(self, job))


def _rented(template: Template, job: Job) -> str:
    """What is rented, by the name that its owner has for it; "" where the template names no machine."""
    from hf_fsdp_tools.foresight.timing.hardware import GPUS

    gpu = GPUS.get(job.gpu or "")
    if template is TEMPLATES["skypilot"] and not job.config.use_cpu:
        if gpu is None or not gpu.skypilot:
            names = ", ".join(name for name, each in GPUS.items() if each.skypilot)
            raise ConfigError(
                f"--skypilot rents GPUs by name and has none for {job.gpu or 'those of this machine'}; say with --gpu "
                f"one of {names}"
            )
        return gpu.skypilot
    if template is not TEMPLATES["hf-jobs"]:
        return ""
    if job.config.num_machines > 1:
        raise ConfigError(
            f"--hf-jobs: a job has one machine, and these are {job.config.num_machines}; use --num-machines 1 and at "
            "most --num-processes 8, or --skypilot or --kubernetes"
        )
    if job.config.use_cpu:
        return "cpu-performance"
    flavors = {name: dict(word.split(":") for word in each.hf_flavors.split()) for name, each in GPUS.items()}
    if str(job.devices) not in flavors.get(job.gpu or "", {}):
        known = ", ".join(f"{name} x {'/'.join(counts)}" for name, counts in flavors.items() if counts)
        asked = f"{job.devices} x {job.gpu}" if job.gpu else "the GPUs of this machine"
        raise ConfigError(
            f"--hf-jobs: there is no flavor with {asked}; say with --gpu and --num-processes one of {known}"
        )
    return flavors[job.gpu or ""][str(job.devices)]


TEMPLATES = {
    "slurm": Template(
        about="the batch script for `sbatch`", file="slurm.sbatch.j2", suffix=".sbatch", start="sbatch {file}"
    ),
    "skypilot": Template(
        about="the task for `sky launch`", file="skypilot.yaml.j2", suffix=".sky.yaml", start="sky launch {file}"
    ),
    "kubernetes": Template(
        about="the job for `kubectl apply`",
        file="kubernetes.yaml.j2",
        suffix=".k8s.yaml",
        start="IMAGE=IMAGE CLAIM=CLAIM envsubst '$IMAGE $CLAIM $ARGS' < {file} | kubectl apply -f -",
    ),
    "hf-jobs": Template(
        about="the script that calls `hf jobs run`",
        file="hf-jobs.sh.j2",
        suffix=".jobs.sh",
        start="IMAGE=IMAGE bash {file}",
    ),
}
"""Kinds of files, by the option that asks for one."""
