# gemmwire in a container. Target cpu serves on any machine, target gpu on one with an SM100 GPU:
#
#   docker build --target cpu -t gemmwire:cpu .
#   docker build --target gpu -t gemmwire:gpu .
#
# pip takes the index that it is given: by the build arguments below, or, with credentials that must not stay in
# the history of a layer, by --secret id=pip.conf,src=FILE (and id=ca.crt for what its `cert` names). On x86-64
# PIP_EXTRA_INDEX_URL has to name PyTorch's CPU index for a small image: PyPI's torch is the CUDA build there.
# BuildKit as it was in Docker 20.10 is enough.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# What both images are built in; it is thrown away.
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_CACHE_DIR=/var/cache/pip \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/gemmwire
ENV PATH=/opt/gemmwire/bin:$PATH
WORKDIR /src
# What is required changes less often than what requires it: this layer is built from the names of the packages
# alone, so that a change of the code installs nothing anew.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p client/gemmwire service/gemmwire_service && \
    touch client/gemmwire/__init__.py service/gemmwire_service/__init__.py

FROM build AS build-cpu
# For the functions that are compiled; the image has no compiler.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt \
    pip install -c constraints.txt ".[service,demo]"
COPY client client
COPY service service
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt \
    pip install --no-deps --force-reinstall .
# Where the architecture has no levels, torch's operators do their work.
RUN (python -m gemmwire_service.compiled || test "$(uname -m)" != x86_64)

# What both images are: the interpreter, a user without rights, and places to write.
# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS base
RUN groupadd --gid 10001 gemmwire && \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/cache/gemmwire \
        --shell /usr/sbin/nologin gemmwire && \
    install -d -o gemmwire -g gemmwire /var/cache/gemmwire && \
    install -d /models
# In a container 0.0.0.0 is the container's own network; who reaches it is decided where the port is published.
ENV PATH=/opt/gemmwire/bin:$PATH \
    HOME=/var/cache/gemmwire \
    XDG_CACHE_HOME=/var/cache/gemmwire \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GEMMWIRE_HOST=0.0.0.0
VOLUME /var/cache/gemmwire
WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-m", "gemmwire_service.healthcheck"]
ENTRYPOINT ["gemmwire-serve"]

FROM base AS cpu
COPY --from=build-cpu /opt/gemmwire /opt/gemmwire

FROM build AS build-gpu
# The compiler of host code is Debian's; nvcc comes from PyPI, of the CUDA that torch is built for.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends g++ && \
    rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt \
    pip install -c constraints.txt ".[gpu,demo]" && \
    toolkit=$(python -c "import importlib.metadata as m; print(m.version('cuda-toolkit'))") && \
    pip install --target /opt/cuda "cuda-toolkit[cccl,crt,cublas,cudart,curand,nvcc,nvrtc,nvvm]==$toolkit"
# The wheels hold libraries as programs load them; a linker looks for names without a version, and for the driver.
RUN mkdir /opt/cuda/stubs && \
    gcc -shared -x c /dev/null -o /opt/cuda/stubs/libcuda.so.1 -Wl,-soname,libcuda.so.1 && \
    ln -s libcuda.so.1 /opt/cuda/stubs/libcuda.so && \
    ln -s lib /opt/cuda/nvidia/cu13/lib64 && \
    for library in /opt/cuda/nvidia/cu13/lib/lib*.so.*; do ln -sf "$library" "${library%%.so.*}.so"; done
# Triton compiles one file of its own at its first launch; docker/cc says how it gets it without a compiler.
COPY docker/cc /opt/gemmwire/bin/cc
RUN mkdir /opt/gemmwire/lib/triton && \
    nvidia=$(python -c "import triton; print(triton.__path__[0])")/backends/nvidia && \
    cp "$nvidia/driver.c" /opt/gemmwire/lib/triton/ && \
    gcc "$nvidia/driver.c" -O3 -shared -fPIC -Wno-psabi -o /opt/gemmwire/lib/triton/driver.so -l:libcuda.so.1 \
        -L/opt/cuda/stubs "-I$nvidia/include" \
        "-I$(python -c "import sysconfig; print(sysconfig.get_paths(scheme='posix_prefix')['include'])")"
ENV CUDA_HOME=/opt/cuda/nvidia/cu13 \
    FLASHINFER_CUBIN_DIR=/opt/gemmwire/lib/cubins \
    FLASHINFER_CUDA_ARCH_LIST="10.0a 10.3a" \
    FLASHINFER_EXTRA_LDFLAGS=-L/opt/cuda/stubs \
    FLASHINFER_WORKSPACE_BASE=/var/cache/flashinfer \
    LD_LIBRARY_PATH=/opt/cuda/stubs
COPY client client
COPY service service
ENV PYTHONPATH=/src/client:/src/service
# Minutes to an hour, by the number of cores; again only what FlashInfer's own sources have changed of.
RUN --mount=type=cache,target=/var/cache/flashinfer \
    python -m gemmwire_service.bake compile mxfp8_quantization_sm100 trtllm_utils mxfp8_gemm_cutlass
# Of a mirror of FlashInfer's cubins, where there is one.
ARG FLASHINFER_CUBINS_REPOSITORY
RUN --mount=type=cache,target=/var/cache/flashinfer \
    python -m gemmwire_service.bake fetch && \
    python -m gemmwire_service.bake compile trtllm_gemm
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/var/cache/pip \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt \
    pip install --no-deps --force-reinstall .
RUN (env -u PYTHONPATH python -m gemmwire_service.compiled || test "$(uname -m)" != x86_64)

FROM base AS gpu
COPY --from=build-gpu /opt/gemmwire /opt/gemmwire
# From here on nothing is fetched and nothing compiled by nvcc: what is missing fails at the start.
ENV CC=/opt/gemmwire/bin/cc \
    FLASHINFER_CUBIN_DIR=/opt/gemmwire/lib/cubins \
    FLASHINFER_DISABLE_JIT=1 \
    FLASHINFER_NO_DOWNLOAD=1 \
    FLASHINFER_WORKSPACE_BASE=/var/cache/gemmwire \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    TRITON_CACHE_DIR=/var/cache/gemmwire/triton \
    TRITON_LIBCUDA_PATH=/opt/gemmwire/lib
RUN --mount=type=tmpfs,target=/tmp \
    FLASHINFER_WORKSPACE_BASE=/tmp python -m gemmwire_service.bake check
