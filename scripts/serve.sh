#!/usr/bin/env bash
# serve.sh [ARGUMENT...]: runs kvstore-server in the foreground from the checkout's own .venv. It first installs the
# package there if it is missing or older than the sources, from the wheel that `make wheels` built from this commit, or
# else from one that it compiles.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.installed
sources="pyproject.toml setup.py MANIFEST.in requirements cext kvstore kvstore_client kvstore_serving kvstore_cli"

changed() {
    [[ ! -e $stamp ]] || [[ -n $(find $sources -type f -newer "$stamp" ! -name '*.so' ! -name '*.pyc' ! -name '_*.c' -print -quit) ]]
}

built_wheel() {
    if [[ -e dist/COMMIT && $(cat dist/COMMIT) == "$(git rev-parse HEAD 2>/dev/null)" && -z $(git status --porcelain -- $sources) ]]; then
        local python=.venv/bin/python
        [[ -e $python ]] || python=${PYTHON:-python3}
        find dist -name "llm_kvstore-*-$("$python" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')-manylinux_*_$(uname -m).whl" -print -quit
    fi
}

if changed; then
    wheel=$(built_wheel)
    echo "serve: installing kvstore into .venv, $([[ -n $wheel ]] && echo "from $wheel" || echo "compiled here"): takes about $([[ -n $wheel ]] && echo 15 || echo 50) s" >&2
    started=$(date +%s)
    scripts/install.sh .venv "$wheel"
    touch -d "@$started" "$stamp" # so the next run notices an edit during the installation
fi
exec .venv/bin/kvstore-server "$@"
