from __future__ import annotations

import hashlib
import json
import urllib.request
from pathlib import Path

from tools import hub


def test_a_listing_has_the_hashes_that_git_and_lfs_use(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"hello\n")
    large = b"x" * hub.LFS_SIZE
    (tmp_path / "large").write_bytes(large)
    with hub.serving({"org/name": tmp_path}) as endpoint:
        listing = urllib.request.urlopen(f"{endpoint}/api/models/org/name/revision/main").read()
    files = {file["rfilename"]: file for file in json.loads(listing)["siblings"]}
    # `echo hello | git hash-object --stdin`
    assert files["small"]["blobId"] == "ce013625030ba8dba906f756967f9e9ca394464a"
    assert files["large"]["lfs"]["sha256"] == hashlib.sha256(large).hexdigest()
