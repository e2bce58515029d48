#!/usr/bin/env bash
# Builds a patched PyTorch from source and tests the set on it; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'END'
usage: scripts/build_from_source.sh [OPTIONS] CHECKOUT
       scripts/build_from_source.sh [OPTIONS] --debian

Applies the patch set to CHECKOUT, a clone of PyTorch with its submodules, compiles it for
the CPU (no GPU, C++ tests, FBGEMM, XNNPACK, QNNPACK or Kineto), installs it as editable
into an environment of its own, CHECKOUT/build/venv, and runs test/functorch/test_ac_*.py
there: the tests that the set brings, beside upstream's. That takes hours, at
the lowest priority. Stopped or killed and started again, it goes on where it was, with
the options of the first time.

  --minimal      also no oneDNN, no kernels for AVX, -O1 and precompiled headers: enough
                 for tests in Python
  --distributed  with torch.distributed
  --debian       instead of a CHECKOUT, Debian's source package of 2.6.0, in a chroot in
                 build/from-source with what Debian builds it with; needs root,
                 debootstrap and 10 GB
  --jobs N       files to compile at a time (default: one per core)
  --json FILE    store how far it came, the hours of all runs, and the tests' outcome

Exit status: 0 built, and the tests pass; 1 not so; 2 bad call, or no source tree.
END
}

refuse() {
  echo "error: $1" >&2
  exit 2
}

minimal='' distributed='' debian='' jobs=$(nproc) json='' tree='' enter=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --minimal | --distributed | --debian) printf -v "${1#--}" %s "$1 " ;;
    --jobs | --json) [ $# -gt 1 ] || refuse "$1 needs a value"; printf -v "${1#--}" %s "$2"; shift ;;
    -*) refuse "there is no option $1; --help lists them" ;;
    *) [ -z "$tree" ] || refuse "give one CHECKOUT, not $tree and $1"; tree=$1 ;;
  esac
  shift
done

if [ "$debian" ]; then
  [ -z "$tree" ] || refuse "--debian brings its own source; leave $tree out"
  root=$(realpath -m "$REPO/build/from-source/chroot")
  (run_module python3 upkeep.debian_source "$root") || exit 2
  tree=$root/src/pytorch inside=/src/pytorch
  # The mount is gone with the last process that sees it.
  # shellcheck disable=SC2016
  enter=(unshare --mount sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$root")
  # As debian/rules has it.
  export USE_SYSTEM_LIBS=1 BUILD_CUSTOM_PROTOBUF=0 ONNX_NAMESPACE=onnx
  export BLAS=Generic GENERIC_BLAS_LIBRARIES=blas
else
  for file in CMakeLists.txt setup.py version.txt; do
    [ -f "$tree/$file" ] || refuse "'$tree' is no source tree of PyTorch: it has no $file"
  done
  tree=$(realpath "$tree") inside=$tree
fi

state=$tree/build/from-source
mkdir -p "$state/hours"
# What is still compiling after its script was killed holds the lock as well.
exec 9>"$state/lock"
flock -n 9 || refuse "another run is building $tree"
wanted=$minimal$distributed
[ -f "$state/options" ] || echo "$wanted" >"$state/options"
read -r options <"$state/options" || true
[ -z "$wanted" ] || [ "${wanted% }" = "$options" ] ||
  refuse "$tree/build was begun with '$options'; go on with that, or remove it"

# Keeps the seconds passed and the CPU seconds of process $1 and all it has waited for,
# in a file, for a kill to leave them.
meter() {
  local place stat start=$SECONDS
  place=$(mktemp "$state/hours/XXXXXX")
  while read -ra stat <"/proc/$1/stat"; do
    echo "$((SECONDS - start)) $((stat[13] + stat[14] + stat[15] + stat[16]))" >"$place"
    sleep 5
  done
}

# run COMMAND...: in the tree, where its compiler and its Python are.
pid='' tests='not run'
run() {
  nice -n 19 ionice -c 3 "${enter[@]}" env -u TMPDIR -C "$inside" \
    PATH="$inside/build/venv/bin:$PATH" "$@" &
  pid=$!
  meter "$pid" >/dev/null 2>&1 9>&- &
  wait "$pid"
}

# shellcheck disable=SC2317
record() {
  local to_compile compiled wall cpu origin
  to_compile=$(grep -c '^build .*\.o: ' "$tree/build/build.ninja" || true)
  compiled=$(cut -f 4 "$tree/build/.ninja_log" | grep '\.o$' | sort -u | wc -l || true)
  read -r wall cpu < <(cat "$state"/hours/* | awk -v ticks="$(getconf CLK_TCK)" \
    '{wall += $1; cpu += $2} END {printf "%.1f %.1f\n", wall / 3600, cpu / ticks / 3600}')
  origin=$(sed -n '1s/ (\(.*\)).*/ of Debian, \1/p' "$tree/debian/changelog" 2>/dev/null ||
    git -C "$tree" describe --always --tags 2>/dev/null || echo unknown)
  python3 - "$json" torch "$(cat "$tree/version.txt")" source "$origin" \
    options "${options:-none}" compiled "$compiled of $to_compile files" \
    "hours passed" "$wall" "CPU hours" "$cpu" tests "$tests" <<'END'
import json, pathlib, sys
place, *words = sys.argv[1:]
data = dict(zip(words[::2], words[1::2]))
pathlib.Path(place).write_text(json.dumps(data, indent=1) + "\n")
END
}

# Runs when this ends, however.
# shellcheck disable=SC2317
finish() {
  kill "$pid" 2>/dev/null || true
  [ -z "$json" ] || [ ! -f "$state/configured" ] || record
}
trap finish EXIT
trap 'trap "" HUP INT TERM; exit 1' HUP INT TERM

# 3: applied to a tree that is no known release, verified by its structure.
"$REPO/scripts/apply_patch.sh" "$tree" || [ $? = 3 ] || exit 1

export LC_ALL=C.UTF-8 MAX_JOBS=$jobs
export CMAKE_BUILD_TYPE=Release CFLAGS='-g0 -w' CXXFLAGS='-g0 -w' BUILD_TEST=0
export USE_CUDA=0 USE_ROCM=0 USE_XPU=0 USE_MPI=0 USE_DISTRIBUTED=0
export USE_FBGEMM=0 USE_XNNPACK=0 USE_PYTORCH_QNNPACK=0 USE_NNPACK=0 USE_KINETO=0 USE_ITT=0
cache=()
case $options in *--distributed*) USE_DISTRIBUTED=1 ;; esac
case $options in
  *--minimal*)
    export USE_MKLDNN=0 USE_PRECOMPILED_HEADERS=1
    export CMAKE_C_FLAGS_RELEASE='-O1 -DNDEBUG' CMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG'
    for set in AVX2 AVX512; do
      cache+=("-DCXX_${set}_FOUND=OFF" "-DCXX_HAS_${set}_2=OFF")
    done
    ;;
esac

if [ ! -f "$state/configured" ]; then
  if [ "$debian" ]; then
    run python3 -m venv --system-site-packages build/venv
  else
    "$(base_python)" -m venv "$tree/build/venv"
    PYTHON=$tree/build/venv/bin/python unconstrained_pip install --quiet \
      --requirement "$tree/requirements.txt" cmake ninja pytest
  fi
  run python setup.py build --cmake-only
  # In its own cache, since setup.py takes no such words.
  run cmake "${cache[@]}" build
  touch "$state/configured"
fi

run ninja -C build -j "$jobs" install
run env PIP_CONSTRAINT=/dev/null python -m pip install --quiet --no-index --no-deps \
  --no-build-isolation --editable .

echo "the tests that the set brings:"
rm -rf "$state/compiled"
failed=0
run env CI= TORCHINDUCTOR_CACHE_DIR="$inside/build/from-source/compiled" \
  sh -c 'python -m pytest test/functorch/test_ac_*.py' >"$state/tests" 2>&1 || failed=1
cat "$state/tests"
tests=$(tail -1 "$state/tests" | tr -d =)
exit $failed
