"""The tests as other machines would run them: with other kernels, numbers of threads and orders, and on a busy machine.

    python -m tests.machines                  # the settings that this processor has
    python -m tests.machines NAME [WORDS]     # the tests under one of them; the words go to pytest
    python -m tests.machines today [WORDS]    # under that of this date

A number that only one processor gives is no number to test for.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
CAPABILITIES = {"default": "", "avx2": "avx2", "avx512": "avx512f"}
"""Of torch's own kernels (ATEN_CPU_CAPABILITY), and what /proc/cpuinfo calls them."""
KERNELS = {"AVX2": "avx2", "AVX512_CORE": "avx512bw", "AVX512_CORE_BF16": "avx512_bf16", "AVX512_CORE_AMX": "amx_tile"}
"""Those of oneDNN (ONEDNN_MAX_CPU_ISA)."""
OTHERS = {
    "oneDNN off": {},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
    "shuffled": {},
    "busy": {},
}


def settings() -> dict[str, dict[str, str]]:
    """Variables of the environment by the name of a setting, as far as this processor has them."""
    flags = {*Path("/proc/cpuinfo").read_text().split(), ""}
    known = [[name for name, flag in kinds.items() if flag in flags] for kinds in (CAPABILITIES, KERNELS)]
    pairs = {f"{a}, {b}": {"ATEN_CPU_CAPABILITY": a, "ONEDNN_MAX_CPU_ISA": b} for a, b in product(*known)}
    return pairs | OTHERS


def run(name: str, words: list[str]) -> int:
    """The exit status of pytest under a setting."""
    environment = os.environ | settings()[name]
    options = re.findall(r"bin/pytest (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)[-1].split()
    command = [sys.executable, "-m", "pytest", "-q", *options]
    with ExitStack() as stack:
        if name == "oneDNN off":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            write_backend(Path(folder))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        if name == "shuffled":
            command += ["--shuffle", str(datetime.date.today().toordinal())]
        for _ in range((os.cpu_count() or 1) * (name == "busy")):
            stack.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
        return subprocess.run([*command, *words], cwd=ROOT, env=environment).returncode


def write_backend(folder: Path) -> None:
    """A package that torch loads by itself at the end of `import torch`, in all processes: no variable turns oneDNN
    off."""
    code = "def load():\n    import torch\n    torch._C._set_mkldnn_enabled(False)\n"
    (folder / "without_onednn.py").write_text(code)
    about = folder / "without_onednn-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: without_onednn\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nwithout_onednn = without_onednn:load\n")


def main() -> int:
    names = list(settings())
    if not sys.argv[1:]:
        print(*names, sep="\n")
        return 0
    name, *words = sys.argv[1:]
    name = names[datetime.date.today().toordinal() % len(names)] if name == "today" else name
    print(f"as on another machine: {name}", flush=True)
    return run(name, words)


if __name__ == "__main__":
    sys.exit(main())
