#!/usr/bin/env bash
# Builds an sdist and from it a manylinux wheel. Installs the wheel into a scratch environment outside the checkout,
# where every compiler fails, and tries it from an empty folder, with a server and `kvstore ping`. This finds sources
# that are missing from the sdist, modules or page files that are missing from the wheel, and imports of packages that
# are no base dependency. A run from the checkout cannot find these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH VIRTUAL_ENV

echo "install: building the wheel and trying it in a scratch environment without a compiler"
PYTHONS=$(command -v "${PYTHON:-python3}") scripts/wheels.sh "$scratch/dist"
mkdir "$scratch/none"
for compiler in cc gcc clang c++ g++ "$(uname -m)-linux-gnu-gcc"; do
    printf '#!/bin/sh\necho "install: $0 was called: the wheel needs a compiler" >&2\nexit 1\n' >"$scratch/none/$compiler"
    chmod +x "$scratch/none/$compiler"
done
CC=gcc PATH=$scratch/none:$PATH scripts/install.sh "$scratch/venv" "$(echo "$scratch"/dist/llm_kvstore-*-manylinux_*.whl)"
mkdir "$scratch/empty"
cd "$scratch/empty"
"$scratch/venv/bin/python" -c 'import kvstore_client, kvstore._cext, kvstore._index'
for command in kvstore-server kvstore; do
    "$scratch/venv/bin/$command" --help >"$scratch/help" 2>&1 || {
        cat "$scratch/help"
        echo "install: $command --help failed"
        exit 1
    }
done

"$scratch/venv/bin/kvstore-server" --port 0 --http 127.0.0.1:0 --memory 64MiB --segment 4MiB >"$scratch/ready" 2>"$scratch/log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -rf "$scratch"' EXIT
for _ in {1..300}; do
    [[ -s $scratch/ready ]] && break
    sleep 0.1
done
endpoint=$(sed -n 's/^kvstore-server ready \(tcp:[^ ]*\) .*/\1/p' "$scratch/ready")
if [[ -z $endpoint ]] || ! "$scratch/venv/bin/kvstore" ping --endpoint "$endpoint"; then
    cat "$scratch/log"
    echo "install: the installed server does not answer: it said '$(cat "$scratch/ready")'"
    exit 1
fi
kill "$server"
wait "$server" || { cat "$scratch/log"; echo "install: the server ended with status $?"; exit 1; }
echo "install: ok"
