# Stands in for python:3.12-slim-trixie in tests (scripts/base_images.sh), with Debian's own Python. Like the official
# image it has `python` and `pip` in /usr/local/bin, a pip that may remove itself, headers, ensurepip with its wheel, and a
# standard library that is not compiled.
ARG DEBIAN_IMAGE=debian:trixie-slim
FROM ${DEBIAN_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates netbase python3-dev python3-venv tzdata \
    && rm -rf /var/lib/apt/lists/*
COPY certificates /etc/ssl/certs/ca-certificates.crt
RUN library=$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))') \
    && wheel=$(echo /usr/share/python-wheels/pip-*.whl) \
    && rm "$library/EXTERNALLY-MANAGED" \
    && python3 "$wheel/pip" install --quiet --no-index --root-user-action=ignore "$wheel" \
    && mkdir -p "$library/ensurepip/_bundled" \
    && mv "$wheel" "$library/ensurepip/_bundled" \
    && rm -r /usr/share/python-wheels \
    && ln -s /usr/bin/python3 /usr/local/bin/python \
    && find "$library" -name '*.pyc' -delete
ENV LANG=C.UTF-8
CMD ["python3"]
