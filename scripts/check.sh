#!/usr/bin/env bash
# check.sh [PYTEST ARGUMENT...]: runs the checks for work on a change, in a few minutes: style, types, and the quick
# unit and integration tests, inside the environment of run.sh. It leaves out engines, chaos, a real installation, the
# tests of tests/slow.txt (each takes more than a second) and those marked `exclusive` (they measure time).
set -euo pipefail
started=$SECONDS
scripts/programs.sh
failed=0
lint=$(mktemp)
scripts/lint.sh >"$lint" 2>&1 &
python -m pytest -q -n "${TEST_WORKERS:-$(scripts/workers.sh)}" --dist loadgroup -m "not slow and not exclusive" \
    --durations=10 --durations-min=1.5 tests/unit tests/integration "$@" || failed=1
wait $! || failed=1
cat "$lint"
rm "$lint"
echo "check: $((SECONDS - started)) s, $( ((failed)) && echo failed || echo passed)"
exit $failed
