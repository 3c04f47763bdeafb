#!/usr/bin/env bash
# On a machine with a GPU: all CUDA tests and two short trainings, or speed against another version
# of the package, which wants the machine for itself.
#
#     bash dev/gpu_check.sh tests OUT
#     bash dev/gpu_check.sh speed OUT FOLDER_WITH_ANOTHER_VERSION [CASE ...]
set -u
what=$1 out=$2
shift 2
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1 NRGPT_DATA=/tmp/nrgpt-data
if [ "$what" = speed ]; then
  exec python3 dev/compare_speed.py "$@" --to "$out/speed.jsonl"
fi
{
  python3 -m nrgpt train debug graph=true compile=true precision=auto iterations=40 --to /tmp/recorded
  python3 -m nrgpt train debug --packed seeds=3 graph=true iterations=40 --to /tmp/packed
  python3 -m nrgpt sample /tmp/recorded
} > "$out/training.txt" 2>&1 &
python3 dev/shard_tests.py --processes "${PROCESSES:-12}" --seconds "${SECONDS_LEFT:-300}" --out "$out/tests.txt" \
  tests/kernels/test_cuda_kernels.py tests/model/test_cuda_models.py tests/measure/test_listops.py
wait
tail -n 30 "$out/training.txt"
