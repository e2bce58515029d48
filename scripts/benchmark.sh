#!/usr/bin/env bash
# Measures what the project claims; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case ${1:-} in
  solvers)
    shift
    exec "$REPO/scripts/run_patched.sh" python "$REPO/scripts/benchmark_solvers.py" "$@"
    ;;
  -h | --help)
    cat <<'EOF'
usage: scripts/benchmark.sh solvers [OPTIONS]

Measures the knapsack solvers against the marks they have to reach, side by side with
upstream's from the untouched wheel, and prints a table. All rows take about ten
minutes; `scripts/benchmark.sh solvers --help` tells how to choose some.
EOF
    ;;
  *)
    echo "usage: scripts/benchmark.sh solvers [OPTIONS]; --help tells more" >&2
    exit 2
    ;;
esac
