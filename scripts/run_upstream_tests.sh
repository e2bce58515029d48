#!/usr/bin/env bash
# Runs upstream's own tests without the set and with it; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
renice -n 10 $$ >/dev/null
run_module "$PYTHON" upkeep.upstream_tests "$@"
