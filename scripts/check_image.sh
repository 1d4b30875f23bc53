#!/usr/bin/env bash
# check_image.sh [PYTEST ARGUMENT...]: builds both images and runs tests/containers on them with podman, inside the
# environment of run.sh. Needs root. With BASE_IMAGES=official in the environment, builds use the base images that the
# Dockerfile names, from their registry, instead of stand-ins (base_images.sh).
#
# Images and containers are in the project's own storage. Containers run in namespaces of this run, so their bridges,
# mounts and processes are separate from the machine's, and always disappear when the run ends.
set -euo pipefail
export IMAGE_BUILDER=buildah BASE_IMAGES=${BASE_IMAGES:-stand-in}
export BUILDAH_ISOLATION=chroot # it needs neither control groups nor its own network
[[ $(id -u) == 0 ]] || { echo "check-image: run as root, which containers with their own networks need" >&2; exit 1; }
CI=true scripts/programs.sh requirements/image-programs.txt
settings=$(scripts/image_storage.sh)
export CONTAINERS_STORAGE_CONF=$settings/storage.conf CONTAINERS_CONF=$settings/containers.conf KVSTORE_IMAGES=1
exec 9>"$settings/lock"
flock -n 9 || { echo "check-image: waiting for another run, which uses the storage $settings" >&2 && flock 9; }

packages=$settings/packages
if ! cmp -s requirements/image.txt "$packages/image.txt"; then
    rm -rf "$packages"
    python -m pip install -q --no-deps --target "$packages" -r requirements/image.txt
    cp requirements/image.txt "$packages"
fi
export PYTHONPATH=$PYTHONPATH:$packages

remove_rest() {
    find /sys/fs/cgroup -depth -type d -path '*/libpod_parent*' -delete 2>/dev/null || true # podman's, unless it runs
    rm -rf /run/kvstore-containers
}
trap remove_rest EXIT

unshare --mount scripts/image.sh 9>&-
if [[ $BASE_IMAGES == official ]]; then
    buildah pull "docker.io/$(sed -nE 's/^ +image: (prom\/prometheus:.*)$/\1/p' docker/compose.yaml)" >/dev/null 9>&-
fi
inside='mount -t tmpfs tmpfs /run
ip link set lo up
podman rm --all --force >/dev/null
podman volume prune --force >/dev/null
podman image prune --force --filter until=168h >/dev/null
python -m pytest -v tests/containers "$@"'
unshare --net --mount --pid --fork --kill-child --mount-proc bash -euc "$inside" check-image "$@" 9>&-
