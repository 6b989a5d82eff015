#!/usr/bin/env bash
# What a GPU shows, with one command, on one page: benchmarks/results/gpu-NAME-DATE.md, and JSON lines beside it.
#
#     benchmarks/gpu.sh                 # all steps; BUDGET_S=3600 for all in one go (reckoned: 45 minutes)
#     benchmarks/gpu.sh 1-4             # some steps; their records are added to those of the day
#     benchmarks/gpu.sh 6 --only LoRA   # parts whose name holds a text; --list names all parts
#     benchmarks/gpu.sh --resume        # what has not passed yet today
#     benchmarks/gpu.sh --small         # tiny sizes, to try the programs
#     benchmarks/gpu.sh --report A.jsonl B.jsonl --output PAGE.md    # one page of several runs; runs nothing
#
# Steps:
#   1  versions, nvidia-smi, hf-fsdp doctor
#   2  tests marked gpu
#   3  contexts: each rank on its own GPU alone (2 GPUs or more)
#   4  loading, warm and cold, and saving, beside the limit of the machine and transformers
#   5  the recipe, and short runs: CPU offload, fp16, whole parameters, LoRA, QLoRA
#   6  LoRA at 8 B beside its peers; full fine-tuning and LoRA at 1 to 8 B, compiled too, beside plain transformers
#   7  peak memory of one rank of 8 and of 64 against prediction
#   8  two GPUs: the same training as on one, saving, resuming
#
# A step that fails ends no other: its last lines are on the page. What cannot run here (no GPU, one GPU, a package that
# is not installed, too little memory) is said in one line. Nothing is downloaded: models have random weights and are
# made on the GPU. Each part has a time limit; exit code 1 says that a part failed.
#
# Steps run in the order 1, 2, 3, 5, 6, 7, 4, 8. A trace of a step, gpu-trace-1b.json.gz, stays beside the page.
# Where a command may take ten minutes only: BUDGET_S=560 and steps 1-3, then 5, then 6, then 7, 4, 8. The records of a day
# are added up where OUT keeps them; where it does not, --report joins them.
#
# Variables: OUT (folder of page and records), SCRATCH (folder for up to 28 GB of models, removed at the end; it should
# be on a disk, for a cold page cache), BUDGET_S (seconds, 1800; what is not begun by then is not run), SMALL=1, PYTHON.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.gpu.run "$@"
