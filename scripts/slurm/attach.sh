#!/usr/bin/env bash
# A shell inside a running job, with its virtual environment and RAY_ADDRESS set; or a command:
#   scripts/slurm/attach.sh JOBID                      a shell on the head node
#   scripts/slurm/attach.sh JOBID NODE                 on another node
#   scripts/slurm/attach.sh JOBID [NODE] -- ray status
# JOBID is such as 42, or 42_3 for a task of an array. JOB_DIR is needed here where it was set for the job.
set -euo pipefail

usage() {
    sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

job=${1:-}
[[ $job =~ ^[0-9]+(_[0-9]+)?$ ]] || usage
shift
node=
if [[ $# -gt 0 && $1 != -- ]]; then
    node=$1
    shift
fi
[[ ${1:-} == -- ]] && shift

# Lines of "ID NUMBER NODES"; the number of an array stands for all of its tasks, each of which also has its own.
running=$(squeue --noheader --jobs="$job" --states=RUNNING --format='%i %A %N' 2>/dev/null) || running=
[[ -n $running ]] || { echo "attach: job $job is not running" >&2; exit 1; }
if [[ $running == *$'\n'* ]]; then
    echo "attach: job $job is an array; name one of the tasks that run: $(cut -d' ' -f1 <<<"$running" | sort -V | xargs)" >&2
    exit 1
fi
read -r job number nodes <<<"$running"
directory=$(scontrol show job "$job" --oneliner | grep -o ' WorkDir=[^ ]*' | cut -d= -f2)
cd "$directory"
[[ $job == *_* && -n ${JOB_DIR:-} ]] && JOB_DIR=$JOB_DIR/${job#*_}
node=${node:-$(scontrol show hostnames "$nodes" | sed -n 1p)}
JOB_DIR=${JOB_DIR:-$directory/runs/slurm-$job}
joined=$JOB_DIR/nodes/joined
[[ -s $joined ]] || { echo "attach: no node of job $job has joined Ray yet ($joined is empty)" >&2; exit 1; }
read -r _ _ address <"$joined"

terminal=()
[[ -t 0 && $# -eq 0 ]] && terminal=(--pty)
export RAY_ADDRESS=$address VENV=${VENV:-.venv}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$JOB_DIR/nodes/ray_token
exec srun --jobid="$number" --overlap --nodes=1 --ntasks=1 --nodelist="$node" "${terminal[@]}" \
    bash -c '[[ -f $VENV/bin/activate ]] && source "$VENV/bin/activate"; exec "${@:-bash}"' attach "$@"
