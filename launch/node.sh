#!/bin/bash
# Says why this node cannot run the job's programs, before all of them fail by it; one task a node, inside the container if
# there is one: node.sh [DEVICES [THE TRAINER'S FLAGS]], where the folder of device files is another in a test.
set -euo pipefail
devices=${1:-/dev}
ok=1
refuse() { echo "node ${SLURMD_NODENAME:-$(hostname)}: $1" && ok=0; }
if [[ ! -w $RUN/logs ]]; then
    refuse "cannot write to $RUN/logs, which the first node made: put RUN on a file system that all nodes share (in a container, below a mount)"
fi
command -v "$PYTHON" >/dev/null || refuse "has no $PYTHON: set PYTHON to one that all nodes have (in a container, the one inside)"
if [[ -e $devices/nvidiactl || -n ${GPUS_OPTION:-} ]]; then
    shopt -s nullglob
    found=("$devices"/nvidia[0-9]*)
    if ((${#found[@]} < GPUS_PER_NODE)); then
        refuse "shows ${#found[@]} GPUs, but GPUS_PER_NODE=$GPUS_PER_NODE: a driver that lost one, or another partition than was meant"
    fi
    if (($# > 1)); then
        found=$("$PYTHON" tools/preflight.py --this-node -- "${@:2}" 2>&1) || refuse "$(tail -n 1 <<<"$found")"
    fi
fi
((ok))
