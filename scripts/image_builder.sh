#!/usr/bin/env bash
# image_builder.sh: prints the program that builds images here: $IMAGE_BUILDER, or the first of docker, podman and
# buildah that works. docker counts only if its daemon answers.
set -euo pipefail
for builder in ${IMAGE_BUILDER:-docker podman buildah}; do
    if "$builder" version >/dev/null 2>&1; then
        echo "$builder"
        exit
    fi
done
echo "image: no program that builds images works here (tried: ${IMAGE_BUILDER:-docker podman buildah}); on Debian:" \
    "apt-get install buildah, or start the Docker daemon; IMAGE_BUILDER= names another one" >&2
exit 1
