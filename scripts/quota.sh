#!/usr/bin/env bash
# quota.sh CORES COMMAND...: runs the command with at most the processor time of CORES cores, as on a smaller machine:
# 0.5 is half a core. `scripts/quota.sh 0.5 make check` finds tests that depend on the machine's speed. It needs root,
# and makes a control group (version 2, or 1), which is removed at the end. It prints how long the command was
# throttled.
set -euo pipefail
if (($# < 2)) || ! [[ $1 =~ ^[0-9]+(\.[0-9]+)?$ ]] || ! awk -v cores="$1" 'BEGIN { exit cores < 0.01 }'; then
    echo "quota.sh: got '${*:-nothing}', expected CORES COMMAND..., for example scripts/quota.sh 0.5 make check" >&2
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
        sleep 0.5 # a process of the command is still ending
    done
    echo "quota.sh: $group is not removed, because processes of it still run: $(tr '\n' ' ' <"$group/cgroup.procs")" >&2
}
if ! mkdir "$group" 2>/dev/null || ! { trap remove EXIT && limit; } 2>/dev/null; then
    echo "quota.sh: cannot limit processor time: it takes root, and control groups mounted for writing" >&2
    exit 1
fi

status=0
trap : INT TERM # the signal ends the command; then the group is removed
(
    trap - INT TERM
    echo "$BASHPID" >"$group/cgroup.procs"
    exec "$@"
) || status=$?
grep -E '^throttled_(time|usec)' "$group/cpu.stat" | sed 's/^/quota.sh: /' >&2 || true
exit "$status"
