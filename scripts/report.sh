#!/usr/bin/env bash
# Writes the README's tables from results/; --check only compares.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "${APPLY_PYTHON:-python3}" "$REPO/scripts/report.py" "$@"
