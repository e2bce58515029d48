#!/usr/bin/env bash
# Measures what the project claims; --help tells how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage="usage: scripts/benchmark.sh all|compare|solvers|saved|operators|kernels|steps|loops|cost|unasked|chunks|fits|gpu|forms [OPTIONS]"
case ${1:-} in
  compare | solvers | saved | operators | kernels | steps | loops | cost | unasked | chunks | fits) ;;
  all)
    run_module "$(base_python)" benchmarks.everything "${@:2}"
    ;;
  forms)
    ensure_environment
    # One thread in each process.
    export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
    run_module "$PYTHON" upkeep.forms "${@:2}"
    ;;
  gpu)
    use_torch installed
    export TORCH_VERSION
    ;;
  -h | --help)
    cat <<EOF2
$usage

  all [--set project|held-out] [--only NAME...]
               every question from compare to fits, one after the other, each by its torch;
               stores results/NAME.json, and skips what this code has stored

  compare      a step in eager mode, with checkpoints, by stock torch.compile and with this
               set: the README's table with --full
  solvers      the knapsack solvers, side by side with upstream's from the untouched wheel
  saved        what plans keep for the backward and compute again, beside upstream's
  operators    the budget that means peak memory, operator by operator, beside upstream's
  kernels      the same by inductor's schedule for a GPU at real size, without a GPU but by
               a torch that was built with CUDA; and by real kernels on a CPU
  steps        a budget for the whole training step where blocks are compiled one by one,
               beside what budgets and checkpoints of single blocks reach
  loops        such a budget in training loops whose steps differ: what is learned again,
               exceeded, recomputed and warned of
  cost         the time to compile with a peak asked, kernels included, beside upstream's,
               and the memory of first steps
  unasked      whether anything holds or takes more than with the untouched wheel while no option
               is set
  chunks       large heads in as many chunks as a bound needs, beside inductor's own chunker
  fits         what what_fits.sh tells, beside torch's allocator and published figures

  gpu          memory and time of plans on this machine's GPU, with python3's torch, patched and
               unpatched (minutes)
  forms        what each pull request changes, on five models or more, by the newest release as
               it came out and with the pull request's branch; stored in results/forms.json
               (minutes for each)

All have --help. Questions have --check, for the counts that must hold, and
--json FILE, to store what they measure; all of them together take two cores some 90 minutes
for each set of nets. scripts/run_tests.sh --help tells of tests that can try more
than CI does: every operator of torch's OpInfo databases, training loops drawn at random.
EOF2
    exit
    ;;
  *)
    echo "$usage; --help tells more" >&2
    exit 2
    ;;
esac
# Wrong options, and --help, need no environment.
case " $* " in *" -h "* | *" --help "*) run_module "$(base_python)" benchmarks.options "$@" ;; esac
(run_module "$(base_python)" benchmarks.options "$@")
# -P: a folder named torch where this is called is not meant.
PYTHONPATH=$REPO/scripts${PYTHONPATH:+:$PYTHONPATH} \
  exec "$REPO/scripts/run_patched.sh" "$PYTHON" -P -m benchmarks "$@"
