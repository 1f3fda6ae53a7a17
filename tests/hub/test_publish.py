# SPDX-License-Identifier: Apache-2.0
"""Publishing to the loopback Hub. Bad input is refused before anything is sent."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from folders import CARD, MAKERS, PIPELINE, make_adapter, make_pipeline, make_scheduler
from huggingface_hub import ModelCard

from diffusers_ext.hub import download, publish


pytestmark = pytest.mark.hub

PROGRAM = str(Path(sys.executable).with_name("diffusers-ext"))


def paths(hub, repo_id="org/repo", revision="main"):
    return set(hub.repository(repo_id).resolve(revision).files) - {".gitattributes"}


# What is published


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("kind", MAKERS)
def test_a_folder_of_each_kind(hub, tmp_path, kind):
    folder = MAKERS[kind](tmp_path / "folder")
    report = publish(folder, "org/repo", token=hub.token)
    assert report.kind == kind and report.committed
    assert paths(hub) == {path.name for path in folder.iterdir()}
    assert report.revision == hub.repository("org/repo").branches["main"] and report.revision in report.usage
    if kind == "pipeline":
        assert report.class_name == "GainPipeline"


def test_the_card_learns_the_organisation(hub, tmp_path):
    publish(make_adapter(tmp_path / "folder"), "org/repo", token=hub.token)
    published = hub.repository("org/repo").file("main", "README.md")[1].data.decode()
    assert "`org/name` is where it lies" in published
    assert "<organisation>" in (tmp_path / "folder" / "README.md").read_text()


def test_links_are_followed_within_the_project(hub, tmp_path):
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "source.json").write_text('{"a": 1}')
    folder = make_adapter(tmp_path / "shelf" / "folder")
    (folder / "extra.json").symlink_to("../../source.json")
    publish(folder, "org/repo", token=hub.token)
    assert hub.repository("org/repo").file("main", "extra.json")[1].data == b'{"a": 1}'


def test_hidden_files_and_caches_stay_here(hub, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    for name in (".env", ".git/config", "__pycache__/a.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    publish(folder, "org/repo", token=hub.token)
    assert paths(hub) == {"README.md", "weights.safetensors"}


def test_one_commit_and_none_for_the_same_content(hub, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    first = publish(folder, "org/repo", token=hub.token)
    again = publish(folder, "org/repo", token=hub.token)
    assert first.committed and not again.committed and again.revision == first.revision
    assert len(list(hub.repository("org/repo").history("main"))) == 2


def test_the_repository_equals_the_folder_after_a_change(hub, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    (folder / "old.json").write_text("{}")
    publish(folder, "org/repo", token=hub.token)
    (folder / "old.json").rename(folder / "new.json")
    publish(folder, "org/repo", token=hub.token)
    assert paths(hub) == {"README.md", "weights.safetensors", "new.json"}
    assert len(list(hub.repository("org/repo").history("main"))) == 3


def test_a_branch_leaves_main_alone(hub, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    main = publish(folder, "org/repo", token=hub.token).revision
    (folder / "new.json").write_text("{}")
    report = publish(folder, "org/repo", revision="v2", token=hub.token)
    assert hub.repository("org/repo").branches == {"main": main, "v2": report.revision}


def test_a_private_repository(hub, tmp_path):
    publish(make_adapter(tmp_path / "folder"), "org/repo", private=True, token=hub.token)
    assert hub.repository("org/repo").private


def test_a_dry_run_sends_nothing(hub, tmp_path):
    report = publish(make_adapter(tmp_path / "folder"), "org/repo", dry_run=True, token=hub.token)
    assert (
        report.revision is None and not report.committed and set(report.files) == {"README.md", "weights.safetensors"}
    )
    assert hub.requests == []


def test_the_published_card_is_valid(hub, tmp_path):
    publish(make_adapter(tmp_path / "folder"), "org/repo", token=hub.token)
    card = ModelCard.load("org/repo", token=hub.token)
    assert card.data.license == "apache-2.0" and card.validate() is None


@pytest.mark.slow
@pytest.mark.extended
def test_the_command_prints_the_revision_and_the_use_and_no_token(hub, tmp_path):
    make_pipeline(tmp_path / "folder")
    environment = {**os.environ, **hub.environment, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    command = [PROGRAM, "publish", "folder", "org/repo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    revision = hub.repository("org/repo").branches["main"]
    assert f"Revision: {revision}" in done.stdout and f'"custom_revision": "{revision}"' in done.stdout
    assert hub.token not in done.stdout + done.stderr


# Interrupted publishing


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("/preupload/", {"status": 403}),
        ("/lfs/objects/batch", {"status": 403}),
        ("/lfs/models/", {"status": 403}),
        ("/commit/", {"status": 500}),
        ("/commit/", {"cut": 0.5}),
        ("/commit/", {"status": 403}),
    ],
)
def test_interrupted_publishing_leaves_the_repository_as_it_was(hub, tmp_path, pattern, fault):
    folder = make_adapter(tmp_path / "folder")
    publish(folder, "org/repo", token=hub.token)
    before = hub.repository("org/repo").branches["main"]
    (folder / "weights.safetensors").rename(folder / "renamed.safetensors")
    (folder / "big.png").write_bytes(b"\x89PNG" + bytes(1000))
    ordered = hub.inject(pattern, **fault)
    with pytest.raises((RuntimeError, ConnectionError), match="org/repo"):
        publish(folder, "org/repo", token=hub.token)
    assert hub.repository("org/repo").branches["main"] == before
    ordered.times = 0
    assert publish(folder, "org/repo", token=hub.token).committed
    assert "renamed.safetensors" in paths(hub) and "weights.safetensors" not in paths(hub)


def test_a_lost_answer_is_found_out_by_publishing_again(hub, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    hub.inject("/commit/", cut=1.0)
    with pytest.raises(ConnectionError, match="Run the command again"):
        publish(folder, "org/repo", token=hub.token)
    assert not publish(folder, "org/repo", token=hub.token).committed


def test_a_commit_of_somebody_else_is_not_overwritten(hub, api, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    publish(folder, "org/repo", token=hub.token)
    (folder / "new.json").write_text("{}")
    hub.inject("/preupload/", delay=0.0, status=412)
    with pytest.raises(RuntimeError, match="Somebody else committed"):
        publish(folder, "org/repo", token=hub.token)


# Bad names


@pytest.mark.parametrize("repo_id", ["repo", "org/", "/repo", "a/b/c", "org/re po", "org/repo.git", "org/-repo", ""])
def test_a_name_that_is_none(hub, tmp_path, repo_id):
    with pytest.raises(ValueError, match="`repo_id` has to be `organisation/name` but is"):
        publish(make_adapter(tmp_path / "folder"), repo_id, token=hub.token)
    assert hub.requests == []


@pytest.mark.parametrize("revision", ["a" * 40, "", "my branch", "-x", "~1"])
def test_a_revision_that_is_no_branch(hub, tmp_path, revision):
    with pytest.raises(ValueError, match="`revision` has to be the name of a branch"):
        publish(make_adapter(tmp_path / "folder"), "org/repo", revision=revision, token=hub.token)
    assert hub.requests == []


def test_a_tag_is_not_moved_by_publishing(hub, api, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    revision = publish(folder, "org/repo", token=hub.token).revision
    api.create_tag("org/repo", tag="v1")
    (folder / "new.json").write_text("{}")
    with pytest.raises(ValueError, match="'v1' is a tag"):
        publish(folder, "org/repo", revision="v1", token=hub.token)
    assert hub.repository("org/repo").tags == {"v1": revision}


def test_a_public_repository_is_not_taken_for_private(hub, tmp_path):
    folder = make_adapter(tmp_path / "folder")
    publish(folder, "org/repo", token=hub.token)
    with pytest.raises(ValueError, match="exists and is public"):
        publish(folder, "org/repo", private=True, token=hub.token)


def test_a_foreign_namespace(hub, tmp_path):
    with pytest.raises(RuntimeError, match="refused to publish stranger/repo.*403"):
        publish(make_adapter(tmp_path / "folder"), "stranger/repo", token=hub.token)


def test_a_wrong_token_is_named_and_not_shown(hub, tmp_path):
    token = "hf_" + "x" * 34
    with pytest.raises((RuntimeError, ConnectionError)) as raised:
        publish(make_adapter(tmp_path / "folder"), "org/repo", token=token)
    assert token not in str(raised.value) and "org/repo" not in {key[1] for key in hub.repositories}


# Bad folders: one error each, and no request


def write(name, text, encoding="utf-8"):
    def change(folder):
        (folder / name).write_bytes(text.encode(encoding) if isinstance(text, str) else text)

    return change


def remove(name):
    return lambda folder: (folder / name).unlink()


def link(name, target):
    return lambda folder: (folder / name).symlink_to(target)


def front_matter(old, new):
    return lambda folder: (folder / "README.md").write_text(CARD.replace(old, new))


def save_pickle(name):
    return lambda folder: torch.save({"a": torch.zeros(1)}, folder / name)


def bomb(folder):
    with zipfile.ZipFile(folder / "w.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", bytes(10**6))


def large(folder):
    (folder / "notes.txt").write_text("word " * 2_000_001)


# In two parts: this file is checked as well.
HOME = "/home" + "/someone"
SECRET = "hf_" + "A1b2" * 8
BAD = [
    ("pipeline", remove("README.md"), "README.md is missing"),
    ("pipeline", write("README.md", "# No front matter\n"), "lacks its front matter"),
    ("pipeline", write("README.md", "---\na: [\n---\n"), "front matter that is not YAML"),
    ("pipeline", write("README.md", "---\n- a\n---\n"), "lacks its front matter"),
    ("pipeline", write("README.md", "---\nlicense: é\n---\n", "latin-1"), "front matter that is not YAML"),
    ("pipeline", front_matter("license: apache-2.0\n", ""), "names no `license`"),
    ("pipeline", front_matter("license: apache-2.0", "license: 3"), "names no `license`"),
    ("pipeline", front_matter("apache-2.0", "other"), "`other` but no `license_name`"),
    ("pipeline", front_matter("library_name: diffusers\n", ""), "needs `library_name: diffusers`"),
    ("pipeline", front_matter("[diffusers]", "diffusers"), "`tags` that are no list"),
    ("pipeline", front_matter("someone/base", "SD 1.5"), "`base_model` that is no id"),
    ("adapter", front_matter("base_model: someone/base\n", ""), "names no `base_model`"),
    ("pipeline", save_pickle("w.pt"), "w.pt is a pickle"),
    ("pipeline", write("w.bin", b"\x80\x02."), "w.bin is a pickle"),
    ("adapter", write("hidden.dat", b"\x80\x04N."), "hidden.dat is a pickle"),
    ("adapter", bomb, "w.pt is a pickle"),
    ("pipeline", write("a.json", '{"path": "%s/model"}' % HOME), "a.json:1 has the path of one machine"),
    (
        "pipeline",
        write("a.py", "x = 'C:\\\\Users\\\\me'\n".replace("\\\\", "\\")),
        "a.py:1 has the path of one machine",
    ),
    ("pipeline", write("a.txt", f"token: {SECRET}\n"), "a.txt:1 has an access token"),
    ("pipeline", write("a.txt", b"\xff\xfe\x00"), "a.txt is not UTF-8"),
    ("pipeline", large, "notes.txt has 10,000,005 bytes"),
    ("pipeline", write("pipeline.py", "def f(:\n"), "pipeline.py is not Python"),
    ("pipeline", write("pipeline.py", "x = 1\n"), "has to define one pipeline class but defines none"),
    (
        "pipeline",
        write("pipeline.py", PIPELINE + PIPELINE.replace("Gain", "Loss")),
        "defines GainPipeline, LossPipeline",
    ),
    ("pipeline", remove("helper_gain.py"), "pipeline.py imports .helper_gain, which is not in the folder"),
    (
        "pipeline",
        write("helper_gain.py", "def f():\n    from .pipeline import x\n"),
        "helper_gain imports pipeline imports",
    ),
    ("pipeline", write("config.json", "{"), "config.json is not JSON"),
    ("pipeline", link("a.txt", Path("/etc/hostname")), "is an absolute link"),
    ("pipeline", link("a.txt", "../nothing.txt"), "which is missing"),
    ("pipeline", link("a", "."), "links to a folder"),
    ("pipeline", link("a.txt", "../outside.txt"), "links out of"),
    ("adapter", remove("weights.safetensors"), "is none of pipeline: pipeline.py"),
    ("adapter", write("weights.safetensors", b"\xff" * 8 + b"{}"), "weights.safetensors is no complete safetensors"),
    ("adapter", write("weights.safetensors", b""), "weights.safetensors is no complete safetensors"),
]


@pytest.mark.parametrize(("kind", "change", "message"), BAD, ids=[f"{row[0]}-{row[2][:40]}" for row in BAD])
def test_a_folder_that_is_not_fit(hub, tmp_path, kind, change, message):
    (tmp_path / "outside.txt").write_text("outside")
    folder = MAKERS[kind](tmp_path / "folder")
    change(folder)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        publish(folder, "org/repo", token=hub.token)
    assert hub.requests == [] and SECRET not in str(raised.value)


def test_all_problems_are_named_at_once(hub, tmp_path):
    folder = make_pipeline(tmp_path / "folder")
    front_matter("license: apache-2.0\n", "")(folder)
    write("a.txt", f"{HOME}/x")(folder)
    with pytest.raises(ValueError, match="names no `license`.*; a.txt:1 has the path of one machine"):
        publish(folder, "org/repo", token=hub.token)


def test_a_folder_that_does_not_exist(hub, tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        publish(tmp_path / "nothing", "org/repo", token=hub.token)


def test_a_file_instead_of_a_folder(hub, tmp_path):
    with pytest.raises(NotADirectoryError, match="is a file"):
        publish(make_adapter(tmp_path / "folder") / "README.md", "org/repo", token=hub.token)


def test_an_empty_folder(hub, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no file"):
        publish(tmp_path / "folder", "org/repo", token=hub.token)


# What only loading finds out


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (
            "pipeline",
            write("helper_gain.py", "import diffusers_ext\nGAIN = 1\n"),
            "imports diffusers_ext, which its users",
        ),
        ("pipeline", write("helper_gain.py", f"raise OSError('no {SECRET}')\n"), "OSError: no hf_..."),
        ("scheduler", write("scheduler_config.json", '{"_class_name": "NobodysScheduler"}'), "NobodysScheduler"),
        ("adapter", write("config.json", '{"_class_name": "Nobodys"}'), "asks for the class 'Nobodys'"),
    ],
)
def test_what_does_not_load_is_not_published(hub, tmp_path, kind, change, message):
    folder = MAKERS[kind](tmp_path / "folder")
    change(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        publish(folder, "org/repo", token=hub.token)
    assert hub.requests == []


@pytest.mark.slow
@pytest.mark.extended
def test_the_code_that_is_tried_sees_no_token(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    folder = make_pipeline(tmp_path / "folder")
    code = "import os\nfrom huggingface_hub import get_token\nassert get_token() is None, 'saw a token'\nGAIN = 1\n"
    (folder / "helper_gain.py").write_text(code)
    assert publish(folder, "org/repo", dry_run=True).class_name == "GainPipeline"


def test_a_scheduler_of_diffusers_needs_no_code(hub, tmp_path):
    report = publish(make_scheduler(tmp_path / "folder", own=False), "org/repo", token=hub.token)
    assert report.usage.startswith("from diffusers import DDIMScheduler")


# Downloads


@pytest.fixture
def published(hub, tmp_path):
    return publish(make_adapter(tmp_path / "folder"), "org/repo", token=hub.token).revision


def test_a_download_is_named_after_its_commit(hub, published):
    folder = download("org/repo", "main", token=hub.token)
    assert folder.name == published and (folder / "weights.safetensors").is_file()


def test_a_damaged_transfer_is_an_error(hub, published):
    hub.inject("resolve/.*weights", method="GET", corrupt=True)
    with pytest.raises(ValueError, match="weights.safetensors of org/repo is damaged in the cache. Delete"):
        download("org/repo", published, token=hub.token)


def test_a_half_written_blob_is_an_error_also_offline(hub, published):
    blob = (download("org/repo", published, token=hub.token) / "weights.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:40])
    with pytest.raises(ValueError, match="is damaged in the cache"):
        download("org/repo", published, local_files_only=True)


@pytest.mark.parametrize(
    ("repo_id", "revision", "message"),
    [
        ("org/other", "main", "org/other at 'main' does not exist"),
        ("org/repo", "v9", "org/repo at 'v9' does not exist"),
    ],
)
def test_a_download_of_nothing(hub, published, repo_id, revision, message):
    with pytest.raises(FileNotFoundError, match=message):
        download(repo_id, revision, token=hub.token)


def test_a_private_repository_looks_like_none(hub, published):
    hub.repository("org/repo").private = True
    with pytest.raises(FileNotFoundError, match="or you may not see it"):
        download("org/repo", published, token="hf_stranger")


def test_offline_and_not_cached(hub):
    with pytest.raises(FileNotFoundError, match="is not in the cache and cannot be downloaded"):
        download("org/repo", "main", local_files_only=True)


def test_a_downloaded_pickle_of_more_than_tensors_is_an_error(hub, api, published):
    content = b"\x80\x02cos\nsystem\n."
    api.upload_file(path_or_fileobj=content, path_in_repo="evil.pt", repo_id="org/repo")
    with pytest.raises(ValueError, match="evil.pt is refused: it holds more than tensors, namely os.system"):
        download("org/repo", "main", token=hub.token)
