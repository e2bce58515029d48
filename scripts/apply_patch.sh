#!/usr/bin/env bash
# Puts the patch set onto a PyTorch tree or takes it off; --help tells how.
# Needs Python 3.9 or newer and nothing else.
set -euo pipefail
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) \
  exec "${APPLY_PYTHON:-python3}" -m patchset.apply "$@"
