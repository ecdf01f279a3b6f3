#!/usr/bin/env bash
# The kernels without a GPU: the numbers of Triton's in its interpreter against float64, what they need when they are
# compiled for three generations of GPUs, against docs/data/kernels.json, and the calls of FlashAttention-4, compiled.
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
printf '\n==> compiled by older versions, from the oldest that can (%d s)\n' "$SECONDS"
older() {
    local folder="$place/$1"
    if [ ! -d "$folder/triton" ]; then
        python -m pip install --quiet --no-deps --target "$folder" "triton==$1" numpy==2.2.6
    fi
    PYTHONPATH="$folder:$PWD" TRITON_CACHE_DIR="$folder/compiled" python -W ignore -m scripts.compile_kernels --only-compile
}
older 3.4.0 & one=$!
older 3.6.0 & two=$!
older 3.7.0
wait "$one"
wait "$two"
printf '\n==> the calls of FlashAttention-4 (%d s)\n' "$SECONDS"
if [ ! -d "$place/flash4/flash_attn" ]; then  # without what these ask for: torch with CUDA
    python -m pip install --quiet --no-deps --target "$place/flash4" flash-attn-4==4.0.0b36 quack-kernels==0.6.5 \
        nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.1 apache-tvm-ffi==0.1.15.post2 \
        torch-c-dlpack-ext==0.1.5 cuda-bindings==13.5.0 cuda-core==1.2.2 cuda-pathfinder==1.9.1 einops==0.8.2
fi
PYTHONPATH="$place/flash4:$place/flash4/nvidia_cutlass_dsl/dsl_packages:$place/3.6.0:$PWD" \
    python -W ignore -m scripts.compile_flash4
printf '\n==> done (%d s)\n' "$SECONDS"
