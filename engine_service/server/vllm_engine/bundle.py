"""The tokenizer's files as one archive, which is how gateways fetch them.

It does not know messages.
"""

from __future__ import annotations

import hashlib
import io
import zipfile

from engine_service.server.tokenizer_files import TokenizerFiles

CHUNK_BYTES = 64 << 10
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of ZIP: equal files make equal archives


def pack(files: TokenizerFiles) -> tuple[bytes, str]:
    """(archive, its sha256). Blocking: it reads the disk and compresses."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, _ in files.files:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(entry, files.read(name))
    content = archive.getvalue()
    return content, hashlib.sha256(content).hexdigest()
