"""Which commit comes after which: by the commit graph, never by dates.

The line of a branch is every commit that its tip can reach, parents before children. Each recorded commit gets a
*standing*:

``graph``      on the line; ``side`` tells those that came in through a merge from the branch's own (first parents).
``elsewhere``  in the repository, but only on other branches.
``orphan``     on no branch: rebased or amended away, or of another repository. Kept and shown, never judged.
``declared``   placed by the date that the record declares, because there is no repository to ask.

What is not on the line has a date's place, before all that is, so that it is never taken for the newest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from harness.errors import StoreError, UsageError, unknown
from harness.gitfacts import GitUnavailable, find_repository, iso_utc, package_root, run_git
from harness.history.moments import utc

STANDINGS: Final = ("graph", "elsewhere", "orphan", "declared")
#: Added to the rank of a commit on the line, so that it comes after every one that is not.
ON_LINE: Final = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a commit stands. ``rank`` orders places; ``side`` marks what came in through a merge."""

    commit: str
    rank: int
    standing: str
    side: bool = False
    date: str | None = None
    subject: str | None = None

    @property
    def judged(self) -> bool:
        """Whether points here take part in verdicts."""
        return self.standing in ("graph", "declared") and not self.side


@dataclass(frozen=True)
class Seen:
    """A commit as the records know it: its date and subject as declared, and when it was first measured."""

    commit: str
    date: str | None = None
    subject: str | None = None
    first: str = ""


@dataclass
class Order:
    """The places of all recorded commits for one branch."""

    branch: str
    places: dict[str, Place] = field(default_factory=dict)
    repository: Path | None = None
    #: Everything on the line, recorded or not, oldest first.
    line: tuple[str, ...] = ()
    reason: str | None = None

    def sort(self, commits: Iterable[str]) -> list[Place]:
        """The places of these commits, oldest first; unknown ones are left out."""
        return sorted((self.places[c] for c in set(commits) if c in self.places), key=lambda place: place.rank)

    def place(self, commit: str) -> Place:
        """The place of a commit; one that nobody recorded is an orphan before everything."""
        return self.places.get(commit) or Place(commit, -1, "orphan")


class Repository:
    """The commits of a git repository.

    Raises:
        StoreError: git is not there or refuses.
    """

    def __init__(self, root: Path) -> None:
        top = find_repository(root.resolve())
        if top is None:
            raise StoreError(f"{root} is in no git repository")
        self.top = top

    def git(self, *args: str) -> str:
        """Standard output of a git command.

        Raises:
            StoreError: the command failed; it says why.
        """
        try:
            return run_git(self.top, *args, top=self.top)
        except GitUnavailable as err:
            raise StoreError(f"repository {self.top}: {err}") from err

    @property
    def shallow(self) -> bool:
        """Whether the history is cut off."""
        return self.git("rev-parse", "--is-shallow-repository").strip() == "true"

    def branches(self) -> list[str]:
        """Names of local and remote branches."""
        names = self.git("for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/remotes").split()
        return [name for name in names if not name.endswith("/HEAD")]

    def resolve(self, name: str) -> str | None:
        """The commit of a branch (local before remote), tag, abbreviation or ``HEAD``; None if it names none."""
        for candidate in (name, f"origin/{name}"):
            try:
                return run_git(
                    self.top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{candidate}^{{commit}}",
                    top=self.top,
                ).strip()  # fmt: skip
            except GitUnavailable:
                continue
        return None

    def line(self, tip: str) -> list[tuple[str, str, str]]:
        """Every commit that the tip reaches, parents before children: (commit, date, subject)."""
        out = self.git("log", "--topo-order", "--reverse", "--format=%H%x00%ct%x00%s", "--end-of-options", tip, "--")
        rows = (row.split("\0", 2) for row in out.split("\n") if row)
        return [(commit, iso_utc(int(seconds)), subject) for commit, seconds, subject in rows]

    def first_parents(self, tip: str) -> set[str]:
        """The commits that were the branch's own."""
        return set(self.git("rev-list", "--first-parent", "--end-of-options", tip, "--").split())

    def everything(self) -> dict[str, tuple[str, str]]:
        """Every commit on any branch or tag: date and subject."""
        out = self.git("log", "--all", "--format=%H%x00%ct%x00%s", "--")
        rows = (row.split("\0", 2) for row in out.split("\n") if row)
        return {commit: (iso_utc(int(seconds)), subject) for commit, seconds, subject in rows}

    def between(self, old: str, new: str) -> list[tuple[str, str]]:
        """Commits reachable from ``new`` and not from ``old``, oldest first: (commit, subject)."""
        out = self.git(
            "log", "--topo-order", "--reverse", "--format=%H%x00%s", "--end-of-options", f"{old}..{new}", "--"
        )
        return [(commit, subject) for commit, _, subject in (row.partition("\0") for row in out.split("\n") if row)]


def find_order_repository(start: Path | None = None) -> Repository | None:
    """The repository to order by: that of the working directory if it holds this project, else that of this code."""
    for folder in (start or Path.cwd(), package_root()):
        top = find_repository(folder.resolve())
        if top is not None and ((top / "harness" / "record.py").is_file() or start is not None):
            return Repository(top)
    return None


def order_commits(seen: Iterable[Seen], repository: Repository | None, branch: str = "HEAD") -> Order:
    """Order recorded commits along a branch.

    Raises:
        UsageError: the branch does not exist; the nearest names are given.
        StoreError: the clone is shallow and lacks a recorded commit, or git refuses.
    """
    recorded = {item.commit: item for item in seen}
    if repository is None:
        order = Order(branch, reason="no repository: ordered by declared dates")
        order.places = _by_date(recorded, "declared", {}, 0)
        return order
    tip = repository.resolve(branch)
    if tip is None:
        if branch == "HEAD":
            order = Order(branch, repository=repository.top, reason="the repository has no commit: ordered by dates")
            order.places = _by_date(recorded, "declared", {}, 0)
            return order
        raise unknown("branch", branch, repository.branches())
    line = repository.line(tip)
    order = Order(branch, repository=repository.top, line=tuple(commit for commit, _, _ in line))
    short = _abbreviated(recorded, order.line)
    on_line = {*order.line, *(name for names in short.values() for name in names)}
    missing = {commit: item for commit, item in recorded.items() if commit not in on_line}
    known = repository.everything() if missing else {}
    if repository.shallow:
        lost = [commit for commit in missing if commit not in known]
        if lost:
            raise StoreError(
                f"repository {repository.top} is a shallow clone without {len(lost)} recorded commit(s), "
                f"{lost[0][:12]} among them, so the history cannot be ordered; run: git fetch --unshallow"
            )
    if recorded and len(missing) == len(recorded) and not known.keys() & recorded.keys():
        # Nothing here is of this repository (another project's, a demonstration): dates are all there is.
        order.reason = "no recorded commit is in this repository: ordered by declared dates"
        order.places = _by_date(recorded, "declared", {}, 0)
        return order
    order.places = _by_date({c: i for c, i in missing.items() if c not in known}, "orphan", {}, 0)
    order.places |= _by_date({c: i for c, i in missing.items() if c in known}, "elsewhere", known, len(order.places))
    own = repository.first_parents(tip)
    for rank, (commit, date, subject) in enumerate(line, ON_LINE):
        for name in (commit, *short.get(commit, ())):
            if name in recorded:
                order.places[name] = Place(name, rank, "graph", commit not in own, date, subject)
    return order


def _abbreviated(recorded: Iterable[str], line: Sequence[str]) -> dict[str, list[str]]:
    """Commit on the line → the beginnings of it that records name it by (imported ones do)."""
    names = [name for name in recorded if 7 <= len(name) < 40]
    found: dict[str, list[str]] = {}
    for name in names:
        near = [commit for commit in line if commit.startswith(name)]
        if len(near) == 1:
            found.setdefault(near[0], []).append(name)
    return found


def _by_date(
    items: Mapping[str, Seen], standing: str, known: Mapping[str, tuple[str, str]], start: int
) -> dict[str, Place]:
    def when(item: Seen) -> tuple[str, str, str]:
        date = known[item.commit][0] if item.commit in known else item.date
        # A declared date may be of any zone.
        return (utc(date) or item.first, item.first, item.commit)

    places = {}
    for rank, item in enumerate(sorted(items.values(), key=when), start):
        date, subject = known.get(item.commit, (item.date, item.subject))
        places[item.commit] = Place(item.commit, rank, standing, False, date, subject)
    return places


def resolve_selection(name: str, repository: Repository | None, recorded: Iterable[str]) -> str:
    """The recorded commit that a user's word names: a commit or its beginning, a branch, a tag.

    Raises:
        UsageError: it names none, or several.
    """
    commits = set(recorded)
    if name in commits:
        return name
    if repository is not None and (found := repository.resolve(name)) is not None:
        return found
    if len(name) >= 4 and (near := [commit for commit in commits if commit.startswith(name)]):
        if len(near) > 1:
            raise UsageError(f"{name!r} begins several recorded commits: {', '.join(sorted(near)[:5])}")
        return near[0]
    raise unknown("commit, branch, tag or run", name, {commit[:12] for commit in commits})
