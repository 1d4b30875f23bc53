"""A process that inherits orphans reaps them, and takes no exit status from code that waits for its own children."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.support.harness import environment

PROGRAM = textwrap.dedent(
    """
    import ctypes, os, subprocess, time
    from kvstore.node.children import reap_adopted

    PR_SET_CHILD_SUBREAPER = 36  # as process 1 of a container is
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0

    def children():
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))

    def wait_for(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    reap_adopted(set())  # there is nobody
    parent = subprocess.Popen(["sh", "-c", "sleep 0.1 & sleep 0.1 & exit 3"])
    wait_for(lambda: len(children()) == 3)
    own = subprocess.Popen(["sh", "-c", "exit 7"])
    waited_for = {parent.pid, own.pid}
    os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)  # both have ended, and wait to be buried
    os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
    reap_adopted(waited_for)
    assert waited_for <= children()
    assert (parent.wait(), own.wait()) == (3, 7)
    wait_for(lambda: reap_adopted(waited_for) or not children())
    print("done")
    """
)


def test_orphans_are_reaped_and_no_exit_status_is_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "done\n", done.stderr
