#!/usr/bin/env bash
# check.sh [PYTEST ARGUMENT...]: what a change needs while it is being made, in a few minutes: style, types, and the
# unit and integration tests that are quick, inside the environment of run.sh. Left out: engines, chaos, a real
# installation, the tests of tests/slow.txt (more than a second each) and those marked `exclusive` (they measure time).
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
