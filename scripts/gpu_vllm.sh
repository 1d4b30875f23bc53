#!/usr/bin/env bash
# Brings the real vLLM to a GPU machine without a network, whose torch is older than vLLM requires.
#
#   gpu_vllm.sh prepare FOLDER [WHEELS]   downloads vLLM's CUDA wheel into FOLDER (327 MB, once) and makes pieces of it,
#                                         FOLDER/1, FOLDER/2 …, each small enough to travel in one call with the checkout,
#                                         the first one also with the folder WHEELS of gpu_wheels.sh (default: no folder)
#   gpu_vllm.sh join PIECE TARGET         there: adds a piece to those in TARGET; with the last one, unpacks vLLM into
#                                         TARGET/site. Says what is missing, or that vLLM is there
#
# Only the files that an engine with a dense model on a Hopper GPU needs are sent: vLLM's Python, its operators
# (_C_stable_libtorch) and FlashAttention 3. KVSTORE_CALL_MIB (default: 64) is the limit of one call.
set -euo pipefail
version=0.32.0 # as in requirements/engine.txt

if [[ ${1:-} == prepare && ($# == 2 || $# == 3) ]]; then
    mkdir -p "$2"
    folder=$(cd "$2" && pwd)
    wheels=${3:+$(cd "$3" && pwd)}
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    python=$(command -v python3.11 || command -v python3)
    wheel=$(find "$folder" -maxdepth 1 -name "vllm-$version-*.whl" -print -quit)
    if [[ -z $wheel ]]; then
        echo "gpu-vllm: downloading vLLM $version for CUDA (327 MB)" >&2
        "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
            --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_35_x86_64 \
            -d "$folder" "vllm==$version" 2> >(grep -v 'is ignored: it is neither a file nor a directory' >&2)
        wheel=$(find "$folder" -maxdepth 1 -name "vllm-$version-*.whl" -print -quit)
    fi
    exec "$python" scripts/gpu_pieces.py cut "$wheel" "$folder" ${wheels:+"$wheels"}
elif [[ ${1:-} == join && $# == 3 ]]; then
    exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_pieces.py" join "$2" "$3"
else
    echo "usage: gpu_vllm.sh prepare FOLDER [WHEELS] | join PIECE TARGET (got: ${*:-nothing})" >&2
    exit 2
fi
