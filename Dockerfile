# syntax=docker/dockerfile:1
# The image for GPU nodes: trainer ranks, SGLang servers and the router all run from it.
#
#   docker build -t megatron-stare .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v /models:/models -v $PWD/runs:/app/runs \
#     megatron-stare train configs/NAME.yaml
#
# Not built or run yet (docs/gpu.md); what is checked is that the pinned versions agree with one another.
ARG CUDA=13.0.2

FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04 AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
      git python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /app
COPY requirements/gpu.txt requirements/
# All versions are decided (requirements/gpu.in says how), so nothing may bring another one in.
RUN pip install --no-deps -r requirements/gpu.txt

# Compiled against the torch above. Hopper and Blackwell; fewer architectures build faster.
ARG ARCHITECTURES="90;100"
ARG JOBS=8
ENV MAX_JOBS=${JOBS} NVTE_CUDA_ARCHS=${ARCHITECTURES} NVTE_FRAMEWORK=pytorch
RUN pip install --no-deps --no-build-isolation transformer-engine-torch==2.20.2
# Fused Adam and gradient-accumulation kernels for Megatron. `--build-arg APEX=` leaves it out: Transformer
# Engine has both. The package of that name on PyPI is another one.
ARG APEX=https://github.com/NVIDIA/apex.git
RUN if [ -n "$APEX" ]; then \
      TORCH_CUDA_ARCH_LIST="$(echo "$ARCHITECTURES" | sed -E 's/([0-9]+)([0-9])/\1.\2/g')" \
      APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-deps --no-build-isolation "git+$APEX"; fi

FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04
# SGLang and Triton compile kernels while they run: hence the compiler and CUDA's headers here too.
RUN apt-get update && apt-get install -y --no-install-recommends \
      build-essential git libnuma1 numactl python3.12-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline \
    CUDA_DEVICE_MAX_CONNECTIONS=1
WORKDIR /app
COPY pyproject.toml README.md ./
COPY megatron_stare megatron_stare
COPY checkpoints_tools checkpoints_tools
COPY configs configs
RUN pip install --no-deps --no-build-isolation -e . && megatron-stare --version
ENTRYPOINT ["megatron-stare"]
