# syntax=docker/dockerfile:1
# docs/how-to/container.md describes the use. TORCH: cpu, or cuda for torch with its CUDA libraries.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
RUN python -m venv /opt/autotune
ENV PATH=/opt/autotune/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY . .
# hadolint ignore=DL3013
RUN case "$TORCH" in \
        cpu) set -- --constraint constraints/cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu ;; \
        cuda) set -- ;; \
        *) echo "TORCH is cpu or cuda, not $TORCH" >&2; exit 2 ;; \
    esac \
    && pip install "$@" '.[postgres,report,tables,tensorboard,video]'

FROM python:${PYTHON}-slim
# torch and DeepSpeed look for a compiler at run time. tini passes signals on to autotune, and reaps processes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/autotune /opt/autotune
RUN useradd --uid 1000 --create-home autotune && mkdir /work && chown autotune /work
# HOME is a folder in which any user may write, for `docker run --user`.
ENV PATH=/opt/autotune/bin:$PATH \
    HOME=/tmp \
    XDG_DATA_HOME=/work/.autotune/data \
    XDG_CACHE_HOME=/work/.autotune/cache \
    HF_HUB_OFFLINE=1 \
    PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
ENTRYPOINT ["tini", "--", "autotune"]
CMD ["--help"]
