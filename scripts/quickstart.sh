#!/usr/bin/env bash
# The main job from nothing: environment, default checkout, patch set, training run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'EOF'
usage: scripts/quickstart.sh [--torch VERSION] [--full] [--json FILE]

Trains two small nets on the CPU, a Llama and a GPT-2 with dropout: in eager mode, by
stock torch.compile at budget 1, at 0 and where its peak is lowest, and with this set.
Shows their peaks, times and errors of gradients. Runs on a patched copy of torch in build/
and touches no installation.

Takes two to three minutes of one core; the first time it also sets up a .venv with torch.

  --torch VERSION   the torch to do it on (default 2.13.0)
  --full            the larger nets of README's table (half an hour)
  --json FILE       also write what was measured to FILE

Exit status: 0 all well; 1 gradients with the set differ from eager mode's, a peak is not
below stock's, or something could not be run; 2 bad call.
EOF
}

take_torch "$@"
set -- "${rest[@]}"
time="two to three minutes"
while [ $# -gt 0 ]; do
  case $1 in
    --full) time="about half an hour" ;;
    --json)
      [ -n "${2:-}" ] || refuse "--json needs a file"
      [ -d "$(dirname "$2")" ] || refuse "--json $2: there is no folder $(dirname "$2")"
      shift
      ;;
    *) refuse "there is no option $1; --help lists them" ;;
  esac
  shift
done
echo "This takes $time of one core; the first time, some minutes more to set up torch." >&2
# -P: a folder named torch where this is called is not meant.
PYTHONPATH=$REPO/scripts exec "$REPO/scripts/run_patched.sh" \
  python -W ignore -P -m benchmarks compare "${rest[@]}"
