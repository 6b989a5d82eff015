#!/usr/bin/env bash
# Runs on a machine with GPUs everything that only a GPU can show, one step after the other (about an hour):
#
#     benchmarks/gpu.sh [FOLDER]        # the outputs go to FOLDER; without one to benchmarks/results/gpu-DATE
#     STEPS="tests load" benchmarks/gpu.sh
#
# doctor   versions, nvidia-smi, `hf-fsdp doctor`
# tests    `pytest -m gpu`: loading, contexts, memory, parity with one process, saving, resuming; two GPUs where there are
# train    the same fine-tune beside its peers: `benchmarks/training.py`
# memory   measured peaks of one rank of 8 and of 64 beside the predicted ones: `benchmarks/foresight.py memory`
# load     loading beside the machine's limit and transformers: `benchmarks/load.py`
# save     saving, likewise: `benchmarks/save.py`
#
# A step that fails ends no other; the exit code is 1 if any failed. Nothing is downloaded: models have random weights.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
out="${1:-benchmarks/results/gpu-$(date +%F)}"
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

doctor() { nvidia-smi; "$python" -m hf_fsdp_tools doctor; }
tests() { "$python" -m pytest -m gpu -v -rfE --tb=short --junitxml "$out/tests.xml" tests; }
train() {
    "$python" benchmarks/training.py --device cuda --models 8b --tuning lora --runs 1 --records "$out/training.jsonl"
}
memory() { "$python" benchmarks/foresight.py memory --device cuda --gpus 8 64 --records "$out/memory.jsonl"; }
load() { "$python" benchmarks/load.py --device cuda --models dense 8b --records "$out/load.jsonl"; }
save() { "$python" benchmarks/save.py --device cuda --models dense --records "$out/save.jsonl"; }

failed=0
for step in ${STEPS:-doctor tests train memory load save}; do
    echo "== $step"
    "$step" 2>&1 | tee "$out/$step.txt" || failed=1
done
exit "$failed"
