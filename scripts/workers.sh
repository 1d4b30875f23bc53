#!/usr/bin/env bash
# workers.sh: prints how many tests run at once. Tests wait for deadlines or events half of the time; only the tests of
# engines compute.
set -euo pipefail
cores=$(nproc)
workers=$((2 * cores))
echo $((workers < 8 ? workers : 8))
