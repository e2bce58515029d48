#!/usr/bin/env bash
# Writes results/*.md, the pictures and the tables of guides from results/*.json; --check
# only compares.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'END'
usage: scripts/report.sh [--check]

Writes the tables of README and docs/, and the figures, from the measurements stored in
results/.

  --check   write nothing; list what differs from results/

Exit status: 0 written, or all as it should be; 1 with --check: something is not, or a
result is missing; 2 bad call.
END
}

case $* in
  '' | --check) ;;
  -h | --help) usage; exit ;;
  *) refuse "$* is not among the options: --check, --help" ;;
esac
ensure_environment
run_module "$PYTHON" benchmarks.report "$@"
