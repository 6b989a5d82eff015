# This package, its recipes and their libraries at the versions of constraints.txt, on PyTorch's own image for CUDA 13.0.
#
#   docker build -t hf-fsdp-tools .
#   docker run --rm --gpus all --ipc=host -v "$PWD/outputs:/workspace/outputs" hf-fsdp-tools     # the README's first command
#   docker run --rm --gpus all --ipc=host -v "$PWD:/workspace" hf-fsdp-tools hf-fsdp finetune --model_name_or_path NAME …
#
# Without --gpus it trains on two CPU processes. --ipc=host gives NCCL and the loaders' workers shared memory.
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 HF_HOME=/workspace/hf-home
COPY . /opt/hf_fsdp_tools
# torch stays the image's own: it has the version that constraints.txt names.
RUN pip install -c /opt/hf_fsdp_tools/constraints.txt '/opt/hf_fsdp_tools[recipes]'
WORKDIR /workspace
CMD ["hf-fsdp", "finetune"]
