#!/usr/bin/env bash
# environment.sh full|test: prints the path of a virtual environment, and makes it first if it is missing.
#
#   test   what requirements/test.txt pins
#   full   that and the engine of requirements/engine.txt (torch and vLLM for the CPU, 3.5 GB); if the engine cannot
#          be had the reason is printed and `test` is used instead, except in CI, where that is an error
#
# Environments are shared by all checkouts, so the project itself is never installed in one. They live in $KVSTORE_CACHE
# (default: kvstore in the user's cache folder) under a name that hashes everything they are made from. Scripts in a
# virtual environment contain its path, so it is built in place under a lock, not moved in. An environment without the
# stamp `.complete`, which is written last, counts as missing and is made again.
#
# From the environment: PYTHON (default: python3.11 if it is installed, else python3), ENGINE=0 (full means test),
# KVSTORE_CACHE, CI=true.
set -euo pipefail
kind=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cache=${KVSTORE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstore}

say() { echo "environment: $*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "no Python from 3.10 to 3.13 (tried: ${PYTHON:-python3.11 python3}); name one with PYTHON=..."
    return 1
}

# The path of the environment of this kind: a change of any pin or declared dependency changes the name.
place() {
    local hash
    hash=$({
        cat requirements/engine.txt requirements/test.txt
        awk '/^\[/ { optional = /optional-dependencies/ } /^dependencies = / { on = 1 } on || optional; /^\]/ { on = 0 }' \
            pyproject.toml
    } | sha256sum | cut -c1-12)
    echo "$cache/venv-$1-$version-$hash"
}

# This is also false if the environment's base interpreter no longer exists.
complete() { [[ -e $1/.complete ]] && "$1/bin/python" -c '' 2>/dev/null; }

why_no_engine() {
    if [[ ${ENGINE:-1} == 0 ]]; then
        echo "ENGINE=0"
    elif [[ $version != 3.11.* || $(uname -sm) != "Linux x86_64" ]]; then
        echo "its pins are for Python 3.11 on Linux x86_64, this is $version on $(uname -sm)"
    fi
}

# pip reports every package that a file index lacks; these lines are dropped, and all other warnings and errors are
# kept.
pip() { "$venv/bin/python" -m pip "$@" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2); }

build() {
    rm -rf "$venv"
    "$python" -m venv "$venv" &&
        pip install -q --no-deps -r requirements/test.txt &&
        "$venv/bin/python" scripts/check_pins.py || return
    if [[ $1 == full ]]; then
        # To compile all of torch and vLLM in advance takes longer than to compile only the imported modules.
        pip install -q --no-deps --no-compile -r requirements/engine.txt &&
            "$venv/bin/python" -W ignore -c \
                'import torch, vllm.platforms as p; assert p.current_platform.is_cpu(), "not the CPU build of vLLM"' \
                >&2 || return
    fi
    touch "$venv/.complete"
}

# Leaves the path in $venv.
provide() {
    venv=$(place "$1")
    if ! complete "$venv"; then
        local since=$SECONDS
        exec 9>"$venv.lock"
        flock -n 9 || { say "waiting for another run that is making $venv" && flock 9; }
        if ! complete "$venv"; then
            say "making $venv (once; $([[ $1 == full ]] && echo "3 to 5 minutes" || echo "half a minute"))"
            build "$1" 9>&- || { rm -rf "$venv"; return 1; }
            say "made it in $((SECONDS - since)) s"
        fi
        exec 9>&-
    fi
    touch "$venv/.complete"
}

# Environments that no run has used for two weeks are removed: their pins have been replaced.
prune() {
    find "$cache" -maxdepth 2 -path '*/venv-*/.complete' -mtime +14 -printf '%h\0' | xargs -0r rm -rf -- || true
}

python=$(find_python)
version=$("$python" -c 'import platform; print(platform.python_version())')
mkdir -p "$cache"

if [[ $kind == full ]]; then
    reason=$(why_no_engine)
    if [[ -z $reason ]] && ! provide full; then
        reason="it could not be installed, see above"
    fi
    if [[ -n $reason ]]; then
        if [[ ${CI:-} == true ]]; then
            say "no engine, which is an error in CI: $reason"
            exit 1
        fi
        say "no engine, so its tests are skipped: $reason"
        provide test
    fi
elif complete "$(place full)"; then
    provide full # it holds all of `test`
else
    provide test
fi
prune
echo "$venv"
