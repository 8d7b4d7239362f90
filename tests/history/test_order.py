"""Order is the commit graph's: merges, rebases, equal dates, several branches, shallow clones, no repository."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import StoreError, UsageError
from harness.history.order import Repository, Seen, order_commits, resolve_selection

Git = Callable[..., str]
#: All commits carry this date unless they say otherwise: dates shall decide nothing.
DATE = "2026-01-01T00:00:00Z"


class Repo:
    """A repository in the making."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *args: str, date: str = DATE) -> str:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "GIT_CONFIG_NOSYSTEM": "1",
            **{
                f"GIT_{who}_{what}": f"{what.lower()}@example.org"
                for who in ("AUTHOR", "COMMITTER")
                for what in ("NAME", "EMAIL")
            },
            "GIT_AUTHOR_DATE": date,
            "GIT_COMMITTER_DATE": date,
        }
        return subprocess.run(
            ["git", "-c", "protocol.file.allow=always", *args],
            cwd=self.root,
            env=env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def commit(self, subject: str, date: str = DATE) -> str:
        self.git("commit", "-q", "--allow-empty", "-m", subject, date=date)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


def seen(*commits: str) -> list[Seen]:
    return [Seen(commit) for commit in commits]


def test_equal_and_backward_dates_do_not_matter(repo: Repo) -> None:
    dates = [f"2026-01-{day:02d}T00:00:00Z" for day in (9, 3, 3, 7, 1)]
    commits = [repo.commit(f"c{n}", date) for n, date in enumerate(dates)]
    order = order_commits(seen(*reversed(commits)), Repository(repo.root), "main")
    assert [place.commit for place in order.sort(commits)] == commits
    assert [place.subject for place in order.sort(commits)] == ["c0", "c1", "c2", "c3", "c4"]
    assert all(place.standing == "graph" and place.judged for place in order.places.values())


def test_a_merge_comes_after_both_of_its_sides(repo: Repo) -> None:
    base = repo.commit("base")
    repo.git("checkout", "-q", "-b", "feature")
    side = [repo.commit("side 1", "2030-01-01T00:00:00Z"), repo.commit("side 2", "2030-01-01T00:00:00Z")]
    repo.git("checkout", "-q", "main")
    own = repo.commit("own")
    repo.git("merge", "-q", "--no-ff", "-m", "merge", "feature")
    merge = repo.git("rev-parse", "HEAD")
    last = repo.commit("last", "2020-01-01T00:00:00Z")
    everything = [base, *side, own, merge, last]
    order = order_commits(seen(*everything), Repository(repo.root), "main")
    rank = {commit: order.place(commit).rank for commit in everything}
    assert rank[base] < rank[side[0]] < rank[side[1]] < rank[merge] < rank[last]
    assert rank[base] < rank[own] < rank[merge]
    assert [order.place(commit).side for commit in everything] == [False, True, True, False, False, False]
    assert not order.place(side[0]).judged
    assert [subject for _, subject in Repository(repo.root).between(own, merge)] == ["side 1", "side 2", "merge"]


def test_another_branch_and_a_rebase(repo: Repo) -> None:
    base = repo.commit("base")
    repo.git("checkout", "-q", "-b", "other")
    elsewhere = repo.commit("on the other branch")
    repo.git("checkout", "-q", "main")
    gone = repo.commit("will be amended")
    repo.git("commit", "-q", "--amend", "--allow-empty", "-m", "amended")
    new = repo.git("rev-parse", "HEAD")
    unknown_here = "f" * 40
    order = order_commits(seen(base, elsewhere, gone, new, unknown_here), Repository(repo.root), "main")
    standing = {commit: order.place(commit).standing for commit in (base, elsewhere, gone, new, unknown_here)}
    assert standing == {base: "graph", elsewhere: "elsewhere", gone: "orphan", new: "graph", unknown_here: "orphan"}
    ordered = [place.commit for place in order.sort(standing)]
    assert ordered[-2:] == [base, new]  # nothing off the line is ever the newest
    assert not order.place(gone).judged
    there = order_commits(seen(base, elsewhere, new), Repository(repo.root), "other")
    assert there.place(elsewhere).standing == "graph"
    assert there.place(new).standing == "elsewhere"
    with pytest.raises(UsageError, match="main"):
        order_commits(seen(base), Repository(repo.root), "mian")


def test_a_shallow_clone_says_how_to_mend_it(repo: Repo, tmp_path: Path) -> None:
    commits = [repo.commit(f"c{n}") for n in range(4)]
    repo.git("clone", "-q", "--depth", "2", f"file://{repo.root}", str(tmp_path / "shallow"))
    shallow = Repository(tmp_path / "shallow")
    assert shallow.shallow
    with pytest.raises(StoreError, match="git fetch --unshallow"):
        order_commits(seen(*commits), shallow, "main")
    order = order_commits(seen(*commits[2:]), shallow, "main")  # what is there can be ordered
    assert [place.commit for place in order.sort(commits)] == commits[2:]


def test_a_remote_branch_will_do(repo: Repo, tmp_path: Path) -> None:
    first = repo.commit("first")
    repo.git("branch", "release")
    repo.git("clone", "-q", f"file://{repo.root}", str(tmp_path / "clone"))
    order = order_commits(seen(first), Repository(tmp_path / "clone"), "release")
    assert order.place(first).standing == "graph"


def test_without_a_repository_declared_dates_order_and_say_so(repo: Repo) -> None:
    a = Seen("a" * 40, "2026-01-02T00:00:00Z", "second")
    b = Seen("b" * 40, "2026-01-01T00:00:00Z", "first")
    for repository in (None, Repository(repo.root)):  # a repository without any commit is as good as none
        order = order_commits([a, b], repository)
        assert [place.subject for place in order.sort([a.commit, b.commit])] == ["first", "second"]
        assert {place.standing for place in order.places.values()} == {"declared"}
        assert order.reason
    repo.commit("nothing to do with the records")
    assert order_commits([a, b], Repository(repo.root)).place(a.commit).standing == "declared"


def test_what_a_word_selects(repo: Repo) -> None:
    commits = [repo.commit(f"c{n}") for n in range(3)]
    repo.git("tag", "v1", commits[1])
    repository = Repository(repo.root)
    assert resolve_selection("v1", repository, commits) == commits[1]
    assert resolve_selection("main", repository, commits) == commits[2]
    assert resolve_selection(commits[0][:8], repository, commits) == commits[0]
    with pytest.raises(UsageError, match="unknown commit"):
        resolve_selection("nothing", repository, commits)
    with pytest.raises(UsageError, match="several"):
        resolve_selection("aaaa", None, ["aaaa1", "aaaa2"])


def test_an_abbreviated_commit_stands_where_the_whole_one_does(repo: Repo) -> None:
    commits = [repo.commit(f"c{n}") for n in range(3)]
    order = order_commits(seen(commits[0], commits[1][:9], commits[2]), Repository(repo.root), "main")
    assert [place.subject for place in order.sort(order.places)] == ["c0", "c1", "c2"]
    assert order.place(commits[1][:9]).judged


def test_a_folder_without_a_repository_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no git repository"):
        Repository(tmp_path)
