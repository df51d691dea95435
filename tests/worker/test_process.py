"""Worker processes end with their engine."""

import subprocess
import sys

END_WITH = """
import sys, time
from lamina.worker.process import exit_with
exit_with(int(sys.argv[1]))
time.sleep(60)
"""


def test_a_worker_whose_engine_has_ended_before_it_looks_ends_without_a_word() -> None:
    engine = subprocess.Popen([sys.executable, "-c", ""])
    engine.wait()
    command = [sys.executable, "-c", END_WITH, str(engine.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
