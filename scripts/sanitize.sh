#!/usr/bin/env bash
# sanitize.sh [PYTEST ARGUMENT...]: runs tests on an extension that is built with AddressSanitizer and UBSan, in a copy
# of this checkout, inside the environment of run.sh. Without arguments, it runs the unit tests and the attacks by
# frames, commands and chains, whose servers run the same build. If a sanitizer finds an error, it ends the process, so
# the test fails.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$folder"
cd "$folder"
flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
CFLAGS=$flags LDFLAGS="-fsanitize=address,undefined" python setup.py -q build_ext --inplace >&2
# The interpreter is built without sanitizers, so they must be loaded before the extension. Leaks are not reported,
# because the interpreter keeps memory until it ends. With malloc instead of pymalloc, every object has its own red
# zones.
LD_PRELOAD=$(cc -print-file-name=libasan.so):$(cc -print-file-name=libubsan.so)
export LD_PRELOAD PYTHONMALLOC=malloc PYTHONPATH=$folder HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-ci}
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1
(($#)) || set -- tests/unit tests/attack/test_{commands,frames,lying_chains}.py
python -m pytest -n "${TEST_WORKERS:-$(nproc)}" --dist loadgroup -m "not exclusive" "$@"
