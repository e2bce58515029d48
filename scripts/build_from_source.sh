#!/usr/bin/env bash
# Builds a patched PyTorch from source and tests the set on it; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
  cat <<'END'
usage: scripts/build_from_source.sh [--minimal] CHECKOUT

Applies the patch set to CHECKOUT, a clone of PyTorch with its submodules, compiles it for
the CPU (no GPU, C++ tests, FBGEMM, XNNPACK, QNNPACK or Kineto), installs it as editable
into an environment of its own, CHECKOUT/build/venv, and runs test/functorch/test_ac_*.py
there: the tests that the set brings, beside upstream's. That takes hours, at the lowest
priority. Stopped or killed and started again, it goes on where it was, with the options
of the first time. An environment that is there is taken as it is, and so are variables
of upstream's build, such as USE_SYSTEM_LIBS=1, USE_DISTRIBUTED=1 or MAX_JOBS=4.

  --minimal      also no oneDNN, no kernels for AVX, -O1 and precompiled headers: enough
                 for tests in Python

Exit status: 0 built, and the tests pass; 1 not so; 2 bad call, or no source tree.
END
}

wanted='' tree=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --minimal) wanted=$1 ;;
    -*) refuse "there is no option $1; --help lists them" ;;
    *) [ -z "$tree" ] || refuse "give one CHECKOUT, not $tree and $1"; tree=$1 ;;
  esac
  shift
done
for file in CMakeLists.txt setup.py version.txt; do
  [ -f "$tree/$file" ] || refuse "'$tree' is no source tree of PyTorch: it has no $file"
done
tree=$(realpath "$tree")

state=$tree/build/from-source
mkdir -p "$state"
# What is still compiling after its script was killed holds the lock as well.
exec 9>"$state/lock"
flock -n 9 || refuse "another run is building $tree"
[ -f "$state/options" ] || echo "$wanted" >"$state/options"
read -r options <"$state/options" || true
[ -z "$wanted" ] || [ -n "$options" ] ||
  refuse "$tree/build was begun without $wanted; go on with that, or remove it"

# run COMMAND...: in the tree, by its Python.
pid=''
run() {
  nice -n 19 ionice -c 3 env -C "$tree" PATH="$tree/build/venv/bin:$PATH" "$@" &
  pid=$!
  wait "$pid"
}
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null || true' EXIT
trap 'trap "" HUP INT TERM; exit 1' HUP INT TERM

# 3: applied to a tree that is no known release, verified by its structure.
"$REPO/scripts/apply_patch.sh" "$tree" || [ $? = 3 ] || exit 1

export LC_ALL=C.UTF-8 MAX_JOBS=${MAX_JOBS:-$(nproc)}
export CMAKE_BUILD_TYPE=Release CFLAGS='-g0 -w' CXXFLAGS='-g0 -w' BUILD_TEST=0
export USE_CUDA=0 USE_ROCM=0 USE_XPU=0 USE_MPI=0 USE_DISTRIBUTED=${USE_DISTRIBUTED:-0}
export USE_FBGEMM=0 USE_XNNPACK=0 USE_PYTORCH_QNNPACK=0 USE_NNPACK=0 USE_KINETO=0 USE_ITT=0
cache=()
if [ -n "$options" ]; then
  export USE_MKLDNN=0 USE_PRECOMPILED_HEADERS=1
  export CMAKE_C_FLAGS_RELEASE='-O1 -DNDEBUG' CMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG'
  for set in AVX2 AVX512; do
    cache+=("-DCXX_${set}_FOUND=OFF" "-DCXX_HAS_${set}_2=OFF")
  done
fi

if [ ! -f "$state/configured" ]; then
  if [ ! -e "$tree/build/venv" ] || [ -e "$state/venv-begun" ]; then
    touch "$state/venv-begun"
    "$(base_python)" -m venv "$tree/build/venv"
    PYTHON=$tree/build/venv/bin/python unconstrained_pip install --quiet \
      --requirement "$tree/requirements.txt" cmake ninja pytest
    rm "$state/venv-begun"
  fi
  run python setup.py build --cmake-only
  # In its own cache, since setup.py takes no such words.
  run cmake "${cache[@]}" build
  touch "$state/configured"
fi

run ninja -C build -j "$MAX_JOBS" install
run env PIP_CONSTRAINT=/dev/null python -m pip install --quiet --no-index --no-deps \
  --no-build-isolation --editable .

echo "the tests that the set brings:"
rm -rf "$state/compiled"
run env CI= TORCHINDUCTOR_CACHE_DIR="$state/compiled" \
  sh -c 'python -m pytest test/functorch/test_ac_*.py' || exit 1
