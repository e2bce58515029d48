#!/usr/bin/env bash
# Measures what the project claims; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage="usage: scripts/benchmark.sh solvers|saved|peak|step|loops|fuzz-loops|schedule|chunks|cost|fits|opinfo|unasked|gpu|forms [OPTIONS]"
case ${1:-} in
  solvers | saved | loops | schedule | chunks | cost | fits | opinfo | unasked) ;;
  fuzz-loops)
    # A test draws them.
    FUZZ=${3:-300} exec "$REPO/scripts/run_tests.sh" "$REPO/test/test_fuzz_loops.py" \
      -n 0 -k drawn --hypothesis-seed "${2:-0}" --hypothesis-show-statistics \
      --timeout 0 --show-capture=no
    ;;
  forms)
    ensure_environment
    # One thread in each process.
    export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
    run_module "$PYTHON" upkeep.forms "${@:2}"
    ;;
  peak) set -- schedule --device operators "${@:2}" ;;
  step) set -- schedule --device operators --steps "${@:2}" ;;
  gpu)
    use_torch installed
    export TORCH_VERSION
    set -- schedule --device cuda "${@:2}"
    ;;
  -h | --help)
    cat <<EOF2
$usage

  solvers      the knapsack solvers against the marks they have to reach, side by side
               with upstream's from the untouched wheel (minutes)
  saved        what plans keep for the backward and compute again, on 25 nets and models,
               beside upstream's (an hour)
  peak         the budget that means peak memory, beside upstream's: peaks, recomputed flops,
               gradients (hours)
  step         a budget for the whole training step where blocks are compiled one by one, beside
               what budgets and checkpoints of single blocks reach (hours)
  loops        such a budget in training loops whose steps differ: what is learned again,
               exceeded, recomputed and warned of (hours)
  fuzz-loops SEED COUNT
               loops that a test draws at random: the same bits as without a budget, peaks
               within what is allowed, or a warning; a fault is shrunk (an hour for 300)
  schedule     what plans hold and take under inductor, on a CPU or for a GPU at real size,
               beside upstream's; needs no GPU, but for one a torch built with CUDA (hours)
  chunks       large heads in as many chunks as a bound needs, beside inductor's own chunker
               (an hour)
  cost         the time to compile a graph with a peak asked, kernels included, beside
               upstream's (half an hour)
  unasked      what holds or takes more than with the untouched wheel although nothing is asked
               (hours)
  fits         what what_fits.sh tells, beside torch's allocator and published figures (an hour)
  opinfo       that no operator of torch's OpInfo databases computes anything else under a
               budget, operator by operator and by inductor (hours)
  gpu          what plans hold and take on the GPU of this machine, by the torch that python3
               has, beside that torch as it is (minutes)
  forms        what each pull request changes, on five models, by the newest release as it came
               out and with the pull request's branch; stored in results/forms.json (minutes
               for each)

All but fuzz-loops have --help; --json FILE, to store what they print; and --check, for the
counts that must hold.
EOF2
    exit
    ;;
  *)
    echo "$usage; --help tells more" >&2
    exit 2
    ;;
esac
# -P: a folder named torch where this is called is not meant.
PYTHONPATH=$REPO/scripts${PYTHONPATH:+:$PYTHONPATH} \
  exec "$REPO/scripts/run_patched.sh" "$PYTHON" -P -m benchmarks "$@"
