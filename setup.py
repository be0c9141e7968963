"""What pyproject.toml cannot say: configs/ lies beside the package and is installed inside it."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["kge_torchrec*"]), "kge_torchrec.configs"],
    package_dir={"kge_torchrec.configs": "configs"},
)
