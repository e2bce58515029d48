#!/usr/bin/env bash
# Writes the tables of the pages and the figures from results/; --check only compares.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
run_module "$PYTHON" benchmarks.report "$@"
