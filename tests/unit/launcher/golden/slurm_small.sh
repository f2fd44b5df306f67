#!/bin/bash
# Written by `persia-launcher slurm`.
#SBATCH --job-name=default
#SBATCH --ntasks=1
#SBATCH hetjob
#SBATCH --ntasks=1
#SBATCH hetjob
#SBATCH --ntasks=1
#SBATCH --nodes=1 --ntasks-per-node=1

set -e

set -uo pipefail
# Variables of one process, which sbatch would hand to all of them.
unset RANK LOCAL_RANK WORLD_SIZE REPLICA_INDEX REPLICA_SIZE MASTER_ADDR MASTER_PORT PERSIA_METRICS_PORT PERSIA_HEALTH_PORT PERSIA_RESTARTS
export PERSIA_JOB_NAME=default PYTHONUNBUFFERED=1
export PERSIA_EMBEDDING_CONFIG=/shared/slots.yml
# This script runs on the first node of component 0, and so does the broker. Ports differ from job to job.
export PERSIA_BIND_HOST=0.0.0.0
export PERSIA_NATS_PORT=$((10000 + SLURM_JOB_ID % 10000))
export PERSIA_NATS_URL="nats://$(hostname):$PERSIA_NATS_PORT"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_2" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

own_secret=
stop() {
    trap '' TERM
    [[ -z "$(jobs -pr)" ]] || kill $(jobs -pr) 2>/dev/null || true
    [[ -z "$own_secret" ]] || rm -f "$own_secret"
}
trap stop EXIT
trap 'exit 143' TERM
# All nodes read the job's secret from this directory, which they share; only this user can read the file.
if [[ -z "${PERSIA_JOB_SECRET:-}${PERSIA_JOB_SECRET_FILE:-}" ]]; then
    own_secret="$PWD/.persia-secret-$SLURM_JOB_ID"
    export PERSIA_JOB_SECRET_FILE="$own_secret"
    persia-launcher secret create >/dev/null
fi

declare -A needed # the job fails when one of them ends before the training
persia-launcher nats-server --host 0.0.0.0 </dev/null &
needed[nats]=$!

srun --het-group=0 --kill-on-bad-exit=1 --label --input=none \
    bash -c 'exec persia-launcher embedding-parameter-server --port=0 --replica-index=$SLURM_PROCID --replica-size=1 --embedding-config=/shared/slots.yml' &
needed[parameter-servers]=$!

srun --het-group=1 --kill-on-bad-exit=1 --label --input=none \
    bash -c 'exec persia-launcher embedding-worker --port=0 --replica-index=$SLURM_PROCID --replica-size=1 --embedding-config=/shared/slots.yml' &
needed[embedding-workers]=$!
loaders=

srun --het-group=2 --kill-on-bad-exit=1 --label --input=none \
    bash -c 'exec persia-launcher nn-worker --nproc-per-node 1 train.py' &
training=$!

fail() {
    local count=$((${SLURM_RESTART_COUNT:-0} + 1))
    if ((count <= 0)); then
        echo "persia-launcher: asks SLURM to queue the job again (restart $count of 0)" >&2
        # Not a job that is being cancelled, whose processes end too. SLURM then ends this script.
        if scontrol requeue Incomplete "$SLURM_JOB_ID"; then sleep 600 & wait $!; fi
        echo "persia-launcher: SLURM has not queued the job again; submit it again with sbatch" >&2
    fi
    exit "$1"
}
has_ended() { ! kill -0 "$1" 2>/dev/null; }
until has_ended "$training"; do
    for name in "${!needed[@]}"; do
        if has_ended "${needed[$name]}"; then
            echo "persia-launcher: $name ended before the training; the job is stopped" >&2
            fail 1
        fi
    done
    # Loaders may end before the training. If they fail, the training may still be about to end.
    if [[ -n "$loaders" ]] && has_ended "$loaders" && ! wait "$loaders"; then
        sleep 5
        has_ended "$training" && break
        echo "persia-launcher: data-loaders failed; the job is stopped" >&2
        fail 1
    fi
    sleep 1
done
wait "$training" || fail $?
