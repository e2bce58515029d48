#!/usr/bin/env bash
# Makes patches/ and the manifest from the table of edits; --check only compares.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer generate "$@"
ensure_environment
run_module "$PYTHON" upkeep.generate "$@"
