"""Tensor writes and reads: bytes between host memory and files.

In: tensors, and the `Filesystem` that tests replace. Out: durable safetensors shards, ranges of them read back into
    memory, digests.
Knows nothing of commits, ranks or logical tensors.
"""

from drumline.storage.dtypes import dtype_of, name_of
from drumline.storage.files import (
    aligned,
    checksum_of,
    digest_of,
    digest_of_file,
    read_range,
    write_bytes,
    write_file,
)
from drumline.storage.filesystem import Filesystem
from drumline.storage.memory import Arena, bytes_of
from drumline.storage.shard import Stored, header, place, read_header

__all__ = [
    "Arena",
    "Filesystem",
    "Stored",
    "aligned",
    "bytes_of",
    "checksum_of",
    "digest_of",
    "digest_of_file",
    "dtype_of",
    "header",
    "name_of",
    "place",
    "read_header",
    "read_range",
    "write_bytes",
    "write_file",
]
