# Mooncake's master and the owner of the pool's memory; compose starts one container of each from this image.
FROM docker.io/library/python:3.12-slim-bookworm
ARG MOONCAKE=mooncake-transfer-engine-non-cuda
ARG PIP_CERT
RUN apt-get update \
 && apt-get install -y --no-install-recommends libibverbs1 libcurl4 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "${MOONCAKE}>=0.3.13" && useradd --uid 10001 --create-home specfleet
USER specfleet
CMD ["mooncake_master", "--help"]
