"""The codecs of a record batch, each with a hard limit on what comes out.

A few kilobytes can announce, and decompress to, gigabytes, and the reader of a batch did not write it. So
`decompress` never hands the codec a buffer that can grow: it allocates one, lets the codec fill
it, and tries again with a larger one only up to the caller's limit. The first size is what the
compressed data says about itself where the format says anything (exact for gzip, snappy and our own
zstd), and a guess otherwise; what the data says is a hint, never trusted beyond the limit. Rejected:
cramjam's `decompress`, whose output grows without bound, and a buffer of the limit at once, whose
clearing costs more than most decompressions.

The formats are the ones Kafka puts into its batches, so that one implementation serves both of our
magics: gzip members, LZ4 frames of blocks that stand alone, zstd frames, and for snappy the framing
of snappy-java (xerial): a 16-byte header, then blocks, each a big-endian length and raw snappy. A
body without that header is one raw snappy block: librdkafka writes those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum

import cramjam


class DecompressionFailed(ValueError):
    """The data is not what its codec writes."""


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
        """The codec that `compression.type` calls `name`. Raises ValueError, naming the choices."""
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

# cramjam's own default for LZ4 is the high compression mode, 28 times as slow on random bytes.
_LZ4_LEVEL = 1
# Blocks of at most 64 KiB that stand alone: with a checksum behind each, as cramjam writes them, and without.
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
"""At most so many bytes come out for each that goes in."""
_LZ4_MAGIC = 0x184D2204
_LZ4_BLOCK_BYTES = {4: 64 << 10, 5: 256 << 10, 6: 1 << 20, 7: 4 << 20}
_ZSTD_BLOCK_BYTES = 128 << 10
_MOST_BLOCKS = 1_024
"""That are counted, at 0.4 us each."""


def compress(codec: Compression, data: bytes | bytearray | memoryview, level: int | None = None) -> bytes:
    """`data` in the format of `codec`; `level` None is the codec's default.

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
    """As Kafka's Java client does, which supports no blocks that refer to those before them; and the Go clients take
    right checksums of blocks for wrong ones (pierrec/lz4 4.1.19). The batch has a checksum."""
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
    """What `compress` was given, in at most `limit` bytes; `data` itself for `Compression.NONE`.

    Memory stays near the limit whatever the data says (zstd keeps a window beside the output, so
    "near" is up to twice). Raises DecompressionTooLarge past the limit, DecompressionFailed for data
    that is cut short, corrupt or followed by anything that is not a further frame. (A cut between two
    blocks of snappy goes unseen, as its framing announces no total: the batch's CRC is for that.)
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
            # Any failure below the limit is worth another try: if the codec's words for "does not fit" changed and we
            # mistook them for corruption, good batches would be unreadable.
            if size == limit:
                if "failed to write whole buffer" in str(error):
                    raise DecompressionTooLarge(
                        f"{codec.name.lower()}: more than the limit of {limit} bytes"
                    ) from error
                raise DecompressionFailed(f"{codec.name.lower()}: {error}") from error
        size = min(limit, max(_SMALLEST_GUESS, size * _GROWTH))


def may_exceed(codec: Compression, data: bytes | bytearray | memoryview, limit: int) -> bool:
    """Whether more than `limit` bytes may come out of `data`, told from its frames in less than a millisecond. False is
    certain, with one exception: gzip data of several members, which no Kafka client writes, passes for as long as the
    last of them. True where only decompressing it can tell."""
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


def _sum_exceeds(bounds: Iterable[int], limit: int) -> bool:
    total = 0
    for number, bound in enumerate(bounds):
        total += bound
        if total > limit or number >= _MOST_BLOCKS:
            return True
    return False


def _lz4_block_bounds(data: memoryview) -> Iterator[int]:
    """What each block may become."""
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
    """What each block may become (RFC 8878, 3.1.1), but no more in a frame than it announces: decoders compare."""
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
    """The length in the trailer: of the last member, modulo 2**32."""
    return int.from_bytes(data[-4:], "little") if len(data) >= 18 else None


def _announced_zstd(data: memoryview) -> int | None:
    """The content size in the first frame's header (RFC 8878, 3.1.1.1), if it is there."""
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
    """Raises DecompressionFailed."""
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
    """One pass to add up what the blocks announce, one to decompress them into a buffer of that size."""
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
