#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --signal=TERM@120 --requeue --open-mode=append

# SLURM requeues a job when a node fails, but not at the time limit. The last line does that, at
# most twenty times: a run that a signal stopped writes stopped.json, and a run that fails does not.
rm -f "$WORK/run/stopped.json"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export head
# shellcheck disable=SC2016  # each node expands its own SLURM_NODEID
srun bash -c 'exec torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8 --rdzv_id=$SLURM_JOB_ID \
    --rdzv_backend=c10d --rdzv_endpoint=$head:29500 --rdzv_conf is_host=$((SLURM_NODEID == 0)) \
    -m kge_torchrec train CONFIG --data.path STORE --run.dir $WORK/run --run.resume auto'
[ -e "$WORK/run/stopped.json" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ] &&
    scontrol requeue "$SLURM_JOB_ID"
