# SPDX-License-Identifier: Apache-2.0
"""What the loopback Hub stores: repositories with commits, branches and tags, in memory."""

import base64
import hashlib
import posixpath
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone


# As on the Hub: what is larger or binary has to come through LFS.
REGULAR_LIMIT = 10 * 2**20
_LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".png", ".jpg", ".npy", ".npz", ".gz", ".zip")


class HubError(Exception):
    """What the Hub answers instead of a result: status, the value of `X-Error-Code`, and a sentence."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class Blob:
    """Content of a file, and whether it came through LFS."""

    data: bytes
    is_lfs: bool = False

    @property
    def sha256(self):
        return hashlib.sha256(self.data).hexdigest()

    @property
    def pointer(self):
        return (
            f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()
        )

    @property
    def git_oid(self):
        """Git's name of the blob; git knows only the pointer of an LFS file."""
        content = self.pointer if self.is_lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self):
        return self.sha256 if self.is_lfs else self.git_oid

    def describe(self, path):
        """The entry of a tree listing."""
        entry = {"type": "file", "path": path, "size": len(self.data), "oid": self.git_oid}
        if self.is_lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.data), "pointerSize": len(self.pointer)}
        return entry


@dataclass(frozen=True)
class Commit:
    """A state of all files."""

    sha: str
    files: dict
    parent: str | None = None
    title: str = "initial commit"
    description: str = ""
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z"))


class Repository:
    """
    One repository of the loopback Hub.

    Args:
        repo_id (`str`): `namespace/name`.
        repo_type (`str`, *optional*, defaults to `"model"`): `"model"`, `"dataset"` or `"space"`.
        private (`bool`, *optional*, defaults to `False`): whether only its namespace sees it.

    `gated` may be set to have everybody else ask for access; `granted` holds the users who got it.
    """

    def __init__(self, repo_id, repo_type="model", private=False):
        self.repo_id, self.repo_type, self.private = repo_id, repo_type, private
        self.gated, self.granted = False, set()
        first = Commit(secrets.token_hex(20), {".gitattributes": Blob(b"*.safetensors filter=lfs\n")})
        self.commits, self.branches, self.tags, self.lfs = {first.sha: first}, {"main": first.sha}, {}, {}

    def resolve(self, revision):
        """The commit behind a branch, a tag or a sha."""
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]

    def file(self, revision, path):
        commit = self.resolve(revision)
        if path not in commit.files:
            raise HubError(404, f"Entry not found: {path}", "EntryNotFound")
        return commit, commit.files[path]

    def upload_mode(self, path, size, sample):
        """Whether a file has to be sent through LFS."""
        is_lfs = path.endswith(_LFS_SUFFIXES) or size > REGULAR_LIMIT or b"\0" in sample
        return "lfs" if is_lfs else "regular"

    def commit(self, branch, lines):
        """Applies the lines of a commit request, all or none."""
        if branch not in self.branches:
            raise HubError(404, f"Invalid branch: {branch}", "RevisionNotFound")
        parent = self.commits[self.branches[branch]]
        header, files = {}, dict(parent.files)
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "header":
                header = value
            elif key == "file":
                data = base64.b64decode(value["content"])
                if len(data) > REGULAR_LIMIT:
                    raise HubError(413, f"{value['path']} is too large for a regular file.")
                files[_checked(value["path"])] = Blob(data)
            elif key == "lfsFile":
                if value["oid"] not in self.lfs:
                    raise HubError(400, f"The LFS object {value['oid']} of {value['path']} was never uploaded.")
                files[_checked(value["path"])] = Blob(self.lfs[value["oid"]], is_lfs=True)
            elif key == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
            elif key == "deletedFolder":
                prefix = value["path"].rstrip("/") + "/"
                files = {path: blob for path, blob in files.items() if not path.startswith(prefix)}
            else:
                raise HubError(400, f"Unknown operation {key!r} in a commit.")
        if header.get("parentCommit") not in (None, parent.sha):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        title, description = header.get("summary", ""), header.get("description", "")
        done = Commit(secrets.token_hex(20), files, parent.sha, title, description)
        self.commits[done.sha] = done
        self.branches[branch] = done.sha
        return done

    def history(self, revision):
        """Commits from the newest to the oldest."""
        commit = self.resolve(revision)
        while commit is not None:
            yield commit
            commit = self.commits.get(commit.parent)

    def squash(self, branch, title):
        """Replaces a branch's history by one commit; commits that nothing refers to are gone."""
        old = self.resolve(branch)
        new = Commit(secrets.token_hex(20), old.files, None, title or "Super-squash branch")
        self.commits[new.sha] = new
        self.branches[branch] = new.sha
        self.forget_unreachable()

    def forget_unreachable(self):
        heads = [*self.branches.values(), *self.tags.values()]
        self.commits = {commit.sha: commit for head in heads for commit in self.history(head)}

    def describe(self, revision="main"):
        """The answer to `model_info` and its siblings."""
        commit = self.resolve(revision)
        return {
            "_id": hashlib.sha1(self.repo_id.encode()).hexdigest()[:24],
            "id": self.repo_id,
            "modelId": self.repo_id,
            "author": self.repo_id.split("/")[0],
            "sha": commit.sha,
            "private": self.private,
            "gated": "manual" if self.gated else False,
            "disabled": False,
            "lastModified": commit.date,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": path} for path in sorted(commit.files)],
        }

    def tree(self, revision, folder, recursive):
        """Entries below a folder; folders themselves included."""
        files = self.resolve(revision).files
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        inside = {path: blob for path, blob in files.items() if path.startswith(prefix)}
        if prefix and not inside:
            raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        entries, folders = [], set()
        for path, blob in sorted(inside.items()):
            parts = path[len(prefix) :].split("/")
            folders |= {prefix + "/".join(parts[:depth]) for depth in range(1, len(parts) if recursive else 2)}
            if recursive or len(parts) == 1:
                entries.append(blob.describe(path))
        folders -= set(inside)
        return [
            {"type": "directory", "path": path, "size": 0, "oid": _oid(path)} for path in sorted(folders)
        ] + entries


def _oid(text):
    return hashlib.sha1(text.encode()).hexdigest()


def _checked(path):
    if posixpath.normpath(path) != path or path.startswith(("/", "../")) or path == "..":
        raise HubError(400, f"Invalid path in a commit: {path!r}")
    return path
