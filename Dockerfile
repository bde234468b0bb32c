# Trainer, environment server and retrieval server.
#
#   docker build -t stppo .                             CPU
#   docker build -t stppo --build-arg DEVICE=gpu13 .    CUDA 13; gpu is CUDA 12 and tpu a TPU
#   docker run --rm -v "$PWD/runs:/stppo/runs" stppo --workdir=runs/first
#
# The image has the libraries of CUDA from PyPI. The host needs the driver and NVIDIA's container
# toolkit. User 1000 runs it, so that user must be able to write to what you mount.
FROM python:3.13-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff ./
COPY experiments experiments
COPY stppo_jax stppo_jax
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels .

FROM python:3.13-slim-bookworm
ARG DEVICE=
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[serve,openenv,bucket${DEVICE:+,$DEVICE}]"
RUN useradd --uid=1000 --create-home stppo && mkdir -p /stppo/runs && chown -R stppo /stppo
USER 1000
WORKDIR /stppo
ENTRYPOINT ["stppo"]
CMD ["--help"]
