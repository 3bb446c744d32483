# The frontend: text in, text out, no torch. Build from the root of the repository:
#   docker build -f docker/frontend.Dockerfile -t tidemill-frontend .
# Any image with Python 3.11 or newer and its venv module serves as a base.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# EndpointSlices are read with a library of their own; EXTRAS=frontend leaves it out.
ARG EXTRAS=frontend,kubernetes
WORKDIR /src
RUN python3 -m venv /venv
COPY requirements requirements
COPY pyproject.toml README.md LICENSE ./
# Dependencies first: they change rarely, so they get a layer of their own, and the lock names all of
# them, so that nothing is resolved (`pip check` below tells what is missing). A mirror of the package
# index, with its password if it has one, comes as a secret (id pip, a pip.conf) and stays out of the
# image.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    mkdir tidemill && printf '__version__ = "0"\n' > tidemill/__init__.py \
    && /venv/bin/pip install --quiet --no-cache-dir --no-deps -r requirements/frontend.lock \
    && /venv/bin/pip install --quiet --no-cache-dir --no-build-isolation \
        -c requirements/cpu.lock ".[${EXTRAS}]"
COPY proto proto
COPY tidemill tidemill
COPY engine_service engine_service
COPY frontend frontend
# pip stays behind: nothing installs anything in a running container.
RUN /venv/bin/pip install --quiet --no-cache-dir --no-deps --no-build-isolation \
        --force-reinstall . \
    && /venv/bin/pip check \
    && /venv/bin/pip uninstall --quiet --yes pip setuptools

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="tidemill-frontend" \
      org.opencontainers.image.description="Tidemill: OpenAI-compatible HTTP and gRPC before engines" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /venv /venv
COPY docker/healthcheck.py /app/healthcheck.py
# Everything outside of /tmp may be read-only: bytecode is compiled already, and /tmp holds the
# tokenizer that the engine sends.
ENV PATH=/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    TIDEMILL_HOST=0.0.0.0
# By number, so that Kubernetes can see that it is not root.
USER 65532:65532
EXPOSE 8000 50051
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python3", "/app/healthcheck.py", "TIDEMILL_HEALTH_PORT", "TIDEMILL_GRPC_PORT=50051"]
ENTRYPOINT ["tidemill", "frontend"]
