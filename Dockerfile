# The suite's images; compose.yaml says which container runs what.
#
#   docker build --target cpu -t polyphase:cpu .     every service, with the CPU engine
#   docker build --target gpu -t polyphase:gpu .     the same on vLLM's own CUDA image
#
# Where pip finds packages, and by which certificates, is the builder's own affair: `--build-arg PIP_INDEX_URL=…`.
ARG PYTHON_IMAGE=python:3.11-slim
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

# What is to be installed. Docker compares the lists, so that nothing is installed again for another line of pyproject.
FROM ${PYTHON_IMAGE} AS wanted
COPY pyproject.toml /
RUN python3 -c "import tomllib; p = tomllib.load(open('/pyproject.toml', 'rb'))['project']; \
      ours = [*p['dependencies'], 'hatchling==1.27.0', 'editables']; \
      open('/cpu.txt', 'w').write('\n'.join([*ours, *p['optional-dependencies']['cpu']])); \
      open('/gpu.txt', 'w').write('\n'.join([*ours, 'accelerate>=1.6,<2']))"

# What the CPU image needs, in one folder; what built it stays behind.
FROM ${PYTHON_IMAGE} AS environment
# CPU builds of torch and torchvision come from wherever pip looks; where it finds none, from PyTorch's own index, for
# these packages alone.
ARG TORCH=torch==2.13.0+cpu
ARG TORCHVISION=torchvision==0.28.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN apt-get update -q && apt-get install -y -q --no-install-recommends binutils && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv \
 && { pip install -q "$TORCH" 2>/dev/null || pip install -q --index-url "$TORCH_INDEX" "$TORCH"; }
# Dependencies before sources: a changed line of ours does not install them again.
COPY --from=wanted /cpu.txt /tmp/
RUN pip install -q -r /tmp/cpu.txt
# CUDA builds, which break `import transformers` beside a CPU torch; triton, a compiler for GPUs; tests and headers of
# other libraries, and vLLM's debug symbols. Without a CPU build of torchvision its CUDA build stays, as in the Makefile.
RUN { pip install -q --no-deps "$TORCHVISION" 2>/dev/null \
      || pip install -q --no-deps --index-url "$TORCH_INDEX" "$TORCHVISION" 2>/dev/null \
      || : > "$(echo /opt/venv/lib/python3*/site-packages)/torchvision/_meta_registrations.py"; } \
 && pip uninstall -q -y torchaudio torchcodec triton \
 && cd /opt/venv/lib/python3*/site-packages \
 && strip --strip-unneeded vllm/*.so \
 && rm -rf torch/include torch/share torch/test pyarrow/include pyarrow/tests \
 && find numpy scipy pandas numba llvmlite sympy networkx plotly -type d -name tests -prune -exec rm -rf {} +

FROM ${PYTHON_IMAGE} AS cpu
COPY --from=environment /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
    HF_HOME=/cache/huggingface VLLM_CACHE_ROOT=/cache/vllm
WORKDIR /app
RUN useradd --create-home --uid 10001 polyphase \
 && mkdir /keys /api-keys /database-keys /data /cache /models \
 && chown polyphase:polyphase /keys /api-keys /database-keys /data /cache /models
COPY . .
RUN chmod -R a+rX . && pip install -q --no-cache-dir --no-deps --no-build-isolation -e .
USER polyphase
ENTRYPOINT ["python3", "-m", "services.launcher.container"]
CMD ["polyphase", "--help"]

# vLLM's own image has the engine, CUDA and torch; what else the suite imports is added and none of that is changed.
FROM ${VLLM_IMAGE} AS gpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HOME=/cache/huggingface VLLM_CACHE_ROOT=/cache/vllm
WORKDIR /app
COPY --from=wanted /gpu.txt /tmp/
RUN python3 -m pip freeze | grep -iE '^(vllm|torch|torchvision|torchaudio|triton|transformers|flashinfer[a-z-]*)==' \
      > /tmp/kept.txt \
 && python3 -m pip install -q -r /tmp/gpu.txt -c /tmp/kept.txt
RUN useradd --create-home --uid 10001 polyphase \
 && mkdir -p /keys /api-keys /database-keys /data /cache /models \
 && chown polyphase:polyphase /keys /api-keys /database-keys /data /cache /models
COPY . .
RUN chmod -R a+rX . && python3 -m pip install -q --no-deps --no-build-isolation -e .
USER polyphase
ENTRYPOINT ["python3", "-m", "services.launcher.container"]
CMD ["polyphase", "--help"]
