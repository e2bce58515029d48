#!/usr/bin/env bash
# Writes the complete series for a checkout, for git am; --help tells how.
set -euo pipefail
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) \
  exec "${APPLY_PYTHON:-python3}" -m patchset.export "$@"
