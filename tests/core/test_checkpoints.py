# SPDX-License-Identifier: Apache-2.0
"""The strict door: what a file says of itself is compared with what is there."""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diffusers_ext import checkpoints, lab


FUZZ = Path(__file__).with_name("fuzz_checkpoints.py")


def safetensors(path, header, data=b"", length=None):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)
    return path


def tensor(**changes):
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def rewrite(path, change, compression=zipfile.ZIP_STORED):
    """The same PyTorch file with another table of tensors, its checksums valid."""
    with zipfile.ZipFile(path) as archive:
        records = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return path


@pytest.fixture
def pickled(tmp_path):
    path = tmp_path / "w.pt"
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.float16)}, path)
    return path


# What is fine


def test_both_formats_give_the_same_tensors(tmp_path, pickled):
    tensors = checkpoints.read_tensors(pickled)
    save_file(tensors, tmp_path / "w.safetensors")
    again = checkpoints.read_tensors(tmp_path / "w.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_a_module_s_state_with_its_metadata_and_shared_tensors(tmp_path):
    layer = torch.nn.Linear(3, 3)
    state = layer.state_dict()
    state["transposed"], state["parameter"] = state["weight"].T, layer.weight
    torch.save({"state_dict": state, "step": 3}, tmp_path / "w.pt")
    assert torch.equal(checkpoints.read_tensors(tmp_path / "w.pt")["transposed"], layer.weight.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool])
def test_dtypes(tmp_path, dtype):
    torch.save({"w": torch.ones(4, dtype=dtype)}, tmp_path / "w.pt")
    assert checkpoints.read_tensors(tmp_path / "w.pt")["w"].dtype == dtype


def test_the_header_is_returned(tmp_path):
    save_file(
        {"w": torch.zeros(2, 3), "scalar": torch.tensor(1.0), "none": torch.zeros(0, 4)}, tmp_path / "w.safetensors"
    )
    found = checkpoints.check_safetensors(tmp_path / "w.safetensors")
    assert found == {"w": ("F32", (2, 3)), "scalar": ("F32", ()), "none": ("F32", (0, 4))}


def test_the_files_of_the_lab_pass():
    assert checkpoints.check_folder(lab.pipeline_folder()) > 8


# safetensors


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": {"dtype": "F32", "shape": [2]}}, "not described by"),
        (tensor(extra=1), "not described by"),
        ({"w": 1}, "not described by"),
        (tensor(dtype="F99"), "unknown dtype 'F99'"),
        (tensor(dtype=[1]), "unknown dtype"),
        (tensor(shape=[2**40]), r"cannot take 8 bytes"),
        (tensor(shape=[2**62, 2**62]), r"cannot take 8 bytes"),
        (tensor(shape=[-2]), "the shape"),
        (tensor(shape=[2.0]), "the shape"),
        (tensor(shape=[True, 2]), "the shape"),
        (tensor(shape=2), "no list as shape"),
        (tensor(shape=[1] * 65 + [2]), "the shape"),
        (tensor(data_offsets=[8, 0]), "cannot take -8 bytes"),
        (tensor(data_offsets=[8, 16]), "overlap or leave gaps"),
        (tensor() | {"v": tensor()["w"]}, "overlap or leave gaps"),
        (tensor(shape=[1], data_offsets=[0, 4]), "tensors of 4 bytes where there are 8"),
        (tensor() | {"__metadata__": {"a": 1}}, "metadata that is no dictionary of strings"),
        (tensor() | {"__metadata__": ["a"]}, "metadata that is no dictionary of strings"),
        (b'{"w": 1, "w": 1}', "appears twice"),
        (b"[1, 2]", "holds a list"),
        (b'{"w": ', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"w": ' + b"9" * 10_000 + b"}", "is not JSON"),
    ],
)
def test_a_header_that_cannot_be(tmp_path, header, message):
    path = safetensors(tmp_path / "w.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=f"no complete safetensors file.*{message}"):
        checkpoints.read_tensors(path)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8, 3])
def test_a_header_of_an_absurd_size_is_not_read(tmp_path, length):
    path = safetensors(tmp_path / "w.safetensors", tensor(), bytes(8), length)
    with pytest.raises(ValueError, match="no complete safetensors file"):
        checkpoints.read_tensors(path)


def test_a_long_header_is_refused_even_if_it_is_there(tmp_path):
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 10**9))
        file.truncate(2 * 10**9)
    with pytest.raises(ValueError, match="a header of 1,000,000,000 bytes, more than"):
        checkpoints.check_safetensors(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8, b"<!DOCTYPE html><html></html>"])
def test_what_is_no_safetensors_file(tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="no complete safetensors file"):
        checkpoints.read_tensors(tmp_path / "w.safetensors")


# Pickles


class Call:
    """Unpickling it calls a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_every_refused_global_is_listed_and_none_is_called(tmp_path):
    marker = tmp_path / "called"
    torch.save({"a": Call(os.mkdir, str(marker)), "b": Call(eval, "1"), "c": Path("x")}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"holds more than tensors, namely .*eval, .*posix.mkdir") as raised:
        checkpoints.read_tensors(tmp_path / "w.pt")
    assert "pathlib" in str(raised.value) and not marker.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_plain_pickle_is_refused(tmp_path, protocol):
    (tmp_path / "w.pkl").write_bytes(pickle.dumps({"w": Call(os.getcwd)}, protocol))
    with pytest.raises(ValueError, match="holds more than tensors, namely"):
        checkpoints.read_tensors(tmp_path / "w.pkl")


def test_the_format_before_pytorch_1_6_is_refused(tmp_path):
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="w.pt is no|w.pt is refused"):
        checkpoints.read_tensors(tmp_path / "w.pt")


def test_a_zip_bomb(pickled):
    rewrite(pickled, lambda content: content + bytes(10**7), zipfile.ZIP_DEFLATED)
    assert pickled.stat().st_size < 10**5
    with pytest.raises(ValueError, match="it is compressed"):
        checkpoints.read_tensors(pickled)


def test_entries_that_claim_the_same_bytes(pickled):
    content = bytearray(pickled.read_bytes())
    at = content.index(b"PK\x01\x02")
    struct.pack_into("<II", content, at + 20, 2**31, 2**31)
    pickled.write_bytes(content)
    with pytest.raises(ValueError, match="claim more bytes than the file has"):
        checkpoints.read_tensors(pickled)


def test_a_storage_that_claims_more_than_its_bytes(pickled):
    # K\x06 is the number 6: the number of elements in the storage of `w`.
    rewrite(pickled, lambda content: content.replace(b"K\x06tq", b"M\xff\xfftq"))
    with pytest.raises(ValueError, match="the storage '0' of 24 bytes claims 65535 elements"):
        checkpoints.read_tensors(pickled)


def test_a_tensor_larger_than_its_storage(pickled):
    rewrite(pickled, lambda content: content.replace(b"K\x02K\x03\x86", b"M\xff\xffK\x03\x86"))
    with pytest.raises(ValueError, match=r"a tensor of shape \(65535, 3\) at 0 in a storage of 6 elements"):
        checkpoints.read_tensors(pickled)


def test_a_tensor_that_repeats_one_element_without_end(tmp_path):
    # Eight bytes in the file, a terabyte as soon as somebody copies it.
    torch.save({"w": torch.zeros(1).expand(2**38)}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="in a storage of 1 elements"):
        checkpoints.read_tensors(tmp_path / "w.pt")


def test_a_memo_of_gigabytes(pickled):
    rewrite(pickled, lambda content: content[:2] + b"Nr\xff\xff\xff\xff0" + content[2:])
    with pytest.raises(ValueError, match="far outside|holds more than tensors"):
        checkpoints.read_tensors(pickled)


def test_attributes_are_not_set_on_what_does_the_checking(pickled):
    code = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x08\x00\x00\x00__call__Ns\x86b."
    rewrite(pickled, lambda content: code)
    with pytest.raises(ValueError, match="no complete PyTorch file"):
        checkpoints.read_tensors(pickled)
    torch.save({"w": torch.zeros(1)}, pickled)
    assert checkpoints.read_tensors(pickled)["w"].shape == (1,)


@pytest.mark.parametrize("content", [[1], {"w": 1.0}, {"state_dict": [1]}, {"w": {"v": torch.zeros(1)}}])
def test_something_else_than_tensors(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="has to hold a dictionary of tensors"):
        checkpoints.read_tensors(tmp_path / "w.pt")


# JSON, folders, keys


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 100_000, b"9" * 10_000])
def test_what_is_no_json_object(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match="is not JSON|has to hold a JSON object"):
        checkpoints.read_json(tmp_path / "a.json")


def test_a_json_file_of_an_absurd_size_is_not_read(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(10**9)
    with pytest.raises(ValueError, match="1,000,000,000 bytes; a JSON file of more than"):
        checkpoints.read_json(tmp_path / "a.json")


def test_a_folder_is_searched_through(tmp_path, pickled):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="deep/er/config.json is not JSON"):
        checkpoints.check_folder(tmp_path)


# Fuzzing


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux'")
def test_a_thousand_damaged_files_neither_crash_nor_hang_nor_take_memory():
    done = subprocess.run([sys.executable, FUZZ], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["files"] >= 1000 and report["refused"] > 0.5 * report["files"]
    assert report["seconds"] < 20 and report["grown"] < 256 * 2**20
