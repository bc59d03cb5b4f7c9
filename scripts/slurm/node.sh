#!/usr/bin/env bash
# Ray on one node of a job; run.sbatch starts it on each. Without RAY_ADDRESS this node is the head.
# It runs until standard input ends. Standard output is for run.sbatch: "joined NODE ADDRESS PORT" or
# "failed NODE WHY"; the rest goes to NODE.log.
set -uo pipefail

readonly NODE=$SLURMD_NODENAME LOG=$JOB_DIR/nodes/$SLURMD_NODENAME.log
# A message to save is for the training program; Ray and what it starts inherit that it is ignored.
trap '' USR1
{ date; hostname; } >>"$LOG"

# The address under which the other nodes reach this one.
own_address() {
    local name address
    if [[ -n ${NETWORK_INTERFACE:-} ]]; then
        ip -4 -o addr show dev "$NETWORK_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }'
        return
    fi
    name=$(scontrol show node "$NODE" --oneliner 2>/dev/null | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
    address=$(getent ahostsv4 "${name:-$NODE}" | awk '{ print $1; exit }')
    # Many systems let a host's own name lead to loopback, which nobody else can reach.
    if [[ -z $address || ($address == 127.* && $address != "$name") ]]; then
        address=$(hostname -I | awk '{ print $1 }')
    fi
    echo "$address"
}

# Passes Ray's output on to the log, and says when Ray is up.
follow() {
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$LOG"
        [[ $line == *"Ray runtime started"* ]] && echo "joined $NODE $address $first"
    done
}

gather_logs() {
    local logs=$RAY_TEMP_DIR/session_latest/logs
    if [[ -d $logs ]]; then
        mkdir -p "$JOB_DIR/nodes/$NODE-ray"
        cp -r "$logs/." "$JOB_DIR/nodes/$NODE-ray/" 2>/dev/null
    fi
}

# shellcheck disable=SC1091
[[ -f $VENV/bin/activate ]] && source "$VENV/bin/activate"
if ! command -v ray >/dev/null; then
    echo "failed $NODE there is no ray: VENV=$VENV has none, and PATH neither"
    exit 1
fi

# A range of its own, held until this script ends: other jobs may be on this machine.
coproc PORTS { exec python "$(dirname "${BASH_SOURCE[0]}")/ports.py" "$PORT_BASE" "$PORT_COUNT" 2>>"$LOG"; }
if ! read -r -t 60 -u "${PORTS[0]}" first; then
    echo "failed $NODE $(tail -n 1 "$LOG")"
    exit 1
fi
address=$(own_address)
options=(
    --node-ip-address="$address"
    --node-manager-port=$((first + 1)) --object-manager-port=$((first + 2))
    --runtime-env-agent-port=$((first + 3)) --metrics-export-port=$((first + 4))
    --dashboard-agent-listen-port=$((first + 5)) --dashboard-agent-grpc-port=$((first + 6))
    --min-worker-port=$((first + 10)) --max-worker-port=$((first + PORT_COUNT - 2)) # the last one is the claim
    --num-cpus="${CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-$(nproc)}}"
    --disable-usage-stats
    --block
)
[[ -n ${SLURM_GPUS_ON_NODE:-} ]] && options+=(--num-gpus="$SLURM_GPUS_ON_NODE")
if [[ -n ${RAY_ADDRESS:-} ]]; then
    options+=(--address="$RAY_ADDRESS")
    unset RAY_ADDRESS
else
    options+=(--head --port="$first" --include-dashboard=false --ray-client-server-port=$((first + 7)))
    options+=(--temp-dir="$RAY_TEMP_DIR")
fi

echo "ray start ${options[*]}" >>"$LOG"
# As in a private Ray: workers are what the node is for, and CUDA_VISIBLE_DEVICES is not emptied.
export RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 PYTHONUNBUFFERED=1
exec 3<&0
ray start "${options[@]}" </dev/null > >(follow) 2>&1 &
ray_pid=$!
# run.sbatch holds our standard input open for as long as the nodes are needed.
(cat <&3 >/dev/null; kill -TERM "$ray_pid" 2>/dev/null) &
stopper_pid=$!
wait "$ray_pid"
code=$?
gather_logs
if kill "$stopper_pid" 2>/dev/null; then
    echo "failed $NODE ray start exited with code $code"
    exit 1
fi
