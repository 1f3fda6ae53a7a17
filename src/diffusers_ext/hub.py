# SPDX-License-Identifier: Apache-2.0
"""Publishing a folder to the Hub, and downloading a pinned one."""

import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from .hub_checks import collect_files, copy_files, find_problems, kind_of, try_loading


_SHA = re.compile(r"[0-9a-f]{40}")
# The Hub's own; a folder does not have it.
_KEPT = {".gitattributes"}


@dataclass
class PublishReport:
    """What [`publish`] found and did: no `revision` after a dry run, no `class_name` for weights without a class."""

    repo_id: str
    kind: str
    class_name: str | None
    files: dict
    revision: str | None = None
    committed: bool = False
    url: str | None = None

    @property
    def usage(self):
        """The lines with which a stranger uses it."""
        revision = self.revision or "<commit>"
        if self.kind == "pipeline":
            return (
                "from diffusers import DiffusionPipeline\n\n"
                f'options = {{"custom_pipeline": "{self.repo_id}", "custom_revision": "{revision}"}}\n'
                'pipe = DiffusionPipeline.from_pretrained("<base model>", **options, trust_remote_code=True)'
            )
        if self.kind == "scheduler" and any(name.endswith(".py") for name in self.files):
            file = next(name for name in self.files if name.startswith("scheduling_"))
            return (
                "from diffusers.utils.dynamic_modules_utils import get_class_from_dynamic_module as get_class\n\n"
                f'code = {{"module_file": "{file}", "class_name": "{self.class_name}", "trust_remote_code": True}}\n'
                f'cls = get_class("{self.repo_id}", revision="{revision}", **code)\n'
                f'pipe.scheduler = cls.from_pretrained("{self.repo_id}", revision="{revision}")'
            )
        if self.kind == "scheduler":
            return (
                f"from diffusers import {self.class_name}\n\n"
                f'pipe.scheduler = {self.class_name}.from_pretrained("{self.repo_id}", revision="{revision}")'
            )
        if self.class_name is None:
            return (
                "from huggingface_hub import snapshot_download\n\n"
                f'folder = snapshot_download("{self.repo_id}", revision="{revision}")'
            )
        return (
            "from diffusers_ext import load_component\nfrom diffusers_ext.hub import download\n\n"
            f'component = load_component(download("{self.repo_id}", "{revision}"))'
        )


def publish(folder, repo_id, private=False, revision=None, dry_run=False, token=None):
    """
    Publishes a folder as a model repository on the Hub, in one commit, so that the repository equals the folder.

    Links are followed. Everything is checked before the first request: the card and its licence, base model, one
    pipeline class, no pickle, no path of this machine, no token, sizes, and a load in a fresh process, which runs the
    code in the folder. `<organisation>` in the card becomes the namespace of `repo_id`. Publishing the same again
    makes no commit, and a commit of somebody else in between is refused rather than overwritten.

    Args:
        folder (`str` or `os.PathLike`):
            A pipeline (`pipeline.py`), a scheduler (`scheduler_config.json`) or weights (safetensors).
        repo_id (`str`):
            `organisation/name`; made if it does not exist.
        private (`bool`, *optional*, defaults to `False`):
            Whether a new repository is private. A public one is never made private, nor the other way round.
        revision (`str`, *optional*):
            Branch to publish to, `main` by default; made from `main` if it does not exist.
        dry_run (`bool`, *optional*, defaults to `False`):
            Only check; nothing is sent.
        token (`str`, *optional*):
            Access token; by default the one that `hf auth login` stored.

    Returns:
        [`PublishReport`]

    Raises:
        FileNotFoundError, NotADirectoryError: when there is no such folder.
        ValueError: with everything that keeps the folder from being published, or on an invalid name.
        RuntimeError: when the Hub refuses, or somebody else committed in between.
        ConnectionError: when the Hub cannot be reached.

    Example:

    ```py
    >>> from diffusers_ext.hub import publish

    >>> publish("adapters/saeuron-emoji-canvas", "org/saeuron-emoji-canvas", dry_run=True).kind  # doctest: +SKIP
    'adapter'
    ```
    """
    _check_names(repo_id, revision)
    sources = collect_files(folder)
    with tempfile.TemporaryDirectory(prefix="diffusers-ext-publish-") as copy:
        copy = Path(copy)
        copy_files(sources, copy, repo_id.split("/")[0])
        try:
            kind = kind_of(copy)
        except ValueError as error:
            raise ValueError(f"{folder} cannot be published. {error}") from error
        problems = find_problems(copy, kind)
        if problems:
            raise ValueError(f"{folder} cannot be published: {'; '.join(problems)}. Nothing was sent.")
        try:
            class_name = try_loading(copy, kind)
        except ValueError as error:
            raise ValueError(f"{folder} cannot be published. {error}. Nothing was sent.") from error
        files = {name: (copy / name).stat().st_size for name in sources}
        report = PublishReport(repo_id, kind, class_name, files)
        if not dry_run:
            _upload(report, copy, private, revision or "main", HfApi(token=token))
    return report


def _check_names(repo_id, revision):
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"`repo_id` has to be `organisation/name` but is {repo_id!r}: {error}") from error
    if repo_id.count("/") != 1:
        raise ValueError(f"`repo_id` has to be `organisation/name` but is {repo_id!r}.")
    if revision is not None and (_SHA.fullmatch(revision) or not re.fullmatch(r"[\w][\w./-]*", revision)):
        raise ValueError(f"`revision` has to be the name of a branch but is {revision!r}.")


def _upload(report, folder, private, branch, api):
    try:
        head = _prepare(report.repo_id, private, branch, api)
        operations = _changes(report, folder, head, api)
        report.revision = head
        if operations:
            title = f"Publish {report.kind} {report.class_name or 'weights'}"
            options = {"revision": branch, "commit_message": title, "parent_commit": head}
            report.revision = api.create_commit(report.repo_id, operations, **options).oid
            report.committed = True
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 412:
            raise RuntimeError(
                f"Somebody else committed to {report.repo_id} meanwhile; nothing was changed. Run the command again."
            ) from error
        raise RuntimeError(f"The Hub refused to publish {report.repo_id}: {_first_line(error)}") from error
    # What goes wrong while a file is sent arrives as a RuntimeError.
    except (HTTPError, ConnectionError, RuntimeError) as error:
        raise ConnectionError(
            f"The Hub could not be reached or went away while {report.repo_id} was published ({_first_line(error)}). "
            f"Run the command again: it goes on from what is there."
        ) from error
    report.url = f"{api.endpoint}/{report.repo_id}/tree/{report.revision}"


def _first_line(error):
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _prepare(repo_id, private, branch, api):
    """Makes repository and branch where they do not exist; the commit that the branch is at."""
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        api.create_repo(repo_id, private=private)
        info = api.model_info(repo_id)
    if private and not info.private:
        raise ValueError(
            f"{repo_id} exists and is public. Change that on the Hub first, or publish it without --private."
        )
    refs = api.list_repo_refs(repo_id)
    if branch in {tag.name for tag in refs.tags}:
        raise ValueError(f"{branch!r} is a tag of {repo_id}. Publish to a branch.")
    heads = {reference.name: reference.target_commit for reference in refs.branches}
    if branch not in heads:
        api.create_branch(repo_id, branch=branch, revision=heads.get("main"))
        return heads["main"]
    return heads[branch]


def _changes(report, folder, head, api):
    """What makes the repository equal to the folder."""
    tree = api.list_repo_tree(report.repo_id, recursive=True, revision=head)
    present = {entry.path: entry for entry in tree if hasattr(entry, "blob_id")}
    operations = [
        CommitOperationAdd(name, folder / name)
        for name in report.files
        if name not in present or _hash(folder / name, present[name].lfs is not None) != _remote_hash(present[name])
    ]
    gone = sorted(set(present) - set(report.files) - _KEPT)
    return operations + [CommitOperationDelete(name, is_folder=False) for name in gone]


def _remote_hash(entry):
    return entry.blob_id if entry.lfs is None else entry.lfs.sha256


def _hash(path, is_lfs):
    digest = hashlib.sha256() if is_lfs else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def download(repo_id, revision, allow_patterns=None, cache_dir=None, local_files_only=False, token=None):
    """
    Downloads a repository at a pinned revision into the cache, or finds it there, and verifies every file.

    The client checks sizes only. Here the content of each file is compared with the hash under which the cache stores
    it, and safetensors, JSON and pickle files have to pass [`checkpoints.check_folder`]. No code is run.

    Args:
        repo_id (`str`):
            `organisation/name`.
        revision (`str`):
            Commit, tag or branch. Only a commit always means the same; the returned folder is named after it.
        allow_patterns (`list[str]`, *optional*):
            Only files that match one of these.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Another cache than that of huggingface_hub.
        local_files_only (`bool`, *optional*, defaults to `False`):
            Only look into the cache.
        token (`str`, *optional*):
            Access token; by default the one that `hf auth login` stored.

    Returns:
        `Path` of the folder; its name is the commit.

    Raises:
        FileNotFoundError: when repository or revision do not exist, may not be seen, or are not cached.
        ValueError: when a file is damaged, with how to get rid of it.
        RuntimeError: when the Hub refuses.

    Example:

    ```py
    >>> from diffusers_ext.hub import download

    >>> folder = download("org/saeuron-emoji-canvas", "<commit>")  # doctest: +SKIP
    ```
    """
    from .checkpoints import check_folder

    _check_names(repo_id, None)
    options = {"allow_patterns": allow_patterns, "cache_dir": cache_dir, "token": token}
    try:
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=local_files_only, **options))
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403, 404):
            raise FileNotFoundError(
                f"{repo_id} at {revision!r} does not exist, or you may not see it: {_first_line(error)} Check both "
                f"names, and `hf auth whoami`."
            ) from error
        raise RuntimeError(f"The Hub refused to give {repo_id}: {_first_line(error)}") from error
    except (HTTPError, OSError) as error:
        raise FileNotFoundError(
            f"{repo_id} at {revision!r} is not in the cache and cannot be downloaded ({_first_line(error)})."
        ) from error
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        blob = path.resolve()
        if not blob.is_file() or _hash(blob, len(blob.name) == 64) != blob.name:
            raise ValueError(f"{path.name} of {repo_id} is damaged in the cache. Delete {blob} and download it again.")
    check_folder(folder)
    return folder
