# SPDX-License-Identifier: Apache-2.0
"""What a folder has to be before it is published; nothing here talks to the Hub."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml


PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib"}
TEXTS = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".cfg"}
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:home|root|work|Users|mnt|tmp)/[\w.-]+|\b[A-Z]:\\Users\\")
# As huggingface_hub writes its tokens.
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
# What the Hub takes without LFS, and at most.
TEXT_LIMIT, FILE_LIMIT = 10 * 10**6, 50 * 10**9
KINDS = {"pipeline": "pipeline.py", "scheduler": "scheduler_config.json", "adapter": "a .safetensors file"}
ORGANISATION = "<organisation>"
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?\n", re.DOTALL)
_TRIAL = Path(__file__).with_name("hub_trial.py")


def collect_files(folder):
    """
    What of a folder is published: links followed, hidden files and caches left out.

    Returns:
        `dict` of paths in the repository to real files.

    Raises:
        FileNotFoundError, NotADirectoryError: when there is no such folder, or it holds no file.
        ValueError: on a link that is absolute, broken, to a folder, or out of the project.
    """
    folder = Path(folder)
    if not folder.exists():
        raise FileNotFoundError(f"There is no folder {folder}. Name the folder to publish.")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file. Name the folder that holds it.")
    project = _project_of(folder.resolve())
    files = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in inside.parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink():
            _check_link(path, project)
        if path.is_file():
            files[inside.as_posix()] = path.resolve()
    if not files:
        raise FileNotFoundError(f"{folder} holds no file to publish.")
    return files


def _project_of(folder):
    """The checkout that a folder lies in, or the folder itself."""
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists() or (parent / "pyproject.toml").is_file():
            return parent
    return folder


def _check_link(path, project):
    if path.readlink().is_absolute():
        raise ValueError(f"{path} is an absolute link, which works on this machine alone. Make it relative.")
    if not path.exists():
        raise ValueError(f"{path} links to {path.readlink()}, which is missing.")
    if path.is_dir():
        raise ValueError(f"{path} links to a folder. Link its files one by one.")
    if not path.resolve().is_relative_to(project):
        raise ValueError(f"{path} links out of {project}. Copy the file, if it is meant to be published.")


def copy_files(files, folder, organisation):
    """Copies files, so that what is checked is what is uploaded; the card learns the organisation."""
    for name, source in files.items():
        target = Path(folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    card = Path(folder, "README.md")
    if card.is_file():
        card.write_bytes(card.read_bytes().replace(ORGANISATION.encode(), organisation.encode()))


def kind_of(folder):
    """
    Which shelf a folder belongs to, a key of `KINDS`.

    Raises:
        ValueError: when it is none of them.
    """
    if (folder / "pipeline.py").is_file():
        return "pipeline"
    if (folder / "scheduler_config.json").is_file():
        return "scheduler"
    if next(folder.rglob("*.safetensors"), None) is not None:
        return "adapter"
    wanted = ", ".join(f"{kind}: {file}" for kind, file in KINDS.items())
    raise ValueError(f"The folder is none of {wanted}. Add the file, or name another folder.")


def find_problems(folder, kind):
    """
    Everything that keeps a copied folder from being published.

    Args:
        folder (`Path`): a folder without links.
        kind (`str`): a key of `KINDS`.

    Returns:
        `list[str]`, empty when it may go.
    """
    from .checkpoints import check_folder

    problems = [*_card_problems(folder, kind), *_file_problems(folder)]
    if kind == "pipeline":
        problems += _pipeline_problems(folder)
    if not any("pickle" in problem for problem in problems):
        try:
            check_folder(folder)
        except ValueError as error:
            problems.append(str(error).replace(f"{folder}{os.sep}", ""))
    return problems


def _card_problems(folder, kind):
    card = folder / "README.md"
    if not card.is_file():
        return ["README.md is missing: a repository needs its card"]
    try:
        match = _FRONT_MATTER.match(card.read_text(encoding="utf-8"))
        data = yaml.safe_load(match[1]) if match else None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"README.md has front matter that is not YAML ({error})"]
    if not isinstance(data, dict):
        return ["README.md lacks its front matter, a YAML mapping between two lines of ---"]
    problems = []
    if not isinstance(data.get("license"), str):
        problems.append("README.md names no `license` in its front matter")
    elif data["license"] == "other" and not (data.get("license_name") and data.get("license_link")):
        problems.append("README.md has the license `other` but no `license_name` and `license_link`")
    if data.get("library_name") != "diffusers":
        problems.append("README.md needs `library_name: diffusers` in its front matter")
    tags = data.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        problems.append("README.md has `tags` that are no list of words")
    bases = data.get("base_model", [])
    bases = [bases] if isinstance(bases, str) else bases
    valid = isinstance(bases, list) and all(isinstance(base, str) and base.count("/") == 1 for base in bases)
    if not valid:
        problems.append("README.md has a `base_model` that is no id (`organisation/name`)")
    elif kind == "adapter" and not bases:
        problems.append("README.md names no `base_model` in its front matter; weights belong to one")
    return problems


def _file_problems(folder):
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        with path.open("rb") as file:
            start = file.read(1)
        if path.suffix in PICKLES or (start == b"\x80" and path.suffix != ".safetensors"):
            yield f"{name} is a pickle, which runs code when it is opened: save safetensors"
        if size > FILE_LIMIT:
            yield f"{name} has {size:,} bytes; the Hub takes {FILE_LIMIT:,}: split it"
        if path.suffix not in TEXTS:
            continue
        if size > TEXT_LIMIT:
            yield f"{name} has {size:,} bytes; a text file may have {TEXT_LIMIT:,}"
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield f"{name} is not UTF-8"
            continue
        lines = text.splitlines()
        for what, pattern in (("the path of one machine", MACHINE_PATH), ("an access token", TOKEN)):
            found = [number for number, line in enumerate(lines, start=1) if pattern.search(line)]
            if found:
                more = f", as {len(found) - 1} more lines" if len(found) > 1 else ""
                yield f"{name}:{found[0]} has {what}{more}: take it out" + (
                    " and revoke it" if pattern is TOKEN else ""
                )


def _pipeline_problems(folder):
    trees = {}
    for path in sorted(folder.glob("*.py")):
        try:
            trees[path.stem] = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError) as error:
            yield f"{path.name} is not Python ({error})"
    imports = {name: relative_imports(tree) for name, tree in trees.items()}
    for name, modules in imports.items():
        for module in sorted(modules - set(trees)):
            yield f"{name}.py imports .{module}, which is not in the folder"
    circle = find_circle(imports)
    if circle:
        yield f"{' imports '.join(circle)}: diffusers follows such a circle without end when it loads Hub code"
    classes = [
        node.name
        for node in trees.get("pipeline", ast.Module([], [])).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Pipeline") for base in node.bases)
    ]
    if "pipeline" in trees and len(classes) != 1:
        yield f"pipeline.py has to define one pipeline class but defines {', '.join(classes) or 'none'}"


def relative_imports(tree):
    """Names in `from .name import ...`, within functions too, as diffusers' loader of Hub code finds them."""
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level}


def find_circle(imports):
    """The names of modules that import each other in a circle, the first one twice; empty if there are none."""
    done = set()

    def visit(name, trail):
        if name in trail:
            return [*trail[trail.index(name) :], name]
        circles = (visit(module, [*trail, name]) for module in sorted(imports.get(name, ())) if module not in done)
        circle = next((circle for circle in circles if circle), [])
        done.add(name)
        return circle

    return next((circle for name in sorted(imports) if (circle := visit(name, []))), [])


def try_loading(folder, kind, timeout=600):
    """
    Loads what is about to be published in a process of its own, without network, token or caches.

    Pipelines and schedulers are loaded without diffusers_ext, as a stranger would. This runs the code in the folder.
    Weights whose config names no class have nothing to load but the tensors that `find_problems` looked at.

    Returns:
        `str`, the name of the class that was loaded, or `None` for such weights.

    Raises:
        ValueError: when it cannot be loaded, with the last line of what Python says.
    """
    config = folder / "config.json"
    if kind == "adapter" and not (
        config.is_file() and "_class_name" in json.loads(config.read_text(encoding="utf-8"))
    ):
        return None
    with tempfile.TemporaryDirectory(prefix="diffusers-ext-trial-") as home:
        hidden = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": home, "HF_MODULES_CACHE": os.path.join(home, "modules")}
        command = [sys.executable, "-c", _TRIAL.read_text(encoding="utf-8"), str(folder), kind]
        options = {"cwd": home, "env": environment, "capture_output": True, "text": True, "timeout": timeout}
        try:
            done = subprocess.run(command, **options)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"Loading it did not end within {timeout} seconds.") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1].replace(f"{folder}{os.sep}", "") if lines else f"exit code {done.returncode}"
        raise ValueError(f"It does not load in a fresh process: {TOKEN.sub('hf_...', said)}")
    return json.loads(done.stdout.splitlines()[-1])
