#!/usr/bin/env bash
# Says what of a model's training fits into how much memory; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# -P: a folder named torch where this is called is not meant.
PYTHONPATH=$REPO/scripts${PYTHONPATH:+:$PYTHONPATH} \
  exec "$REPO/scripts/run_patched.sh" "$PYTHON" -W ignore -P -m what_fits "$@"
