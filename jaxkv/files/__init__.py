"""Files and folders: reading with one-line errors, and atomic writes.

An error of a file becomes a ValueError of one line that names the file. A file or
folder is written under a temporary name and renamed, so that it is complete or absent.
"""

from typing import TYPE_CHECKING

from pallas_kernels.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from jaxkv.files.blocks import (
        BLOCK_BYTES,
        MISSING,
        TableBlock,
        iterate_objects,
        read_blocks,
        read_head,
    )
    from jaxkv.files.bundled import (
        BUNDLED,
        bundled_model,
        bundled_models,
        cache_folder,
        find_heads_folder,
        model_folder,
    )
    from jaxkv.files.checksums import (
        DIGESTS,
        check_digests,
        digests,
        file_digest,
        verify_checksums,
        verify_listed,
        write_checksums,
    )
    from jaxkv.files.delimited import RaggedError
    from jaxkv.files.locking import LOCK_FILE, WriterLock
    from jaxkv.files.raw_table import Cell, RawRow, RawTable
    from jaxkv.files.reading import (
        MAX_CHARACTERS,
        parse_json,
        parse_object,
        read_json,
        read_text,
        reporting_errors,
    )
    from jaxkv.files.shadowing import InstalledPackages, watch_packages
    from jaxkv.files.tables import read_decompressed_text, read_table
    from jaxkv.files.writing import (
        ARRAY_OVERHEAD_BYTES,
        check_disk_space,
        check_replaceable,
        folder_or_temporary,
        replace_folder,
        reporting_write_errors,
        silencing_orbax,
        system_reason,
        write_atomically,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
