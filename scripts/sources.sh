#!/usr/bin/env bash
# sources.sh FOLDER: copies the files that a build needs into FOLDER, so that old files in a checkout (extensions built
# in place, an older build/) do not get into the build, and the checkout does not change.
set -euo pipefail
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cp -r pyproject.toml setup.py MANIFEST.in README.md LICENSE cext kvstore kvstore_client kvstore_serving kvstore_cli "$folder"
rm -f "$folder"/kvstore/*.so "$folder"/cext/_*.c
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
