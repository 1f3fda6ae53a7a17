# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from diffusers_ext import lab


def test_there_are_64_objects_and_8_styles():
    assert len(set(lab.OBJECTS)) == 64
    assert len(set(lab.STYLES)) == 8


def test_prompts_are_every_object_in_every_style():
    captions = lab.prompts()
    assert len(captions) == 512
    assert {(c.object, c.style) for c in captions} == {(o, s) for o in lab.OBJECTS for s in lab.STYLES}


def test_a_prompt_names_its_object_and_style():
    assert [c.prompt for c in lab.prompts(["red apple"], ["ink", "neon"])] == [
        "red apple, ink style",
        "red apple, neon style",
    ]


@pytest.mark.parametrize("wrong", [{"objects": ["dragon"]}, {"styles": ["oil"]}])
def test_an_unknown_name_is_refused_with_the_known_ones(wrong):
    with pytest.raises(
        ValueError, match="EmojiCanvas has no (object 'dragon'; it has airplane|style 'oil'; it has sticker)"
    ):
        lab.prompts(**wrong)


def test_importing_the_lab_loads_neither_torch_nor_diffusers():
    code = "import sys, diffusers_ext.lab; print(sorted({'torch', 'diffusers', 'scipy'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_found():
    assert set(lab.__all__) <= set(dir(lab))
    for name in lab.__all__:
        assert getattr(lab, name) is not None


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'diffusers_ext.lab' has no attribute 'nothing'"):
        _ = lab.nothing
