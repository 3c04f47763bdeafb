#!/usr/bin/env bash
# On the machine with the GPU: keep the parts of the text that have come, and when all are there,
# prepare them twice in the background, as GPT-2 tokens and as byte pairs of their own; and the
# held-out text (owt_sample.txt, experiments/text_first).
#
#     bash experiments/all_text/keep.sh FOLDER [last]
set -eu
mkdir -p /tmp/text
cp -r "$1"/. /tmp/text/
ls -la /tmp/text
[ "${2:-}" = last ] || exit 0
export PYTHONPATH=$PWD/src NRGPT_GPT2_RANKS=/tmp/text/gpt2.tiktoken
parts=(/tmp/text/wiki*.txt.xz)
{
  setsid nohup python3 -m nrgpt data text /tmp/text/owt_sample.txt --to /tmp/owt --validation 0.99 &
  setsid nohup python3 -m nrgpt data text "${parts[@]}" --to /tmp/all --workers 8 &
  setsid nohup python3 -m nrgpt data text "${parts[@]}" --to /tmp/english --workers 8 \
    --tokenizer bpe --vocabulary 4096 &
} > /tmp/text/prepare.log 2>&1
