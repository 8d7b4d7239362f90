"""Which commit is being measured, and is the tree clean? Imports no torch and needs no git binary to answer in part.

The tree is the one that holds this package, not the working directory: a wheel that is run from inside somebody
else's checkout must not take that checkout's commit. Changes under ``results/`` alone do not make a tree dirty.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

#: What git would otherwise take from a hook or a wrapper that calls us, pointing it at another tree.
_GIT_ENV = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
ROOMS = ("kernels", "impls", "suites", "harness", "dashboard")
#: An untracked file outside the rooms counts only when it can change what runs.
SOURCES = frozenset({".py", ".pyi", ".pyx", ".pth", ".so", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".toml"})
TIMEOUT_S = 30.0
TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True)
class GitFacts:
    """The commit under test.

    source: ``git``, ``files`` (.git read without a git binary), ``asv``, ``declared`` or ``none``.
    dirty: True also where nothing shows that the tree is clean; ``reason`` then says why.
    changed: up to twenty paths that make it dirty.
    commit_date: committer's time, ISO 8601 UTC.
    """

    commit: str | None = None
    branch: str | None = None
    dirty: bool = True
    commit_date: str | None = None
    subject: str | None = None
    source: str = "none"
    shallow: bool | None = None
    changed: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def declared(self) -> bool:
        """Whether somebody said so, rather than a repository."""
        return self.source == "declared"


class GitUnavailable(Exception):
    """git could not answer; the message says why."""


def package_root() -> Path:
    """The folder that holds the harness package."""
    return Path(__file__).resolve().parent.parent


def git_facts(root: Path | None = None, environ: Mapping[str, str] | None = None) -> GitFacts:
    """The commit that this process measures.

    In this order: the commit that asv installed (``ASV_COMMIT`` with ``ASV_CONF_DIR``), the repository that tracks
    ``root``, the ``PAIRBENCH_COMMIT``, ``_BRANCH``, ``_DATE`` and ``_DIRTY`` that somebody declared.
    """
    env = os.environ if environ is None else environ
    if env.get("ASV_COMMIT") and env.get("ASV_CONF_DIR"):
        return _asv(env["ASV_COMMIT"], Path(env["ASV_CONF_DIR"]), env)
    project = root or package_root()
    top = find_repository(project)
    why = f"{project} is in no git repository" if root else "this package is in no git repository"
    if top is not None:
        try:
            if tracks(project, top, env):
                return _from_git(project, top, env)
            why = "the repository around this package does not track it"
        except GitUnavailable as err:
            why = str(err)
            if not env.get("PAIRBENCH_COMMIT") and (project / ".git").exists():
                return _from_files(project, why, env)
    return _declared(env, why)


def find_repository(start: Path) -> Path | None:
    """The nearest folder at or above ``start`` with a ``.git`` (a folder, or a file in a worktree or submodule)."""
    for folder in (start, *start.parents):
        if (folder / ".git").exists():
            return folder
    return None


def run_git(cwd: Path, *args: str, top: Path, environ: Mapping[str, str] | None = None) -> str:
    """Standard output of ``git args`` in ``cwd``.

    A tree owned by another user (containers, CI) is read all the same: whoever runs its code trusts it already, and
    the setting holds for this one call.

    Raises:
        GitUnavailable: no git binary, a refusal, a failure or no answer in time.
    """
    env = dict(os.environ if environ is None else environ)
    for name in _GIT_ENV:
        env.pop(name, None)
    env.update(GIT_OPTIONAL_LOCKS="0", GIT_TERMINAL_PROMPT="0", LC_ALL="C")
    command = [
        "git",
        "-c",
        f"safe.directory={top}",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "log.showSignature=false",
        *args,
    ]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, errors="replace"
        )
    except FileNotFoundError:
        raise GitUnavailable("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise GitUnavailable(f"git {args[0]} gave no answer within {TIMEOUT_S:.0f} s") from None
    except OSError as err:
        raise GitUnavailable(f"git could not be run: {err}") from None
    if done.returncode != 0:
        message = done.stderr.strip().splitlines()
        raise GitUnavailable(f"git {args[0]}: {message[0] if message else f'exit code {done.returncode}'}")
    return done.stdout


def tracks(project: Path, top: Path, env: Mapping[str, str]) -> bool:
    """Whether the repository tracks anything under ``project``; a virtual environment inside a checkout is not."""
    if project == top:
        return True
    return bool(run_git(project, "ls-files", "--", ".", top=top, environ=env).strip())


def _from_git(project: Path, top: Path, env: Mapping[str, str]) -> GitFacts:
    commit, date, subject = _commit(project, top, "HEAD", env)
    changed = changed_paths(project, top, env)
    shallow = run_git(project, "rev-parse", "--is-shallow-repository", top=top, environ=env).strip() == "true"
    return GitFacts(
        commit=commit,
        branch=_branch(project, top, env) or ci_branch(env),
        dirty=bool(changed),
        commit_date=date,
        subject=subject,
        source="git",
        shallow=shallow,
        changed=tuple(changed[:20]),
    )


def _commit(project: Path, top: Path, rev: str, env: Mapping[str, str]) -> tuple[str, str, str]:
    try:
        out = run_git(project, "log", "-1", "--format=%H%x00%ct%x00%s", rev, "--", top=top, environ=env)
    except GitUnavailable as err:
        if rev == "HEAD" and "does not have any commits" in str(err):
            raise GitUnavailable("the repository has no commit yet") from None
        raise
    commit, seconds, subject = out.rstrip("\n").split("\0", 2)
    return commit, iso_utc(int(seconds)), subject


def iso_utc(seconds: int) -> str:
    """Seconds since 1970 as ISO 8601 UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _branch(project: Path, top: Path, env: Mapping[str, str]) -> str | None:
    try:
        return run_git(project, "symbolic-ref", "--short", "-q", "HEAD", top=top, environ=env).strip() or None
    except GitUnavailable:
        return None  # a detached head has no branch


def ci_branch(env: Mapping[str, str]) -> str | None:
    """The branch that a CI job says it builds; CI systems check out a detached head."""
    for name in ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BUILDKITE_BRANCH", "BRANCH_NAME"):
        if env.get(name):
            return env[name]
    return env.get("GIT_BRANCH", "").removeprefix("origin/") or None


def changed_paths(project: Path, top: Path, env: Mapping[str, str] | None = None) -> list[str]:
    """Paths, relative to ``project``, that differ from the commit and can change what is measured.

    Tracked files count wherever they are, but for results/; untracked ones in the rooms, or when they are source.
    """
    prefix = run_git(project, "rev-parse", "--show-prefix", top=top, environ=env).rstrip("\n")
    out = run_git(project, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--", ".", top=top, environ=env)
    entries = iter(out.split("\0"))
    changed: list[str] = []
    for entry in entries:
        if not entry:
            continue
        state, paths = entry[:2], [entry[3:]]
        if "R" in state or "C" in state:
            paths.append(next(entries))
        for path in paths:
            inside = path.removeprefix(prefix)
            if inside.split("/")[0] == "results":
                continue
            if state == "??" and inside.split("/")[0] not in ROOMS and Path(inside).suffix not in SOURCES:
                continue
            changed.append(inside)
    return changed


def _asv(commit: str, conf: Path, env: Mapping[str, str]) -> GitFacts:
    """The commit that asv installed, from a clean checkout; dirty when asv's plugin says that the suites are not."""
    dirty = _declared_dirty(env)
    top = find_repository(conf.resolve())
    if top is None:
        return GitFacts(commit=commit, dirty=dirty, source="asv", reason="ASV_CONF_DIR is in no git repository")
    try:
        full, date, subject = _commit(conf, top, commit, env)
        branch = _branch(conf, top, env)
        if branch:
            try:
                run_git(conf, "merge-base", "--is-ancestor", full, "HEAD", top=top, environ=env)
            except GitUnavailable:
                branch = None
        reason = "the suites that asv measured are not committed" if dirty else None
        return GitFacts(full, branch, dirty, date, subject, "asv", reason=reason)
    except GitUnavailable as err:
        return GitFacts(commit=commit, dirty=dirty, source="asv", reason=str(err))


def _declared_dirty(env: Mapping[str, str]) -> bool:
    return env.get("PAIRBENCH_DIRTY", "").strip().lower() in TRUE


def _declared(env: Mapping[str, str], why: str) -> GitFacts:
    commit = env.get("PAIRBENCH_COMMIT")
    if not commit:
        return GitFacts(reason=f"{why}; declare the commit with PAIRBENCH_COMMIT, _BRANCH, _DATE and _DIRTY")
    date, reason = env.get("PAIRBENCH_DATE"), why
    if date:
        try:
            parsed = datetime.fromisoformat(date)
            parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
            date = iso_utc(int(parsed.timestamp()))
        except ValueError:
            reason, date = f"{why}; PAIRBENCH_DATE {date!r} is not ISO 8601 and was left out", None
    return GitFacts(
        commit=commit,
        branch=env.get("PAIRBENCH_BRANCH") or ci_branch(env),
        dirty=_declared_dirty(env),
        commit_date=date,
        source="declared",
        reason=reason,
    )


def _from_files(top: Path, why: str, env: Mapping[str, str]) -> GitFacts:
    """What .git itself says without git: commit and branch, and date and subject if the object is not packed."""
    git_dir = top / ".git"
    try:
        if git_dir.is_file():
            git_dir = (top / git_dir.read_text().strip().removeprefix("gitdir:").strip()).resolve()
        common = git_dir
        if (git_dir / "commondir").is_file():
            common = (git_dir / (git_dir / "commondir").read_text().strip()).resolve()
        head = (git_dir / "HEAD").read_text().strip()
        ref = head.removeprefix("ref:").strip() if head.startswith("ref:") else None
        commit = _resolve(git_dir, common, ref) if ref else head
    except OSError as err:
        return _declared(env, f"{why}; .git could not be read: {err.strerror}")
    if not commit:
        return _declared(env, "the repository has no commit yet")
    date, subject = _loose_commit(common, commit)
    return GitFacts(
        commit=commit,
        branch=ref.removeprefix("refs/heads/") if ref else ci_branch(env),
        dirty=True,
        commit_date=date,
        subject=subject,
        source="files",
        shallow=(common / "shallow").is_file(),
        reason=f"{why}, so that nothing shows whether the tree is clean",
    )


def _resolve(git_dir: Path, common: Path, ref: str) -> str | None:
    for folder in (git_dir, common):
        if (folder / ref).is_file():
            return (folder / ref).read_text().strip()
    packed = common / "packed-refs"
    if packed.is_file():
        for line in packed.read_text().splitlines():
            commit, _, name = line.partition(" ")
            if name == ref:
                return commit
    return None


def _loose_commit(common: Path, commit: str) -> tuple[str | None, str | None]:
    path = common / "objects" / commit[:2] / commit[2:]
    try:
        _, _, body = zlib.decompress(path.read_bytes()).partition(b"\0")
    except (OSError, zlib.error):
        return None, None  # packed, or damaged: git itself would have to read it
    header, _, message = body.decode(errors="replace").partition("\n\n")
    for line in header.splitlines():
        if line.startswith("committer "):
            return iso_utc(int(line.rsplit(" ", 2)[1])), message.split("\n", 1)[0]
    return None, None
