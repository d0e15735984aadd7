# SPDX-License-Identifier: MIT OR Apache-2.0
"""What ``data.pkl`` of a file of ``torch.save`` says about tensors: which storage each views, and how.

The names that a state dict needs are listed here; any other one is refused by its name. They are read as what they
mean, and nothing of PyTorch is imported or called. Written against what PyTorch 1.6 to 2.13 save.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeGuard

from metrale.checkpoint.pickle_machine import RefusedPickle, read_pickle
from metrale.checkpoint.strided import MAX_DIMENSIONS, Strided

ITEMSIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "u16": 2, "u32": 4,
        "u64": 8, "bool": 1, "c32": 4, "c64": 8, "c128": 16, "f8_e4m3": 1, "f8_e5m2": 1, "f8_e4m3fnuz": 1,
        "f8_e5m2fnuz": 1, "f8_e8m0": 1,
    }
)  # fmt: skip
"""Bytes of an element of every dtype that is described; names are those of safetensors where it has one."""

_STORAGES: Final = {
    "DoubleStorage": "f64", "FloatStorage": "f32", "HalfStorage": "f16", "BFloat16Storage": "bf16",
    "LongStorage": "i64", "IntStorage": "i32", "ShortStorage": "i16", "CharStorage": "i8", "ByteStorage": "u8",
    "BoolStorage": "bool", "ComplexFloatStorage": "c64", "ComplexDoubleStorage": "c128",
}  # fmt: skip
_BYTES: Final = ("torch.storage.UntypedStorage", "torch.storage._UntypedStorage", "torch.UntypedStorage")
_DTYPES: Final = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "bool",
    "complex32": "c32", "complex64": "c64", "complex128": "c128", "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2",
    "float8_e4m3fnuz": "f8_e4m3fnuz", "float8_e5m2fnuz": "f8_e5m2fnuz", "float8_e8m0fnu": "f8_e8m0",
}  # fmt: skip

_LONGEST_KEY: Final = 100
_MOST_METADATA: Final = 8


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that the pickle refers to.

    Attributes
    ----------
    key : str
        The name of its entry, without the folder.
    dtype : str
    elements : int
    """

    key: str
    dtype: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.elements * ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: elements of ``dtype`` in a storage. Nothing in ``view`` is checked yet."""

    storage: Storage
    dtype: str
    view: Strided

    def problem(self) -> str | None:
        """Return what is wrong with the view, or None."""
        return self.view.problem(self.storage.nbytes // ITEMSIZES[self.dtype])


def read_state(data: bytes) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of a pickled dictionary by name, and what is wrong with it, a sentence each.

    Values that are plain (numbers, text, lists and dictionaries without tensors) are left aside.

    Raises
    ------
    RefusedPickle
        When the pickle is damaged or has anything but tensors and plain values in it.
    """
    names = _TorchNames()
    state = read_pickle(data, names)
    if type(state) is not dict:
        raise RefusedPickle("holds no dictionary of tensors by name, as a state dict is")
    tensors: dict[str, StoredTensor] = {}
    problems = []
    plain: set[int] = set()  # dictionaries that are looked through already: one may be there under many names
    for name, value in state.items():
        if not isinstance(value, StoredTensor):
            if type(value) is dict and id(value) not in plain:
                plain.add(id(value))
                if any(isinstance(item, StoredTensor) for item in value.values()):
                    problems.append(f"holds a dictionary of tensors under {name!r}, expected one alone: save only that")
            continue
        if not isinstance(name, str):
            problems.append(f"names a tensor by the number {name}, expected text")
        elif problem := value.problem():
            problems.append(f"tensor {name!r} has {problem}")
        else:
            tensors[name] = value
    return tensors, problems


@dataclass(frozen=True, slots=True, eq=False)
class _Global:
    """A name that the pickle may use: what to do when it is called, the dtype that it stands for."""

    name: str
    call: Callable[[tuple[object, ...]], object] | None = None
    dtype: str | None = None
    storage: str | None = None


class _TorchNames:
    """The vocabulary of a state dict."""

    def __init__(self) -> None:
        self._storages: dict[str, Storage] = {}

    def find(self, name: str) -> object:
        found = _GLOBALS.get(name)
        if found is None:
            raise RefusedPickle(
                f"asks for {name[:200]!r}, which is no part of a tensor: nothing was executed, and the file is not read"
            )
        return found

    def call(self, function: object, arguments: tuple[object, ...]) -> object:
        if not isinstance(function, _Global) or function.call is None:
            raise RefusedPickle("calls something that is no function of a tensor")
        return function.call(arguments)

    def load(self, reference: object) -> object:
        match reference:
            case ("storage", _Global(storage=str(dtype)), str(key), str(), int(elements)) if (
                elements >= 0 and len(key) <= _LONGEST_KEY
            ):
                storage = self._storages.setdefault(key, Storage(key, dtype, elements))
                if (storage.dtype, storage.elements) != (dtype, elements):
                    raise RefusedPickle(f"refers to the storage {key!r} in two ways")
                return storage
        raise RefusedPickle("refers to something outside that is no storage")


def _tensor(arguments: tuple[object, ...]) -> object:
    """``_rebuild_tensor(storage, offset, size, stride)``, and ``_rebuild_tensor_v2``, which has more behind it."""
    match arguments:
        case (Storage() as storage, offset, shape, strides) | (
            Storage() as storage,
            offset,
            shape,
            strides,
            bool(),
            dict() | None,
        ):
            return _viewed(storage, storage.dtype, offset, shape, strides)
        case (Storage() as storage, offset, shape, strides, bool(), dict() | None, metadata):
            _require_plain(metadata)
            return _viewed(storage, storage.dtype, offset, shape, strides)
    raise RefusedPickle("builds a tensor of something else than a storage, a shape and strides")


def _tensor_of_dtype(arguments: tuple[object, ...]) -> object:
    """``_rebuild_tensor_v3``: a storage of bytes, and the dtype behind the hooks."""
    match arguments:
        case (Storage() as storage, offset, shape, strides, bool(), dict() | None, _Global(dtype=str(dtype)), *rest):
            if len(rest) <= 1:
                _require_plain(*rest)
                return _viewed(storage, dtype, offset, shape, strides)
    raise RefusedPickle("builds a tensor of something else than a storage, a shape, strides and a dtype")


def _viewed(storage: Storage, dtype: str, offset: object, shape: object, strides: object) -> StoredTensor:
    if type(offset) is int and _is_integers(shape) and _is_integers(strides):
        return StoredTensor(storage, dtype, Strided(offset, shape, strides))
    raise RefusedPickle("builds a tensor with an offset, a shape or strides that are not integers")


def _is_integers(value: object) -> TypeGuard[tuple[int, ...]]:
    # the length first: what is shared may be looked at very often
    return type(value) is tuple and len(value) <= MAX_DIMENSIONS and all(type(item) is int for item in value)


def _require_plain(metadata: object = None) -> None:
    if type(metadata) is dict and len(metadata) <= _MOST_METADATA and not any(metadata.values()):
        return
    if metadata is not None:
        raise RefusedPickle("has a tensor that is to be negated or conjugated when it is read: save it resolved")


def _parameter(arguments: tuple[object, ...]) -> object:
    """``_rebuild_parameter(tensor, requires_grad, hooks)``, also with a state behind it."""
    match arguments:
        case (StoredTensor() as tensor, bool(), dict() | None, *rest) if len(rest) <= 1:
            return tensor
    raise RefusedPickle("builds a parameter of something else than a tensor")


def _tensor_with_attributes(arguments: tuple[object, ...]) -> object:
    """``_rebuild_from_type_v2(function, type, arguments, state)``: attributes are dropped."""
    match arguments:
        case (_Global(call=function), _Global(name=kind), tuple() as inner, _):
            if function in (_tensor, _tensor_of_dtype, _parameter) and kind in _TENSOR_TYPES:
                return function(inner)
    raise RefusedPickle("builds a tensor of a kind of its own")


def _without_data(arguments: tuple[object, ...]) -> object:
    raise RefusedPickle("has a tensor without data (of PyTorch's meta device)")


def _size(arguments: tuple[object, ...]) -> object:
    match arguments:
        case (extents,) if _is_integers(extents):
            return extents
    raise RefusedPickle("builds a torch.Size of something else than integers")


def _ordered(arguments: tuple[object, ...]) -> object:
    if arguments:
        raise RefusedPickle("builds an OrderedDict in a way that torch.save does not")
    return {}


_TENSOR_TYPES: Final = ("torch.Tensor", "torch.nn.parameter.Parameter")
_CALLS: Final[Mapping[str, Callable[[tuple[object, ...]], object]]] = {
    "collections.OrderedDict": _ordered,
    "torch.Size": _size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_meta_tensor_no_storage": _without_data,
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
}
_GLOBALS: Final[Mapping[str, _Global]] = {
    **{name: _Global(name, call=call) for name, call in _CALLS.items()},
    **{f"torch.{name}": _Global(f"torch.{name}", storage=dtype) for name, dtype in _STORAGES.items()},
    **{name: _Global(name, storage="u8") for name in _BYTES},
    **{f"torch.{name}": _Global(f"torch.{name}", dtype=dtype) for name, dtype in _DTYPES.items()},
    **{name: _Global(name) for name in _TENSOR_TYPES},
}
