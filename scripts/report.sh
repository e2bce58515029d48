#!/usr/bin/env bash
# Writes results/*.md, the pictures and the tables of guides from results/*.json; --check
# only compares.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
run_module "$PYTHON" benchmarks.report "$@"
