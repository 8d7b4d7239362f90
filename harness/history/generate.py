"""Synthetic history: as many records as one likes, with noise, steps and failures planted, for tests of speed.

Every record says ``"synthetic": true`` and ``machine: synthetic``, and the generator refuses a store that is the
results of a checkout: nobody shall take these figures for measurements.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

from harness.errors import StoreError, UsageError
from harness.history.compact import FILE_RECORDS, LineFile
from harness.history.store import Store, gpu_folder
from harness.record import METHOD, SCHEMA, metric, to_line

FAMILIES: Final = ("fusion", "attention", "precision", "quantization", "graphs", "memory", "parallel", "moe", "serving")
GPUS: Final = ("h200", "h100-sxm", "a100-sxm-80gb", "l40s")
VARIANTS: Final = (("baseline", ""), ("optimized", ""), ("torch_compile", "torch"), ("liger", "library"))
WORKLOADS: Final = 3
STEP_RATIOS: Final = (0.9, 1.05, 1.1, 1.25)


@dataclass(frozen=True)
class Shape:
    """How much to make: techniques × variants × workloads a run, ``runs`` a commit and GPU type, until ``records``."""

    records: int = 10_000
    techniques: int = 40
    gpus: int = 4
    runs: int = 1
    seed: int = 0
    noise: float = 0.01
    steps: int = 40


@dataclass(frozen=True)
class Step:
    """A planted change: latency of one variant of one technique on one GPU type is ``ratio`` times as long from the
    commit at ``index`` on."""

    technique: str
    variant: str
    gpu: str
    index: int
    commit: str
    ratio: float


@dataclass
class Generated:
    """What was written, and where the steps lie."""

    records: int = 0
    files: int = 0
    commits: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"records": self.records, "files": self.files, "commits": len(self.commits)} | {
            "steps": [asdict(step) for step in self.steps]
        }


class Maker:
    """Makes the records of one run after another."""

    def __init__(self, shape: Shape, commits: Sequence[str] = ()) -> None:
        if shape.records < 1 or shape.techniques < 1 or not 1 <= shape.gpus <= len(GPUS) or shape.runs < 1:
            raise UsageError(f"generate: at least one record, technique and run, and 1 to {len(GPUS)} GPU types")
        self.shape = shape
        self.techniques = [self._technique(n) for n in range(shape.techniques)]
        self.gpus = GPUS[: shape.gpus]
        self.a_run = 3 + shape.techniques * len(VARIANTS) * WORKLOADS
        needed = -(-shape.records // (self.a_run * shape.gpus * shape.runs))
        self.declared = not commits
        self.commits = list(commits)[-needed:] if commits else [self._sha(n) for n in range(needed)]
        self._dice = random.Random(shape.seed)
        self.steps = self._plant()
        self._started = datetime(2025, 1, 1, tzinfo=UTC)

    def _sha(self, number: int) -> str:
        return hashlib.sha1(f"{self.shape.seed}/{number}".encode(), usedforsecurity=False).hexdigest()

    @staticmethod
    def _technique(number: int) -> tuple[str, str]:
        family = FAMILIES[number % len(FAMILIES)]
        return f"{family}_{number:02d}", family

    def _plant(self) -> list[Step]:
        count = len(self.commits)
        steps: list[Step] = []
        for _ in range(self.shape.steps if count >= 8 else 0):
            index = self._dice.randrange(count // 4, 3 * count // 4 + 1)
            technique = self._dice.choice(self.techniques)[0]
            gpu = self._dice.choice(self.gpus)
            if any((s.technique, s.gpu) == (technique, gpu) for s in steps):
                continue
            variant = self._dice.choice(("baseline", "optimized"))
            ratio = self._dice.choice(STEP_RATIOS)
            steps.append(Step(technique, variant, gpu, index, self.commits[index], ratio))
        return steps

    def runs(self, gpus: Sequence[str] = GPUS) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
        """Runs on these GPU types as (GPU type, run id, records). A run does not depend on those before it."""
        left = self.shape.records
        for index, commit in enumerate(self.commits):
            for gpu in self.gpus:
                for repeat in range(self.shape.runs):
                    if left <= 0:
                        return
                    if gpu in gpus:
                        self._dice = random.Random(f"{self.shape.seed}/{index}/{gpu}/{repeat}")
                        run_id, records = self._run(index, commit, gpu)
                        yield gpu, run_id, records[:left]
                    left -= self.a_run

    def _run(self, index: int, commit: str, gpu: str) -> tuple[str, list[dict[str, Any]]]:
        start = self._started + timedelta(hours=6 * index, seconds=self._dice.randrange(3600))
        run_id = start.strftime("%Y%m%dT%H%M%SZ") + f"-{self._dice.getrandbits(32):08x}"
        new = index >= len(self.commits) // 2
        common: dict[str, Any] = {
            "schema": SCHEMA,
            "method": METHOD,
            "run": run_id,
            "time": start.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "commit": commit,
            "branch": "main",
            "dirty": False,
            "gpu": gpu,
            "machine": "synthetic",
            "synthetic": True,
            "declared": self.declared,
            "commit_source": "declared" if self.declared else "git",
            "commit_date": (self._started + timedelta(hours=6 * index)).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit_subject": f"Synthetic change {index}",
            "stack": {"python": "3.12", "torch": "2.12.0" if new else "2.11.0", "triton": "3.6.0", "driver": "580.65"},
        }
        run = {**common, "type": "run", "id": f"{run_id}-run", "command": "pairbench run --tier quick"}
        records = [run, self._sentinel(common, "start")]
        for technique, family in self.techniques:
            records.extend(self._technique_records(common, technique, family, index))
        records.append(self._sentinel(common, "end"))
        return run_id, records

    def _sentinel(self, common: dict[str, Any], when: str) -> dict[str, Any]:
        reading = {"matmul_s": 2e-4 * self._dice.gauss(1, 0.003), "copy_s": 5e-4 * self._dice.gauss(1, 0.003)}
        moved = {"moved": False, "reason": None} if when == "end" else {}
        return {
            **common,
            "type": "sentinel",
            "id": f"{common['run']}-{when}",
            "when": when,
            "reading": reading,
            **moved,
        }

    def _technique_records(
        self, common: dict[str, Any], technique: str, family: str, index: int
    ) -> Iterator[dict[str, Any]]:
        levels = {s.variant: s.ratio for s in self.steps if (s.technique, s.gpu) == (technique, common["gpu"])
                  and index >= s.index}  # fmt: skip
        for workload in range(WORKLOADS):
            base = 1e-4 * (1 + hash_share(technique, common["gpu"])) * (1 + workload)
            baseline = base * self._dice.gauss(1, self.shape.noise) * levels.get("baseline", 1.0)
            for place, (variant, peer) in enumerate(VARIANTS):
                plain = base / (1 + place * hash_share(technique, variant)) * levels.get(variant, 1.0)
                latency = baseline if place == 0 else plain * self._dice.gauss(1, self.shape.noise)
                yield self._measurement(common, technique, family, variant, peer, workload, latency, baseline)

    def _measurement(
        self,
        common: dict[str, Any],
        technique: str,
        family: str,
        variant: str,
        peer: str,
        workload: int,
        latency: float,
        baseline: float,
    ) -> dict[str, Any]:
        rare = self._dice.random()
        status = "passed" if rare > 0.01 or variant == "baseline" else "oom" if rare > 0.005 else "skipped"
        ranks = 2**workload if family == "parallel" else 1
        kind = {"serving": "serve", "parallel": "step"}.get(family, "op")
        record: dict[str, Any] = {
            **common,
            "type": "measurement",
            "id": f"{common['run']}-{technique}-{variant}-{workload}",
            "technique": technique,
            "family": family,
            "kind": kind,
            "layer": "system" if family in ("serving", "parallel", "memory") else "kernel",
            "variant": variant,
            "peer": peer,
            "workload": f"w{workload}",
            "workload_id": hashlib.sha256(f"{technique}/{workload}".encode()).hexdigest()[:12],
            "dtype": "bfloat16",
            "tier": "quick",
            "ranks": ranks,
            "status": status,
            "reason": None if status == "passed" else f"synthetic {status}",
            "reproduce": f"pairbench run {technique} --workload w{workload}",
            "dims": {"rows": 4096 << workload, "width": 4096, "rate": 2.0 * (workload + 1)},
        }
        if status != "passed":
            return record
        values = [latency * self._dice.gauss(1, 0.004) for _ in range(10)]
        record["samples"] = {"values": values, "clock": "events", "cache": "cold", "rounds": 10, "settled": True}
        record["check"] = {"rule": "same_precision", "passed": True, "error": 1e-3, "bound": 4e-3, "tensor": "out"}
        size = float(4096 << workload) * 4096 * 4
        record["work"] = {"flops": size * 4, "bytes": size, "items": 4096 << workload, "unit": "rows"}
        record["floor"] = {"seconds": size / 4.8e12, "limit": "memory", "share": size / 4.8e12 / latency}
        record["costs"] = {"build_s": 0.1, "compile_s": 1.5, "check_s": 0.2}
        record["metrics"] = self._metrics(latency, baseline, variant, size, workload, kind)
        return record

    def _metrics(
        self, latency: float, baseline: float, variant: str, size: float, workload: int, kind: str
    ) -> dict[str, Any]:
        found = {
            "latency": metric("latency", latency, latency * 0.997, latency * 1.003),
            "throughput": metric("throughput", (4096 << workload) / latency, unit="rows/s"),
            "peak_memory": metric("peak_memory", size),
            "absolute_memory": metric("absolute_memory", size * 2),
            "mbu": metric("mbu", min(1.0, size / latency / 4.8e12)),
            "bandwidth": metric("bandwidth", size / latency),
            "floor_share": metric("floor_share", size / 4.8e12 / latency),
            "compile_s": metric("compile_s", 1.5),
        }
        if variant != "baseline":
            speedup = baseline / latency
            found["speedup"] = metric("speedup", speedup, speedup * 0.995, speedup * 1.005)
            found["speedup_peer"] = metric("speedup_peer", speedup * 0.8, speedup * 0.79, speedup * 0.81)
        if kind == "serve":
            for name, scale in (("ttft_p50", 20), ("ttft_p99", 90), ("itl_p50", 5), ("itl_p99", 15), ("e2e_p50", 400)):
                found[name] = metric(name, latency * scale * (1 + workload))
            found["output_rate"] = metric("output_rate", 1000.0 * (1 + workload) * (1e-4 / latency))
            found["goodput"] = metric("goodput", 1.5 * (1 + workload))
        if kind == "step":
            found["exposed_comm"] = metric("exposed_comm", latency * 0.1 * workload)
        return found


@cache
def hash_share(*words: str) -> float:
    """A number in [0, 1) that belongs to the words."""
    return int.from_bytes(hashlib.sha256("/".join(words).encode()).digest()[:4], "big") / 2**32


def is_results(store: Store) -> bool:
    """Whether a store lies in the results of a checkout: in a folder ``results`` beside the harness."""
    if store.path is None:
        return False
    whole = store.path.resolve()
    return any(folder.name == "results" and (folder.parent / "harness").is_dir() for folder in (whole, *whole.parents))


def generate(
    store: Store, shape: Shape, *, parquet: bool = True, commits: Sequence[str] = (), workers: int = 1
) -> Generated:
    """Write synthetic records into a local store, as compacted files or as one JSONL file a run.

    Args:
        commits: real commits, oldest first; otherwise made-up ones, declared with dates.
        workers: processes that share the GPU types among them.

    Raises:
        StoreError: the store is not a local folder, cannot be written, or holds results.
        UsageError: a shape that makes nothing.
    """
    if is_results(store):
        raise StoreError(f"store {store.url}: synthetic records do not belong in the results of a checkout")
    if store.path is None:
        raise StoreError(f"store {store.url}: synthetic records are written into local folders only")
    maker = Maker(shape, commits)
    done = Generated(commits=maker.commits, steps=maker.steps)
    shares = [maker.gpus[n :: max(1, workers)] for n in range(min(max(1, workers), len(maker.gpus)))]
    try:
        for gpu in maker.gpus:
            (store.path / gpu_folder(gpu)).mkdir(parents=True, exist_ok=True)
        if len(shares) == 1:
            counts = [_write_share(store.path, shape, commits, shares[0], parquet)]
        else:
            with ProcessPoolExecutor(len(shares), mp_context=multiprocessing.get_context("spawn")) as pool:
                jobs = [pool.submit(_write_share, store.path, shape, commits, share, parquet) for share in shares]
                counts = [job.result() for job in jobs]
    except OSError as err:
        raise StoreError(f"store {store.url}: cannot be written: {err}") from err
    done.records, done.files = (sum(column) for column in zip(*counts, strict=True))
    return done


def _write_share(
    root: Path, shape: Shape, commits: Sequence[str], gpus: Sequence[str], parquet: bool
) -> tuple[int, int]:
    """Write the runs on some GPU types; gives the numbers of records and files."""
    maker = Maker(shape, commits)
    return (_write_parquet if parquet else _write_jsonl)(root, maker, gpus)


def _write_jsonl(root: Path, maker: Maker, gpus: Sequence[str]) -> tuple[int, int]:
    count = files = 0
    for gpu, run_id, records in maker.runs(gpus):
        with open(root / gpu_folder(gpu) / f"{run_id}.jsonl", "x", encoding="utf-8") as file:
            file.writelines(map(_line, records))
        count += len(records)
        files += 1
    return count, files


def _write_parquet(root: Path, maker: Maker, gpus: Sequence[str]) -> tuple[int, int]:
    open_files: dict[str, tuple[Path, Path, LineFile]] = {}
    count = files = 0

    def finish(gpu: str) -> None:
        temporary, target, out = open_files.pop(gpu)
        out.close()
        temporary.rename(target)

    try:
        for gpu, run_id, records in maker.runs(gpus):
            if gpu not in open_files:
                target = root / gpu_folder(gpu) / f"synthetic-{secrets.token_hex(4)}.parquet"
                temporary = target.with_name(f".{target.name}.tmp")
                open_files[gpu] = (temporary, target, LineFile(temporary))
                files += 1
            out = open_files[gpu][2]
            for number, record in enumerate(records, 1):
                out.add(record, f"{gpu_folder(gpu)}/{run_id}.jsonl", number, _line(record).encode())
            count += len(records)
            if out.records >= FILE_RECORDS:
                finish(gpu)
        for gpu in list(open_files):
            finish(gpu)
    finally:
        for temporary, _, _ in open_files.values():
            temporary.unlink(missing_ok=True)
    return count, files


_encode: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode
_checked_kinds: set[tuple[str, str]] = set()


def _line(record: dict[str, Any]) -> str:
    """The line of a record; the first of each kind is judged as a real one would be, the rest are written at speed."""
    kind = (record["type"], record.get("status", ""))
    if kind not in _checked_kinds:
        _checked_kinds.add(kind)
        return to_line(record)
    return _encode(record) + "\n"
