#!/usr/bin/env bash
# wheels.sh [FOLDER]: builds an sdist and, from it, a wheel for each Python from 3.10 to 3.13 that this machine has, into
# FOLDER (default: dist). The wheels install without a compiler wherever glibc is as new as their names say
# (manylinux_2_31: glibc 2.31, as in Debian 11 and Ubuntu 20.04); auditwheel finds this version from the symbols that
# they use.
#
# PYTHONS names the interpreters (default: python3.10 to python3.13 on the PATH or of pyenv). Nothing is built for a
# free-threaded Python or for aarch64, because neither has been tested.
set -euo pipefail
mkdir -p "${1:-dist}"
folder=$(cd "${1:-dist}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "wheels: $*" >&2; }
pip() { "$tools/bin/python" -m pip "$@" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2); }

find_pythons() {
    local version candidate
    for version in 3.10 3.11 3.12 3.13; do
        for candidate in "$(command -v "python$version" || true)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
            if "$candidate" -c "import sys; sys.exit(sys.version_info[:2] != ($(tr . , <<<"$version")))" 2>/dev/null; then
                echo "$candidate"
                break
            fi
        done
    done
}

pythons=${PYTHONS:-$(find_pythons)}
if [[ -z $pythons ]]; then
    say "no Python from 3.10 to 3.13; name some with PYTHONS='/path/to/python3.11 ...'"
    exit 1
fi
if [[ $(uname -m) != x86_64 ]]; then
    say "got a machine of $(uname -m), expected x86_64, because wheels for others have not been tested"
    exit 1
fi
rm -f "$folder/COMMIT" "$folder"/llm_kvstore-* # all files in the folder must come from one state of the sources
commit=
if [[ -z $(git status --porcelain 2>&1) ]]; then
    commit=$(git rev-parse HEAD)
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
say "an sdist, and wheels for $(wc -w <<<"$pythons") Pythons: about $((10 + 15 * $(wc -w <<<"$pythons"))) s"
tools=$scratch/tools
"$(head -1 <<<"${pythons// /$'\n'}")" -m venv "$tools"
pip install -q --no-deps -r requirements/wheels.txt

mkdir "$scratch/sources" "$scratch/wheels"
scripts/sources.sh "$scratch/sources"
"$tools/bin/python" -m build --sdist --outdir "$scratch" "$scratch/sources" >"$scratch/said" 2>&1 || {
    cat "$scratch/said" >&2
    exit 1
}
for python in $pythons; do
    started=$SECONDS
    "$python" -m venv --clear "$scratch/venv"
    "$scratch/venv/bin/python" -m pip wheel -q --no-deps -w "$scratch/wheels" "$scratch"/llm_kvstore-*.tar.gz \
        2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
    PATH=$tools/bin:$PATH "$tools/bin/python" -m auditwheel repair -w "$folder" "$scratch"/wheels/*.whl >"$scratch/said" 2>&1 || {
        cat "$scratch/said" >&2
        exit 1
    }
    rm "$scratch"/wheels/*.whl
    say "$("$python" -V): $((SECONDS - started)) s"
done
cp "$scratch"/llm_kvstore-*.tar.gz "$folder"
# `make serve` installs a wheel from here if the sources are those of this commit.
if [[ -n $commit ]]; then
    echo "$commit" >"$folder/COMMIT"
fi
find "$folder" -type f -printf "wheels: %p\n" | sort >&2
