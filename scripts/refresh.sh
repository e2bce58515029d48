#!/usr/bin/env bash
# Takes in a new release of torch, or what was changed in a checkout; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer refresh "$@"
ensure_environment
# One thread in each process; the processes are one per core.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
run_module "$PYTHON" upkeep.refresh "$@"
