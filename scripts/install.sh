#!/usr/bin/env bash
# install.sh VENV [WHEEL]: installs the package as a user does, as a wheel with its base dependencies, into the virtual
# environment VENV, which is made if it is missing. Without WHEEL, a wheel is built first. The pins of test.txt are used
# only as constraints, so that dependencies have tested versions. It prints its progress and, on a terminal, the time so
# far.
set -euo pipefail
venv=$1
wheel=${2:-}
scripts=$(dirname "${BASH_SOURCE[0]}")
wheels=$(mktemp -d)
clock=
stop_clock() {
    [[ -z $clock ]] || { kill "$clock" 2>/dev/null && printf '\n' >&2; } || true
    clock=
}
trap 'rm -rf "$wheels"; stop_clock' EXIT

# TEXT COMMAND...: runs the command and prints how long it took.
step() {
    local text=$1 started=$SECONDS
    shift
    if [[ -t 2 ]]; then
        while :; do
            printf '\rinstall: %s: %d s ' "$text" $((SECONDS - started)) >&2
            sleep 1
        done &
        clock=$!
    fi
    "$@" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
    stop_clock
    printf 'install: %s: %d s\n' "$text" $((SECONDS - started)) >&2
}

"$venv/bin/python" -c 'import pip' 2>/dev/null || step "making $venv" "${PYTHON:-python3}" -m venv --clear "$venv"
if [[ -z $wheel ]]; then
    PYTHON=$venv/bin/python step "compiling (about 15 s of processor time)" "$scripts/wheel.sh" "$wheels"
    wheel=$(echo "$wheels"/llm_kvstore-*.whl)
fi
step "installing it with what it needs (mostly downloads)" \
    "$venv/bin/python" -m pip install -q -c "$scripts/../requirements/test.txt" "$wheel"
# pip does not replace an installed package if only its content changed, not its version.
"$venv/bin/python" -m pip install -q --no-deps --no-index --force-reinstall "$wheel"
