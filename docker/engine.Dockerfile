# The engine: token ids, KV pages, the GPU. Build from the root of the repository:
#   docker build -f docker/engine.Dockerfile -t tidemill-engine .
# The wheels of torch bring CUDA; the driver comes from the host (NVIDIA container toolkit). The base
# needs Python 3.11 or newer with its headers and its venv module.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# requirements/cpu.lock and torch's index of CPU builds make an engine without CUDA (compose.yaml).
ARG LOCK=requirements/gpu.lock
ARG PIP_EXTRA_INDEX_URL
# engine,flash adds FlashAttention 4 (compute capability 9 and 10).
ARG EXTRAS=engine
WORKDIR /src
RUN python3 -m venv /venv
COPY requirements requirements
COPY pyproject.toml README.md LICENSE ./
# Dependencies first: they are gigabytes and change rarely, so they get a layer of their own.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    mkdir tidemill && printf '__version__ = "0"\n' > tidemill/__init__.py \
    && /venv/bin/pip install --quiet --no-cache-dir -c "${LOCK}" "setuptools>=77" ".[${EXTRAS}]"
COPY proto proto
COPY tidemill tidemill
COPY frontend frontend
COPY engine_service engine_service
RUN /venv/bin/pip install --quiet --no-cache-dir --no-deps --no-build-isolation --force-reinstall . \
    && /venv/bin/pip check \
    && /venv/bin/pip uninstall --quiet --yes pip

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="tidemill-engine" \
      org.opencontainers.image.description="Tidemill: autoregressive and diffusion models on GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
# Triton compiles the launchers of its kernels with a C compiler when the engine starts.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /models /cache \
    && chown 65532:65532 /models /cache
COPY --from=build /venv /venv
COPY docker/healthcheck.py /app/healthcheck.py
# Writable are /models (what the hub sends), /cache (compiled kernels) and /tmp; give each a volume
# and the rest may be read-only. LOGNAME: there is no account behind the number below.
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    LOGNAME=tidemill \
    HF_HOME=/models \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=/cache/flash-attention \
    QUACK_CACHE_DIR=/cache/quack \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    TIDEMILL_HOST=0.0.0.0
USER 65532:65532
EXPOSE 50061
# The first start downloads and compiles; what takes longer than the start period is not ready yet.
HEALTHCHECK --interval=5s --timeout=3s --start-period=600s --retries=3 \
    CMD ["python3", "/app/healthcheck.py", "TIDEMILL_HEALTH_PORT", "TIDEMILL_ENGINE_PORT=50061"]
ENTRYPOINT ["tidemill", "engine"]
