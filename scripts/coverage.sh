#!/usr/bin/env bash
# coverage.sh [PYTEST ARGUMENT...]: runs the tests with line coverage, inside the environment of run.sh, and prints the
# coverage of each package. Servers, shards and commands that tests start are measured too, unless they are killed with
# SIGKILL.
set -euo pipefail
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-ci}
scripts/programs.sh
coverage erase
status=0
coverage run -m pytest -n "${TEST_WORKERS:-$(scripts/workers.sh)}" --dist loadgroup "$@" || status=$?
coverage combine -q
rm -f .coverage.* # left by processes that were killed while they wrote
coverage report
for package in kvstore kvstore_client kvstore_serving kvstore_cli; do
    echo "$package: $(coverage report --include="$package/*" --format=total) % of its lines"
done
exit $status
