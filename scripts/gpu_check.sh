#!/usr/bin/env bash
# Everything that needs a GPU, in one command of at most 8 minutes: the engines, the tests on CuPy arrays, the example, and the
# benchmark beside torch. Each step has a time limit of its own, and one that fails does not keep the later ones from running.
#
#   scripts/gpu_check.sh [--double] [--install] [--python PROGRAM] [OUT]
#
#   OUT          folder for logs and results (default: $OUT, else benchmarks/results)
#   --python     the Python to use (default: python3 of the environment that is active); funcnn is taken from this clone
#   --install    make a virtual environment in a temporary folder and install everything there from the network
#   --double     try this script on a machine without a GPU: the CPU double of the tests, few tests, tiny arrays
#
# With pytest-xdist the tests run in 6 processes, which share the GPU: most of their time is that of compilers on the CPU.
# Exit status: 0 if every step passed; 1 if one failed, ran out of time or missed a target; 2 if there is nothing to run on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=python3 double='' install='' out=${OUT:-}
limit=480   # seconds in all
reserve=15  # of these for what ends a step and for the summary

usage() { sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"; }

while (($#)); do
    case $1 in
    --double) double=1 ;;
    --install) install=1 ;;
    --python)
        python=${2:?--python needs a program}
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    -*)
        echo "unknown option: $1" >&2
        usage >&2
        exit 2
        ;;
    *) out=$1 ;;
    esac
    shift
done

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
if [[ -z $out ]]; then
    # What a trial run writes is no result.
    if [[ -n $double ]]; then out=$(mktemp -d); else out=$root/benchmarks/results; fi
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
[[ $python == */* ]] && python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
cd "$root"

if [[ -n $install ]]; then
    "$python" -m venv "$temporary/env"
    python=$temporary/env/bin/python
    "$python" -m pip install --quiet --disable-pip-version-check -e ".[test,examples,benchmarks,cuda13]" torch
    SECONDS=0 # the 8 minutes are those of the checks
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

# Python with the doubles in place of CuPy and the GPU: -m MODULE or a script, with its arguments.
# shellcheck disable=SC2329 # a step calls it
doubled() {
    "$python" -c '
import runpy, sys
sys.path.insert(0, "tests")
from gpu import double
double.install()
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path.insert(1, sys.argv[0].rpartition("/")[0])  # the doubles stay first
    runpy.run_path(sys.argv[0], run_name="__main__")
' "$@"
}
export -f doubled
export python

names=() verdicts=() failed=0

# run_step NAME SECONDS COMMAND...: run it within the time, its output to the screen and to OUT/NAME.log; note how it went.
run_step() {
    local name=$1 most=$2 status=0 verdict
    shift 2
    local left=$((limit - reserve - SECONDS))
    ((most > left)) && most=$left
    if ((most < 5)); then
        names+=("$name") verdicts+=("left out: the time is up") failed=1
        return 0
    fi
    echo "== $name (at most $most s)"
    local start=$SECONDS
    # Without a driver cuDNN reports each of its functions that it misses, for each plan.
    timeout --kill-after=5 "$most" "$@" 2>&1 | { grep -v --line-buffered "^Could not load symbol" || true; } |
        tee "$out/$name.log" || status=$?
    case $status in
    0) verdict=passed ;;
    124 | 137) verdict="ran out of its $most s" ;;
    *) verdict="failed, status $status" ;;
    esac
    [[ $name == benchmark && $status == 3 ]] && verdict="a target is missed"
    ((status)) && failed=1
    names+=("$name") verdicts+=("$verdict ($((SECONDS - start)) s)")
}

has_gpu='
import sys
try:
    import cupy
except ImportError as error:
    sys.exit(f"{error}: pip install cupy-cuda13x, or --install")
if not cupy.is_available():
    sys.exit("CuPy finds no GPU (--double tries this script without one)")
'

if [[ -n $double ]]; then
    start=(bash -euo pipefail -c 'doubled "$@"' doubled)
    tests=(tests/test_conv.py tests/test_max_pool.py -k "padding or tie" --maxfail 20)
    trial=(--double)
    benchmark_most=25
else
    "$python" -c "$has_gpu" || exit 2
    start=("$python")
    tests=(--durations 10)
    if "$python" -c "import xdist" 2>/dev/null; then tests+=(-n 6); fi
    trial=()
    benchmark_most=$limit
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv || true
fi

# Both engines must be there; the list says why one is not.
run_step engines 60 bash -euo pipefail -c \
    '"$@" -m funcnn | tee /dev/stderr | awk "/^(cudnn|cuda) +available/ {n++} END {exit n != 2}"' engines "${start[@]}"
FUNCNN_TEST_BACKENDS=cupy_cudnn,cupy_cuda run_step tests 240 \
    "$python" -m pytest -p no:cacheprovider -m gpu -q "${tests[@]}"
run_step example 60 "${start[@]}" examples/train_digits.py --xp cupy --quick --out "$temporary/digits"
# The benchmark ends by itself a little before its limit: a row that has begun is finished.
left=$((limit - reserve - SECONDS))
((benchmark_most < left)) && left=$benchmark_most
run_step benchmark "$left" "$python" benchmarks/run_gpu.py --seconds $((left > 30 ? left - 20 : left / 2)) --out "$out" "${trial[@]}"

echo
echo "== summary (in all $SECONDS s; logs and results in $out)"
[[ -n $double ]] && echo "a trial run on the CPU double: nothing here was run on a GPU"
for i in "${!names[@]}"; do
    printf '%-10s %s\n' "${names[i]}" "${verdicts[i]}"
done
exit "$failed"
