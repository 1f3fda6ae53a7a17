# SPDX-License-Identifier: Apache-2.0
"""The loopback Hub, asked by the real client."""

import hashlib
import subprocess
import sys

import httpx2
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


pytestmark = pytest.mark.hub

WEIGHTS = bytes(range(256)) * 4000


@pytest.fixture
def repo(api):
    """A repository with one regular and one LFS file."""
    api.create_repo("org/repo")
    api.upload_file(path_or_fileobj=b"hello\n", path_in_repo="docs/a.txt", repo_id="org/repo")
    api.upload_file(path_or_fileobj=WEIGHTS, path_in_repo="w.safetensors", repo_id="org/repo")
    return "org/repo"


@pytest.fixture
def fetch(api, tmp_path):
    """Downloads a file of `repo` into an empty cache, or into the one of the call before."""

    def fetch(path="w.safetensors", **kwargs):
        local = api.hf_hub_download("org/repo", path, cache_dir=tmp_path / "cache", **kwargs)
        with open(local, "rb") as file:
            return file.read()

    return fetch


# Accounts and repositories


def test_the_account_and_its_organisations(api):
    answer = api.whoami()
    assert answer["name"] == "me" and [org["name"] for org in answer["orgs"]] == ["org"]


def test_an_unknown_token_is_refused(hub):
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        HfApi(endpoint=hub.endpoint, token="hf_wrong").whoami()


def test_creating_twice_needs_exist_ok(api, repo):
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo(repo)
    assert api.create_repo(repo, exist_ok=True).repo_id == repo


def test_a_foreign_namespace_is_refused(api):
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("stranger/repo")


def test_writing_without_a_token_is_refused(anonymous, repo):
    with pytest.raises(HfHubHTTPError, match="401"):
        anonymous.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=repo)


def test_a_stranger_may_read_and_not_write(stranger, repo):
    assert stranger.file_exists(repo, "w.safetensors")
    with pytest.raises(HfHubHTTPError, match="403"):
        stranger.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=repo)


@pytest.mark.parametrize("client", ["stranger", "anonymous"])
def test_a_private_repository_does_not_exist_for_others(api, repo, client, request):
    api.update_repo_settings(repo, private=True)
    with pytest.raises(RepositoryNotFoundError):
        request.getfixturevalue(client).model_info(repo)
    assert api.model_info(repo).private


def test_a_gated_repository_shows_itself_and_keeps_its_content(hub, api, stranger, repo, tmp_path):
    api.update_repo_settings(repo, gated="manual")
    assert stranger.model_info(repo).gated == "manual"
    with pytest.raises(GatedRepoError):
        stranger.hf_hub_download(repo, "docs/a.txt", cache_dir=tmp_path)
    hub.repository(repo).granted.add("stranger")
    assert stranger.hf_hub_download(repo, "docs/a.txt", cache_dir=tmp_path)


def test_a_deleted_repository_is_gone(api, repo):
    api.delete_repo(repo)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info(repo)


def test_lists_only_what_may_be_seen(api, stranger, repo):
    api.create_repo("org/hidden", private=True)
    assert [model.id for model in api.list_models(author="org")] == ["org/hidden", repo]
    assert [model.id for model in stranger.list_models(author="org")] == [repo]


@pytest.mark.parametrize("repo_type", ["dataset", "space"])
def test_other_kinds_of_repositories(api, repo_type, tmp_path):
    api.create_repo("me/other", repo_type=repo_type, **({"space_sdk": "gradio"} if repo_type == "space" else {}))
    api.upload_file(path_or_fileobj=WEIGHTS, path_in_repo="w.bin", repo_id="me/other", repo_type=repo_type)
    local = api.hf_hub_download("me/other", "w.bin", repo_type=repo_type, cache_dir=tmp_path)
    with open(local, "rb") as file:
        assert file.read() == WEIGHTS


# Commits, branches and tags


def test_regular_and_lfs_files_come_back(fetch, repo):
    assert fetch("docs/a.txt") == b"hello\n" and fetch() == WEIGHTS


def test_the_tree_names_hashes_as_git_and_lfs_do(api, repo):
    files = {entry.path: entry for entry in api.list_repo_tree(repo, recursive=True)}
    assert files["docs/a.txt"].blob_id == hashlib.sha1(b"blob 6\0hello\n").hexdigest()
    assert files["w.safetensors"].lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
    assert files["w.safetensors"].size == len(WEIGHTS)


def test_a_tree_level_and_a_folder(api, repo):
    assert {entry.path for entry in api.list_repo_tree(repo)} == {".gitattributes", "docs", "w.safetensors"}
    assert [entry.path for entry in api.list_repo_tree(repo, "docs")] == ["docs/a.txt"]
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(repo, "nothing"))


def test_paths_can_be_asked_for(api, repo):
    assert [entry.path for entry in api.get_paths_info(repo, ["w.safetensors", "nothing"])] == ["w.safetensors"]


def test_an_unchanged_file_makes_no_commit(api, repo):
    before = api.model_info(repo).sha
    api.upload_file(path_or_fileobj=WEIGHTS, path_in_repo="w.safetensors", repo_id=repo)
    assert api.model_info(repo).sha == before


def test_one_commit_adds_and_deletes(api, repo):
    operations = [CommitOperationAdd("b.txt", b"b"), CommitOperationDelete("docs/", is_folder=True)]
    info = api.create_commit(repo, operations, commit_message="change")
    assert set(api.list_repo_files(repo)) == {".gitattributes", "b.txt", "w.safetensors"}
    commits = api.list_repo_commits(repo)
    assert commits[0].commit_id == info.oid and commits[0].title == "change" and len(commits) == 4


def test_a_commit_on_an_old_state_is_refused(api, repo):
    old = api.list_repo_commits(repo)[-1].commit_id
    with pytest.raises(HfHubHTTPError, match="412"):
        api.create_commit(repo, [CommitOperationAdd("b.txt", b"b")], commit_message="late", parent_commit=old)
    assert "b.txt" not in api.list_repo_files(repo)


def test_deleting_what_is_not_there_changes_nothing(api, repo):
    operations = [CommitOperationAdd("b.txt", b"b"), CommitOperationDelete("nothing.txt")]
    with pytest.raises(EntryNotFoundError):
        api.create_commit(repo, operations, commit_message="change")
    assert "b.txt" not in api.list_repo_files(repo)


def test_branches_tags_and_shas_name_states(api, repo):
    first = api.model_info(repo).sha
    api.create_tag(repo, tag="v1")
    api.create_branch(repo, branch="feature/x")
    api.upload_file(path_or_fileobj=b"new", path_in_repo="new.txt", repo_id=repo, revision="feature/x")
    assert "new.txt" in api.list_repo_files(repo, revision="feature/x")
    assert api.model_info(repo, revision="v1").sha == api.model_info(repo, revision=first).sha == first
    refs = api.list_repo_refs(repo)
    assert [tag.name for tag in refs.tags] == ["v1"] and {b.name for b in refs.branches} == {"main", "feature/x"}


def test_a_tag_can_be_moved_and_is_not_overwritten(api, repo):
    api.create_tag(repo, tag="v1")
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(repo, tag="v1")
    api.upload_file(path_or_fileobj=b"new", path_in_repo="new.txt", repo_id=repo)
    api.delete_tag(repo, tag="v1")
    api.create_tag(repo, tag="v1")
    assert api.model_info(repo, revision="v1").sha == api.model_info(repo).sha


def test_a_squashed_history_loses_its_commits(api, repo):
    old = api.model_info(repo).sha
    api.super_squash_history(repo)
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision=old)
    assert len(api.list_repo_commits(repo)) == 1 and "w.safetensors" in api.list_repo_files(repo)


def test_a_broken_card_is_refused_before_the_upload(api, repo):
    with pytest.raises(ValueError, match="Invalid metadata in README.md"):
        api.upload_file(path_or_fileobj=b"---\na: [\n---\n", path_in_repo="README.md", repo_id=repo)
    assert "README.md" not in api.list_repo_files(repo)


def test_a_card_makes_the_round_trip(api, repo):
    card = ModelCard("---\nlicense: apache-2.0\n---\n\n# Title\n")
    card.validate()
    api.upload_file(path_or_fileobj=str(card).encode(), path_in_repo="README.md", repo_id=repo)
    assert ModelCard.load(repo, token=api.token).data.license == "apache-2.0"


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/x"])
def test_a_path_out_of_the_repository_is_refused(hub, repo, path):
    head = hub.repository(repo).branches["main"]
    line = b'{"key": "file", "value": {"path": "%s", "content": "eA==", "encoding": "base64"}}' % path.encode()
    url = f"{hub.endpoint}/api/models/{repo}/commit/main"
    answer = httpx2.post(url, content=line, headers={"Authorization": f"Bearer {hub.token}"})
    assert answer.status_code == 400 and hub.repository(repo).branches["main"] == head


def test_an_lfs_file_that_was_never_uploaded_is_refused(hub, repo):
    line = b'{"key": "lfsFile", "value": {"path": "x.bin", "oid": "%s", "size": 1}}' % (b"0" * 64)
    url = f"{hub.endpoint}/api/models/{repo}/commit/main"
    answer = httpx2.post(url, content=line, headers={"Authorization": f"Bearer {hub.token}"})
    assert answer.status_code == 400 and "never uploaded" in answer.text


# Downloads


def test_what_is_not_there_is_named(api, repo, tmp_path):
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download(repo, "nothing.txt", cache_dir=tmp_path)
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download(repo, "w.safetensors", revision="nothing", cache_dir=tmp_path)
    with pytest.raises(RepositoryNotFoundError):
        api.hf_hub_download("org/nothing", "w.safetensors", cache_dir=tmp_path)


def test_a_snapshot_and_again_from_the_cache(hub, api, repo, tmp_path):
    folder = api.snapshot_download(repo, cache_dir=tmp_path)
    asked = len(hub.requests)
    assert api.snapshot_download(repo, cache_dir=tmp_path, local_files_only=True) == folder
    assert len(hub.requests) == asked


def test_a_range(hub, repo):
    url = f"{hub.endpoint}/{repo}/resolve/main/w.safetensors"
    answer = httpx2.get(url, headers={"Range": "bytes=10-19"})
    assert answer.status_code == 206 and answer.content == WEIGHTS[10:20]
    assert answer.headers["Content-Range"] == f"bytes 10-19/{len(WEIGHTS)}"


def test_a_range_behind_the_end(hub, repo):
    url = f"{hub.endpoint}/{repo}/resolve/main/w.safetensors"
    answer = httpx2.get(url, headers={"Range": f"bytes={len(WEIGHTS)}-"})
    assert answer.status_code == 416


# Faults


def test_a_cut_transfer_is_resumed(hub, fetch, repo, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)
    hub.inject("resolve/.*w.safetensors", method="GET", cut=0.5)
    assert fetch() == WEIGHTS
    assert [status for method, path, status in hub.requests if method == "GET" and "w.safe" in path] == [200, 206]


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(hub, api, repo, status):
    fault = hub.inject("preupload", status=status, headers={"Retry-After": "0"})
    api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id=repo)
    assert fault.times == 0 and "x.txt" in api.list_repo_files(repo)


def test_an_error_of_the_server_reaches_the_user(hub, api, repo):
    hub.inject("/api/models/org/repo", status=500)
    with pytest.raises(HfHubHTTPError, match="500"):
        api.model_info(repo)


def test_a_wrong_hash_goes_unnoticed_by_the_client(hub, fetch, repo):
    # Why `diffusers_ext.hub.download` verifies what it gets.
    hub.inject("resolve/.*w.safetensors", method="GET", corrupt=True)
    assert fetch() != WEIGHTS


def test_a_damaged_upload_is_refused(hub, repo):
    path = f"{hub.endpoint}/lfs/models/{repo}/{'0' * 64}"
    answer = httpx2.put(path, content=b"other")
    assert answer.status_code == 400 and "0" * 64 not in hub.repository(repo).lfs


def test_a_download_survives_an_answer_that_is_too_slow(hub, fetch, repo, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    fault = hub.inject("resolve/.*w.safetensors", method="GET", delay=1.0)
    assert fetch() == WEIGHTS and fault.times == 0


def test_a_lost_answer_leaves_the_commit(hub, api, repo):
    hub.inject("/commit/", cut=1.0)
    with pytest.raises(httpx2.RemoteProtocolError):
        api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id=repo)
    assert "x.txt" in api.list_repo_files(repo)


def test_a_cut_commit_is_not_carried_out(hub, api, repo):
    hub.inject("/commit/", cut=0.5)
    with pytest.raises(httpx2.RemoteProtocolError):
        api.upload_file(path_or_fileobj=b"x", path_in_repo="x.txt", repo_id=repo)
    assert "x.txt" not in api.list_repo_files(repo)


def test_xet_is_not_spoken(hub, repo):
    assert httpx2.get(f"{hub.endpoint}/api/models/{repo}/xet-write-token/main").status_code == 404


# The server as a part


def test_it_needs_neither_torch_nor_pytest():
    code = "import sys, diffusers_ext.testing.hub_server; print({'torch', 'diffusers', 'pytest'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_two_servers_do_not_share_repositories(hub, api, repo):
    with type(hub)() as other:
        assert not HfApi(endpoint=other.endpoint, token=other.token).repo_exists(repo)
