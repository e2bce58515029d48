#!/usr/bin/env bash
# Trains real models within budgets and checks gradients and bytes; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# -P: a folder named torch where this is called is not meant.
PYTHONPATH=$REPO/scripts${PYTHONPATH:+:$PYTHONPATH} \
  exec "$REPO/scripts/run_patched.sh" python -P -m benchmarks check_models "$@"
