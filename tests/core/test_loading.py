# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file

from diffusers_ext import SparseAutoencoder, custom_pipeline, load_component


@pytest.fixture
def folder(tmp_path):
    DDIMScheduler(num_train_timesteps=7).save_pretrained(tmp_path / "scheduler")
    sae = SparseAutoencoder(d_in=4, expansion_factor=2, k=2)
    sae.save_pretrained(tmp_path / "sae")
    index = {
        "_class_name": "DDIMPipeline",
        "scheduler": ["diffusers", "DDIMScheduler"],
        "unet": ["diffusers", "UNet2DModel"],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    unet = UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        layers_per_block=1,
    )
    unet.save_pretrained(tmp_path / "unet")
    return tmp_path


def test_a_stock_component(folder):
    assert load_component(folder, subfolder="scheduler").config.num_train_timesteps == 7


def test_a_stock_pipeline(folder):
    assert type(load_component(folder)).__name__ == "DDIMPipeline"


def test_a_component_of_a_plugin(folder):
    assert isinstance(load_component(folder, subfolder="sae"), SparseAutoencoder)


def test_options_reach_the_class(folder):
    assert load_component(folder, subfolder="sae", dtype=torch.bfloat16).W_dec.dtype == torch.bfloat16


def test_a_pipeline_whose_index_names_a_module_of_a_plugin(folder):
    # In a process of its own, where nothing else has imported that module.
    index = json.loads((folder / "model_index.json").read_text())
    index["sae"] = ["diffusers_ext.methods.saeuron.modeling_saeuron", "SparseAutoencoder"]
    (folder / "model_index.json").write_text(json.dumps(index))
    code = """
import sys
import diffusers
from diffusers_ext import load_component
module = "diffusers_ext.methods.saeuron.modeling_saeuron"
class DDIMPipeline(diffusers.DDIMPipeline):
    def __init__(self, unet, scheduler, sae):
        super().__init__(unet, scheduler)
        self.register_modules(sae=sae)
diffusers.DDIMPipeline = DDIMPipeline
assert module not in sys.modules
print(type(load_component(sys.argv[1]).sae).__module__)
"""
    command = [sys.executable, "-c", code, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "diffusers_ext.methods.saeuron.modeling_saeuron", run.stderr[-2000:]


def test_a_custom_pipeline_file(folder, tmp_path):
    code = "from diffusers import DDIMPipeline\n\n\nclass OurDDIMPipeline(DDIMPipeline):\n    pass\n"
    (tmp_path / "pipeline_ours.py").write_text(code)
    pipe = load_component(folder, custom_pipeline=tmp_path / "pipeline_ours.py", trust_remote_code=True)
    assert type(pipe).__name__ == "OurDDIMPipeline"


# Bad input


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder. Download a repository first"):
        load_component(tmp_path / "nothing")


def test_a_hub_id_is_not_downloaded():
    with pytest.raises(FileNotFoundError, match="snapshot_download"):
        load_component("organisation/name")


def test_a_folder_without_an_index(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds none of model_index.json, config.json, scheduler_config.json"):
        load_component(tmp_path)


def test_an_unknown_class(folder):
    (folder / "scheduler" / "scheduler_config.json").write_text('{"_class_name": "NobodysScheduler"}')
    with pytest.raises(ValueError, match="asks for the class 'NobodysScheduler', which neither diffusers nor"):
        load_component(folder, subfolder="scheduler")


def test_a_config_without_a_class(folder):
    (folder / "sae" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="asks for the class None"):
        load_component(folder, subfolder="sae")


@pytest.mark.parametrize(
    ("text", "message"), [('{"_class_name": "DDI', "is not valid JSON"), ("[1]", "has to hold a JSON object")]
)
def test_a_damaged_index(folder, text, message):
    (folder / "model_index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_component(folder)


def test_a_custom_pipeline_folder_without_pipeline_py(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"scheduler/pipeline\.py is missing"):
        load_component(folder, custom_pipeline=folder / "scheduler", trust_remote_code=True)


@pytest.mark.parametrize("name", ["saeuron", "nobody/nothing", "pipeline_x.py"])
def test_a_custom_pipeline_that_is_no_file(folder, name):
    with pytest.raises(FileNotFoundError, match="`custom_pipeline` has to be a pipeline file"):
        load_component(folder, custom_pipeline=name, trust_remote_code=True)


def test_a_custom_pipeline_for_a_component(folder):
    with pytest.raises(ValueError, match="`custom_pipeline` is for pipelines"):
        load_component(folder, subfolder="sae", custom_pipeline=custom_pipeline("saeuron"))


def test_a_custom_pipeline_without_trust(folder):
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_component(folder, custom_pipeline=custom_pipeline("saeuron"))


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_that_do_not_fit(folder, change):
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    if change == "missing":
        del weights["conv_in.weight"]
    else:
        weights["nothing.weight"] = torch.zeros(1)
    save_file(weights, path)
    with pytest.raises(ValueError, match=rf"do not fit their config: {change}_keys \['\w+.weight'\]"):
        load_component(folder, subfolder="unet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("diffusion_pytorch_model.safetensors", b"\xff" * 8 + b"{}", "no complete safetensors file"),
        ("extra.pt", b"\x80\x02cos\nsystem\n.", "holds more than tensors, namely os.system"),
        ("extra.json", b"{", "is not JSON"),
    ],
)
def test_a_hostile_file_beside_the_config(folder, name, content, message):
    (folder / "unet" / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_component(folder, subfolder="unet")
