#!/usr/bin/env bash
# Style, format and types, inside the environment of run.sh. One failure does not hide the others. What mypy found out
# about numpy and the other libraries is kept beside them, for every checkout.
set -euo pipefail
failed=0
ruff check . || failed=1
ruff format --check . || failed=1
mypy --cache-dir "$VIRTUAL_ENV/mypy-cache" || failed=1
exit $failed
