#!/usr/bin/env bash
# Makes one's own PyTorch checkout runnable without a build; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer checkout link "$@"
ensure_environment
run_module "$PYTHON" upkeep.checkout link "$@"
