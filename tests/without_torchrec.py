"""A process in which TorchRec and FBGEMM are not installed, as on macOS and Windows.

python tests/without_torchrec.py VERB ...    the command line
torchrun ... tests/without_torchrec.py VERB ...
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.abc import MetaPathFinder

MISSING = ("torchrec", "fbgemm_gpu", "fbgemm-gpu", "fbgemm-gpu-cpu")


class Missing(MetaPathFinder):
    """A finder before all others that finds none of the blocked packages."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def forget_them() -> None:
    """Make the packages unimportable from here on."""
    sys.meta_path.insert(0, Missing())
    version = metadata.version

    def known(name: str) -> str:
        if name in MISSING:
            raise metadata.PackageNotFoundError(name)
        return version(name)

    metadata.version = known


if __name__ == "__main__":
    forget_them()
    from kge_torchrec.cli import main

    sys.exit(main())
