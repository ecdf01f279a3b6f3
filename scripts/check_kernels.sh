#!/usr/bin/env bash
# The Triton kernels without a GPU: their numbers in Triton's interpreter against float64, and what they need when they
# are compiled for three generations of GPUs, against docs/data/kernels.json.
#
#   bash scripts/check_kernels.sh          Triton in a temporary folder
#   bash scripts/check_kernels.sh DIR      in a folder that is kept, and filled if there is none
#
# Run it in the environment of the other tests. Triton is added for these checks alone: it is a download of 285 MB, its
# interpreter does not run with the numpy of that environment, and nothing else may depend on it.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${1:-}
if [ -z "$place" ]; then
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
fi
if [ ! -d "$place/triton" ]; then
    python -m pip install --quiet --no-deps --target "$place" triton==3.9.0 numpy==2.2.6
fi
export PYTHONPATH="$place:$PWD" TRITON_CACHE_DIR="$place/compiled" OMP_NUM_THREADS=1
printf '\n==> the numbers, in the interpreter (%d s)\n' "$SECONDS"
# Without the settings of the other tests, which import transformers.
TRITON_INTERPRET=1 python -m pytest --noconftest -p no:cacheprovider -q tests/attention/kernels/test_kernel_numerics.py
printf '\n==> compiled ahead of time (%d s)\n' "$SECONDS"
rm -rf "$TRITON_CACHE_DIR"
python -W ignore -m scripts.compile_kernels
for version in 3.4.0 3.6.0 3.7.0; do  # the oldest that compiles, and others that torch brings
    printf '\n==> compiled by Triton %s (%d s)\n' "$version" "$SECONDS"
    older="$place/$version"
    if [ ! -d "$older/triton" ]; then
        python -m pip install --quiet --no-deps --target "$older" "triton==$version" numpy==2.2.6
    fi
    PYTHONPATH="$older:$PWD" TRITON_CACHE_DIR="$older/compiled" python -W ignore -m scripts.compile_kernels --only-compile
done
printf '\n==> done (%d s)\n' "$SECONDS"
