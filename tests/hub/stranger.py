# SPDX-License-Identifier: Apache-2.0
"""Run by tests in a fresh process: somebody who has diffusers, and not diffusers_ext.

Takes a JSON list of jobs and prints a JSON list of answers: the digest of a picture, or the error.
"""

import hashlib
import importlib.abc
import json
import sys


class WithoutUs(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "diffusers_ext":
            raise ImportError("diffusers_ext is not installed here")


sys.meta_path.insert(0, WithoutUs())

import torch  # noqa: E402
from diffusers import DiffusionPipeline  # noqa: E402
from diffusers.utils.dynamic_modules_utils import get_class_from_dynamic_module  # noqa: E402
from huggingface_hub import HfApi, snapshot_download  # noqa: E402


torch.set_num_threads(1)


def draw(base, call, sae=None, **options):
    """Digest of the picture that a pipeline draws."""
    pipe = DiffusionPipeline.from_pretrained(base, dtype=torch.float32, trust_remote_code=True, **options)
    pipe.set_progress_bar_config(disable=True)
    if sae is not None:
        pipe.load_sae(sae["repository"], revision=sae["revision"])
        pipe.load_concepts(sae["repository"], revision=sae["revision"])
    images = pipe(generator=torch.Generator().manual_seed(0), output_type="pt", **call).images
    digest = hashlib.sha256(torch.as_tensor(images).numpy().tobytes()).hexdigest()
    return {"picture": digest, "module": type(pipe).__module__, "gain": getattr(pipe, "gain", None)}


def schedule(repository, file, name, revision=None):
    """What a scheduler out of a code repository does."""
    where = {"revision": revision} if revision else {}
    cls = get_class_from_dynamic_module(repository, file, class_name=name, trust_remote_code=True, **where)
    scheduler = cls.from_pretrained(repository, **where)
    scheduler.set_timesteps(5)
    return {"timesteps": scheduler.timesteps.tolist(), "config": json.loads(scheduler.to_json_string())}


def snapshot(repository, revision):
    return {"folder": snapshot_download(repository, revision=revision, local_files_only=True)}


def change(method, **arguments):
    getattr(HfApi(), method)(**arguments)
    return {}


def main():
    answers = []
    for job in json.loads(sys.argv[1]):
        action = {"draw": draw, "schedule": schedule, "snapshot": snapshot, "change": change}[job.pop("action")]
        # A later job may use what an earlier one found.
        job = {
            key: answers[value["of"]][value["key"]] + value["add"]
            if isinstance(value, dict) and "of" in value
            else value
            for key, value in job.items()
        }
        try:
            answers.append(action(**job))
        except Exception as error:
            answers.append({"error": type(error).__name__, "message": str(error)})
    assert "diffusers_ext" not in sys.modules
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
