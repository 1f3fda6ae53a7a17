# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark, each in a process of its own, and says where the results are."""

import subprocess
import sys
from pathlib import Path


def main():
    folder = Path(__file__).parent
    failed = []
    for script in sorted(folder.glob("bench_*.py")):
        print(f"== {script.name}", flush=True)
        if subprocess.run([sys.executable, str(script)]).returncode:
            failed.append(script.name)
    print(f"Results: {folder / 'results'}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
