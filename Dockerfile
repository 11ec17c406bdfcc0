# One image for every service of the suite, with the CPU engine. compose.yaml says which container runs what.
FROM python:3.11-slim

# torch's CPU build comes from wherever pip looks; where it finds none, from PyTorch's own index, for this one package.
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app

RUN pip install -q "$TORCH" 2>/dev/null || pip install -q --index-url "$TORCH_INDEX" "$TORCH"

# Dependencies before sources: a changed line of ours does not install them again. The three that are removed are CUDA
# builds, which vLLM's dependencies bring and which break `import transformers` beside a CPU torch.
COPY pyproject.toml ./
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
      print(*p['dependencies'], *p['optional-dependencies']['cpu'], sep='\n')" > /tmp/requirements.txt \
 && pip install -q -r /tmp/requirements.txt \
 && pip uninstall -q -y torchvision torchaudio torchcodec

COPY . .
RUN chmod -R a+rX . \
 && pip install -q --no-deps -e . \
 && useradd --create-home polyphase \
 && mkdir /keys /data && chown polyphase:polyphase /keys /data
USER polyphase

ENV VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
ENTRYPOINT ["python3", "-m", "services.launcher.container"]
CMD ["polyphase", "--help"]
