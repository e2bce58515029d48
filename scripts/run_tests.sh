#!/usr/bin/env bash
# All tests, run by the default patched checkout's torch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'EOF'
usage: scripts/run_tests.sh [--torch VERSION] [PYTEST ARGUMENTS]

Sets up what it needs (a .venv, the default patched checkout in build/) and runs the
project's tests, or those that the pytest arguments name.

  --torch VERSION   the torch to run them on (default 2.13.0)
  --all-releases    what is tested per release, on every release: without this on the
                    oldest, 2.13.0 and the newest (300 MB of wheels, the first time)
  -n N              processes (default: one per core, at most four); -n 0 to debug

A release that cannot be had is skipped, and named at the end. Some tests try as many cases
as FUZZ says, which may take hours; --hypothesis-seed N draws the same ones again:

  FUZZ=100000 scripts/run_tests.sh test/test_solvers.py -k equals_the_oracle --timeout 0
  FUZZ=1000   scripts/run_tests.sh test/test_programs.py --timeout 0
  FUZZ=300    scripts/run_tests.sh test/test_drawn_loops.py --timeout 0   # an hour
  FUZZ=10000  scripts/run_tests.sh test/test_opinfo.py                    # all operators
EOF
}

take_torch "$@"
cd "$REPO"
# One thread in each process; what is slow is shared out as processes fall idle.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
# Each test has a cache of its own, and would have the compiler tried out in it.
export TORCHINDUCTOR_VEC_ISA_OK=1
processes=(-n logical --maxprocesses 4 --dist worksteal)
exec "$REPO/scripts/run_patched.sh" python -m pytest "${processes[@]}" "${rest[@]}"
