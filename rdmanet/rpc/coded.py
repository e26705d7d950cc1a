# cython: annotation_typing=False, nonecheck=True
# Method is copied (method.py: fitted), by what Cython makes for pickle.
"""What each call has to know of its method: compiled, since each call asks for much of it."""

from __future__ import annotations

from typing import Any

from rdmanet.rpc.errors import Code, Error
from rdmanet.rpc.framing import with_tail


class Coded:
    """A method, as calls of it see it; method.py says how this comes about.

    :ivar number: its place in the schema
    :ivar name: its name in the class
    :ivar label: the same with the service's name
    :ivar kind: who streams
    :ivar count: how many positional arguments make a complete call; -1 if there are keywords or a stream, too
    :ivar buffers: which parameters may go by reference
    :ivar bytes_at: the place of the one parameter that may go by reference or in the message, if that is no array; else
        -1
    :ivar brings: whether there are arrays inside of the arguments (packing.py); and so `result_brings`
    :ivar result_is_apart: whether the result may need more than to be decoded
    :ivar result_is_memory: whether it may be memory that the service changes after it has returned it (snapshot.py)
    :ivar is_limited: whether its options say how long a call may take, or how many there may be
    :ivar exact: decodes arguments that are complete, or raises an Exception
    :ivar scale: weighs arguments before they are decoded, if these are of `weighed_bytes` or more
    """

    def __init__(self, label: str, name: str) -> None:
        self.label = label
        self.name = name
        self.number = -1
        self.bytes_at = -1
        self.brings = self.result_brings = self.result_is_apart = False
        self.result_is_buffer = self.result_is_array = self.result_is_memory = False

    def read_result(self, decode: Any, scale: Any) -> None:
        """Results are decoded, and weighed before that, by these."""
        self._result = decode
        self._result_scale = scale
        self._weighed_result_bytes = scale.least

    def decode_result(self, raw: Any, most: int) -> Any:
        """A call's result, or an item that the callee streams. A buffer or an array is as in `decode_arguments`.

        :raises Error: INTERNAL; it is not of its type. RESOURCE_EXHAUSTED; its objects take more bytes than `most`
        """
        if len(raw) >= self._weighed_result_bytes:
            self._result_scale.weigh(raw, most)
        try:
            return self._result(raw)
        except Exception as exc:
            raise self.wrong_result(exc) from None

    def tailed_result(self, raw: bytes, tail: bytes, most: int) -> Any:
        """The same as `decode_result`, for a result that has come as a tail (framing.PlainReply)."""
        if not self.result_is_buffer or self.result_is_array:
            return self.decode_result(with_tail(raw, tail), most)
        return tail if type(self.decode_result(raw, most)) is bytes else memoryview(tail)

    def wrong_result(self, exc: BaseException) -> Error:
        """The error for a result that is not of its type."""
        return Error(Code.INTERNAL, f"{self.label}: the result that has come is not of its type: {exc}")
