# CPU:   docker build --build-arg TORCH_INDEX=URL --tag kge-torchrec .
#        URL is the index of CPU builds that PyTorch's site names; without it pip takes its default.
# CUDA:  docker build --build-arg VARIANT=gpu --tag kge-torchrec .
# Use:   docker run --rm --volume "$PWD:/work" --shm-size 4g kge-torchrec train demo
#        docker run --rm --gpus all --entrypoint torchrun kge-torchrec --nproc-per-node 8 -m kge_torchrec train ...
FROM debian:bookworm-slim

ARG VARIANT=cpu
ARG TORCH_INDEX=

# On a GPU's machine Triton compiles kernels with gcc and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 kge

WORKDIR /opt/kge_torchrec
COPY Makefile pyproject.toml setup.py README.md LICENSE ./
COPY configs configs
COPY kge_torchrec kge_torchrec
RUN PIP_NO_CACHE_DIR=1 make setup VARIANT="$VARIANT" TORCH_INDEX="$TORCH_INDEX"

ENV PATH="/opt/kge_torchrec/.venv/bin:$PATH"
USER 1000
WORKDIR /work
ENTRYPOINT ["kge-torchrec"]
CMD ["--help"]
