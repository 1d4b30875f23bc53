#!/usr/bin/env bash
# wheel.sh FOLDER: builds the wheel for one Python version into FOLDER, from a copy of the sources. PYTHON is the
# interpreter.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v "${CC:-gcc}" >/dev/null; then
    echo "wheel: the C compiler ${CC:-gcc} is not installed; on Debian: apt-get install gcc python3-dev" >&2
    exit 1
fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
scripts/sources.sh "$copy"
"${PYTHON:-python3}" -m pip wheel -q --no-deps -w "$folder" "$copy" \
    2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
