"""A process of a world that torchrun or srun made: it joins, launches what it is told, and writes the outcomes."""

import json
import os
import sys
from pathlib import Path

from harness.launch import Job, launch
from harness.world import detect_world, join


def main(folder: str, *jobs: str) -> None:
    place = detect_world(os.environ)
    assert place is not None
    joined = join(place, timeout_s=30)
    outcomes = []
    for number, job in enumerate(jobs):
        logs = Path(folder) / str(number)
        found = launch(Job("fake_worker", tuple(job.split()), ranks=place.world, timeout_s=30, logs=logs), joined)
        outcomes.append([found.status, found.reason, found.rank])
    (Path(folder) / f"outcomes{place.rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
