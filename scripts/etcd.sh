#!/usr/bin/env bash
# Sees to it that etcd, where the nodes of a cluster register, is there. Without it those tests skip; in CI it is an
# error.
set -euo pipefail
have() { command -v "$1" >/dev/null; }

if ! have etcd && [[ $(id -u) == 0 ]] && have apt-get; then
    echo "etcd: installing etcd-server" >&2
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # at run level 1 the package does not start its own server
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends etcd-server; } </dev/null >&2 || true
fi
if ! have etcd; then
    echo "etcd: no etcd, and it cannot be installed here (that takes root and apt): its tests are skipped" >&2
    [[ ${CI:-} != true ]]
fi
