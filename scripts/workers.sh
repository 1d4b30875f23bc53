#!/usr/bin/env bash
# workers.sh: prints how many tests run at once. Half of a test is waiting, for a deadline to pass or something to happen;
# the engines' tests compute.
set -euo pipefail
cores=$(nproc)
workers=$((2 * cores))
echo $((workers < 8 ? workers : 8))
