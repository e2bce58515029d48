"""Commits on a checkout's branch, made beside the user's index and work tree."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from typing import Optional

from .target import Conflict, Target
from .transaction import Change


# What one commit says, and what it changes.
Step = tuple[str, Sequence[Change]]


def git(
    target: Target,
    *arguments: str,
    content: Optional[bytes] = None,
    index: Optional[str] = None,
) -> bytes:
    """git on the target's own repository, never on one further up."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.root.parent)}
    if index is not None:
        environment["GIT_INDEX_FILE"] = index
    done = subprocess.run(
        ["git", "-C", str(target.root), *arguments],
        input=content,
        env=environment,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        words = done.stderr.decode().strip() or f"exit {done.returncode}"
        raise Conflict(f"git {arguments[0]}: {words}")
    return done.stdout


def check_committable(target: Target, changes: Iterable[Change]) -> None:
    """Before a write: git knows an author, and HEAD holds what we start from."""
    git(target, "var", "GIT_AUTHOR_IDENT")
    for change in changes:
        known = (change.before, change.after)
        if head_content(target, change.path) not in known:
            raise Conflict(
                f"{change.path}: has changes that are not committed; commit or stash "
                "them first"
            )


def head_content(target: Target, path: str) -> Optional[bytes]:
    """The file as it is committed, None where HEAD has none."""
    if not git(target, "ls-tree", "HEAD", "--", path):
        return None
    return git(target, "cat-file", "blob", f"HEAD:{path}")


def commit_on_head(target: Target, steps: Sequence[Step]) -> list[str]:
    """One commit per step on top of HEAD, then the branch moved once.

    Returns a line per commit; none where HEAD holds it all already. A kill leaves the
    branch where it was.
    """
    final = {c.path: c.after for _, changes in steps for c in changes}
    if all(head_content(target, path) == content for path, content in final.items()):
        return []
    # First, so that a call that failed here can be run again.
    git(target, "update-index", "--add", "--", *final)
    before = git(target, "rev-parse", "HEAD").decode().strip()
    head, made = _commits(target, before, steps)
    _move(target, "HEAD", before, head)
    return made


def commit_on_branch(
    target: Target, branch: str, steps: Sequence[Step], force: bool = False
) -> list[str]:
    """One commit per step on top of HEAD, as a branch that is not checked out.

    Returns a line per commit; none where the branch is there, with these files and words.
    Conflict where it holds something else, unless that is to go by ``force``.
    """
    reference = f"refs/heads/{branch}"
    before = git(target, "rev-parse", "HEAD").decode().strip()
    head, made = _commits(target, before, steps)

    def held(by: str) -> list[bytes]:
        return git(target, "log", "--format=%T %B", f"{before}..{by}").split()

    form = "--format=%(objectname) %(worktreepath)"
    there, _, open_in = (
        git(target, "for-each-ref", form, reference).decode().partition(" ")
    )
    if there and held(reference) == held(head):
        return []
    if there and not force:
        raise Conflict(
            f"branch {branch} exists and holds something else: rename it, or let it go "
            "with --force"
        )
    if open_in.strip():
        raise Conflict(f"branch {branch} is checked out in {open_in.strip()}")
    _move(target, reference, there, head)
    return made


def _move(target: Target, reference: str, before: str, after: str) -> None:
    """The reference, if it is where it was; empty: there was none."""
    reason = "activation memory budget patch set"
    git(target, "update-ref", "-m", reason, reference, after, before)


def _commits(target: Target, head: str, steps: Sequence[Step]) -> tuple[str, list[str]]:
    """Commits above ``head``: the last one, and a line for each."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        index = os.path.join(folder, "index")
        git(target, "read-tree", head, index=index)
        for words, changes in steps:
            for change in changes:
                blob = git(target, "hash-object", "-w", "--stdin", content=change.after)
                entry = f"100644,{blob.decode().strip()},{change.path}"
                git(target, "update-index", "--add", "--cacheinfo", entry, index=index)
            tree = git(target, "write-tree", index=index).decode().strip()
            commit = ("commit-tree", tree, "-p", head, "-F", "-")
            head = git(target, *commit, content=words.encode()).decode().strip()
            made.append(f"{head} {words.partition(chr(10))[0]}")
    return head, made
