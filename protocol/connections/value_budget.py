"""A bound on the values of a MessagePack frame, checked before the frame is decoded.

A decoder makes an object of a hundred bytes and more out of three bytes of a frame. msgspec bounds each list by itself,
but lists within lists multiply: a request of 25 MB took 14 seconds and 3.4 GB. Bytes and strings are skipped, so the
check costs in proportion to the values, and ends at the bound.
"""

from struct import Struct

from minibroker.protocol.errors import InvalidMessage
from minibroker.protocol.messages import Buffer

_LENGTHS = {1: Struct(">B").unpack_from, 2: Struct(">H").unpack_from, 4: Struct(">I").unpack_from}

_SIZES = [1] * 256
"""By the first byte of a value: the bytes that it takes, or those before its contents if their length follows."""
_VALUES = [0] * 256
"""By the first byte: the values within it, if the first byte has their number."""
_MEASURED: dict[int, tuple[int, int, int]] = {}
"""By the first byte: the width of the length that follows, the bytes for each unit of it, and the values."""
for _first in range(0x80, 0x90):  # maps
    _VALUES[_first] = 2 * (_first & 0x0F)
for _first in range(0x90, 0xA0):  # arrays
    _VALUES[_first] = _first & 0x0F
for _first in range(0xA0, 0xC0):  # strings
    _SIZES[_first] = 1 + (_first & 0x1F)
for _first, _size in zip(range(0xCA, 0xD9), (5, 9, 2, 3, 5, 9, 2, 3, 5, 9, 3, 4, 6, 10, 18), strict=True):
    _SIZES[_first] = _size  # numbers, extensions of fixed size
for _position, _width in enumerate((1, 2, 4)):
    _MEASURED[0xC4 + _position] = _width, 1, 0  # bytes
    _MEASURED[0xD9 + _position] = _width, 1, 0  # strings
    _MEASURED[0xC7 + _position] = _width, 1, 0  # extensions, whose type follows the length
    _SIZES[0xC4 + _position] = _SIZES[0xD9 + _position] = 1 + _width
    _SIZES[0xC7 + _position] = 2 + _width
for _position, _width in enumerate((2, 4)):
    _MEASURED[0xDC + _position] = _width, 0, 1  # arrays
    _MEASURED[0xDE + _position] = _width, 0, 2  # maps
    _SIZES[0xDC + _position] = _SIZES[0xDE + _position] = 1 + _width


def check_values(frame: Buffer, most: int, what: str) -> None:
    """Raise InvalidMessage if the first value of the frame consists of more than `most` values, at all depths. A frame
    that ends too early is left to the decoder. `what` are the things that the values describe."""
    values, position = count_values(frame, most)
    if values > most:
        raise InvalidMessage(
            f"the request consists of more than {most} values, at {position} of its {len(frame)} bytes: "
            f"name fewer {what} in a request"
        )


def count_values(frame: Buffer, most: int) -> tuple[int, int]:
    """Return the number of values within the first value of the frame, at all depths, and the position after the last
    one looked at. Counting ends above `most`."""
    position, end = 0, len(frame)
    pending, seen = 1, 0
    while pending and position < end:
        pending -= 1
        first = frame[position]
        values = _VALUES[first]
        measured = _MEASURED.get(first)
        if measured is not None:
            width, bytes_each, values_each = measured
            if position + 1 + width > end:
                break
            (length,) = _LENGTHS[width](frame, position + 1)
            position += length * bytes_each
            values = length * values_each
        position += _SIZES[first]
        if values:
            pending += values
            seen += values
            if seen > most:
                break
    return seen, position
