#!/usr/bin/env bash
# Ten minutes on a GPU without a network: the suite gpu (the most telling first), the self-test, the tests marked gpu, and
# docs/gpu.md from what was measured.
#
#   bash scripts/gpu_run.sh pack WHEELS [3.12]           in the environment of the tests: wheels for a Python that has torch
#   bash scripts/gpu_run.sh OUTPUT [SECONDS] [WHEELS]    on the GPU, with torch for CUDA
#
# Every part writes what it has to OUTPUT when it has it, and ends in time. The same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = pack ]; then
    mkdir -p "${2:?a folder for the wheels}"
    python - >"$2/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

seen, found, todo = set(), {}, ["hf-posenc[data,plot,report,train]", "pytest-timeout", "pytest-xdist"]
while todo:
    needed = Requirement(todo.pop())
    name, extras = re.sub("[-_.]+", "-", needed.name).lower(), {"", *needed.extras}
    if name == "torch" or str(needed) in seen:
        continue
    seen.add(str(needed))
    try:
        lines = [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:  # of another system
        continue
    found[name] = version(name)
    marked = [x for x in lines if not x.marker or any(x.marker.evaluate({"extra": e}) for e in extras)]
    todo += [f"{x.name}[{','.join(x.extras)}]" if x.extras else x.name for x in marked]
print(*(f"{name}=={number}" for name, number in found.items() if name != "hf-posenc"), sep="\n")
PYTHON
    platforms=$(printf -- '--platform manylinux%s_x86_64 ' _2_28 _2_27 _2_24 _2_17 2014 1)
    # shellcheck disable=SC2086
    exec python -m pip download --quiet --no-deps --only-binary=:all: --python-version "${3:-3.12}" $platforms \
        --dest "$2" -r "$2/requirements.txt"
fi

output=$(realpath -m "${1:?a folder for the results}")
ends=$((SECONDS + ${2:-540}))
mkdir -p "$output"
if [ -n "${3:-}" ] && [ ! -d "$output/site" ]; then
    python -m pip install --quiet --no-index --no-deps --target "$output/site" "$3"/*.whl
fi
export PYTHONPATH="$PWD:$output/site" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
posenc=(python -c 'from hf_posenc.cli import main; main()')

# Runs a part for at most so many of the seconds that are left; `timeout` ends all its processes.
part() {
    local name=$1 most=$2 left=$((ends - SECONDS)) status=0
    if [ -e "$output/$name.ended" ]; then
        echo "==> $name has ended before"
    elif [ "$left" -lt 10 ]; then
        echo "==> $name: no time is left"
    else
        echo "==> $name"
        timeout --kill-after=5 "$((most < left ? most : left))" "${@:3}" 2>&1 | tee -a "$output/$name.log" || status=$?
        echo "==> $name: status $status"
        [ "$status" -gt 1 ] || echo "$status" >"$output/$name.ended"  # 1: found something
    fi
}

first=$((ends - SECONDS > 400 ? ends - SECONDS - 220 : (ends - SECONDS) / 2))
part bench "$((first + 20))" "${posenc[@]}" bench --suite gpu --budget "${first}s" --output "$output/bench"
part selftest 90 "${posenc[@]}" selftest "$output/selftest.json"
part tests 150 python -m pytest -m gpu -n 16 -v -p no:cacheprovider

if [ -e "$output/bench/gpu.json" ]; then
    device=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["machine"]["device"].split(maxsplit=3)[3].lower().replace(" ", "-"))' \
        "$output/bench/gpu.json")
    cp "$output/bench/gpu.json" "docs/data/gpu/${device}_model.json"
    python -m scripts.make_readme
    cp docs/gpu.md "$output/"
fi
