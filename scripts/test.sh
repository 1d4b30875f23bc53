#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENT...]: all that must hold before a change lands, inside the environment of run.sh. With
# arguments, which select tests, the check of a real installation is left out.
#
# The tests run in TEST_WORKERS processes (three for two cores); those that measure time run last, alone. Style,
# types and the installation are checked beside the first tests; what they say is printed at the end.
set -euo pipefail
started=$SECONDS
scripts/programs.sh
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-ci}
said=$(mktemp)
{
    failed=0
    scripts/lint.sh || failed=1
    (($#)) || scripts/check_install.sh || failed=1
    exit $failed
} >"$said" 2>&1 &
beside=$!
status=0
python -m pytest -n "${TEST_WORKERS:-$(scripts/workers.sh)}" --dist loadgroup "$@" || status=$?
wait $beside || status=1
cat "$said"
rm "$said"
echo "test: $((SECONDS - started)) s in all, $( ((status)) && echo failed || echo passed)"
exit $status
