# Trains on the photos in a mounted folder:
#   docker build -t everytoken .
#   docker run --rm --gpus all --shm-size 4g -v "$PWD:/work" everytoken train photos
# Without a GPU: the same without --gpus.
# Linted (hadolint), not run by us.
FROM python:3.13-slim AS build
ARG VERSION=0.2.0.dev0
# the version comes from git's tags, which are not copied: docker build --build-arg VERSION=$(git describe --tags)
ENV PIP_NO_CACHE_DIR=1
RUN python -m venv /venv && /venv/bin/pip install torch torchvision
COPY . /src
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_EVERYTOKEN="${VERSION}" /venv/bin/pip install '/src[lab,registry,export]'

FROM python:3.13-slim
RUN useradd --create-home --uid 1000 user
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH
USER 1000
WORKDIR /work
ENTRYPOINT ["everytoken"]
CMD ["--help"]
