#!/usr/bin/env bash
# install.sh VENV: installs the package as a user does, a wheel with its base dependencies, into the virtual
# environment VENV, which is made when missing. The pins of test.txt are constraints: known-good versions, nothing more.
set -euo pipefail
venv=$1
scripts=$(dirname "${BASH_SOURCE[0]}")

"$venv/bin/python" -c 'import pip' 2>/dev/null || "${PYTHON:-python3}" -m venv --clear "$venv"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
PYTHON=$venv/bin/python "$scripts/wheel.sh" "$wheels"
"$venv/bin/python" -m pip install -q -c "$scripts/../requirements/test.txt" "$wheels"/llm_kvstore-*.whl \
    2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
# pip leaves an installed package alone when only its content changed, not its version.
"$venv/bin/python" -m pip install -q --no-deps --no-index --force-reinstall "$wheels"/llm_kvstore-*.whl
