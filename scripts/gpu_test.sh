#!/usr/bin/env bash
# gpu_test.sh [PYTEST ARGUMENT...]: every test that needs a CUDA device, then the benchmark of the copies between the
# device and host memory. Says at the end what failed.
#
# The other scripts install vLLM's CPU build. This one takes an interpreter that has torch for CUDA: PYTHON (default:
# python3). With vLLM there, its code makes the copies, and the tests that need vLLM run as well. The interpreter's
# packages stay as they are: what else the tests need goes into a virtual environment in $KVSTORE_CACHE (default: kvstore
# in the user's cache folder).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(command -v "${PYTHON:-python3}") || { echo "gpu-test: there is no ${PYTHON:-python3}" >&2; exit 2; }

reason=$("$python" -W ignore -c '
try:
    import torch
except ImportError as error:
    print(f"it cannot import torch ({error})")
else:
    if not torch.cuda.is_available():
        print(f"its torch {torch.__version__} finds no CUDA device")
') || reason="it does not run"
if [[ -n $reason ]]; then
    echo "gpu-test: $python cannot run the tests: $reason. Name an interpreter that has torch for CUDA: make gpu-test" \
        "PYTHON=/path/to/python" >&2
    exit 2
fi

cache=${KVSTORE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstore}
venv=$cache/venv-gpu-$({ echo "$python"; cat requirements/test.txt; } | sha256sum | cut -c1-12)
if [[ ! -e $venv/.complete ]]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    # Behind the environment's own packages come those of the interpreter, which pip then counts as installed.
    "$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
        >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/under.pth"
    # Without the pins, because torch and vLLM say which versions they go with. A new environment has an old setuptools.
    sed -nE 's/^([A-Za-z0-9_.-]+)==[^;]*(;.*)?$/\1\2/p' requirements/test.txt | sort -u >"$venv/names.txt"
    "$venv/bin/python" -m pip install -q -r "$venv/names.txt" "setuptools>=77"
    touch "$venv/.complete"
fi
export PATH=$venv/bin:$PATH PYTHONPATH=$PWD HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
flock setup.py python setup.py -q build_ext --inplace >&2

python -W ignore -c '
import importlib.util, torch
vllm = "with vLLM" if importlib.util.find_spec("vllm") else "without vLLM: its tests are left out"
print(f"gpu-test: torch {torch.__version__}, {torch.cuda.get_device_name()}, {vllm}")'
failed=
python -m pytest -m gpu tests/gpu tests/engine "$@" || failed+=" tests"
python -m benchmarks.remote_kv_cache.test_swap || failed+=" benchmarks.remote_kv_cache.test_swap"
echo "gpu-test: ${failed:+failed:}${failed:-passed}"
[[ -z $failed ]]
