"""A copy of the installed SGLang without the patches, for comparisons with stock.

Owns the copy only: it is made of hard links where the file system allows, and the patch tool
replaces whole files, so the installation itself is never written to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def make_unpatched_site(site: Path) -> Path:
    """Fill the folder `site` with `sglang/` and its dist-info; put it on PYTHONPATH to use it.

    Raises CalledProcessError, and CliError where the patches are not to be found.
    """
    import sglang

    from sam.cli.delegate import patch_tool

    package = Path(sglang.__file__).parent
    site.mkdir(parents=True, exist_ok=True)
    sources = [package, *package.parent.glob("sglang-*.dist-info")]
    for source in sources:
        try:
            shutil.copytree(source, site / source.name, symlinks=True, copy_function=os.link)
        except shutil.Error:
            shutil.copytree(source, site / source.name, symlinks=True, dirs_exist_ok=True)
    command = [sys.executable, str(patch_tool()), "revert", "--target", str(site)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return site
