"""How much memory a message of msgpack is going to make."""

from typing_extensions import Buffer

def weigh(
    data: Buffer,
    most: int,
    container_bytes: int = 72,
    text_bytes: int = 56,
    *,
    value_bytes: int = 0,
    number_bytes: int = 0,
    text_keys: int = 0,
    has_float_keys: bool = False,
    has_sets: int = 0,
    has_set_keys: bool = False,
    tags: bytes = b"",
) -> int: ...
