# syntax=docker/dockerfile:1
# Images of persia. None runs as root; no compiler is in any of them.
#
#   docker build --target cpu      -t persiaml/persia-cpu-runtime .
#   docker build --target cuda     -t persiaml/persia-cuda-runtime .
#   docker build --target operator -t persiaml/persia-k8s-operator .
ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS base
ENV PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN useradd --uid 1000 --create-home persia \
    && install --directory --owner persia /data

# The wheel, built once: it holds no CUDA code, so both runtimes take it.
FROM base AS wheel
# Newest of the distribution: it is rebuilt to get its fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libasio-dev libzstd-dev libxxhash-dev libssl-dev \
       libnghttp2-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY native native
COPY persia persia
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM base AS runtime
# What the wheel's module needs beside the libraries of the base image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnghttp2-14 \
    && rm -rf /var/lib/apt/lists/*
COPY examples /opt/persia/examples
WORKDIR /opt/persia
CMD ["persia-launcher", "--help"]

FROM runtime AS cpu
ARG TORCH=torch==2.13.0
# Without its CUDA libraries PyTorch takes a tenth of the space. The version is the argument's.
# hadolint ignore=DL3013
RUN pip install "${TORCH}" --index-url https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3013
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/persia-*.whl) && pip install "${wheel}[examples]"
USER 1000

FROM runtime AS cuda
ARG TORCH=torch==2.13.0
# These wheels bring the CUDA libraries; the host brings the driver.
# hadolint ignore=DL3013
RUN pip install "${TORCH}"
# hadolint ignore=DL3013
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    wheel=$(echo /wheels/persia-*.whl) && pip install "${wheel}[examples]"
USER 1000

FROM base AS operator
RUN --mount=type=bind,source=k8s,target=/k8s,rw pip install /k8s
USER 1000
ENTRYPOINT ["persia-k8s-utils"]
CMD ["operator"]
