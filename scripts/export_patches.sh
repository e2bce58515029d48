#!/usr/bin/env bash
# Writes the complete series for a checkout, for git am; --help tells how.
# Needs Python 3.9 or newer and nothing else.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
run_patchset export "$@"
