# SPDX-License-Identifier: Apache-2.0
"""Rules about the repository that no linter knows. Prints what breaks them; exit code 1 if anything does."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

from diffusers_ext.hub_checks import MACHINE_PATH, PICKLES, TEXTS, find_circle


ROOT = Path(__file__).resolve().parents[1]
SPDX = "# SPDX-License-Identifier: Apache-2.0"
# What someone has who installed diffusers and nothing of ours; NumPy and Pillow come with diffusers.
ALLOWED_IMPORTS = {"torch", "diffusers", "transformers", "peft", "safetensors", "huggingface_hub", "numpy", "PIL"}
SKIPPED = {
    ".git",
    ".venv",
    ".venv-newest",
    "outputs",
    "build",
    "dist",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
}


def files_of(root):
    """Files and links of the repository, without what is generated."""
    found = []
    for path in sorted(root.iterdir()):
        if path.name in SKIPPED or path.name.endswith(".egg-info"):
            continue
        if path.is_dir() and not path.is_symlink():
            found += files_of(path)
        else:
            found.append(path)
    return found


def sources(root):
    return [path for path in files_of(root) if path.suffix == ".py" and not path.is_symlink()]


def pipeline_files(root):
    return [
        path for path in sources(root) if path.name.startswith("pipeline_") and "src" in path.relative_to(root).parts
    ]


def relative_imports(path):
    """Modules beside `path` that it imports with `from .name import ...`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module}


def inference_files(pipeline):
    """A pipeline file and everything that it imports from its folder, directly or not."""
    found, queue = [], [pipeline]
    while queue:
        path = queue.pop()
        if path not in found and path.is_file():
            found.append(path)
            queue += [path.parent / f"{name}.py" for name in sorted(relative_imports(path))]
    return sorted(found)


def check_headers(root):
    for path in sources(root):
        if path.read_text(encoding="utf-8").split("\n", 1)[0] != SPDX:
            yield f"{path}: the first line has to be {SPDX!r}"


def check_pickles(root):
    # Fixtures are files as other libraries wrote them.
    for path in files_of(root):
        if path.suffix in PICKLES and "fixtures" not in path.relative_to(root).parts:
            yield f"{path}: weights have to be safetensors"


def check_machine_paths(root):
    for path in files_of(root):
        if path.suffix not in TEXTS or path.is_symlink():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if match := MACHINE_PATH.search(line):
                yield f"{path}:{number}: path of one machine {match.group()!r}"


def check_links(root):
    for path in files_of(root):
        if not path.is_symlink():
            continue
        if path.readlink().is_absolute():
            yield f"{path}: a link has to be relative"
        elif not path.exists():
            yield f"{path}: links to {path.readlink()}, which is missing"
        elif not path.resolve().is_relative_to(root.resolve()):
            yield f"{path}: links out of the repository"


def check_shelves(root):
    """A code repository on the shelf `pipelines`: links to all inference files of its method, and `example.py`."""
    for shelf in sorted((root / "pipelines").glob("*/")):
        if not (shelf / "pipeline.py").exists():
            yield f"{shelf}: pipeline.py is missing"
            continue
        for path in sorted(shelf.glob("*.py")):
            if not path.is_symlink() and path.name != "example.py":
                yield f"{path}: has to be a link to the file in src"
        for path in inference_files((shelf / "pipeline.py").resolve()):
            if path.resolve() not in {link.resolve() for link in shelf.glob("*.py")}:
                yield f"{shelf}: a link to {path.name} is missing"


def check_pipeline_files(root):
    for path in pipeline_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # diffusers takes any subclass of a pipeline that it finds in the file, whatever its name.
        classes = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Pipeline") for base in node.bases)
        ]
        if len(classes) != 1:
            found = ", ".join(classes) or "none"
            yield f"{path}: has to define one pipeline class but defines {len(classes)} ({found})"
        direct = relative_imports(path)
        for helper in inference_files(path):
            if helper != path and helper.stem not in direct:
                yield f"{path}: has to import {helper.stem} itself, diffusers copies no other helpers"


def check_inference_imports(root):
    for path in sorted({file for pipeline in pipeline_files(root) for file in inference_files(pipeline)}):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            elif isinstance(node, ast.ImportFrom) and (node.level > 1 or not node.module or "." in node.module):
                yield f"{path}:{node.lineno}: helpers are imported flatly, `from .helper import name`"
                continue
            else:
                continue
            for module in modules:
                package = module.split(".")[0]
                if package not in ALLOWED_IMPORTS and package not in sys.stdlib_module_names:
                    yield f"{path}:{node.lineno}: an inference file must not import {package}"


def check_circles(root):
    """diffusers follows the import statements of Hub code, those in functions too, and never leaves a circle."""
    for pipeline in pipeline_files(root):
        circle = find_circle({path.stem: relative_imports(path) for path in inference_files(pipeline)})
        if circle:
            yield f"{pipeline.parent}: {' imports '.join(circle)}; use importlib inside the function"


def check_unique_names(root):
    places = defaultdict(set)
    for pipeline in pipeline_files(root):
        for path in inference_files(pipeline):
            places[path.name].add(path)
    for name, paths in sorted(places.items()):
        if len(paths) > 1:
            yield f"{name}: {' and '.join(map(str, sorted(paths)))} have one name, but are copied into one folder"


def check_reserved_folders(root):
    from diffusers import pipelines

    reserved = set(dir(pipelines))
    for folder in sorted({path.parent for path in sources(root) if "src" in path.relative_to(root).parts}):
        if folder.name in reserved:
            yield f"{folder}: diffusers has pipelines.{folder.name} and would save components in here as its own"


CHECKS = (
    check_headers,
    check_pickles,
    check_machine_paths,
    check_links,
    check_shelves,
    check_pipeline_files,
    check_inference_imports,
    check_circles,
    check_unique_names,
    check_reserved_folders,
)


def main():
    problems = [problem for check in CHECKS for problem in check(ROOT)]
    for problem in problems:
        print(problem.removeprefix(f"{ROOT}/"), file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
