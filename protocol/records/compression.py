"""The codecs of a record batch, each with a hard limit on its output.

The problem: a few kilobytes can decompress to gigabytes, and a reader cannot trust the writer of a batch. So
`decompress` never gives the codec a growing buffer: it allocates one of fixed size, lets the codec fill it, and retries
with a larger one only up to the caller's limit. The first size is the one that the compressed data announces, if its
format does so (exact for gzip, snappy and our own zstd), and otherwise a guess; an announced size is a hint, never
trusted beyond the limit. Rejected: cramjam's `decompress`, whose output grows without bound; a buffer of the limit at
once, whose clearing costs more than most decompressions.

The formats are those of Kafka's batches, so one implementation serves both magics: gzip members, LZ4 frames of
independent blocks, zstd frames, and for snappy the framing of snappy-java (xerial): a 16-byte header, then blocks, each
a big-endian length and raw snappy. A body without that header is one raw snappy block, as librdkafka writes it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum

import cramjam


class DecompressionFailed(ValueError):
    """The data is not valid for its codec."""


class DecompressionTooLarge(DecompressionFailed):
    """The data would be larger than the limit once decompressed."""


class Compression(IntEnum):
    """A codec, numbered as in bits 0-2 of a batch's attributes (Kafka's CompressionType)."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4

    @classmethod
    def from_name(cls, name: str) -> Compression:
        """Return the codec that `compression.type` calls `name`. Raises ValueError, naming the choices."""
        try:
            return cls[name.upper()]
        except KeyError:
            choices = ", ".join(codec.name.lower() for codec in cls)
            raise ValueError(f"unknown compression {name!r}: use one of {choices}") from None


# Kafka's ranges for compression.gzip.level, compression.lz4.level and compression.zstd.level (KIP-390).
LEVELS = {Compression.GZIP: (1, 9), Compression.LZ4: (1, 17), Compression.ZSTD: (-131072, 22)}

_MODULES = {
    Compression.GZIP: cramjam.gzip,
    Compression.LZ4: cramjam.lz4,
    Compression.ZSTD: cramjam.zstd,
}

# cramjam's default for LZ4 is the high compression mode, 28 times as slow on random bytes.
_LZ4_LEVEL = 1
# Independent blocks of at most 64 KiB: with a checksum behind each, as cramjam writes them, and without.
_LZ4_WITH_CHECKSUMS = bytes.fromhex("04224d18 7040ad")
_LZ4_HEADER = bytes.fromhex("04224d18 604082")
_LZ4_SIZE = struct.Struct("<I")
_LZ4_NOT_COMPRESSED = 1 << 31
_LZ4_CHECKSUM_BYTES = 4

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER = _XERIAL_MAGIC + struct.pack(">ii", 1, 1)  # version, oldest compatible version
_XERIAL_BLOCK = struct.Struct(">I")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_RLE = 1
_ZSTD_COMPRESSED = 2

_SMALLEST_GUESS = 4096
_GROWTH = 4

_LARGEST_RATIOS = {
    Compression.NONE: 1,
    Compression.GZIP: 1_032,  # a match of 258 bytes in two bits
    Compression.SNAPPY: 22,  # a copy of 64 bytes in three
    Compression.LZ4: 255,  # a byte for each 255 of a match
    Compression.ZSTD: 1 << 15,  # a block of 128 KiB in four bytes
}
"""The largest number of output bytes for each input byte."""
_LZ4_MAGIC = 0x184D2204
_LZ4_BLOCK_BYTES = {4: 64 << 10, 5: 256 << 10, 6: 1 << 20, 7: 4 << 20}
_ZSTD_BLOCK_BYTES = 128 << 10
_MOST_BLOCKS = 1_024
"""The largest number of blocks to count, at 0.4 us each."""


def compress(codec: Compression, data: bytes | bytearray | memoryview, level: int | None = None) -> bytes:
    """Return `data` in the format of `codec`; `level` None is the codec's default.

    Raises ValueError for a level that the codec does not have (snappy and none have no levels).
    """
    if level is not None:
        lowest, highest = LEVELS.get(codec, (0, -1))
        if not lowest <= level <= highest:
            allowed = f"{lowest}..{highest}" if codec in LEVELS else "none"
            raise ValueError(f"{codec.name.lower()} has no level {level} (levels: {allowed})")
    if codec is Compression.NONE:
        return bytes(data)
    if codec is Compression.SNAPPY:
        block = cramjam.snappy.compress_raw(data)
        return b"".join((_XERIAL_HEADER, _XERIAL_BLOCK.pack(len(block)), block))
    if codec is Compression.LZ4:
        return _compress_lz4(bytes(data), level or _LZ4_LEVEL)
    return bytes(_MODULES[codec].compress(data, level=level))


def _compress_lz4(data: bytes, level: int) -> bytes:
    """Compress into independent blocks without checksums. Kafka's Java client supports no linked blocks, and the Go
    clients reject correct checksums of blocks (pierrec/lz4 4.1.19). The batch has its own checksum."""
    compressor = cramjam.lz4.Compressor(level, content_checksum=False, block_linked=False)
    compressor.compress(data)
    frame = memoryview(compressor.finish())
    assert frame[: len(_LZ4_WITH_CHECKSUMS)] == _LZ4_WITH_CHECKSUMS, bytes(frame[:7])
    parts: list[bytes | memoryview] = [_LZ4_HEADER]
    position = len(_LZ4_WITH_CHECKSUMS)
    while size := _LZ4_SIZE.unpack_from(frame, position)[0]:
        end = position + _LZ4_SIZE.size + (size & ~_LZ4_NOT_COMPRESSED)
        parts.append(frame[position:end])
        position = end + _LZ4_CHECKSUM_BYTES
    parts.append(_LZ4_SIZE.pack(0))
    return b"".join(parts)


def decompress(codec: Compression, data: bytes | bytearray | memoryview, limit: int) -> bytes | bytearray | memoryview:
    """Return the input of `compress`, in at most `limit` bytes; `data` itself for `Compression.NONE`.

    Memory stays near the limit for any data (up to twice the limit for zstd, which keeps a window beside the output).
    Raises DecompressionTooLarge past the limit, and DecompressionFailed for data that is cut short, corrupt or followed
    by anything but another frame. A cut between two blocks of snappy is not detected, since its framing announces no
    total; the batch's CRC detects it.
    """
    if codec is Compression.NONE:
        if len(data) > limit:
            raise DecompressionTooLarge(f"{len(data)} bytes, more than the limit of {limit}")
        return data
    view = memoryview(data)
    if codec is Compression.SNAPPY:
        return _decompress_snappy(view, limit)
    announced = _announced_gzip(view) if codec is Compression.GZIP else None
    if codec is Compression.ZSTD:
        announced = _announced_zstd(view)
    if announced is not None and announced > limit:
        raise DecompressionTooLarge(
            f"{codec.name.lower()}: announces {announced} bytes, more than the limit of {limit}"
        )
    size = min(limit, max(_SMALLEST_GUESS, len(view) * _GROWTH) if announced is None else announced)
    decompress_into = _MODULES[codec].decompress_into
    while True:
        output = bytearray(size)
        try:
            return memoryview(output)[: decompress_into(view, output)]
        except cramjam.DecompressionError as error:
            # Retry after any failure below the limit: if cramjam changed its text for "does not fit", valid batches
            # would otherwise count as corrupt.
            if size == limit:
                if "failed to write whole buffer" in str(error):
                    raise DecompressionTooLarge(
                        f"{codec.name.lower()}: more than the limit of {limit} bytes"
                    ) from error
                raise DecompressionFailed(f"{codec.name.lower()}: {error}") from error
        size = min(limit, max(_SMALLEST_GUESS, size * _GROWTH))


BEGINNINGS: dict[int, tuple[bytes, ...]] = {
    Compression.GZIP: (b"\x1f\x8b",),
    Compression.LZ4: (b"\x04\x22\x4d\x18",),
    # frames to be skipped may come first (RFC 8878, 3.1.2)
    Compression.ZSTD: (b"\x28\xb5\x2f\xfd", *(bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60))),
}
"""The first bytes of compressed data. Snappy has none."""


def may_exceed(codec: Compression, data: bytes | bytearray | memoryview, limit: int) -> bool:
    """Return whether the output may exceed `limit` bytes, derived from the frames in less than a millisecond.

    False is certain, except for gzip data of several members, which no Kafka client writes: only the last one counts.
    True if only decompression can tell."""
    if len(data) * _LARGEST_RATIOS[codec] <= limit:
        return False
    view = memoryview(data)
    try:
        if codec is Compression.GZIP:
            announced = _announced_gzip(view) if len(view) * _LARGEST_RATIOS[codec] < 1 << 32 else None
            return announced is None or announced > limit
        if codec is Compression.SNAPPY:
            lengths = map(cramjam.snappy.decompress_raw_len, _snappy_blocks(view))
            return _sum_exceeds(lengths, limit)
        if codec is Compression.LZ4:
            return _sum_exceeds(_lz4_block_bounds(view), limit)
        if codec is Compression.ZSTD:
            return _sum_exceeds(_zstd_frame_bounds(view), limit)
    except (IndexError, struct.error, DecompressionFailed, cramjam.DecompressionError):
        pass  # cut short, or corrupt
    return True


def most_output(codec: Compression, data: bytes | bytearray | memoryview, limit: int) -> int:
    """Return an upper bound of the decompressed size, at most four times too large; `limit` if it is larger."""
    bound = min(limit, max(_SMALLEST_GUESS, len(data)))
    while bound < limit and may_exceed(codec, data, bound):
        bound = min(limit, bound * _GROWTH)
    return bound


def _sum_exceeds(bounds: Iterable[int], limit: int) -> bool:
    total = 0
    for number, bound in enumerate(bounds):
        total += bound
        if total > limit or number >= _MOST_BLOCKS:
            return True
    return False


def _lz4_block_bounds(data: memoryview) -> Iterator[int]:
    """Yield the largest output of each block."""
    position = 0
    while position < len(data):
        if _LZ4_SIZE.unpack_from(data, position)[0] != _LZ4_MAGIC:
            raise DecompressionFailed("lz4: not a frame")
        flags = data[position + 4]
        largest = _LZ4_BLOCK_BYTES.get(data[position + 5] >> 4 & 7, 0)
        position += 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
        while size := _LZ4_SIZE.unpack_from(data, position)[0]:
            is_stored, size = size >> 31, size & ~_LZ4_NOT_COMPRESSED
            position += _LZ4_SIZE.size + size + (_LZ4_CHECKSUM_BYTES if flags & 0x10 else 0)
            yield size if is_stored else min(largest, size * _LARGEST_RATIOS[Compression.LZ4])
        position += _LZ4_SIZE.size + (_LZ4_CHECKSUM_BYTES if flags & 0x04 else 0)


def _zstd_frame_bounds(data: memoryview) -> Iterator[int]:
    """Yield the largest output of each block (RFC 8878, 3.1.1), in total at most what its frame announces."""
    position = 0
    while position < len(data):
        if data[position : position + 4] != _ZSTD_MAGIC:
            raise DecompressionFailed("zstd: not a frame")
        descriptor = data[position + 4]
        left = _announced_zstd(data[position:])
        single_segment = descriptor >> 5 & 1
        size_bytes = (single_segment, 2, 4, 8)[descriptor >> 6]
        position += 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
        is_last = 0
        while not is_last:
            block = data[position] | data[position + 1] << 8 | data[position + 2] << 16
            is_last, kind, size = block & 1, block >> 1 & 3, block >> 3
            position += 3 + (1 if kind == _ZSTD_RLE else size)
            bound = _ZSTD_BLOCK_BYTES if kind == _ZSTD_COMPRESSED else size
            if left is not None:
                bound = min(bound, left)
                left -= bound
            yield bound
        position += 4 if descriptor >> 2 & 1 else 0


def _announced_gzip(data: memoryview) -> int | None:
    """Return the length in the trailer: that of the last member, modulo 2**32."""
    return int.from_bytes(data[-4:], "little") if len(data) >= 18 else None


def _announced_zstd(data: memoryview) -> int | None:
    """Return the content size in the first frame's header (RFC 8878, 3.1.1.1), if it is there."""
    if len(data) < 5 or data[:4] != _ZSTD_MAGIC:
        return None
    descriptor = data[4]
    single_segment = descriptor >> 5 & 1
    size_flag = descriptor >> 6
    length = (single_segment, 2, 4, 8)[size_flag]
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if length == 0 or len(data) < start + length:
        return None
    return int.from_bytes(data[start : start + length], "little") + (256 if size_flag == 1 else 0)


def _snappy_blocks(data: memoryview) -> Iterator[memoryview]:
    """Yield the raw blocks. Raises DecompressionFailed."""
    if data[: len(_XERIAL_MAGIC)] == _XERIAL_MAGIC:
        position = len(_XERIAL_HEADER)
        if position > len(data):
            raise DecompressionFailed("snappy: cut short within the header")
        while position < len(data):
            start = position + _XERIAL_BLOCK.size
            if start > len(data):
                raise DecompressionFailed("snappy: cut short within a block's length")
            position = start + _XERIAL_BLOCK.unpack_from(data, position)[0]
            if position > len(data):
                raise DecompressionFailed("snappy: cut short within a block")
            yield data[start:position]
    else:
        yield data


def _decompress_snappy(data: memoryview, limit: int) -> memoryview:
    """Add up the announced sizes of the blocks, then decompress them into a buffer of that size."""
    blocks = list(_snappy_blocks(data))
    try:
        lengths = [cramjam.snappy.decompress_raw_len(block) for block in blocks]
        if sum(lengths) > limit:
            raise DecompressionTooLarge(f"snappy: announces {sum(lengths)} bytes, more than the limit of {limit}")
        output = memoryview(bytearray(sum(lengths)))
        position = 0
        for block, length in zip(blocks, lengths, strict=True):
            written = cramjam.snappy.decompress_raw_into(block, output[position : position + length])
            if written != length:
                raise DecompressionFailed(f"snappy: a block of {length} bytes held {written}")
            position += length
    except cramjam.DecompressionError as error:
        raise DecompressionFailed(f"snappy: {error}") from error
    return output
