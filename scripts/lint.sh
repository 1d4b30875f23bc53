#!/usr/bin/env bash
# Style, format and types, inside the environment of run.sh. One failure does not hide the others.
set -euo pipefail
failed=0
ruff check . || failed=1
ruff format --check . || failed=1
mypy || failed=1
exit $failed
