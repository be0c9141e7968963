"""What pyproject.toml cannot say: configs/ lies beside the package and is installed inside it."""

from setuptools import find_packages, setup

CONFIGS = [f"kge_torchrec.configs{part}" for part in ("", ".recipes", ".portfolio")]

setup(
    packages=[*find_packages(include=["kge_torchrec*"]), *CONFIGS],
    package_dir={name: name.removeprefix("kge_torchrec.").replace(".", "/") for name in CONFIGS},
)
