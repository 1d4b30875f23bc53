#!/usr/bin/env bash
# programs.sh [LIST]: installs the packages of all missing programs of LIST (default: requirements/programs.txt) if it
# can, which takes root and apt. Tests that need a missing program are skipped; in CI a missing program is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/sbin:/sbin
list=${1:-requirements/programs.txt}

missing() { # prints a line "PROGRAM PACKAGE" for each missing program
    local program package
    while read -r program package; do
        [[ $program == \#* || -z $program ]] || command -v "$program" >/dev/null || echo "$program $package"
    done <"$list"
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
    echo "programs: these are missing and were not installed (it takes root and apt); their tests are skipped:" >&2
    sed 's/\(.*\) \(.*\)/  \1 (Debian package \2)/' <<<"$absent" >&2
    [[ ${CI:-} != true ]]
fi
