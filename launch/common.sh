# Sourced by every job: settings, log folder, srun lines, signals. No model logic.
# A job gets CLUSTER, RUN_FILE and ROOT from submit.sh; with DRY_RUN=1 it prints its srun lines and runs nothing.
set -euo pipefail

: "${ROOT:?is the repository; submit.sh sets it}"
: "${CLUSTER:?is a file of launch/clusters}" "${RUN_FILE:?is a file of settings of the run}"
cd "$ROOT"
# shellcheck disable=SC1090
source "$CLUSTER"
# shellcheck disable=SC1090
source "$RUN_FILE"
: "${RUN:?is the folder of the run, on a file system that all nodes share}"
: "${GPUS_PER_NODE:?}" "${PYTHON:?}" "${TIME_LIMIT_MIN:?}"
DRY_RUN=${DRY_RUN:-0}
TRAIN_NODES=${TRAIN_NODES:-1} ROLLOUT_NODES=${ROLLOUT_NODES:-0}
SIGNAL_S=${SIGNAL_S:-300} STEP_S=${STEP_S:-0}
BATCHES_PER_STEP=${BATCHES_PER_STEP:-1} PROMPTS_PER_BATCH=${PROMPTS_PER_BATCH:-32}
SAMPLES_PER_PROMPT=${SAMPLES_PER_PROMPT:-8} PUBLISH_EVERY=${PUBLISH_EVERY:-1} MAX_LAG=${MAX_LAG:-0}
SAMPLES_PER_STEP=$((BATCHES_PER_STEP * PROMPTS_PER_BATCH * SAMPLES_PER_PROMPT))

say() { printf '%s %s\n' "$(date -u +%FT%TZ)" "$*"; }

# Of the job; a requeued one is another attempt of the same job.
JOB=${SLURM_JOB_ID:-JOB} ATTEMPT=${SLURM_RESTART_COUNT:-0}
LOGS=$RUN/logs/job-$JOB/attempt-$ATTEMPT
PAUSED=$RUN/paused # The name in megatron_trace/rl/exchange.py.

begin() { # begin: says what runs, refuses what cannot, makes the log folder.
    ((DRY_RUN)) && return
    mkdir -p "$LOGS"
    {
        say "job $JOB, attempt $ATTEMPT: $0 on ${SLURM_JOB_NODELIST:-?} ${SLURM_JOB_NODELIST_HET_GROUP_1:-}"
        say "settings: CLUSTER=$CLUSTER RUN_FILE=$RUN_FILE"
        say "commit: $(git describe --always --dirty --abbrev=12 2>/dev/null || echo 'no git here')"
        say "versions: $("$PYTHON" tools/doctor.py --versions)"
    } 2>&1 | tee "$LOGS/job.txt"
    local nodes
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST${SLURM_JOB_NODELIST_HET_GROUP_1:+,$SLURM_JOB_NODELIST_HET_GROUP_1}" | wc -l)
    preflight --slurm-nodes "$nodes" ${CUDA_VISIBLE_DEVICES:+--visible-devices "$CUDA_VISIBLE_DEVICES"}
}

preflight() { # preflight FLAGS: refuses, with a sentence, a job that cannot run.
    "$PYTHON" tools/preflight.py --train-nodes "$TRAIN_NODES" --rollout-nodes "$ROLLOUT_NODES" \
        --gpus-per-node "$GPUS_PER_NODE" --run "$RUN" --samples-per-step "$SAMPLES_PER_STEP" \
        --steps-kept "$((MAX_LAG + 2))" --time-limit-s $((TIME_LIMIT_MIN * 60)) \
        --signal-s "$SIGNAL_S" --step-s "$STEP_S" ${HOST_GIB:+--host-gib "$HOST_GIB"} "$@" \
        -- "${MODEL_FLAGS[@]}" "${TRAIN_FLAGS[@]}" --global-batch-size="$SAMPLES_PER_STEP"
}

# srun_line NAME NODES TASKS_PER_NODE PROGRAM...: sets LINE. HET_GROUP chooses the component.
srun_line() {
    local name=$1 nodes=$2 per_node=$3
    shift 3
    LINE=(srun --nodes="$nodes" --ntasks="$((nodes * per_node))" --ntasks-per-node="$per_node"
        --output="$LOGS/$name.%t.log" --open-mode=append --kill-on-bad-exit="${KILL_ON_BAD_EXIT:-1}")
    [[ -n ${HET_GROUP:-} ]] && LINE+=(--het-group="$HET_GROUP")
    [[ -n ${CPUS_PER_TASK:-} ]] && LINE+=(--cpus-per-task="$CPUS_PER_TASK")
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then # Pyxis.
        LINE+=(--container-image="$CONTAINER_IMAGE" --container-workdir="$ROOT"
            --container-mounts="$ROOT:$ROOT,$RUN:$RUN${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
    fi
    # shellcheck disable=SC2206
    LINE+=(${SRUN_OPTIONS:-} "$@")
}

# step NAME NODES TASKS_PER_NODE PROGRAM...: starts it in the background; its pid is STEP.
STEPS=()
step() {
    srun_line "$@"
    if ((DRY_RUN)); then
        printf '%q ' "${LINE[@]}" && echo
        return
    fi
    say "step $1: $(printf '%q ' "${LINE[@]}")" | tee -a "$LOGS/job.txt"
    "${LINE[@]}" &
    STEP=$!
    STEPS+=("$STEP")
}

finish() { # finish PID: waits for a step, whatever signals come, and gives its status.
    ((DRY_RUN)) && return
    local status=0
    wait "$1" || status=$?
    while kill -0 "$1" 2>/dev/null; do # A signal ended `wait`, not the step.
        status=0
        wait "$1" || status=$?
    done
    return "$status"
}

# A signal ahead of the time limit: the trainer saves after its step and ends, workers end at once;
# what is complete stays. Then the job goes back into the queue, and the next attempt goes on there.
STOPPING=0 REQUEUE=0
stop() {
    STOPPING=1
    [[ -d $RUN ]] && touch "$PAUSED"
    for pid in ${STEPS[@]+"${STEPS[@]}"}; do
        kill -USR1 "$pid" 2>/dev/null || true # srun hands it to the tasks.
    done
}
on_usr1() {
    say "signal ahead of the time limit: saving"
    REQUEUE=1
    stop
}
on_term() { # Slurm preempts or cancels: it requeues by itself, or must not.
    say "told to end"
    stop
}
trap on_usr1 USR1
trap on_term TERM

# over STATUS: ends the job, or requeues it where it was stopped.
over() {
    ((DRY_RUN)) && exit 0
    if ((STOPPING)); then
        say "stopped at version $(version)"
        ((REQUEUE)) && scontrol requeue "${SLURM_HET_JOB_ID:-$JOB}" && sleep 60
        exit 143
    fi
    say "ends with status $1"
    exit "$1"
}

version() { cat "$RUN/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

rendezvous() { # Sets MASTER_ADDR and MASTER_PORT for the tasks of the first component.
    export MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-0} % 10000))
    ((DRY_RUN)) && return
    local head
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
    MASTER_ADDR=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    export MASTER_ADDR
}

# What the programs of a run get.
programs() {
    : "${START:?is the Megatron checkpoint to start from}" "${TASKS:?is the file of prompts}" "${STEPS_OF_RUN:?}"
    CREATE=("$PYTHON" tools/exchange.py create "$RUN" --steps "$STEPS_OF_RUN"
        --batches-per-step "$BATCHES_PER_STEP" --prompts-per-batch "$PROMPTS_PER_BATCH"
        --samples-per-prompt "$SAMPLES_PER_PROMPT" --publish-every "$PUBLISH_EVERY"
        --max-lag "$MAX_LAG" --lease-s "${LEASE_S:-60}")
    WORKER=(launch/worker.sh --rollout-worker "$PYTHON" examples/rollout_worker.py "${MODEL_FLAGS[@]}"
        "${ROLLOUT_FLAGS[@]}" ${WORKER_FLAGS[@]+"${WORKER_FLAGS[@]}"} --load="$START" --rollout-tasks="$TASKS" --rollout-run="$RUN")
    TRAINER=(launch/rank.sh "$PYTHON" examples/pretrain_trace.py "${MODEL_FLAGS[@]}" "${TRAIN_FLAGS[@]}"
        --trace-hint-dir="$RUN" --pretrained-checkpoint="$START" --load="$RUN/checkpoints"
        --save="$RUN/checkpoints" --save-interval="$PUBLISH_EVERY" --train-iters="$STEPS_OF_RUN"
        --global-batch-size="$SAMPLES_PER_STEP" --exit-signal-handler --exit-signal=SIGUSR1)
}

create_run() {
    if ((DRY_RUN)); then
        printf '%q ' "${CREATE[@]}" && echo
        return
    fi
    "${CREATE[@]}"
    rm -f "$PAUSED" # Of the attempt before.
}
