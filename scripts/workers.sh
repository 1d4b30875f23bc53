#!/usr/bin/env bash
# workers.sh: prints how many tests run at once. Half of a test is waiting, for a server to start or a deadline to pass;
# the engines' tests compute.
set -euo pipefail
cores=$(nproc)
workers=$((3 * cores / 2))
echo $((workers < 2 ? 2 : workers < 8 ? workers : 8))
