from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from pathlib import Path
from random import Random

import cramjam
import pytest

from minibroker.protocol.records.compression import (
    Compression,
    DecompressionFailed,
    DecompressionTooLarge,
    compress,
    decompress,
    may_exceed,
)

REPOSITORY = Path(__file__).resolve().parents[3]
CODECS = [codec for codec in Compression if codec is not Compression.NONE]
TEXT = b"".join(b"record %d says hello; " % number for number in range(3000))


def zstd_of_repeated_blocks(window_log: int, blocks: int) -> bytes:
    """A frame without content size: each block says "128 KiB of zeros" in four bytes (RFC 8878)."""
    middle = (131072 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (131072 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x00" + bytes([window_log - 10 << 3]) + middle * (blocks - 1) + last


@pytest.mark.parametrize("codec", list(Compression))
@pytest.mark.parametrize("data", [b"", b"a", TEXT, bytes(1_000_000)], ids=["empty", "one", "text", "zeros"])
def test_every_codec_returns_what_it_was_given(codec: Compression, data: bytes) -> None:
    assert bytes(decompress(codec, compress(codec, data), len(data))) == data


@pytest.mark.parametrize("codec", list(Compression))
def test_any_buffer_can_be_compressed_and_decompressed(codec: Compression) -> None:
    compressed = compress(codec, memoryview(bytearray(TEXT)))

    assert bytes(decompress(codec, memoryview(bytearray(compressed)), len(TEXT))) == TEXT


@pytest.mark.parametrize("codec", list(Compression))
def test_one_byte_more_than_the_limit_is_too_large(codec: Compression) -> None:
    with pytest.raises(DecompressionTooLarge):
        decompress(codec, compress(codec, TEXT), len(TEXT) - 1)


@pytest.mark.parametrize("codec", CODECS)
def test_data_cut_short_anywhere_is_refused(codec: Compression) -> None:
    compressed = compress(codec, TEXT[:200])

    for length in range(len(compressed)):
        if codec is Compression.SNAPPY and length == 16:
            continue  # between the header and the first block: to the framing, an empty body
        with pytest.raises(DecompressionFailed):
            decompress(codec, compressed[:length], 10_000)


@pytest.mark.parametrize("codec", CODECS)
def test_trailing_bytes_are_refused(codec: Compression) -> None:
    with pytest.raises(DecompressionFailed):
        decompress(codec, compress(codec, TEXT) + b"x", 1_000_000)


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.LZ4, Compression.ZSTD])
def test_several_frames_are_one_body_though_the_first_announces_less(codec: Compression) -> None:
    compressed = compress(codec, TEXT) + compress(codec, b"tail")

    assert bytes(decompress(codec, compressed, 1_000_000)) == TEXT + b"tail"


def test_gzip_is_what_other_gzip_programs_read_and_write() -> None:
    assert gzip.decompress(compress(Compression.GZIP, TEXT)) == TEXT
    assert bytes(decompress(Compression.GZIP, gzip.compress(TEXT), len(TEXT))) == TEXT


def test_zstd_without_a_content_size_grows_up_to_the_limit() -> None:
    frame = zstd_of_repeated_blocks(window_log=17, blocks=8)

    assert bytes(decompress(Compression.ZSTD, frame, 1 << 20)) == bytes(1 << 20)
    with pytest.raises(DecompressionTooLarge):
        decompress(Compression.ZSTD, frame, (1 << 20) - 1)


def test_an_announced_length_beyond_the_limit_is_refused_before_decompressing() -> None:
    lying_zstd = b"\x28\xb5\x2f\xfd\xe0" + (1 << 60).to_bytes(8, "little")
    lying_snappy = b"\xff\xff\xff\xff\x0f"

    with pytest.raises(DecompressionTooLarge, match=str(1 << 60)):
        decompress(Compression.ZSTD, lying_zstd, 1 << 20)
    with pytest.raises(DecompressionTooLarge, match=str((1 << 32) - 1)):
        decompress(Compression.SNAPPY, lying_snappy, 1 << 20)


def test_snappy_is_written_in_the_framing_of_snappy_java() -> None:
    compressed = compress(Compression.SNAPPY, TEXT)
    block = bytes(cramjam.snappy.compress_raw(TEXT))

    assert compressed == b"\x82SNAPPY\0" + struct.pack(">iii", 1, 1, len(block)) + block


def test_snappy_in_several_blocks_is_read() -> None:
    blocks = [bytes(cramjam.snappy.compress_raw(part)) for part in (TEXT[:100], TEXT[100:], b"")]
    framed = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    framed += b"".join(struct.pack(">i", len(block)) + block for block in blocks)

    assert bytes(decompress(Compression.SNAPPY, framed, len(TEXT))) == TEXT


def test_snappy_without_framing_is_read_as_one_block() -> None:
    compressed = bytes(cramjam.snappy.compress_raw(TEXT))

    assert bytes(decompress(Compression.SNAPPY, compressed, len(TEXT))) == TEXT


def test_lz4_blocks_stand_alone_and_have_no_checksums() -> None:
    """Kafka's Java client refuses blocks that refer to earlier ones; the Go clients refuse those with checksums."""
    random = Random(1)
    for data in (b"", TEXT, TEXT * 20, random.randbytes(200_000)):
        frame = compress(Compression.LZ4, data)

        assert frame[:7] == bytes.fromhex("04224d18 60 40 82"), "version 1, independent blocks of 64 KiB, nothing else"
        assert bytes(decompress(Compression.LZ4, frame, len(data) + 1)) == data


def test_codecs_are_found_by_the_names_of_compression_type() -> None:
    names = {name: Compression.from_name(name) for name in ("none", "gzip", "snappy", "lz4", "zstd")}

    assert list(names.values()) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="use one of none, gzip, snappy, lz4, zstd"):
        Compression.from_name("brotli")


@pytest.mark.parametrize(
    ("codec", "levels"),
    [(Compression.GZIP, (1, 9)), (Compression.LZ4, (1, 17)), (Compression.ZSTD, (-131072, 22))],
)
def test_the_levels_of_a_codec_work_to_both_ends_and_no_further(codec: Compression, levels: tuple[int, int]) -> None:
    for level in levels:
        assert bytes(decompress(codec, compress(codec, TEXT, level), len(TEXT))) == TEXT
    for level in (levels[0] - 1, levels[1] + 1):
        with pytest.raises(ValueError, match="has no level"):
            compress(codec, TEXT, level)


def test_codecs_without_levels_refuse_one() -> None:
    for codec in (Compression.NONE, Compression.SNAPPY):
        with pytest.raises(ValueError, match="levels: none"):
            compress(codec, TEXT, 1)


MEASURE = """
import resource, sys
from minibroker.protocol.records.compression import Compression, DecompressionTooLarge, decompress

limit = 1 << 20
data = sys.stdin.buffer.read()
codec = Compression.from_name(sys.argv[1])
try:
    decompress(codec, data[:0] + b"x", limit)
except ValueError:
    pass
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decompress(codec, data, limit)
except DecompressionTooLarge:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def bombs() -> list[tuple[str, bytes]]:
    zeros = bytes(64 << 20)
    snappy_block = bytes(cramjam.snappy.compress_raw(zeros[: 1 << 20]))
    snappy = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
    return [
        ("gzip", gzip.compress(zeros, 1)),
        ("gzip", gzip.compress(zeros, 1) + gzip.compress(b"x")),  # the trailer announces one byte
        ("snappy", snappy + (struct.pack(">i", len(snappy_block)) + snappy_block) * 64),
        ("lz4", bytes(cramjam.lz4.compress(zeros, level=1))),
        ("zstd", bytes(cramjam.zstd.compress(zeros))),
        ("zstd", bytes(cramjam.zstd.compress(b"x")) + bytes(cramjam.zstd.compress(zeros))),
        ("zstd", zstd_of_repeated_blocks(window_log=27, blocks=8192)),
    ]


def test_a_bomb_takes_memory_near_the_limit_and_no_more() -> None:
    for name, bomb in bombs():
        measured = subprocess.run(
            [sys.executable, "-c", MEASURE, name],
            input=bomb,
            capture_output=True,
            check=True,
            cwd=REPOSITORY,
        )
        grown_kibibytes = int(measured.stdout)
        assert grown_kibibytes < 8 << 10, f"{name}: {grown_kibibytes} KiB for a limit of 1 MiB"


@pytest.mark.parametrize("codec", list(Compression))
def test_what_may_exceed_a_limit_is_told_from_the_frames_and_never_wrongly_denied(codec: Compression) -> None:
    random = Random(1)
    for size in (0, 1, 100, 70_000, 300_000, 1 << 20):
        for data in (bytes(size), random.randbytes(size), (TEXT * (size // len(TEXT) + 1))[:size]):
            compressed = compress(codec, data)
            if size:
                assert may_exceed(codec, compressed, size - 1)
            assert not may_exceed(codec, compressed, size + (128 << 10)), "a block of zstd may be so much larger"


def test_all_frames_count_and_each_as_its_decoder_takes_it() -> None:
    data = bytes(1 << 20)
    two = compress(Compression.ZSTD, data) * 2
    assert may_exceed(Compression.ZSTD, two, (2 << 20) - 1)
    assert not may_exceed(Compression.ZSTD, two, 2 << 20)
    streamed = cramjam.zstd.Compressor()
    streamed.compress(data)
    without_size = bytes(streamed.finish())
    assert may_exceed(Compression.ZSTD, without_size, (1 << 20) - 1)
    assert not may_exceed(Compression.ZSTD, without_size, 2 << 20)
    two = compress(Compression.LZ4, data) * 2
    assert may_exceed(Compression.LZ4, two, (2 << 20) - 1)
    assert not may_exceed(Compression.LZ4, two, 2 << 20)
    checked = cramjam.lz4.compress(data)  # with the content's size, and checksums
    assert may_exceed(Compression.LZ4, bytes(checked), (1 << 20) - 1)
    assert not may_exceed(Compression.LZ4, bytes(checked), 4 << 20)
    frame = zstd_of_repeated_blocks(window_log=17, blocks=8)
    understated = frame[:4] + b"\x80" + frame[5:6] + (100).to_bytes(4, "little") + frame[6:]
    with pytest.raises(DecompressionFailed):
        decompress(Compression.ZSTD, understated, 1 << 22)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_no_frame_or_has_very_many_blocks_may_be_anything(codec: Compression) -> None:
    limit = 1 << 20
    for junk in (b"\xff" * 5_000_000, compress(codec, TEXT * 70)[:-9] + b"\xff" * 5_000_000):
        assert may_exceed(codec, junk, limit)
    many = {
        Compression.GZIP: bytes(5 << 20) + b"\1\0\0\0",
        Compression.SNAPPY: compress(codec, b"")[:16] + b"\0\0\0\1\0" * 10_000_000,
        Compression.LZ4: compress(codec, b"")[:7] + b"\1\0\0\x80x" * 1_000_000,
        Compression.ZSTD: b"\x28\xb5\x2f\xfd\x00\x38" + b"\0\0\0" * 1_000_000,
    }[codec]
    assert may_exceed(codec, many, limit)
