#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENT...]: all that must hold before a change lands, inside the environment of run.sh. With
# arguments, which select tests, the check of a real installation is left out.
#
# The tests run in TEST_WORKERS processes (two a core: they mostly wait); those that measure time run last, alone.
set -euo pipefail
started=$SECONDS
scripts/programs.sh
scripts/lint.sh
if (($# == 0)); then
    scripts/check_install.sh
fi
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-ci}
status=0
python -m pytest -n "${TEST_WORKERS:-$(scripts/workers.sh)}" --dist loadgroup "$@" || status=$?
echo "test: $((SECONDS - started)) s in all"
exit $status
