#!/usr/bin/env bash
# gpu_wheels.sh FOLDER: downloads the wheels of requirements/gpu.txt into FOLDER, for a GPU machine without a network.
#
# They are for Python 3.12 on Linux x86-64 with glibc 2.34 or later. If PYTHON is set, they are for its version.
# Wheels that are already in FOLDER are not downloaded again; wheels of other versions are removed.
set -euo pipefail
if (($# != 1)) || [[ $1 == -* ]]; then
    echo "usage: gpu_wheels.sh FOLDER (got: ${*:-nothing}); FOLDER gets the wheels of requirements/gpu.txt" >&2
    exit 2
fi
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d "$folder/.downloading.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

platforms="--platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 --platform manylinux1_x86_64"
for minor in {34..17}; do # pip accepts only the platforms that are listed
    platforms="$platforms --platform manylinux_2_${minor}_x86_64"
done
version=3.12
[[ -z ${PYTHON:-} ]] || version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
python=$(command -v python3.11 || command -v python3)
# shellcheck disable=SC2086
"$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" $platforms --find-links "$folder" \
    -d "$scratch" -r requirements/gpu.txt 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
rm -f "$folder"/*.whl
mv "$scratch"/*.whl "$folder"
echo "gpu-wheels: $(find "$folder" -name '*.whl' | wc -l) wheels, $(du -cb "$folder"/*.whl | tail -1 | cut -f1 |
    awk '{ printf "%.1f MiB", $1 / 1048576 }') in $folder"
