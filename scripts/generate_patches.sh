#!/usr/bin/env bash
# Makes patches/ and the manifest from the table of edits; --check only compares.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'END'
usage: scripts/generate_patches.sh [--check]

Writes patches/ and scripts/patchset/manifest.json from the edits in
scripts/patchset/topics/. Fetches the Python trees of all releases, once.

  --check   write nothing; name what is not what the edits give

Exit status: 0 written, or all as it should be; 1 with --check: something is not; 2 bad
call.
END
}

take_check "$@"
ensure_environment
run_module "$PYTHON" upkeep.generate "$@"
