#!/usr/bin/env bash
# All tests, run by the default patched checkout's torch.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'EOF'
usage: scripts/run_tests.sh [--torch VERSION] [PYTEST ARGUMENTS]

Sets up what it needs (a .venv, the default patched checkout in build/) and runs the
project's tests, or those that the pytest arguments name.

  --torch VERSION   the torch to run them on (default 2.13.0)
EOF
}

rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --torch) use_torch "${2:?--torch needs a version, such as 2.15.0}"; shift 2 ;;
    -h | --help) usage; exit ;;
    *) rest+=("$1"); shift ;;
  esac
done
cd "$REPO"
export TORCH_VERSION
exec "$REPO/scripts/run_patched.sh" python -m pytest "${rest[@]}"
