#!/bin/bash
# worker.sh FLAG PROGRAM...: a process of its own that gets its number as FLAG; begun anew when it is lost, until its work
# is done or the run is paused.
set -uo pipefail
export RANK=0 WORLD_SIZE=1 LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=127.0.0.1
# Workers of a node differ by their local number, those of other nodes have their own ports.
export MASTER_PORT=$((31000 + (SLURM_JOB_ID * 16 + SLURM_LOCALID) % 1500))
flag=$1 name=$SLURM_PROCID losses=0
shift
trap : USR1 # The worker ends by it; this script looks why.
while :; do
    "$@" "$flag=$name"
    status=$?
    ((status == 0)) && exit 0
    [[ -e $RUN/paused ]] && exit 0
    ((status == 2)) && exit 2 # A flag that the program does not know: the next life would not either.
    losses=$((losses + 1))
    if ((losses > ${MAX_LOSSES:-10})); then
        echo "worker $name was lost $losses times, the last time with status $status: giving up"
        exit "$status"
    fi
    echo "worker $name was lost with status $status; beginning anew ($losses of ${MAX_LOSSES:-10})"
    sleep "${RESPAWN_S:-5}"
done
