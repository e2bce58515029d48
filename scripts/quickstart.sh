#!/usr/bin/env bash
# The main job from nothing: environment, default checkout, patch set, training run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'EOF'
usage: scripts/quickstart.sh [--torch VERSION] [--json FILE]

Sets up a .venv, assembles a PyTorch checkout in build/ from the installed wheel,
applies the patch set, verifies it, and trains a small transformer on the CPU: in eager
mode, at upstream's lowest peak, with the target "peak", and with a StepBudget. Takes
about three minutes, the first time with downloads on top.

  --torch VERSION   the torch to do it on (default 2.13.0)
  --json FILE       also write the tables' rows to FILE

Exit status: 0 all well; 1 gradients differ from eager's, or a peak is not below
upstream's; 2 bad call.
EOF
}

take_torch "$@"
# -P: a folder named torch where this is called is not meant.
PYTHONPATH=$REPO/scripts exec "$REPO/scripts/run_patched.sh" \
  python -W ignore -P -m benchmarks quickstart "${rest[@]}"
