#!/usr/bin/env bash
# Makes one's own PyTorch checkout runnable without a build; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'END'
usage: scripts/link_build.sh [--remove] CHECKOUT

Links the binaries of the torch installed in the .venv into CHECKOUT, so that its Python
tree runs without compiling PyTorch; --remove takes the links out again. The .venv is
set up first where it is missing. CHECKOUT must be of the same major.minor release: for
another one than the default, set TORCH_VERSION, or TORCH_VERSION=installed for the torch
of APPLY_PYTHON or python3.

Run the checkout with PYTHONPATH=CHECKOUT in front; its scripts and tests would import
the installed torch otherwise.

  TORCH_VERSION=2.15.0 scripts/link_build.sh CHECKOUT

Exit status: 0 done or already in the wanted state; 2 bad call, or refused with the
reason.
END
}

tree=''
for word; do
  case $word in
    -h | --help) usage; exit ;;
    --remove) ;;
    -*) refuse "there is no option $word; --help lists them" ;;
    *) [ -z "$tree" ] || refuse "give one CHECKOUT, not $tree and $word"; tree=$word ;;
  esac
done
[ -n "$tree" ] || { usage >&2; exit 2; }
[ -f "$tree/torch/__init__.py" ] ||
  refuse "'$tree' is no PyTorch checkout: it has no torch/__init__.py"

ensure_environment
run_module "$PYTHON" upkeep.checkout link "$@"
