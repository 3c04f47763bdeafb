#!/usr/bin/env bash
# On a machine with a GPU: all CUDA tests, and a short recorded training, then speed against another
# version of the package.
#
#     bash dev/gpu_check.sh FOLDER_WITH_ANOTHER_VERSION OUT [CASE ...]
set -u
before=$1 out=$2
shift 2
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 NRGPT_DATA=/tmp/nrgpt-data
pytest="python3 -m pytest -o addopts= -q -p no:cacheprovider --timeout-method=thread"
python3 -c "import pytest_timeout" 2>/dev/null || pytest="python3 -m pytest -o addopts= -q -p no:cacheprovider"
$pytest tests/kernels/test_cuda_kernels.py > "$out/tests-kernels.txt" 2>&1 &
$pytest tests/model/test_cuda_models.py > "$out/tests-models.txt" 2>&1 &
{
  python3 -m nrgpt train debug graph=true compile=true precision=auto iterations=40 --to /tmp/recorded
  python3 -m nrgpt train debug --packed seeds=3 iterations=40 --to /tmp/packed
  python3 -m nrgpt sample /tmp/recorded
} > "$out/training.txt" 2>&1 &
wait
tail -n 3 "$out"/*.txt
python3 dev/compare_speed.py "$before" "$@" --to "$out/speed.jsonl"
