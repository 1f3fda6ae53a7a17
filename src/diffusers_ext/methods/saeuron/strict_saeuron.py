# SPDX-License-Identifier: Apache-2.0
"""Files that strangers made: what they claim of themselves is compared with what is there, before allocation.

Lies here, and not in the core of the package, because the published pipeline reads foreign files without the package.
"""

import collections
import io
import json
import math
import pickle
import pickletools
import zipfile
from pathlib import Path

from safetensors import SafetensorError


# A header of this size names about two hundred thousand tensors; parsing it takes some 300 MB.
HEADER_LIMIT = 25 * 2**20
JSON_LIMIT = 50 * 2**20
PICKLE_LIMIT = 16 * 2**20
# Bits of an element.
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6}
DTYPE_BITS |= {"F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
DTYPE_BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
# Bytes of an element.
_STORAGES = {"ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "ShortStorage": 2, "HalfStorage": 2}
_STORAGES |= {"BFloat16Storage": 2, "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8}
# What a pickled dictionary of tensors consists of.
_OPCODES = frozenset(
    """
    PROTO FRAME STOP MARK EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS APPEND APPENDS
    BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE BINUNICODE SHORT_BINUNICODE BINPUT LONG_BINPUT BINGET
    LONG_BINGET MEMOIZE GLOBAL REDUCE BINPERSID BUILD
    """.split()
)


def read_json(path, expected=dict):
    """
    Reads a JSON file that has to hold an object, or what else is `expected`.

    Raises:
        ValueError: on anything else.
    """
    path = Path(path)
    size = path.stat().st_size
    if size > JSON_LIMIT:
        raise ValueError(f"{path} has {size:,} bytes; a JSON file of more than {JSON_LIMIT:,} is refused.")
    return _parse_json(path.read_bytes(), path, expected)


def _parse_json(content, path, expected=dict, object_pairs_hook=None):
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=object_pairs_hook)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Download or save it again.") from error
    if not isinstance(parsed, expected):
        raise ValueError(f"{path} has to hold a JSON object but holds a {type(parsed).__name__}.")
    return parsed


def check_safetensors(path):
    """
    Compares the header of a safetensors file with the file, without loading tensors.

    Returns:
        `dict` of names to `(dtype, shape)`, dtypes as the format writes them.

    Raises:
        ValueError: when the file is cut, too long, or says of itself what cannot be.
    """
    path = Path(path)
    size = path.stat().st_size

    def refuse(why):
        raise ValueError(f"{path} is no complete safetensors file ({why}). Download it again.")

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or length > size - 8:
            refuse(f"a header of {length:,} bytes in a file of {size:,}")
        if length > HEADER_LIMIT:
            refuse(f"a header of {length:,} bytes, more than {HEADER_LIMIT:,}")
        content = file.read(length)
    try:
        header = _parse_json(content, path, object_pairs_hook=_without_duplicates)
    except ValueError as error:
        refuse(f"its header: {error}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse("metadata that is no dictionary of strings")
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            refuse(f"{name!r} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            refuse(f"{name!r} has the unknown dtype {dtype!r}")
        if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
            refuse(f"{name!r} has no list as shape, or no two offsets")
        if not _are_sizes(shape) or not _are_sizes(offsets):
            refuse(f"{name!r} has the shape {shape!r} and the offsets {offsets!r}")
        if math.prod(shape) * DTYPE_BITS[dtype] != 8 * (offsets[1] - offsets[0]):
            refuse(f"{name!r} of shape {shape} and dtype {dtype} cannot take {offsets[1] - offsets[0]:,} bytes")
        spans.append(offsets)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            refuse("tensors that overlap or leave gaps")
        end = stop
    if end != size - 8 - length:
        refuse(f"tensors of {end:,} bytes where there are {size - 8 - length:,}")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _without_duplicates(pairs):
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice")
    return result


def _are_sizes(values):
    # PyTorch has no tensors of more than 64 dimensions.
    return len(values) <= 64 and all(type(value) is int and 0 <= value < 2**63 for value in values)


def check_pickle(path):
    """
    Checks that a file of `torch.save` holds nothing but tensors, each as large as its bytes, without loading it.

    Refused are: compressed entries (zip bombs), entries that overlap, every global that a dictionary of tensors does
    not need, and storages or tensors that claim more elements than there are.

    Raises:
        ValueError: with the list of refused globals, or with what does not fit.
    """
    path = Path(path)
    damaged = f"{path} is no complete PyTorch file"
    with path.open("rb") as file:
        plain = file.read(PICKLE_LIMIT)
    if plain.startswith(b"\x80"):
        _check_instructions(plain, path)
        raise ValueError(f"{path} is no PyTorch file of today's format. Save it again with torch.save.")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise ValueError(f"{path} is refused: it is compressed, which PyTorch never does (a zip bomb?).")
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise ValueError(f"{path} is refused: its entries claim more bytes than the file has (a zip bomb?).")
            sizes = {entry.filename: entry.file_size for entry in entries}
            roots = [name.removesuffix("data.pkl") for name in sizes if name.endswith("/data.pkl")]
            if len(roots) != 1 or len(sizes) != len(entries):
                raise ValueError(f"{damaged} (it holds {len(roots)} times data.pkl). Download it again.")
            if sizes[f"{roots[0]}data.pkl"] > PICKLE_LIMIT:
                raise ValueError(f"{path} is refused: its table of tensors has more than {PICKLE_LIMIT:,} bytes.")
            content = archive.read(f"{roots[0]}data.pkl")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{damaged} ({error}). Download it again.") from error
    _check_instructions(content, path)
    try:
        _Survey(content, roots[0], sizes).load()
    # What a damaged pickle raises depends on the byte that is read as an instruction.
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{damaged} ({error}). Download it again.") from error


def _check_instructions(content, path):
    refused = set()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "GLOBAL":
                name = argument.replace(" ", ".")
                if name not in _ALLOWED:
                    refused.add(name)
            elif opcode.name not in _OPCODES:
                refused.add(f"the instruction {opcode.name}")
            elif opcode.name == "LONG_BINPUT" and argument > len(content):
                raise ValueError("an entry of the memo that lies far outside")
    except ValueError as error:
        raise ValueError(f"{path} is no complete PyTorch file ({error}). Download it again.") from error
    if refused:
        raise ValueError(f"{path} is refused: it holds more than tensors, namely {', '.join(sorted(refused))}.")


class _Survey(pickle.Unpickler):
    """Walks through the table of tensors with stand-ins for everything, and looks at the sizes."""

    def __init__(self, content, root, sizes):
        super().__init__(io.BytesIO(content))
        self.root, self.sizes = root, sizes

    def find_class(self, module, name):
        return _ALLOWED[f"{module}.{name}"]

    def persistent_load(self, description):
        kind, itemsize, key, _, count = description
        size = self.sizes[f"{self.root}data/{key}"]
        if kind != "storage" or type(count) is not int or count * itemsize != size:
            raise ValueError(f"the storage {key!r} of {size:,} bytes claims {count!r} elements of {itemsize} bytes")
        return _Storage(count)


_Storage = collections.namedtuple("_Storage", "count")


class _TensorStandIn:
    # Without attributes of its own, so that a pickle cannot set any.
    __slots__ = ()

    def __call__(self, storage, offset, shape, stride, *_):
        if not isinstance(storage, _Storage) or len(shape) != len(stride) or not _are_sizes([*shape, *stride]):
            raise ValueError(f"a tensor of shape {shape!r} and stride {stride!r}")
        last = offset + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if offset < 0 or math.prod(shape) > storage.count or (math.prod(shape) and last >= storage.count):
            raise ValueError(f"a tensor of shape {shape} at {offset} in a storage of {storage.count:,} elements")


class _ParameterStandIn:
    __slots__ = ()

    def __call__(self, tensor, requires_grad, hooks):
        return tensor


class _DictionaryStandIn:
    __slots__ = ()

    def __call__(self):
        return collections.OrderedDict()


_ALLOWED = {
    "collections.OrderedDict": _DictionaryStandIn(),
    "torch._utils._rebuild_tensor_v2": _TensorStandIn(),
    "torch._utils._rebuild_parameter": _ParameterStandIn(),
    **{f"torch.{name}": size for name, size in _STORAGES.items()},
}


def read_tensors(path):
    """
    Reads a dictionary of tensors out of a safetensors file, or out of one of `torch.save`, after checking it.

    Raises:
        ValueError: on what [`check_safetensors`] and [`check_pickle`] refuse, or content that is something else.
    """
    # The checks alone need no torch, and a folder is checked before it is published.
    import torch
    from safetensors.torch import load_file

    path = Path(path)
    if path.suffix == ".safetensors":
        check_safetensors(path)
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no complete safetensors file ({error}). Download it again.") from error
    check_pickle(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(f"{path} is no complete PyTorch file. Download it again.") from error
    loaded = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ValueError(f"{path} has to hold a dictionary of tensors.")
    return loaded
