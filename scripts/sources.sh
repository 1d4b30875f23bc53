#!/usr/bin/env bash
# sources.sh FOLDER: copies what a build needs into FOLDER, so that what lies about in a checkout (extensions built in
# place, build/ of an older state) cannot get into it, and the checkout stays as it was.
set -euo pipefail
folder=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cp -r pyproject.toml setup.py MANIFEST.in README.md LICENSE cext kvstore kvstore_client kvstore_serving kvstore_cli "$folder"
rm -f "$folder"/kvstore/*.so "$folder"/cext/_*.c
find "$folder" -name __pycache__ -prune -exec rm -rf {} +
