#!/usr/bin/env bash
#SBATCH --job-name=gcore
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#
# A run on Slurm: Ray's head on the first node, a worker on each other node, and `gcore-llm train` on the first. Options
# are those of train; submitted again, the same ones continue the run from its last checkpoint:
#
#   sbatch deploy/slurm.sh --model models/Qwen2.5-7B-Instruct --data.train-files train.jsonl --reward math-verify
#
# Ten minutes before the time limit (--signal) the run saves its last finished step, and the job is queued again. From a
# clone with its environment (.venv) on a file system that all nodes share.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate
ulimit -n "$(ulimit -Hn)"

# Without the token no one else on these nodes can use the cluster. Only the owner can read the file.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID"
(umask 077 && openssl rand -hex 32 >"$RAY_AUTH_TOKEN_PATH")
# srun does not take over sbatch's option by itself, and would bind each step to one core.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# The steps of srun end with this script.
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"; jobs -p | xargs -r kill || true' EXIT

# All of it is read: with pipefail, what `head` cuts short would end the script.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# Where nodes have several networks, set it to the address on the fastest one.
host=$(hostname --all-ip-addresses | cut -d " " -f 1)
port=$((20000 + SLURM_JOB_ID % 10000))
resources=(--num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)

srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" \
  ray start --head --node-ip-address="$host" --port="$port" --include-dashboard=false "${resources[@]}" &
for _ in {1..120}; do
  (: </dev/tcp/"$host"/"$port") 2>/dev/null && break
  sleep 1
done
if ((SLURM_NNODES > 1)); then
  others=$((SLURM_NNODES - 1))
  srun --overlap --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --exclude="$first" \
    ray start --address="$host:$port" "${resources[@]}" &
fi

gcore-llm doctor --ray "$host:$port" --nodes "$SLURM_NNODES"
gcore-llm train --runtime ray --ray.address "$host:$port" "$@" &
train=$!
is_over=
trap 'is_over=1; kill -USR1 "$train"' USR1
code=0
wait "$train" || code=$?
if [[ $is_over ]]; then
  # The signal has ended the first `wait`, not the run.
  code=0
  wait "$train" || code=$?
  # 130: the run has saved what it had finished; 138: it had not started yet.
  if ((code == 130 || code == 138)); then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
