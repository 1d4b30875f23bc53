#!/usr/bin/env bash
# image_storage.sh: writes settings with which podman and buildah keep this project's images and containers apart from
# all others on this machine, and prints their folder. Programs find them by two variables:
#   CONTAINERS_STORAGE_CONF=FOLDER/storage.conf CONTAINERS_CONF=FOLDER/containers.conf podman images
#
# They are kept apart because the stand-ins of base_images.sh have the names of official images. In the usual storage,
# every later build on this machine would use them. The storage is in $KVSTORE_CACHE and is kept between runs. To remove
# it, run `podman system reset --force` with the same variables.
set -euo pipefail
cache=${KVSTORE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstore}/containers
state=/run/kvstore-containers # state that must not outlive a restart of the machine
mkdir -p "$cache"

# If no overlays can be mounted, layers are copied instead, which takes more space and time.
for driver in overlay vfs; do
    echo "[storage]
driver = '$driver'
graphroot = '$cache/$driver'
runroot = '$state/storage'" >"$cache/storage.conf"
    if CONTAINERS_STORAGE_CONF=$cache/storage.conf "${1:-buildah}" info >"$cache/info" 2>&1; then
        break
    fi
    [[ $driver != vfs ]] || { cat "$cache/info" >&2; exit 1; }
done

# systemd is not needed: podman makes the control groups itself, and writes its events to a file. The runtime is runc,
# since crun does not work with groups of version 1 on new kernels. Podman's own limits of open files and processes need
# a right that even root lacks on some systems.
echo "[containers]
default_ulimits = ['nofile=16384:16384', 'nproc=16384:16384']

[engine]
runtime = 'runc'
cgroup_manager = 'cgroupfs'
events_logger = 'file'
lock_type = 'file'
tmp_dir = '$state/libpod'

[network]
network_backend = 'netavark'
network_config_dir = '$cache/networks'" >"$cache/containers.conf"
echo "$cache"
