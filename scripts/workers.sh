#!/usr/bin/env bash
# workers.sh: prints how many tests run at once. Most of a test is waiting, for a server to start or a deadline to pass.
set -euo pipefail
cores=$(nproc)
workers=$((2 * cores))
echo $((workers < 8 ? workers : 8))
