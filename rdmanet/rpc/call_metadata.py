"""What a call carries beside its arguments: metadata, a map from names to texts or bytes. No I/O.

It is for what goes along with calls of every method: an identity, a trace, a tenant. Both sides limit its length in
msgpack by `Limits.metadata_bytes`. A call whose metadata is too long, or something else than such a map, is refused,
and others are not concerned.
"""

from __future__ import annotations

import datetime  # noqa: F401  before msgspec, see credit.py
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rdmanet.errors import shown
from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.limits import Limits, exceeded
from rdmanet.rpc.messages import encode
from rdmanet.rpc.weights import Scale

__all__ = ["Metadata"]

Metadata = dict[str, str | bytes]

_scale: Final = Scale(dict[str, Any])
_decode: Final = msgspec.msgpack.Decoder(dict[Annotated[str, Meta(max_length=256)], Any] | None).decode


def checked_metadata(metadata: Mapping[str, str | bytes], most: int) -> Metadata | None:
    """Metadata that is to be sent; None if it is empty.

    :param most: its length in bytes
    :raises TypeError: it is something else
    :raises Error: RESOURCE_EXHAUSTED
    """
    found = dict(metadata)
    for name, value in found.items():
        if not isinstance(name, str) or len(name) > 256:
            raise TypeError(f"metadata: {shown(name)} is not a text of at most 256 characters")
        if not isinstance(value, (str, bytes)):
            raise TypeError(f"metadata: {name!r} is {shown(value)}, and must be a str or bytes")
    if (length := len(encode(found))) > most:
        raise exceeded("metadata_bytes", most, f"metadata of {length} bytes")
    return found or None


def decoded(raw: Any, limits: Limits) -> tuple[Metadata, int]:
    """Metadata that a peer has sent, and how many bytes of memory it takes, as it came and as it is decoded.

    :raises Error: INVALID_ARGUMENT, RESOURCE_EXHAUSTED
    """
    length, most = len(raw), limits.metadata_bytes
    if length > most:
        raise exceeded("metadata_bytes", most, f"metadata of {length} bytes")
    made_bytes = _scale.weigh(raw, limits.decoded_bytes)
    try:
        found = _decode(raw) or {}
    except Exception:
        raise _wrong() from None
    if not all(isinstance(value, (str, bytes)) for value in found.values()):
        raise _wrong()
    return found, length + made_bytes


def _wrong() -> Error:
    return Error(Code.INVALID_ARGUMENT, "the metadata is not a map from names to texts or bytes")
