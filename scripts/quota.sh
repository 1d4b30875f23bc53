#!/usr/bin/env bash
# quota.sh CORES COMMAND...: the command with so much processor time at most, as on a smaller machine: 0.5 is half a
# core. `scripts/quota.sh 0.5 make check` finds tests that depend on the machine's speed. It needs root, and takes a
# control group of its own (version 2, or 1), which is removed at the end. It says how long the command was held up.
set -euo pipefail
if (($# < 2)) || ! [[ $1 =~ ^[0-9]+(\.[0-9]+)?$ ]] || ! awk -v cores="$1" 'BEGIN { exit cores < 0.01 }'; then
    echo "quota.sh: got '${*:-nothing}', expected CORES COMMAND..., as in: scripts/quota.sh 0.5 make check" >&2
    exit 2
fi
period_us=100000
quota_us=$(awk -v cores="$1" -v period="$period_us" 'BEGIN { printf "%d", cores * period }')
shift

top=$(awk '$3 == "cgroup" && $4 ~ /(^|,)cpu(,|$)/ { print $2; exit }' /proc/mounts)
if [[ -n $top ]]; then
    group=$top/quota.$$
    limit() { echo "$period_us" >"$group/cpu.cfs_period_us" && echo "$quota_us" >"$group/cpu.cfs_quota_us"; }
else
    top=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
    group=$top/quota.$$
    limit() { echo "+cpu" >"$top/cgroup.subtree_control" && echo "$quota_us $period_us" >"$group/cpu.max"; }
fi
remove() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        if rmdir "$group" 2>/dev/null; then
            return
        fi
        sleep 0.5 # a process of the command is ending
    done
    echo "quota.sh: $group stays: of the command still run: $(tr '\n' ' ' <"$group/cgroup.procs")" >&2
}
if ! mkdir "$group" 2>/dev/null || ! { trap remove EXIT && limit; } 2>/dev/null; then
    echo "quota.sh: cannot limit processor time: it takes root, and control groups mounted for writing" >&2
    exit 1
fi

status=0
trap : INT TERM # the command ends by it; then the group is removed
(
    trap - INT TERM
    echo "$BASHPID" >"$group/cgroup.procs"
    exec "$@"
) || status=$?
grep -E '^throttled_(time|usec)' "$group/cpu.stat" | sed 's/^/quota.sh: /' >&2 || true
exit "$status"
