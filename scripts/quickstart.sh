#!/usr/bin/env bash
# The main job from nothing: environment, default checkout, patch set, training run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'EOF'
usage: scripts/quickstart.sh [--torch VERSION] [OPTIONS OF quickstart.py]

Sets up a .venv, assembles a PyTorch checkout in build/ from the installed wheel,
applies the patch set, verifies it, and trains a small transformer with every solver
at three budgets. Takes about three minutes, the first time with downloads on top.

  --torch VERSION   the torch to do it on (default 2.13.0)

EOF
}

rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --torch) use_torch "${2:?--torch needs a version, such as 2.15.0}"; shift 2 ;;
    -h | --help) usage; exec python3 "$REPO/scripts/quickstart.py" --help ;;
    *) rest+=("$1"); shift ;;
  esac
done
ensure_patched_checkout
TORCH_VERSION=$TORCH_VERSION exec "$REPO/scripts/run_patched.sh" python "$REPO/scripts/quickstart.py" "${rest[@]}"
