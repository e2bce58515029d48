#!/usr/bin/env bash
# Takes a new release of torch in, or checks all of them again; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
# The release's own torch, for its behaviour; the command itself runs on the default one.
command_python=$PYTHON
case " $* " in
  *" --structure-only "* | *" --help "* | *" -h "*) ;;
  *)
    for word in "$@"; do
      case $word in
        [0-9]*.[0-9]*)
          use_torch "$word"
          ensure_environment
          ;;
      esac
    done
    ;;
esac
PYTHONPATH=$REPO/scripts exec "$command_python" -m patchset.refresh "$@"
