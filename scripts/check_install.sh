#!/usr/bin/env bash
# Installs the package into a scratch environment outside the tree and tries it from an empty folder: finds a module
# that the wheel lacks and an import that is no base dependency, which a run from the checkout cannot.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset PYTHONPATH VIRTUAL_ENV

echo "install: building the wheel and trying it in a scratch environment"
scripts/install.sh "$scratch/venv"
mkdir "$scratch/empty"
cd "$scratch/empty"
"$scratch/venv/bin/python" -c 'import kvstore_client, kvstore._cext'
for command in kvstore-server kvstore; do
    "$scratch/venv/bin/$command" --help >"$scratch/help" 2>&1 || {
        cat "$scratch/help"
        echo "install: $command --help failed"
        exit 1
    }
done
echo "install: ok"
