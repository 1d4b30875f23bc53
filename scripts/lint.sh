#!/usr/bin/env bash
# Style, format, plain English and types, inside the environment of run.sh. All checks run, even after a failure. mypy's
# cache for numpy and the other libraries is kept next to these libraries, for all checkouts.
set -euo pipefail
failed=0
ruff check . || failed=1
ruff format --check . || failed=1
python scripts/plain_english.py || failed=1
mypy --cache-dir "$VIRTUAL_ENV/mypy-cache" || failed=1
exit $failed
