# SPDX-License-Identifier: Apache-2.0
"""Damages files in a thousand ways, seeded, and reads them with a limit on memory.

Every file has to be read or refused with a `ValueError`, and nothing else may lie in the folder afterwards. Prints
a JSON report.
"""

import json
import random
import resource
import struct
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from diffusers_ext import checkpoints


EACH = 350
MEMORY = 512 * 2**20
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF)


def mutate(content, rng):
    """Flips, cuts, repeats, inserts or overwrites a few bytes."""
    content = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(len(content) + 1), rng.randrange(6)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content = content[:at] or bytearray(b"\0")
        elif kind == 2:
            content[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 3:
            content[at : at + rng.randint(1, 16)] = bytes([rng.choice(NUMBERS)]) * rng.randint(1, 8)
        elif kind == 4:
            content[at:at] = content[at : at + rng.randint(1, 64)]
        else:
            del content[at : at + rng.randint(1, 16)]
            content = content or bytearray(b"\0")
    return bytes(content)


def mutate_header(content, rng):
    """Damages the header of a safetensors file and keeps its length right, so that the damage is looked at."""
    length = struct.unpack("<Q", content[:8])[0]
    header = mutate(content[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def mutate_table(path, rng):
    """Damages the table of tensors inside a PyTorch file and keeps the checksums right."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, mutate(content, rng) if name.endswith("/data.pkl") else content)


def main():
    rng = random.Random(0)
    torch.manual_seed(0)
    tensors = {"encoder.weight": torch.randn(8, 4), "bias": torch.randn(8).half(), "step": torch.tensor(3)}
    report = {"files": 0, "refused": 0}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        config = {"a": [1, 2.5, None, True], "b": {"c": "text", "d": [[], {}]}, "e": -1e9}
        save_file(tensors, folder / "good.safetensors", metadata={"format": "pt"})
        torch.save({"state_dict": torch.nn.Linear(3, 2).state_dict(), **tensors}, folder / "good.pt")
        (folder / "good.json").write_text(json.dumps(config))
        good = {path.suffix: path.read_bytes() for path in folder.iterdir()}
        for suffix in good:
            read = checkpoints.read_json if suffix == ".json" else checkpoints.read_tensors
            read(folder / f"good{suffix}")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
        started = time.process_time()
        for suffix, content in good.items():
            read = checkpoints.read_json if suffix == ".json" else checkpoints.read_tensors
            for number in range(EACH):
                path = folder / f"bad{suffix}"
                path.write_bytes(content)
                if suffix == ".pt" and number % 2:
                    mutate_table(path, rng)
                elif suffix == ".safetensors" and number % 2:
                    path.write_bytes(mutate_header(content, rng))
                else:
                    path.write_bytes(mutate(content, rng))
                try:
                    read(path)
                except ValueError as error:
                    assert str(path) in str(error), f"the file is not named: {error}"
                    report["refused"] += 1
                path.unlink()
                report["files"] += 1
                assert len(list(folder.iterdir())) == len(good), "something was left behind"
        report["seconds"] = time.process_time() - started
        report["grown"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
