#!/usr/bin/env bash
# Says what of a model's training fits into how much memory; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The options are read by whatever Python there is: what is wrong is told at once.
if ! front=$(base_python); then
  exit 2
fi
# -P: a folder named torch where this is called is not meant.
PYTHONPATH=$REPO/scripts${PYTHONPATH:+:$PYTHONPATH} exec "$front" -P -m what_fits "$@"
