#!/usr/bin/env bash
# A shell inside a running job, with its virtual environment and RAY_ADDRESS set; or a command:
#   scripts/slurm/attach.sh JOBID                      a shell on the head node
#   scripts/slurm/attach.sh JOBID NODE                 on another node
#   scripts/slurm/attach.sh JOBID [NODE] -- ray status
set -euo pipefail

usage() {
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

job=${1:-}
[[ $job =~ ^[0-9]+$ ]] || usage
shift
node=
if [[ $# -gt 0 && $1 != -- ]]; then
    node=$1
    shift
fi
[[ ${1:-} == -- ]] && shift

nodes=$(squeue --noheader --jobs="$job" --states=RUNNING --format=%N 2>/dev/null) || nodes=
[[ -n $nodes ]] || { echo "attach: job $job is not running" >&2; exit 1; }
directory=$(scontrol show job "$job" --oneliner | grep -o ' WorkDir=[^ ]*' | cut -d= -f2)
cd "$directory"
node=${node:-$(scontrol show hostnames "$nodes" | head -n 1)}
JOB_DIR=${JOB_DIR:-$directory/runs/slurm-$job}
joined=$JOB_DIR/nodes/joined
[[ -s $joined ]] || { echo "attach: no node of job $job has joined Ray yet ($joined is empty)" >&2; exit 1; }
read -r _ _ address <"$joined"

terminal=()
[[ -t 0 && $# -eq 0 ]] && terminal=(--pty)
export RAY_ADDRESS=$address VENV=${VENV:-.venv}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$JOB_DIR/nodes/ray_token
exec srun --jobid="$job" --overlap --nodes=1 --ntasks=1 --nodelist="$node" "${terminal[@]}" \
    bash -c '[[ -f $VENV/bin/activate ]] && source "$VENV/bin/activate"; exec "${@:-bash}"' attach "$@"
