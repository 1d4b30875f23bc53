#!/usr/bin/env bash
# Sees to it that every program of requirements/programs.txt is there: installs the packages of those that are not, where
# that is possible (root and apt). Tests of a program that stays missing skip; in CI a missing program is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/sbin:/sbin

missing() { # lines "PROGRAM PACKAGE" of what is not there
    local program package
    while read -r program package; do
        [[ $program == \#* || -z $program ]] || command -v "$program" >/dev/null || echo "$program $package"
    done <requirements/programs.txt
}

absent=$(missing)
if [[ -n $absent && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    packages=$(awk '{ print $2 }' <<<"$absent" | sort -u)
    echo "programs: installing" $packages >&2
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # at run level 1 a package does not start its own server
    # shellcheck disable=SC2086
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends $packages; } </dev/null >&2 || true
    absent=$(missing)
fi
if [[ -n $absent ]]; then
    echo "programs: missing, and not installed here (that takes root and apt); tests that need them are skipped:" >&2
    sed 's/\(.*\) \(.*\)/  \1 (Debian package \2)/' <<<"$absent" >&2
    [[ ${CI:-} != true ]]
fi
