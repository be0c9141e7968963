"""Knowledge-graph embeddings on TorchRec, from a laptop CPU to many GPUs on many hosts.

Importing it changes nothing in the process and loads neither torch nor TorchRec: that takes
seconds, and happens when a name below is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Config": "kge_torchrec.config",
    "KGEError": "kge_torchrec.errors",
    "Run": "kge_torchrec.api",
    "load_config": "kge_torchrec.config_parser",
    "load_model": "kge_torchrec.export.plain_model",
    "open_run": "kge_torchrec.api",
    "resume": "kge_torchrec.api",
    "train": "kge_torchrec.api",
}
_WITHOUT_TORCHREC = ("KGEError", "load_model")  # the rest of the set may be missing

__all__ = [*_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_TORCHREC:
        from kge_torchrec.environment import check_packages

        check_packages()
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
