#!/usr/bin/env bash
# The runs of this folder, side by side on one GPU. Usage: run.sh FOLDER_FOR_RESULTS
# NRGPT_DATA must hold the prepared Shakespeare dataset, or NRGPT_SHAKESPEARE its file.
set -u
results=$1
runs=$(mktemp -d)

keep() { # everything but the checkpoints
  for run in "$runs"/*/; do
    mkdir -p "$results/$(basename "$run")"
    cp "$run"/*.json "$run"/*.jsonl "$run"/*.txt "$run"/*.png "$results/$(basename "$run")" 2>/dev/null
  done
}

python -m nrgpt train listops_nrgpt_ff2w --to "$runs/listops_nrgpt_ff2w" > "$runs/listops.log" 2>&1 &
for name in gpt rgpt_parallel nrgpt_ff1 nrgpt_ff2w; do
  preset=shakespeare_${name}_released
  python -m nrgpt train "$preset" --to "$runs/$preset" iterations=5000 eval_batches=40 \
    > "$runs/$preset.log" 2>&1 &
done
while [ -n "$(jobs -rp)" ]; do sleep 5; keep; done
keep
