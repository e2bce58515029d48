#!/usr/bin/env bash
# Takes a new release of torch in, or checks all of them again; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
cd "$REPO"
# One thread in each process; the processes are one per core.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
run_module "$PYTHON" upkeep.refresh "$@"
