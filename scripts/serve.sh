#!/usr/bin/env bash
# serve.sh [ARGUMENT...]: runs kvstore-server in the foreground from the checkout's own .venv, installing the package
# there first when it is missing or the sources are newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.installed

changed() {
    [[ ! -e $stamp ]] || [[ -n $(find pyproject.toml setup.py requirements cext kvstore kvstore_client kvstore_serving kvstore_cli -type f \
        -newer "$stamp" ! -name '*.so' ! -name '*.pyc' ! -name '_*.c' -print -quit) ]]
}

if changed; then
    echo "serve: installing kvstore into .venv" >&2
    started=$(date +%s)
    scripts/install.sh .venv
    touch -d "@$started" "$stamp" # an edit made meanwhile is seen next time
fi
exec .venv/bin/kvstore-server "$@"
