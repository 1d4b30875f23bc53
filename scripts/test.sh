#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENT...]: all that must hold before a change lands, inside the environment of run.sh. With
# arguments, which select tests, the check of a real installation is left out.
set -euo pipefail
scripts/programs.sh
scripts/lint.sh
if (($# == 0)); then
    scripts/check_install.sh
fi
exec python -m pytest "$@"
