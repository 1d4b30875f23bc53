#!/usr/bin/env bash
# check_arm64.sh [PYTEST ARGUMENT...]: the checks for arm64 that an x86-64 machine can run, inside the environment of
# run.sh:
#   1. every dependency of the image has a wheel for arm64 and the Python that the image names
#   2. the extension modules compile for arm64, without a warning
#   3. they run there, in qemu, which is slow: tests of the native code, and a server with a disk tier under `kvstore bench`
# It cannot check memory ordering and speed, which only real hardware shows.
#
# Needs root, and a Debian archive with arm64. qemu is registered in the kernel's binfmt_misc only in a namespace of
# this run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $(id -u) == 0 ]] || { echo "check-arm64: run as root, to unpack packages of another architecture" >&2; exit 1; }
CI=true scripts/programs.sh requirements/arm64-programs.txt
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tests=${*:-tests/unit/test_hashing.py tests/unit/test_copying.py tests/unit/test_id_ring.py tests/unit/test_index.py tests/unit/test_wire.py}

say() { echo "check-arm64: $*" >&2; }
wheels() { # PYTHON OPTION... : installs for arm64, only from wheels
    python -m pip install --quiet --no-warn-conflicts --ignore-installed --only-binary=:all: --implementation cp --python-version "$1" \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        --target "$scratch/site" --constraint requirements/test.txt "${@:2}" 2> >(grep -v 'is ignored: it is neither' >&2)
}

named=$(sed -n 's/^ARG PYTHON_IMAGE=python:\(3\.[0-9]*\)-.*/\1/p' docker/Dockerfile)
python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*p["dependencies"], *p["optional-dependencies"]["cluster"], sep="\n")' >"$scratch/needed"
wheels "$named" --dry-run --requirement "$scratch/needed"
say "1. $(wc -l <"$scratch/needed") dependencies and what they need have wheels for Python $named"

# shellcheck source=/dev/null
. /etc/os-release
apt-get indextargets 'Created-By: Packages' | awk '
    { field[$1] = $2 }
    /^Target-Of:/ && field["Origin:"] == "Debian" { print "deb", field["Repo-URI:"], field["Release:"], field["Component:"] }
    ' | sort -u >"$scratch/sources"
apt-config dump | grep -E '^Acquire::(http|https|Check-)' >"$scratch/apt.conf" || true
mmdebstrap --quiet --mode=root --arch=arm64 --variant=extract --include=python3,libpython3-dev,libstdc++6 \
    --aptopt="$scratch/apt.conf" "$VERSION_CODENAME" "$scratch/system" - <"$scratch/sources"
arm64=$(echo "$scratch"/system/usr/bin/python3.[0-9]*)
version=$(sed "s/.*python//" <<<"$arm64")
mkdir "$scratch/source"
cp -r kvstore kvstore_client kvstore_cli tests pyproject.toml "$scratch/source"
rm "$scratch"/source/kvstore/*.so
for module in _cext:-O2 _index:-O1; do
    aarch64-linux-gnu-gcc "${module#*:}" -shared -fPIC -fno-strict-aliasing -Wall -Wno-unused-function -Werror -Icext \
        -isystem "$scratch/system/usr/include/python$version" -isystem "$scratch/system/usr/include" "cext/${module%:*}.c" \
        -o "$scratch/source/kvstore/${module%:*}.cpython-${version/./}-aarch64-linux-gnu.so" -lm
done
say "2. both extension modules compile for arm64, with Python $version"

wheels "$version" --requirement "$scratch/needed" hypothesis psutil pytest pytest-timeout pytest-xdist pyzmq PyYAML
cd "$scratch/source"
export QEMU_LD_PREFIX=$scratch/system PYTHONPATH=$scratch/source:$scratch/site PYTHONDONTWRITEBYTECODE=1
# The first bytes of an arm64 program, and the mask of the bits that are compared.
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
inside='mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf "%s" ":qemu:M::$1:$2:$(command -v qemu-aarch64-static):F" >/proc/sys/fs/binfmt_misc/register
ip link set lo up
python=$3 scratch=$4
shift 4
"$python" -m pytest -q -p no:cacheprovider --basetemp="$scratch/tests" -o timeout=1800 "$@"
"$python" -m kvstore --memory 64MiB --segment 4MiB --disk "$scratch/disk" --disk-size 64MiB >"$scratch/ready" &
server=$!
for _ in {1..600}; do
    grep -q ready "$scratch/ready" && break
    sleep 0.1
done
"$python" -m kvstore_cli bench --blocks 16 --rounds 1 --batch 4
kill "$server"
wait "$server"'
# shellcheck disable=SC2086
unshare --user --map-root-user --mount --net --pid --fork --kill-child --mount-proc bash -euc "$inside" check-arm64 \
    "$magic" "$mask" "$arm64" "$scratch" $tests
say "3. they run there, in qemu:" $tests "and a server"
