"""Names, sizes and safetensors codes of the element types a checkpoint can hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class DType:
    """An element type.

    Attributes:
        size_bytes: Size of one element, a power of two.
        safetensors: Code in a data file's header. None where some safetensors readers know no code and would refuse
            the file: such a tensor is stored as U8 with one more dimension of `size_bytes`.
        in_numpy: Whether plain numpy has the type.
    """

    size_bytes: int
    safetensors: str | None
    in_numpy: bool


def _numpy(size_bytes: int, safetensors: str | None) -> DType:
    return DType(size_bytes=size_bytes, safetensors=safetensors, in_numpy=True)


def _torch_only(size_bytes: int, safetensors: str | None) -> DType:
    return DType(size_bytes=size_bytes, safetensors=safetensors, in_numpy=False)


# By torch's name, which is numpy's too wherever both have the type.
DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        "bool": _numpy(1, "BOOL"),
        "uint8": _numpy(1, "U8"),
        "int8": _numpy(1, "I8"),
        "uint16": _numpy(2, "U16"),
        "int16": _numpy(2, "I16"),
        "uint32": _numpy(4, "U32"),
        "int32": _numpy(4, "I32"),
        "uint64": _numpy(8, "U64"),
        "int64": _numpy(8, "I64"),
        "float16": _numpy(2, "F16"),
        "float32": _numpy(4, "F32"),
        "float64": _numpy(8, "F64"),
        "complex64": _numpy(8, None),
        "complex128": _numpy(16, None),
        "complex32": _torch_only(4, None),
        "bfloat16": _torch_only(2, "BF16"),
        "float8_e4m3fn": _torch_only(1, "F8_E4M3"),
        "float8_e5m2": _torch_only(1, "F8_E5M2"),
        "float8_e4m3fnuz": _torch_only(1, None),
        "float8_e5m2fnuz": _torch_only(1, None),
        "float8_e8m0fnu": _torch_only(1, None),
        "float4_e2m1fn_x2": _torch_only(1, None),
    }
)
