#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENT...]: runs all checks that must pass before a change is merged, inside the environment of
# run.sh. Arguments select tests; with arguments, the check of a real installation is left out.
#
# The tests run in TEST_WORKERS processes (four for two cores): the quick ones first, and those that measure time last
# and alone. Style, types and the installation are checked while the first tests run; a failure is reported at once.
set -euo pipefail
started=$SECONDS
scripts/programs.sh
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-ci}
said=$(mktemp)

beside_the_tests() {
    local failed=0
    if scripts/lint.sh >"$said" 2>&1; then
        echo "test: style and types: ok"
    else
        failed=1
        cat "$said"
        echo "test: style or types: FAILED, see above; to repeat it: make lint"
    fi
    if (($# == 0)) && ! scripts/check_install.sh >"$said" 2>&1; then
        failed=1
        cat "$said"
        echo "test: installation: FAILED, see above; to repeat it: make check-install"
    fi
    return $failed
}

beside_the_tests "$@" &
beside=$!
status=0
python -m pytest -n "${TEST_WORKERS:-$(scripts/workers.sh)}" --dist loadgroup --durations=10 "$@" || status=$?
wait $beside || status=1
rm "$said"
echo "test: $((SECONDS - started)) s in all, $( ((status)) && echo failed || echo passed)"
exit $status
