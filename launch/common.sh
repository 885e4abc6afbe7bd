# shellcheck shell=bash disable=SC2034  # The jobs use what is set here.
# Sourced by every job: settings, log folder, srun lines, signals. No model logic.
# A job gets KIND, CLUSTER, RUN_FILE and ROOT from submit.sh; with DRY_RUN=1 it prints its srun lines and runs nothing.
set -euo pipefail

: "${ROOT:?is the repository; submit.sh sets it}" "${KIND:?is the kind of job; submit.sh sets it}"
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
WORKERS_PER_NODE=${WORKERS_PER_NODE:-$GPUS_PER_NODE}
# NODES of the first component; a second one has a disaggregated run only. NEEDED: settings that must name something.
case $KIND in
    colocated | disaggregated) NODES=$TRAIN_NODES TRAINS=1 NEEDED=(START TASKS STEPS_OF_RUN) ;;
    evaluate) NODES=${EVALUATE_NODES:-1} TRAINS=0 NEEDED=(EVALUATE_TASKS) ;;
    ptq) NODES=${EVALUATE_NODES:-1} TRAINS=0 NEEDED=(EVALUATE_TASKS PUBLISHED) ;;
    export) NODES=1 TRAINS=0 NEEDED=(PUBLISHED) ;;
esac
if [[ $KIND == disaggregated ]]; then NEEDED+=(ROLLOUT_NODES); else ROLLOUT_NODES=0; fi
for needed in "${NEEDED[@]}"; do
    [[ ${!needed:-0} != 0 ]] || { echo "the job $KIND needs $needed in $RUN_FILE (see launch/runs/example.env)" >&2; exit 1; }
done
PTQ_RECIPES=${PTQ_RECIPES:-vanilla 4over6 h_scale}
SIGNAL_S=${SIGNAL_S:-300} STEP_S=${STEP_S:-0}
BATCHES_PER_STEP=${BATCHES_PER_STEP:-1} PROMPTS_PER_BATCH=${PROMPTS_PER_BATCH:-32}
SAMPLES_PER_PROMPT=${SAMPLES_PER_PROMPT:-8} PUBLISH_EVERY=${PUBLISH_EVERY:-1} MAX_LAG=${MAX_LAG:-0}
SAMPLES_PER_STEP=$((BATCHES_PER_STEP * PROMPTS_PER_BATCH * SAMPLES_PER_PROMPT))

# What tools/report.py reads; TRAIN_FLAGS may name another folder.
METRICS_FLAG=(--trace-metrics-dir="$RUN/training")

say() { printf '%s %s\n' "$(date -u +%FT%TZ)" "$*"; }

# Of the job; a requeued one is another attempt of the same job.
JOB=${SLURM_JOB_ID:-JOB} ATTEMPT=${SLURM_RESTART_COUNT:-0}
LOGS=$RUN/logs/job-$JOB/attempt-$ATTEMPT
# Its presence tells this job's tasks to end; of a job that trains it is the name in megatron_trace/rl/exchange.py.
export RUN PYTHON GPUS_PER_NODE GPUS_OPTION=${GPUS_OPTION:-} PAUSED=$LOGS/paused
((TRAINS)) && PAUSED=$RUN/paused

begin() { # begin: says what runs, refuses what cannot, makes the log folder.
    if ((!DRY_RUN)); then
        mkdir -p "$LOGS"
        cp "$CLUSTER" "$LOGS/cluster.env"
        cp "$RUN_FILE" "$LOGS/run.env"
        local nodes gpus
        gpus=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | sort | uniq -c) || true
        {
            say "job $JOB, attempt $ATTEMPT: $KIND on ${SLURM_JOB_NODELIST:-?} ${SLURM_JOB_NODELIST_HET_GROUP_1:-}"
            say "settings: CLUSTER=$CLUSTER RUN_FILE=$RUN_FILE, copies in $LOGS"
            say "commit: $(git describe --always --dirty --abbrev=12 2>/dev/null || echo 'no git here')"
            say "versions: $("$PYTHON" tools/doctor.py --versions); $(srun --version)"
            say "GPUs of $(hostname): ${gpus:-none}"
        } 2>&1 | tee "$LOGS/job.txt"
        nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST${SLURM_JOB_NODELIST_HET_GROUP_1:+,$SLURM_JOB_NODELIST_HET_GROUP_1}" | wc -l)
        preflight --slurm-nodes "$nodes" ${CUDA_VISIBLE_DEVICES:+--visible-devices "$CUDA_VISIBLE_DEVICES"}
    fi
    local flags=()
    if ((TRAINS)); then flags=(/dev "${MODEL_FLAGS[@]}" "${TRAIN_FLAGS[@]}"); fi
    if [[ $KIND == disaggregated ]]; then
        HET_GROUP=0 check_nodes nodes-training "$NODES" "${flags[@]}"
        HET_GROUP=1 check_nodes nodes-rollout "$ROLLOUT_NODES"
    else
        check_nodes nodes "$NODES" ${flags[@]+"${flags[@]}"}
    fi
}

check_nodes() { # check_nodes NAME NODES [/dev THE TRAINER'S FLAGS]: refuses nodes that cannot run what follows.
    step "$1" "$2" 1 launch/node.sh "${@:3}"
    finish "${STEP:-}" && return
    cat "$LOGS/$1".*.log
    over 1
}

preflight() { # preflight FLAGS: refuses, with a sentence, a job that cannot run.
    local needed flags=(--train-nodes "$NODES" --rollout-nodes "$ROLLOUT_NODES" --gpus-per-node "$GPUS_PER_NODE"
        --run "$RUN" --time-limit-s $((TIME_LIMIT_MIN * 60)) --signal-s "$SIGNAL_S")
    local model=("${MODEL_FLAGS[@]}")
    if ((TRAINS)); then
        flags+=(--samples-per-step "$SAMPLES_PER_STEP" --steps-kept "$((MAX_LAG + 2))" --step-s "$STEP_S"
            ${HOST_GIB:+--host-gib "$HOST_GIB"})
        model+=("${METRICS_FLAG[@]}" "${TRAIN_FLAGS[@]}" --global-batch-size="$SAMPLES_PER_STEP")
    fi
    if [[ -z ${CONTAINER_IMAGE:-} ]]; then # In a container, paths may be others.
        for needed in "${NEEDED[@]}"; do
            if [[ $needed != *_* || $needed == *_TASKS ]]; then flags+=(--needs "$needed=${!needed}"); fi
        done
        # A later attempt finds part of what it exports.
        if [[ $KIND == export || $KIND == ptq ]] && ((ATTEMPT == 0)); then flags+=(--published "$PUBLISHED"); fi
    fi
    # shellcheck disable=SC2206  # Several words.
    if [[ $KIND == ptq ]]; then flags+=(--recipes $PTQ_RECIPES); fi
    "$PYTHON" tools/preflight.py "${flags[@]}" "$@" -- "${model[@]}"
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
    if ((STOPPING)); then over 0; fi
    srun_line "$@"
    if ((DRY_RUN)); then
        printf '%q ' "${LINE[@]}" && echo
        return
    fi
    say "step $1: $(printf '%q ' "${LINE[@]}")" | tee -a "$LOGS/job.txt"
    "${LINE[@]}" &
    STEP=$!
    STEPS[STEP]=$STEP
}

finish() { # finish PID: waits for a step, whatever signals come, and gives its status.
    ((DRY_RUN)) && return
    local status=0
    wait "$1" || true
    while kill -0 "$1" 2>/dev/null; do # A signal ended `wait`, not the step.
        wait "$1" || true
    done
    wait "$1" || status=$? # Bash keeps it, also of a step that ended just after the signal.
    unset "STEPS[$1]"
    return "$status"
}

# A signal ahead of the time limit: the trainer saves after its step and ends, workers end at once;
# what is complete stays. Then the job goes back into the queue, and the next attempt goes on there.
STOPPING=0 REQUEUE=0
stop() {
    STOPPING=1
    [[ -d ${PAUSED%/*} ]] && touch "$PAUSED"
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
trap on_term TERM INT

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

# checkpoint FOLDER: sets CHECKPOINT, its newest iteration, and VERSION; one for the whole job, also while a run goes on.
checkpoint() {
    CHECKPOINT=$1 VERSION=latest
    if [[ -f $1/latest_checkpointed_iteration.txt ]]; then
        VERSION=$(<"$1/latest_checkpointed_iteration.txt")
        if [[ $VERSION != release ]]; then printf -v CHECKPOINT '%s/iter_%07d' "$1" "$VERSION"; else CHECKPOINT=$1/release; fi
    elif [[ $1 =~ iter_0*([0-9]+)$ ]]; then
        VERSION=${BASH_REMATCH[1]}
    fi
    ((DRY_RUN)) || [[ -f $CHECKPOINT/metadata.json ]] || { say "there is no checkpoint in $1"; over 1; }
}

rendezvous() { # Sets MASTER_ADDR and MASTER_PORT for the tasks of the first component.
    export MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-0} % 10000))
    ((DRY_RUN)) && return
    local head
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
    MASTER_ADDR=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    export MASTER_ADDR
}

# make_folder NAME FOLDER PROGRAM...: runs a program that writes a folder (as a whole or not at all), unless it is there.
make_folder() {
    local name=$1 folder=$2
    shift 2
    if ((!DRY_RUN)) && [[ -e $folder ]]; then
        say "$folder is there already: remove it to make it anew"
        return
    fi
    step "$name" 1 1 "$@"
    finish "${STEP:-}" || over 1
}

# evaluate NAME FOLDER FLAGS...: the answers of CHECKPOINT to EVALUATE_TASKS, a share of them from each worker.
evaluate() {
    local name=$1 folder=$2
    shift 2
    if ((!DRY_RUN)) && [[ -e $folder/evaluation.json ]]; then
        say "$folder/evaluation.json is there already: remove $folder to evaluate anew"
        return
    fi
    step "$name" "$NODES" "$WORKERS_PER_NODE" launch/worker.sh --evaluate-share "$PYTHON" examples/evaluate.py \
        "${MODEL_FLAGS[@]}" "${ROLLOUT_FLAGS[@]}" --load="$CHECKPOINT" --rollout-tasks="$EVALUATE_TASKS" \
        --evaluate-output="$folder" --evaluate-num-shares=$((NODES * WORKERS_PER_NODE)) "$@"
    finish "${STEP:-}" || over 1
    ((DRY_RUN)) || [[ -f $folder/evaluation.json ]] || over 1 # Workers of a job that was told to end do so without an error.
}

# Two jobs that train one run would write over each other's checkpoints.
own_run() {
    ((DRY_RUN)) && return
    local other state waited=0
    until (set -o noclobber && echo "$JOB" >"$RUN/job") 2>/dev/null; do
        other=$(cat "$RUN/job" 2>/dev/null || true)
        [[ $other == "$JOB" ]] && return
        state=$(squeue --noheader --format=%T --jobs="$other" 2>/dev/null | head -1) || true
        if [[ $state == COMPLETING ]] && ((waited++ < 120)); then
            sleep 1
        elif [[ $state == RUNNING || $state == SUSPENDED || $state == COMPLETING ]]; then
            say "job $other trains $RUN already: cancel it, or give this run a folder of its own"
            over 1
        else
            rm -f "$RUN/job"
        fi
    done
}

# What the programs of a run get.
programs() {
    CREATE=("$PYTHON" tools/exchange.py create "$RUN" --steps "$STEPS_OF_RUN"
        --batches-per-step "$BATCHES_PER_STEP" --prompts-per-batch "$PROMPTS_PER_BATCH"
        --samples-per-prompt "$SAMPLES_PER_PROMPT" --publish-every "$PUBLISH_EVERY"
        --max-lag "$MAX_LAG" --lease-s "${LEASE_S:-60}")
    WORKER=(launch/worker.sh --rollout-worker "$PYTHON" examples/rollout_worker.py "${MODEL_FLAGS[@]}"
        "${ROLLOUT_FLAGS[@]}" ${WORKER_FLAGS[@]+"${WORKER_FLAGS[@]}"} --load="$START" --rollout-tasks="$TASKS" --rollout-run="$RUN")
    TRAINER=(launch/rank.sh "$PYTHON" examples/pretrain_trace.py "${MODEL_FLAGS[@]}" "${METRICS_FLAG[@]}" "${TRAIN_FLAGS[@]}"
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
