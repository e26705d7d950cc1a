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
) -> int:
    """How many bytes of memory the objects will take that a value in msgpack becomes, beside its texts and bytes.

    :raises OverflowError: it is more than `most`
    :raises RecursionError: it is nested too deep
    :raises ValueError: it has maps or sets whose keys collide, or maps in each other whose tags come late
    """
