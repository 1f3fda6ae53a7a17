# SPDX-License-Identifier: Apache-2.0
"""Renders model cards, and the tables of figures in the README, from `model_cards/` and the files in `results/`.

A figure is only ever taken from a result file, by its path in the JSON. Run with `--check` to see whether anything is
stale.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import yaml
from jinja2 import Environment, StrictUndefined


ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- end figures -->)", re.DOTALL)


class Results:
    """Figures by file and path, for instance `saeuron` and `summary.exact.objects.ua.mean`."""

    def __init__(self, folder):
        self.folder, self._files = folder, {}

    def value(self, file, path):
        if file not in self._files:
            self._files[file] = json.loads((self.folder / f"{file}.json").read_text(encoding="utf-8"))
        value = self._files[file]
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                raise KeyError(f"results/{file}.json has no figure {path!r} (stopped at {key!r}).")
            value = value[key]
        return value

    def show(self, cell):
        """Text of a table's cell: plain text, or `{file, path, format}`."""
        if not isinstance(cell, dict):
            return str(cell)
        return format(self.value(cell["file"], cell["path"]), cell.get("format", ""))


def table(results, rows):
    """A Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(results.show(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def front_matter(data):
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True).strip()


def render_all():
    """Every generated file with the text that it should have."""
    results = Results(ROOT / "results")
    template = (ROOT / "model_cards" / "template.md").read_text(encoding="utf-8")
    options = {"keep_trailing_newline": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(undefined=StrictUndefined, **options)
    environment.filters["table"] = lambda rows: table(results, rows)
    environment.filters["front_matter"] = front_matter
    rendered = {}
    for path in sorted((ROOT / "model_cards").glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        if "target" in data:
            rendered[ROOT / data["target"]] = environment.from_string(template).render(**data)
    blocks = yaml.safe_load((ROOT / "model_cards" / "figures.yaml").read_text(encoding="utf-8"))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        replaced = BLOCK.sub(lambda m: f"{m[1]}{table(results, blocks['tables'][m['name']])}\n{m[3]}", text)
        if BLOCK.search(text):
            rendered[path] = replaced
    return rendered


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Change nothing; exit with 1 if a file is stale.")
    args = parser.parse_args()
    stale = []
    for path, text in render_all().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not args.check:
                path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{'stale' if args.check else 'written'}: {path.relative_to(ROOT)}")
    sys.exit(1 if stale and args.check else 0)


if __name__ == "__main__":
    main()
