# Sourced by the other scripts: where things are, and how they come to be there.
# shellcheck shell=bash

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
DEFAULT_TORCH=2.13.0

# refuse WORDS: a bad call.
refuse() {
  echo "error: $1" >&2
  exit 2
}

# use_torch VERSION: the environment and the default checkout for that torch. `installed`
# is the one that $APPLY_PYTHON or python3 has: nothing is fetched for it.
use_torch() {
  case $1 in
    installed | [0-9]*.[0-9]*.[0-9]*) ;;
    *) refuse "'$1' is no version of torch; give one such as 2.15.0, or none for $DEFAULT_TORCH" ;;
  esac
  TORCH_VERSION=$1
  CHECKOUT=$REPO/build/pytorch-$TORCH_VERSION
  if [ "$TORCH_VERSION" = installed ]; then
    VENV=''
    PYTHON=$(command -v "${APPLY_PYTHON:-python3}") ||
      refuse "there is no ${APPLY_PYTHON:-python3}; name a Python in APPLY_PYTHON"
    return
  fi
  VENV=$REPO/.venv
  [ "$TORCH_VERSION" = "$DEFAULT_TORCH" ] || VENV=$REPO/.venv-$TORCH_VERSION
  PYTHON=$VENV/bin/python
}
use_torch "${TORCH_VERSION:-$DEFAULT_TORCH}"

# take_torch ARGUMENTS: heeds --torch and --help, and leaves what remains in `rest`.
take_torch() {
  rest=()
  while [ $# -gt 0 ]; do
    case $1 in
      --torch) use_torch "${2:-}"; shift 2 ;;
      -h | --help) usage; exit ;;
      *) rest+=("$1"); shift ;;
    esac
  done
  export TORCH_VERSION
}

# A Python of at least 3.11 to make the environment with.
base_python() {
  local candidate
  for candidate in python3.11 python3 python3.12 python3.13; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.11 or newer (with its venv module) is needed; none is on the PATH" >&2
  return 1
}

# pip by the machine's index and certificates, but not under its constraints: they are
# for what is installed for others, and may forbid the very release that is asked for.
# (pip lets an empty variable count as unset, so this names an empty file.)
unconstrained_pip() {
  PIP_CONSTRAINT=/dev/null PIP_BUILD_CONSTRAINT=/dev/null \
    "$PYTHON" -m pip --disable-pip-version-check "$@"
}

# quiet COMMAND: what it prints is shown only if it fails.
quiet() {
  local said
  said=$("$@" 2>&1) || { local status=$?; echo "$said" >&2; return $status; }
}

# The .venv with torch and the pinned requirements; nothing to do where it is current.
ensure_environment() {
  [ -n "$VENV" ] || return 0
  local wanted base
  wanted="torch==$TORCH_VERSION $(cksum <"$REPO/requirements.txt")"
  # Of commands that start together, one sets it up, and the others wait.
  {
    flock 9
    [ "$(cat "$VENV/.complete" 2>/dev/null)" = "$wanted" ] && return
    base=$(base_python)
    echo "setting up $VENV with torch $TORCH_VERSION (once, a minute or two) ..." >&2
    "$base" -m venv --clear "$VENV"
    # pip would make all bytecode, on one core; trees that are made of torch need its own.
    quiet unconstrained_pip install --quiet --no-compile \
      "torch==$TORCH_VERSION" --requirement "$REPO/requirements.txt"
    "$PYTHON" -m compileall -q -j 0 "$VENV"/lib/python*/site-packages/torch >/dev/null || true
    echo "$wanted" >"$VENV/.complete"
  } 9>"$VENV.lock"
}

# The default checkout: the wheel's Python tree, its binaries linked in, the set applied.
ensure_patched_checkout() {
  ensure_environment
  mkdir -p "$REPO/build"
  # Commands that start together take turns.
  {
    flock 9
    (run_module "$PYTHON" upkeep.checkout assemble "$CHECKOUT" >&2)
    # 3: applied to a torch that is no release.
    APPLY_PYTHON=$PYTHON "$REPO/scripts/apply_patch.sh" "$CHECKOUT" >&2 || [ $? = 3 ]
  } 9>"$REPO/build/.lock"
}

# answer MODULE ARGUMENTS: --help and wrong options, before anything is set up. The
# module needs nothing but Python to read its `options`.
answer() {
  local python words
  python=$(base_python)
  words=$(PYTHONPATH=$REPO/scripts "$python" -c '
import importlib, sys
importlib.import_module(sys.argv[1]).options(sys.argv[2:])
' "upkeep.$1" "${@:2}")
  # Where the options are right, nothing is said but the help.
  [ -z "$words" ] || { echo "$words"; exit; }
}

# run_module PYTHON MODULE ARGUMENTS: becomes a module of one of the packages in scripts/.
run_module() {
  PYTHONPATH=$REPO/scripts${PYTHONPATH:+:$PYTHONPATH} exec "$1" -m "${@:2}"
}

# run_patchset MODULE ARGUMENTS: a command of scripts/patchset, by $APPLY_PYTHON or python3.
run_patchset() {
  local python=${APPLY_PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
    refuse "$python is no Python 3.9 or newer; name one in APPLY_PYTHON"
  fi
  run_module "$python" "patchset.$1" "${@:2}"
}
