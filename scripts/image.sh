#!/usr/bin/env bash
# image.sh [BUILD OPTION...]: builds both images of docker/Dockerfile, kvstore:VERSION and kvstore-etcd:3.5, as `docker
# build` would, with docker, podman or buildah. Options go to the builder, e.g. --platform linux/arm64.
#
# From the environment:
#   IMAGE_BUILDER               docker, podman or buildah (default: the first that works)
#   PYTHON_IMAGE, DEBIAN_IMAGE  the images to begin with, e.g. from another registry than Docker Hub
#   BASE_IMAGES=stand-in        begin with stand-ins (base_images.sh), in a storage of the project's own (image_storage.sh)
# pip in the build downloads as pip does on this machine: its index, proxy and certificates (`pip config list`) are
# passed to the build as secrets, which no image keeps. Folders of this machine are not passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
started=$SECONDS
IMAGE_BUILDER=$(scripts/image_builder.sh)
export IMAGE_BUILDER DOCKER_BUILDKIT=1
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kvstore/__init__.py)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

say() { echo "image: $*" >&2; }

# The settings of this machine's pip as a pip.conf. Variables override files; local folders and files do not exist in
# the build.
pip_settings() {
    "${PYTHON:-python3}" -m pip config list 2>/dev/null | sort | sed -nE "s/^(:env:|global)\.([a-z-]+)='(.*)'$/\2 \3/p" | awk '
        BEGIN { print "[global]" }
        $1 ~ /^(default-timeout|extra-index-url|index-url|proxy|retries|timeout|trusted-host)$/ && !seen[$1]++ {
            value = ""
            for (i = 2; i <= NF; i++) if ($i !~ /^(file:|\/)/) value = value " " $i
            if (value) print ($1 == "default-timeout" ? "timeout" : $1) " =" value
        }'
}

build() { # NAME TARGET OPTION...
    local name=$1 target=$2 since=$SECONDS
    shift 2
    say "$name with $IMAGE_BUILDER"
    # shellcheck disable=SC2086
    "$IMAGE_BUILDER" build $options ${PYTHON_IMAGE:+--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"} \
        ${DEBIAN_IMAGE:+--build-arg "DEBIAN_IMAGE=$DEBIAN_IMAGE"} --file docker/Dockerfile --tag "$name" --target "$target" "$@" . || {
        say "$name was not built. If its base image could not be pulled: PYTHON_IMAGE= and DEBIAN_IMAGE= name the images" \
            "of another registry; BASE_IMAGES=stand-in makes them of Debian's packages, for tests (root)"
        exit 1
    }
    say "$name: $((SECONDS - since)) s, $("$IMAGE_BUILDER" images --format '{{.Size}}' "$name")"
}

if [[ ${BASE_IMAGES:-official} == stand-in ]]; then
    settings=$(scripts/image_storage.sh)
    export CONTAINERS_STORAGE_CONF=$settings/storage.conf CONTAINERS_CONF=$settings/containers.conf
    scripts/base_images.sh
fi
pip_settings >"$scratch/pip.conf"
options="--secret id=pip.conf,src=$scratch/pip.conf"
certificates=$("${PYTHON:-python3}" -m pip config list 2>/dev/null | sed -nE "s/^(:env:|global)\.cert='(.*)'$/\2/p" | head -1)
[[ -z $certificates ]] || options="$options --secret id=ca.crt,src=$certificates"
# Formats other than Docker's have no HEALTHCHECK.
[[ $IMAGE_BUILDER == docker ]] || options="$options --format docker --layers --force-rm"

say "two images: one to three minutes, mostly downloads; much less when only kvstore changed"
build "kvstore:$version" server "$@"
build kvstore-etcd:3.5 etcd "$@"
say "both are built: $((SECONDS - started)) s"
