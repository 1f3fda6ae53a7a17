# SPDX-License-Identifier: Apache-2.0
"""What users expect of a training script, which is started as they start it: in a process of its own."""

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1", "--num_processes")


def start_script(script, settings, launcher=(sys.executable,), env=(), **kwargs):
    """
    Starts a training script on the CPU with one thread per process.

    Args:
        script (`str` or `os.PathLike`):
            The script.
        settings (`dict`):
            Its arguments: `{"max_train_steps": 3}` is `--max_train_steps 3`, a list gives several values, `True` a
            flag alone; `None` leaves the argument out.
        launcher (`tuple[str, ...]`, *optional*):
            What comes before the script, for instance `(*TORCHRUN, "2")` or `(*ACCELERATE, "1")`. `accelerate launch
            --cpu` with more processes than one would run just one.
        env (`dict[str, str]`, *optional*):
            Changes to the environment.
        kwargs:
            Passed on to `subprocess.Popen`.

    Returns:
        `subprocess.Popen`
    """
    command = [*launcher, str(script)]
    for name, value in settings.items():
        if value is None:
            continue
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        command += [f"--{name}", *map(str, values)]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **dict(env)}
    return subprocess.Popen(command, env=env, text=True, **kwargs)


def run_script(script, settings, launcher=(sys.executable,), env=(), check=True, timeout=900):
    """Runs a training script to its end, see [`start_script`]; returns exit code, output and error output."""
    with start_script(script, settings, launcher, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            output, error = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert not check or process.returncode == 0, error[-3000:]
    return process.returncode, output, error


def checkpoints(folder):
    """Steps of the checkpoints in a folder, in order."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


class TrainingContract:
    """
    Tests of a training script that has diffusers' argument names: `--output_dir`, `--max_train_steps`,
    `--checkpointing_steps`, `--checkpoints_total_limit` and `--resume_from_checkpoint`. Subclasses set `script`,
    override the fixture `settings`, and define `losses` and `weights`.

    Attributes:
        script: path of the script.
        max_train_steps: length of a run, enough for the loss to fall.
        checkpointing_steps: a third of it or less.
    """

    script = None
    max_train_steps = 12
    checkpointing_steps = 3

    @pytest.fixture(scope="class")
    def settings(self):
        """Arguments of the script that make it train something tiny, logging every step."""
        raise NotImplementedError

    def losses(self, folder):
        """Loss by step, read from what the script logged into its output folder."""
        raise NotImplementedError

    def weights(self, folder):
        """State dict of the result in an output folder, loaded as users load it."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def run(self, settings):
        """Runs the script into a folder, with settings that differ from the usual ones."""

        def run(folder, launcher=(sys.executable,), env=(), **changes):
            return run_script(self.script, self.all_settings(settings, folder, changes), launcher, env)

        return run

    def all_settings(self, settings, folder, changes=()):
        lengths = {"max_train_steps": self.max_train_steps, "checkpointing_steps": self.checkpointing_steps}
        return {**settings, **lengths, "checkpoints_total_limit": 2, "output_dir": folder, **dict(changes)}

    @pytest.fixture(scope="class")
    def hub(self):
        """Address of a Hub that has nothing, and what it was asked for."""
        asked = []

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self):
                asked.append(self.path)
                self.send_error(404)

            do_GET = do_HEAD = do_POST = handle_any

            def log_message(self, *args):
                """Keeps quiet."""

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}", asked
            server.shutdown()

    @pytest.fixture(scope="class")
    def trained(self, run, hub, tmp_path_factory):
        """The output folder of a run that nothing disturbed."""
        folder = tmp_path_factory.mktemp("trained")
        run(folder, env={"HF_ENDPOINT": hub[0], "HF_HUB_OFFLINE": "0"})
        return folder

    def assert_falls(self, losses):
        values = [losses[step] for step in range(1, self.max_train_steps + 1)]
        # Batches differ, so neighbouring steps may rise.
        assert max(values[-3:]) < min(values[:3])

    def test_loss_falls(self, trained):
        self.assert_falls(self.losses(trained))

    def test_nothing_is_asked_of_the_hub(self, trained, hub):
        assert hub[1] == []

    def test_checkpoints_obey_the_limit(self, trained):
        last = self.max_train_steps - self.max_train_steps % self.checkpointing_steps
        assert checkpoints(trained) == [last - self.checkpointing_steps, last]

    def test_weights_are_finite(self, trained):
        assert all(tensor.isfinite().all() for tensor in self.weights(trained).values())

    def test_killed_and_resumed_it_ends_bit_for_bit_the_same(self, settings, run, trained, tmp_path):
        arguments = self.all_settings(settings, tmp_path)
        process = start_script(self.script, arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 900
        while not checkpoints(tmp_path) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert checkpoints(tmp_path), "the script ended without a checkpoint"
        # What a kill while writing leaves behind in a script that does not write aside.
        (tmp_path / f"checkpoint-{self.max_train_steps - 1}").mkdir(exist_ok=True)
        run(tmp_path, resume_from_checkpoint="latest")
        expected, resumed = self.weights(trained), self.weights(tmp_path)
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
        assert self.losses(tmp_path)[self.max_train_steps] == self.losses(trained)[self.max_train_steps]

    def test_two_processes_train_one_result(self, run, trained, tmp_path):
        run(tmp_path, launcher=(*TORCHRUN, "2"))
        self.assert_falls(self.losses(tmp_path))
        assert self.weights(tmp_path).keys() == self.weights(trained).keys()

    def test_accelerate_launch_gives_the_same_as_python(self, run, trained, tmp_path):
        run(tmp_path, launcher=(*ACCELERATE, "1"))
        assert all(torch.equal(self.weights(tmp_path)[k], v) for k, v in self.weights(trained).items())
