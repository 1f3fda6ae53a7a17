# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from diffusers_ext import MethodSpec, custom_pipeline, get_method, list_methods, plugins


METHODS = "diffusers_ext.methods"
# Read before any test installs a plugin.
OWN = sorted(entry.name for entry in metadata.entry_points(group=METHODS) if entry.dist.name == "diffusers_ext")


def source(name, **fields):
    fields = "".join(f", {key}={value!r}" for key, value in fields.items())
    return f"from diffusers_ext import MethodSpec\nSPEC = MethodSpec(name={name!r}, title='A title'{fields})\n"


def test_our_own_methods_come_through_the_entry_points():
    (entry,) = {entry for entry in metadata.entry_points(group=METHODS) if entry.name == "saeuron"}
    assert replace(entry.load(), distribution="diffusers-ext") == get_method("saeuron")


def test_every_entry_point_of_ours_loads():
    for group in plugins.GROUPS:
        for plugin in plugins.discover(group).values():
            if plugin.distribution == plugins.OWN_DISTRIBUTION:
                assert plugin.load() is not None


def test_a_plugin_is_found_with_its_distribution(install):
    install("Their_Plugin", {METHODS: {"blur": "blur_spec:SPEC"}}, blur_spec=source("blur"))
    assert get_method("blur").distribution == "their-plugin"
    assert [method.name for method in list_methods()] == sorted(["blur", *OWN])


def test_filters(install):
    spec = source("blur", kinds=("attention_processor",), base_families=("a-base",))
    install("their-plugin", {METHODS: {"blur": "blur_spec:SPEC"}}, blur_spec=spec)
    assert [m.name for m in list_methods(kind="attention_processor")] == ["blur"]
    assert [m.name for m in list_methods(kind="scheduler")] == ["ambient_diffusion"]
    assert [m.name for m in list_methods(base="a-base")] == ["blur"]
    assert [m.name for m in list_methods(pattern="s*")] == ["saeuron"]
    assert list_methods(kind="attention_processor", pattern="s*") == []


def test_custom_pipeline_is_the_file_of_the_method():
    path = Path(custom_pipeline("saeuron"))
    assert path.name == "pipeline_saeuron.py" and path.is_file()


# A plugin that fails


@pytest.fixture
def broken(install):
    return install("broken-plugin", {METHODS: {"broken": "broken_spec:SPEC"}}, broken_spec="import not_installed\n")


def test_a_plugin_that_raises_at_import_is_left_out_with_one_warning(broken, caplog):
    assert [method.name for method in list_methods()] == OWN
    list_methods()
    (record,) = caplog.records
    assert "'broken'" in record.message and "broken-plugin 1.0" in record.message and "not_installed" in record.message


def test_asking_for_the_broken_plugin_raises_with_its_cause(broken):
    with pytest.raises(RuntimeError, match="'broken' of the distribution broken-plugin 1.0 .*not_installed") as raised:
        get_method("broken")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_broken_plugin_does_not_stop_the_others(broken):
    assert get_method("saeuron").name == "saeuron"


@pytest.mark.parametrize(
    "code",
    ["raise KeyError('x')", "1 / 0", "SPEC = = 1", "from diffusers_ext import MethodSpec\nSPEC = MethodSpec()"],
)
def test_whatever_a_plugin_raises_is_reported(install, code):
    install("broken-plugin", {METHODS: {"broken": "broken_spec:SPEC"}}, broken_spec=code)
    with pytest.raises(RuntimeError, match="broken-plugin"):
        get_method("broken")


@pytest.mark.parametrize("target", ["no_such_module:SPEC", "blur_spec:NO_SUCH_NAME"])
def test_an_entry_point_to_nothing_is_reported(install, target):
    install("broken-plugin", {METHODS: {"broken": target}}, blur_spec=source("blur"))
    with pytest.raises(RuntimeError, match="'broken' of the distribution broken-plugin"):
        get_method("broken")


def test_a_record_of_the_wrong_type_is_refused(install, caplog):
    install("wrong-plugin", {METHODS: {"wrong": "wrong_spec:SPEC"}}, wrong_spec="SPEC = {'name': 'wrong'}\n")
    with pytest.raises(
        TypeError, match="of wrong-plugin has to point at a `MethodSpec` but wrong_spec:SPEC is a dict"
    ):
        get_method("wrong")
    assert [method.name for method in list_methods()] == OWN
    assert "wrong-plugin" in caplog.text


def test_a_record_of_another_name_is_refused(install):
    install("wrong-plugin", {METHODS: {"blur": "blur_spec:SPEC"}}, blur_spec=source("sharpen"))
    with pytest.raises(ValueError, match="'blur' of wrong-plugin points at the method 'sharpen'"):
        get_method("blur")


# Two of one name


def test_our_own_wins_over_a_plugin_of_the_same_name(install, caplog):
    install("a-plugin", {METHODS: {"saeuron": "other_spec:SPEC"}}, other_spec=source("saeuron", status="stable"))
    assert get_method("saeuron").distribution == "diffusers-ext"
    assert "diffusers-ext" in caplog.text and "a-plugin 1.0" in caplog.text


def test_distribution_and_name_tell_two_plugins_apart(install):
    install("a-plugin", {METHODS: {"saeuron": "other_spec:SPEC"}}, other_spec=source("saeuron", status="stable"))
    assert get_method("a-plugin:saeuron").status == "stable"
    assert get_method("A_plugin:saeuron").status == "stable"
    assert get_method("diffusers-ext:saeuron").status == get_method("saeuron").status


def test_two_plugins_of_one_name_are_warned_about_once(install, caplog):
    install("b-plugin", {METHODS: {"blur": "b_spec:SPEC"}}, b_spec=source("blur"))
    install("a-plugin", {METHODS: {"blur": "a_spec:SPEC"}}, a_spec=source("blur"))
    assert get_method("blur").distribution == "a-plugin" and get_method("b-plugin:blur").distribution == "b-plugin"
    list_methods()
    (record,) = caplog.records
    assert "'b-plugin:blur'" in record.message


def test_a_name_with_capitals_is_ignored_with_a_warning(install, caplog):
    install("a-plugin", {METHODS: {"Blur": "a_spec:SPEC"}}, a_spec=source("Blur"))
    assert [method.name for method in list_methods()] == OWN
    assert "'Blur' of a-plugin 1.0" in caplog.text


# Wrong arguments


@pytest.mark.parametrize("name", ["saeurom", "SAeUron", "seauron"])
def test_an_unknown_name_answers_with_the_closest(name):
    with pytest.raises(ValueError, match=f"There is no method '{name}'. Closest: saeuron."):
        get_method(name)


def test_a_name_close_to_none_answers_with_all():
    with pytest.raises(ValueError, match=f"Known: {', '.join(OWN)}"):
        get_method("xyz")


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ValueError, match="There is no method 'nobody:saeuron'"):
        get_method("nobody:saeuron")


@pytest.mark.parametrize("name", [None, 3, ["saeuron"]])
def test_a_name_that_is_no_string_is_refused(name):
    with pytest.raises(TypeError, match="`name` has to be a string"):
        get_method(name)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="`kind` has to be one of pipeline, scheduler, .* but is 'pipelines'"):
        list_methods(kind="pipelines")


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="`group` has to be one of .* but is 'diffusers_ext.method'"):
        plugins.discover("diffusers_ext.method")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kinds": ("pipeline", "hooks")}, "`kinds` has to be out of .* but has 'hooks'"),
        ({"status": "done"}, "`status` has to be one of experimental, beta, stable but is 'done'"),
    ],
)
def test_a_wrong_field_of_a_record_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MethodSpec(name="x", title="X", **fields)


def test_custom_pipeline_of_a_method_without_one_names_those_that_have(install):
    install("a-plugin", {METHODS: {"blur": "a_spec:SPEC"}}, a_spec=source("blur"))
    with pytest.raises(ValueError, match="'blur' has no pipeline. Methods that have one: .*saeuron"):
        custom_pipeline("blur")


@pytest.mark.parametrize("module", ["no_such_package.pipeline_blur", "no_such_pipeline"])
def test_custom_pipeline_whose_file_is_missing_names_it(install, module):
    spec = source("blur", kinds=("pipeline",), pipeline=f"{module}:BlurPipeline")
    install("a-plugin", {METHODS: {"blur": "a_spec:SPEC"}}, a_spec=spec)
    with pytest.raises(FileNotFoundError, match=f"{module.replace('.', '/')}.py is missing from a-plugin"):
        custom_pipeline("blur")
