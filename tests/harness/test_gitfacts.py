"""The commit under test, in real repositories of every shape."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness import gitfacts
from harness.gitfacts import GitUnavailable, changed_paths, git_facts

ENV = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_AUTHOR_DATE": "2026-01-02T03:04:05+01:00",
    "GIT_COMMITTER_DATE": "2026-01-02T03:04:05+01:00",
}


def git(cwd: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=cwd, env=ENV, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repo(tmp_path):
    root = tmp_path / "repo"
    (root / "harness").mkdir(parents=True)
    (root / "results" / "history").mkdir(parents=True)
    (root / "harness" / "a.py").write_text("x = 1\n")
    (root / "results" / "history" / "r.jsonl").write_text("{}\n")
    (root / ".gitignore").write_text("*.ignored.py\n")
    git(root, "init", "-q", "-b", "trunk")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "First: a subject\n\nbody")
    return root


def test_a_clean_tree(repo):
    facts = git_facts(repo, ENV)
    assert facts.commit == git(repo, "rev-parse", "HEAD")
    assert facts.branch == "trunk"
    assert facts.dirty is False
    assert facts.commit_date == "2026-01-02T02:04:05Z"
    assert facts.subject == "First: a subject"
    assert (facts.source, facts.declared, facts.shallow, facts.reason) == ("git", False, False, None)


def test_changes_under_results_alone_do_not_make_it_dirty(repo):
    (repo / "results" / "history" / "r.jsonl").write_text("{}\n{}\n")
    (repo / "results" / "history" / "new.py").write_text("")
    assert git_facts(repo, ENV).dirty is False


@pytest.mark.parametrize(
    ("path", "dirty"),
    [
        ("harness/new.py", True),
        ("harness/data.txt", True),
        ("conftest.py", True),
        ("kernel.cu", True),
        ("out.csv", False),
        ("harness/x.ignored.py", False),
        ("ünï code.py", True),
    ],
)
def test_untracked_files_count_when_they_can_change_what_runs(repo, path, dirty):
    (repo / path).write_text("")
    facts = git_facts(repo, ENV)
    assert facts.dirty is dirty
    assert facts.changed == ((path,) if dirty else ())


def test_edited_staged_renamed_and_deleted_files_make_it_dirty(repo):
    (repo / "harness" / "a.py").write_text("x = 2\n")
    assert git_facts(repo, ENV).changed == ("harness/a.py",)
    git(repo, "checkout", "-q", ".")
    git(repo, "mv", "harness/a.py", "harness/b.py")
    assert set(git_facts(repo, ENV).changed) == {"harness/a.py", "harness/b.py"}
    git(repo, "reset", "-q", "--hard")
    (repo / "harness" / "a.py").unlink()
    assert git_facts(repo, ENV).dirty is True


def test_a_file_that_moves_out_of_results_still_counts(repo):
    git(repo, "mv", "results/history/r.jsonl", "harness/r.jsonl")
    assert git_facts(repo, ENV).changed == ("harness/r.jsonl",)


def test_a_detached_head_has_no_branch_but_ci_may_name_it(repo):
    git(repo, "checkout", "-q", "--detach")
    assert git_facts(repo, ENV).branch is None
    assert git_facts(repo, {**ENV, "GITHUB_REF_NAME": "feature"}).branch == "feature"
    assert git_facts(repo, {**ENV, "GIT_BRANCH": "origin/feature"}).branch == "feature"


def test_a_shallow_clone_says_so(repo, tmp_path):
    (repo / "harness" / "a.py").write_text("x = 2\n")
    git(repo, "commit", "-qam", "second")
    git(tmp_path, "clone", "-q", "--depth", "1", repo.as_uri(), "thin")
    facts = git_facts(tmp_path / "thin", ENV)
    assert facts.shallow is True
    assert facts.subject == "second"


def test_a_worktree_has_its_own_head(repo, tmp_path):
    git(repo, "worktree", "add", "-q", "-b", "side", str(tmp_path / "wt"))
    facts = git_facts(tmp_path / "wt", ENV)
    assert facts.branch == "side"
    assert facts.dirty is False


def test_a_project_in_a_folder_of_a_larger_repository(repo):
    project = repo / "sub"
    (project / "harness").mkdir(parents=True)
    (project / "results").mkdir()
    (project / "harness" / "a.py").write_text("")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "sub")
    (project / "results" / "r.jsonl").write_text("")
    (repo / "harness" / "elsewhere.py").write_text("")
    assert git_facts(project, ENV).dirty is False
    (project / "harness" / "a.py").write_text("1")
    assert git_facts(project, ENV).changed == ("harness/a.py",)


def test_an_installed_package_inside_a_checkout_does_not_take_its_commit(repo):
    site = repo / ".venv" / "site-packages"
    site.mkdir(parents=True)
    facts = git_facts(site, ENV)
    assert facts.commit is None
    assert "does not track" in (facts.reason or "")


def test_a_hook_that_sets_git_dir_does_not_mislead(repo, tmp_path):
    git(tmp_path, "init", "-q", "other")
    facts = git_facts(repo, {**ENV, "GIT_DIR": str(tmp_path / "other" / ".git")})
    assert facts.subject == "First: a subject"


def test_without_a_repository_what_is_declared_is_used_and_marked(tmp_path):
    env = {
        **ENV,
        "PAIRBENCH_COMMIT": "f" * 40,
        "PAIRBENCH_BRANCH": "rel",
        "PAIRBENCH_DATE": "2026-01-02T03:04:05+01:00",
        "PAIRBENCH_DIRTY": "1",
    }
    facts = git_facts(tmp_path, env)
    assert (facts.commit, facts.branch, facts.dirty) == ("f" * 40, "rel", True)
    assert facts.commit_date == "2026-01-02T02:04:05Z"
    assert facts.declared is True
    assert git_facts(tmp_path, {**env, "PAIRBENCH_DIRTY": "0"}).dirty is False
    odd = git_facts(tmp_path, {**env, "PAIRBENCH_DATE": "yesterday"})
    assert odd.commit_date is None
    assert "yesterday" in (odd.reason or "")


def test_with_a_repository_the_declaration_is_not_used(repo):
    assert git_facts(repo, {**ENV, "PAIRBENCH_COMMIT": "f" * 40}).commit == git(repo, "rev-parse", "HEAD")


def test_nothing_known_is_dirty_and_says_how_to_declare(tmp_path):
    facts = git_facts(tmp_path, ENV)
    assert facts.commit is None
    assert facts.dirty is True
    assert "PAIRBENCH_COMMIT" in (facts.reason or "")


def test_an_empty_repository_says_so(tmp_path):
    git(tmp_path, "init", "-q")
    facts = git_facts(tmp_path, ENV)
    assert facts.commit is None
    assert "no commit yet" in (facts.reason or "")


@pytest.mark.parametrize("packed", [False, True])
def test_without_a_git_binary_the_files_are_read(repo, packed):
    head = git(repo, "rev-parse", "HEAD")
    if packed:
        git(repo, "gc", "-q", "--aggressive", "--prune=now")
    facts = git_facts(repo, {**ENV, "PATH": "/nonexistent"})
    assert (facts.commit, facts.branch, facts.source) == (head, "trunk", "files")
    assert facts.dirty is True
    assert "git is not installed" in (facts.reason or "")
    if not packed:
        assert (facts.commit_date, facts.subject) == ("2026-01-02T02:04:05Z", "First: a subject")


def test_without_a_git_binary_a_worktree_is_read(repo, tmp_path):
    git(repo, "worktree", "add", "-q", "-b", "side", str(tmp_path / "wt"))
    facts = git_facts(tmp_path / "wt", {**ENV, "PATH": "/nonexistent"})
    assert facts.branch == "side"
    assert facts.commit == git(repo, "rev-parse", "HEAD")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_tree_of_another_user_is_read_all_the_same(repo):
    for path in (repo, *repo.rglob("*")):
        os.chown(path, 12345, 12345)
    refused = subprocess.run(["git", "status"], cwd=repo, env=ENV, capture_output=True, text=True, check=False)
    facts = git_facts(repo, ENV)
    assert facts.source == "git"
    assert facts.dirty is False
    assert "dubious ownership" in refused.stderr


def test_a_git_that_refuses_falls_back_to_the_files(repo, tmp_path):
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n")
    fake.chmod(0o755)
    facts = git_facts(repo, {**ENV, "PATH": f"{fake.parent}:/bin:/usr/bin"})
    assert facts.source == "files"
    assert "dubious ownership" in (facts.reason or "")


def test_a_git_that_hangs_is_given_up(repo, tmp_path, monkeypatch):
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 30\n")
    fake.chmod(0o755)
    monkeypatch.setattr(gitfacts, "TIMEOUT_S", 0.2)
    with pytest.raises(GitUnavailable, match="no answer"):
        changed_paths(repo, repo, {**ENV, "PATH": f"{fake.parent}:/bin:/usr/bin"})


def test_under_asv_the_commit_is_the_one_that_asv_installed(repo, tmp_path):
    first = git(repo, "rev-parse", "HEAD")
    (repo / "harness" / "a.py").write_text("x = 2\n")
    git(repo, "commit", "-qam", "second")
    (repo / "harness" / "a.py").write_text("x = 3\n")
    env = {**ENV, "ASV_COMMIT": first[:12], "ASV_CONF_DIR": str(repo)}
    facts = git_facts(tmp_path, env)
    assert (facts.commit, facts.source, facts.dirty) == (first, "asv", False)
    assert facts.subject == "First: a subject"
    assert facts.branch == "trunk"
    assert git_facts(repo, {**ENV, "ASV_COMMIT": first}).subject == "second"


def test_under_asv_a_commit_is_dirty_when_the_suites_are_not_committed(repo, tmp_path):
    env = {**ENV, "ASV_COMMIT": git(repo, "rev-parse", "HEAD"), "ASV_CONF_DIR": str(repo), "PAIRBENCH_DIRTY": "1"}
    facts = git_facts(tmp_path, env)
    assert (facts.commit, facts.dirty) == (env["ASV_COMMIT"], True)
    assert "suites" in (facts.reason or "")
    assert git_facts(tmp_path, {**env, "ASV_COMMIT": "a" * 40}).dirty
    assert not git_facts(tmp_path, {**env, "PAIRBENCH_DIRTY": "0"}).dirty


def test_under_asv_a_commit_of_another_branch_is_not_put_on_this_one(repo):
    git(repo, "checkout", "-q", "-b", "side")
    (repo / "harness" / "a.py").write_text("x = 2\n")
    git(repo, "commit", "-qam", "on the side")
    side = git(repo, "rev-parse", "HEAD")
    git(repo, "checkout", "-q", "trunk")
    facts = git_facts(repo, {**ENV, "ASV_COMMIT": side, "ASV_CONF_DIR": str(repo)})
    assert (facts.commit, facts.branch) == (side, None)


def test_under_asv_a_commit_that_cannot_be_looked_up_is_kept(repo, tmp_path):
    facts = git_facts(repo, {**ENV, "ASV_COMMIT": "a" * 40, "ASV_CONF_DIR": str(repo)})
    assert facts.commit == "a" * 40
    assert facts.reason
    shutil.rmtree(repo / ".git")
    assert "no git repository" in (git_facts(repo, {**ENV, "ASV_COMMIT": "a", "ASV_CONF_DIR": str(repo)}).reason or "")
