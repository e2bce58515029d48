#!/usr/bin/env bash
# Runs upstream's own tests without the set and with it; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
exec nice -n 10 "$PYTHON" "$REPO/scripts/upstream_tests.py" "$@"
