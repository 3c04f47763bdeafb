#!/usr/bin/env bash
# A training on SLURM that survives the end of its time: sbatch slurm.sh shakespeare_nrgpt_ff2w --to runs/mine
#
# SLURM sends SIGTERM five minutes before the end. The training saves and exits with 75, and the job
# is put back into the queue, where the same command goes on. Every other exit code ends the job (see
# nrgpt train --help). The number of nodes and GPUs may be another one next time: the order of the
# samples does not depend on it.
#SBATCH --job-name=nrgpt
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=nrgpt-%j.log
set -u
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# One task for each GPU. Without torchrun, which would turn every exit code into 1.
# shellcheck disable=SC2016
srun bash -c 'export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec python -m nrgpt train "$@"' nrgpt "$@"
code=$?
if [ "$code" -eq 75 ]; then
  echo "nrgpt: saved; back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
