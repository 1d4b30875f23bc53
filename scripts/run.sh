#!/usr/bin/env bash
# run.sh full|test COMMAND...: runs a command on this checkout, inside the shared environment of this kind
# (environment.sh).
#
# The extension is built in place (kvstore/_*.so) and the checkout is put on PYTHONPATH, so the current sources are
# used. kvstore's commands are those of scripts/bin.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(scripts/environment.sh "$1")
shift

export VIRTUAL_ENV=$venv PATH=$PWD/scripts/bin:$venv/bin:$PATH PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
unset PYTHONDONTWRITEBYTECODE # otherwise each process takes seconds to compile vLLM
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 # the engine makes its own models and sends no reports
flock setup.py python setup.py -q build_ext --inplace >&2
exec "$@"
