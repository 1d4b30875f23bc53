#!/usr/bin/env bash
# wheel.sh FOLDER: builds the wheel into FOLDER, isolated, from a copy of the sources: what lies about in a checkout
# (extensions built in place, build/ of an older state) cannot get into it, and the checkout stays as it was.
# PYTHON names the interpreter to build for.
set -euo pipefail
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v "${CC:-gcc}" >/dev/null; then
    echo "wheel: no C compiler (${CC:-gcc}); on Debian: apt-get install gcc python3-dev" >&2
    exit 1
fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r pyproject.toml setup.py README.md LICENSE cext kvstore kvstore_client kvstore_serving kvstore_cli "$copy"
rm -f "$copy"/kvstore/*.so "$copy"/cext/_*.c
"${PYTHON:-python3}" -m pip wheel -q --no-deps -w "$folder" "$copy" \
    2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
