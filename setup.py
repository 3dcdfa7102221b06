"""Puts the patches and the patch tool into the wheel; everything else is in pyproject.toml.

In an editable install they stay where they are, beside the package.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PATCHSET = ("patches/*", "scripts/patchtool.py", "scripts/patchlib/*.py")


class BuildWithPatches(build_py):
    def run(self):
        if self.editable_mode:
            return super().run()
        shutil.rmtree(Path(self.build_lib, "sam"), ignore_errors=True)
        super().run()
        target = Path(self.build_lib, "sam", "_patchset")
        for source in (path for pattern in PATCHSET for path in sorted(ROOT.glob(pattern))):
            place = target / source.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)


setup(cmdclass={"build_py": BuildWithPatches})
