#!/usr/bin/env bash
# Makes one topic a branch of a PyTorch checkout and writes its text; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer pull_request "$@"
ensure_environment
run_module "$PYTHON" upkeep.pull_request "$@"
