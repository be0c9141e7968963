"""Knowledge-graph embeddings on TorchRec, from a laptop CPU to many GPUs on many hosts."""

from kge_torchrec.environment import check_packages, limit_spinning, silence_dependencies

silence_dependencies()
limit_spinning()

__all__ = ["Config", "Run", "load_config", "load_model", "open_run", "train"]


def __getattr__(name: str):
    # Importing torch and torchrec takes seconds; `kge-torchrec --help` should not wait for them.
    if name == "load_model":  # needs torch alone, so the rest of the set may be missing
        from kge_torchrec.export.plain_model import load_model

        return load_model
    if name in __all__:
        check_packages()
    if name in ("Config",):
        from kge_torchrec.config import Config

        return Config
    if name == "load_config":
        from kge_torchrec.config_parser import load_config

        return load_config
    if name in ("Run", "open_run", "train"):
        from kge_torchrec import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
