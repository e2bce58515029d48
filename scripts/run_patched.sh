#!/usr/bin/env bash
# Runs a command on the default patched checkout; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'END'
usage: scripts/run_patched.sh COMMAND [ARGUMENTS]

Runs COMMAND, say `python train.py`, with torch imported from the patched checkout in
build/, which is set up first where it is missing. No installation is changed: the
command gets a PYTHONPATH that begins with the checkout and a PATH that begins with
the .venv. It compiles into a folder of its own that is deleted afterwards; set
TORCHINDUCTOR_CACHE_DIR to keep what was compiled. Python's bytecode is kept, even where
PYTHONDONTWRITEBYTECODE is set.

  TORCH_VERSION=2.15.0 scripts/run_patched.sh ...     on another release of torch
  TORCH_VERSION=installed scripts/run_patched.sh ...  on a patched copy of the torch that
                                                      python3 imports, with its packages

The exit status is the command's.
END
}

case ${1:-} in
  -h | --help) usage; exit ;;
  '') usage >&2; exit 2 ;;
  -*) refuse "$1 is no command; --help tells more" ;;
esac

ensure_patched_checkout
export PYTHONPATH="$CHECKOUT${PYTHONPATH:+:$PYTHONPATH}"
PATH="$(dirname "$PYTHON"):$PATH"
# Every run compiles for itself: what an earlier one left in a cache proves nothing.
if [ -z "${TORCHINDUCTOR_CACHE_DIR:-}" ]; then
  TORCHINDUCTOR_CACHE_DIR=$(mktemp -d)
  export TORCHINDUCTOR_CACHE_DIR
  trap 'rm -rf "$TORCHINDUCTOR_CACHE_DIR"' EXIT
fi
# Without the bytecode of what torch imports, each process would take 5 s longer.
unset PYTHONDONTWRITEBYTECODE
"$@"
