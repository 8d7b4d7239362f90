"""A worker that behaves as its first argument says; run by the launcher's tests."""

import atexit
import ctypes
import os
import subprocess
import sys
import threading
import time

RANK = int(os.environ.get("RANK", "0"))


def stuck() -> None:
    while True:
        time.sleep(0.05)


def main(how: str, *rest: str) -> None:
    print(f"rank {RANK} does {how}")
    if how == "pass":
        print("threads", os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"])
    elif how == "raise":
        if int(rest[0]) == RANK:
            raise RuntimeError(f"planted on rank {RANK}\nsecond line")
        stuck()
    elif how == "exit":
        if int(rest[0]) == RANK:
            sys.exit(7)
        stuck()
    elif how == "die":
        if int(rest[0]) == RANK:
            os.kill(os.getpid(), 9)
        stuck()
    elif how == "crash":
        ctypes.string_at(0)
    elif how == "hang":
        stuck()
    elif how == "grandchild":
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(rest[0], "w") as file:
            file.write(str(child.pid))
        if rest[1] == "hang":
            stuck()
    elif how == "stubborn":
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stuck()
    elif how == "abort":
        os.write(2, b"terminate called without an active exception\n")
        os.abort()
    elif how == "end":
        end()
        if rest:
            sys.exit(int(rest[0]) if rest[0].isdigit() else rest[0])
    elif how == "memory":
        raise MemoryError("planted")
    elif how == "collective":
        collective(*rest)
    else:
        raise SystemExit(f"unknown behaviour {how!r}")


def end() -> None:
    """Leave something to do for every step of a process's end."""

    class Said:
        def __del__(self, write=os.write) -> None:
            write(1, b"taken apart\n")

    sys.said = Said()  # type: ignore[attr-defined]  # lives as long as the interpreter
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread ended"))).start()
    ctypes.CDLL(None).printf(b"native print\n")


def late(group: object) -> None:
    """A last collective of which gloo's thread lets go while this thread holds the interpreter's lock to the end."""
    import torch

    from harness.world import close_world

    close_world()
    sys.setswitchinterval(1000)
    KEPT.append(group)
    group.allreduce([torch.ones(1)])  # type: ignore[attr-defined]
    until = time.monotonic() + 1
    while time.monotonic() < until:
        pass


KEPT: list[object] = []


def collective(how: str, rank: str) -> None:
    """All ranks meet in an all-reduce; one of them may be killed or hang before the second."""
    import torch
    import torch.distributed as dist

    from harness.world import close_world, init_world

    mine, world, mesh = init_world("cpu")
    assert mesh is not None
    assert mesh.size() == world
    total = torch.ones(1)
    dist.all_reduce(total)
    print("sum", total.item())
    if mine == int(rank):
        if how == "die":
            os.kill(os.getpid(), 9)
        if how == "hang":
            stuck()
        if how == "raise":
            raise ValueError("planted in the middle")
    if how == "late":
        late(mesh.get_group())
    elif how != "pass":
        dist.all_reduce(total)
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
