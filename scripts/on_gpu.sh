#!/usr/bin/env bash
# on_gpu.sh --wheels FOLDER --out FOLDER [--vllm PIECE] [--only NAME]... [--within SECONDS] [--quick] [--list]
#
# Runs all tests and benchmarks that need a GPU machine, without a network: tests of the copies and of the connector's
# worker half on CUDA, and benchmarks, also with real engines. docs/gpu.md says how to run it, and has the results. Each
# step writes its own FOLDER/NAME.json as soon as there is a result, so an interrupted run keeps the results of finished
# steps. Without a CUDA device, all steps run in small sizes on the CPU, and the results say which parts are skipped
# because they need the device.
#
#   --wheels FOLDER   of gpu_wheels.sh. What the interpreter lacks of them is installed, outside of the checkout and of the
#                     interpreter; a later run on the same machine finds it there and needs no FOLDER
#   --vllm PIECE      of gpu_vllm.sh, to be added to those of earlier runs; with the last one vLLM is there
#   --only NAME       runs this step; may be given several times. --list prints the steps and their time limits
#   --within SECONDS  the time limit for all steps together; a step gets at most the time that is left
#   --quick           small sizes, even with a device
#
# PYTHON: the interpreter (default: python3), which has torch, pytest, hypothesis, Cython and a C compiler.
# KVSTORE_CACHE: where wheels and vLLM are kept (default: kvstore in the user's cache folder).
set -euo pipefail
python=$(command -v "${PYTHON:-python3}") || { echo "on-gpu: there is no ${PYTHON:-python3}" >&2; exit 2; }

fail() {
    echo "on-gpu: $*" >&2
    exit 2
}

wheels='' piece='' previous=''
for word in "$@"; do
    if [[ $previous == --wheels ]]; then wheels=$word; fi
    if [[ $previous == --vllm ]]; then piece=$word; fi
    previous=$word
done
[[ -n $wheels ]] || fail "--wheels FOLDER is missing; expected the folder that \`scripts/gpu_wheels.sh FOLDER\` filled"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

export KVSTORE_CACHE=${KVSTORE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstore}
cache=$KVSTORE_CACHE/gpu
site=$cache/site-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [[ -d $wheels ]]; then
    "$python" -W ignore "$root/scripts/install_missing.py" "$wheels" "$site"
elif [[ ! -d $site ]]; then
    fail "--wheels $wheels: the folder does not exist, and no earlier run has installed the wheels here. Make it with \`scripts/gpu_wheels.sh $wheels\`"
fi
if [[ -n $piece ]]; then
    [[ -d $piece ]] || fail "--vllm $piece: the folder does not exist; expected one that \`scripts/gpu_vllm.sh prepare\` made"
    PYTHON=$python "$root/scripts/gpu_vllm.sh" join "$piece" "$cache/vllm"
fi

export PYTHONPATH=$root:$site:$cache/vllm/site HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
PATH=$(dirname "$python"):$PATH
if ! (cd "$root" && flock setup.py "$python" setup.py -q build_ext --inplace >&2); then
    "$python" -c 'import kvstore._cext, kvstore._index' || fail "the extensions cannot be built with $python, and the checkout has no built ones"
    echo "on-gpu: the extensions cannot be built here; using the built ones of the checkout" >&2
fi
ulimit -n 65536 2>/dev/null || true # a server lends its memory through file descriptors
exec "$python" -W ignore -m benchmarks.gpu "$@"
