#!/usr/bin/env bash
# The kernels without a GPU: the numbers of Triton's in its interpreter against float64, what they need when they are
# compiled for three generations of GPUs, against docs/data/kernels.json, and the calls of FlashAttention-4, compiled.
#
#   bash scripts/check_kernels.sh          Triton in a temporary folder
#   bash scripts/check_kernels.sh DIR      in a folder that is kept, and filled if there is none
#
# Run it in the environment of the other tests. Triton is added for these checks alone: it is a download of 285 MB, its
# interpreter does not run with the numpy of that environment, and nothing else may depend on it. The parts run two at a
# time, and the log of each is printed when it ends.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${1:-}
if [ -z "$place" ]; then
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
fi
export place OMP_NUM_THREADS=1

# Installs packages in a folder by their name, unless it is there.
install() {
    if [ ! -d "$place/$1" ]; then
        rm -rf "$place/$1.part"
        python -m pip install --quiet --no-deps --target "$place/$1.part" "${@:2}"
        mv "$place/$1.part" "$place/$1"
    fi
}

# Runs a module or script with a version of Triton.
with() {
    install "$1" "triton==$1" numpy==2.2.6
    PYTHONPATH="$place/$1:$PWD" TRITON_CACHE_DIR="$place/compiled/$1" python "${@:2}"
}

recorded() {  # compiled ahead of time
    with 3.9.0 -W ignore -m scripts.compile_kernels
}
numbers() {  # in the interpreter, and without the settings of the other tests, which import transformers
    TRITON_INTERPRET=1 with 3.9.0 -m pytest --noconftest -p no:cacheprovider -q \
        tests/attention/kernels/test_kernel_numerics.py
}
older() {  # compiled by older versions, from the oldest that can
    with "$1" -W ignore -m scripts.compile_kernels --only-compile
}
flash4() {  # the calls of FlashAttention-4, without what its packages ask for: torch with CUDA
    install flash4 flash-attn-4==4.0.0b36 quack-kernels==0.6.5 \
        nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.1 apache-tvm-ffi==0.1.15.post2 \
        torch-c-dlpack-ext==0.1.5 cuda-bindings==13.5.0 cuda-core==1.2.2 cuda-pathfinder==1.9.1 einops==0.8.2
    for capability in 90 100; do
        PYTHONPATH="$place/flash4:$place/flash4/nvidia_cutlass_dsl/dsl_packages:$place/3.6.0:$PWD" \
            python -W ignore -m scripts.compile_flash4 "$capability"
    done
}

# Runs a part and prints its log.
part() {
    local log="$place/${1//[; ]/-}.log" status=0
    SECONDS=0
    bash -euo pipefail -c "$1" >"$log" 2>&1 || status=1
    printf '\n==> %s (%d s)\n' "$1" "$SECONDS"
    cat "$log"
    return "$status"
}
export -f install with recorded numbers older flash4 part

rm -rf "$place/compiled"
install 3.9.0 triton==3.9.0 numpy==2.2.6  # two parts need it at once
printf '%s\0' recorded numbers 'older 3.6.0; flash4' 'older 3.4.0' 'older 3.7.0' |
    xargs -0 -P 2 -I {} bash -c 'part "{}"'
