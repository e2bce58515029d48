#!/usr/bin/env bash
# Puts the patch set onto a PyTorch tree or takes it off; --help tells how.
# Needs Python 3.9 or newer and nothing else.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
run_patchset apply "$@"
