"""A runner that launches a worker with a grandchild and hangs in it, for the test that kills the runner."""

import sys

from harness.launch import Job, launch

if __name__ == "__main__":
    launch(Job("fake_worker", ("grandchild", sys.argv[1], "hang"), ranks=int(sys.argv[2]), timeout_s=120))
