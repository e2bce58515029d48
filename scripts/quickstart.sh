#!/usr/bin/env bash
# The main job from nothing: environment, default checkout, patch set, training run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'EOF'
usage: scripts/quickstart.sh [--torch VERSION] [--backend NAME] [--json FILE]

Sets up a .venv, assembles a PyTorch checkout in build/ from the installed wheel,
applies the patch set, verifies it, and trains a small transformer with every solver
at three budgets. Takes about three minutes, the first time with downloads on top.

  --torch VERSION   the torch to do it on (default 2.13.0)
  --backend NAME    torch.compile's backend: aot_eager_decomp_partition (default) or
                    inductor, which needs a C++ compiler
  --json FILE       also write the table's rows to FILE

Exit status: 0 all well; 1 gradients differ from eager's, or a solver did not keep the
budget it promises; 2 bad call.
EOF
}

take_torch "$@"
exec "$REPO/scripts/run_patched.sh" python "$REPO/scripts/quickstart.py" "${rest[@]}"
