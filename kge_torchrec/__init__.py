"""Knowledge-graph embeddings on TorchRec, from a laptop CPU to many GPUs on many hosts.

Importing it changes nothing in the process and loads neither torch nor TorchRec: that takes
seconds, and happens when a name below is first used.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    # what to call
    "compare": "kge_torchrec.comparison.command",
    "evaluate": "kge_torchrec.api",
    "load_config": "kge_torchrec.config.parser",
    "load_model": "kge_torchrec.export.plain_model",
    "open_run": "kge_torchrec.api",
    "plan": "kge_torchrec.planning.command",
    "prepare": "kge_torchrec.data.prepare",
    "resume": "kge_torchrec.api",
    "train": "kge_torchrec.api",
    "Run": "kge_torchrec.api",
    "register": "kge_torchrec.config.registry",
    # settings
    "Config": "kge_torchrec.config",
    "CheckpointConfig": "kge_torchrec.config",
    "DataConfig": "kge_torchrec.config",
    "DenseConfig": "kge_torchrec.config",
    "EntitiesConfig": "kge_torchrec.config",
    "EvaluationConfig": "kge_torchrec.config",
    "LossConfig": "kge_torchrec.config",
    "ModelConfig": "kge_torchrec.config",
    "NegativesConfig": "kge_torchrec.config",
    "RunConfig": "kge_torchrec.config",
    "TrainConfig": "kge_torchrec.config",
    # to derive parts of one's own from: docs/extend.md
    "Scorer": "kge_torchrec.models.scorers.base",
    "QueryScorer": "kge_torchrec.models.scorers.base",
    "DotScorer": "kge_torchrec.models.scorers.base",
    "TrilinearScorer": "kge_torchrec.models.scorers.base",
    "Loss": "kge_torchrec.models.losses",
    "Regularizer": "kge_torchrec.models.regularizers",
    "EntityDraw": "kge_torchrec.data.negatives",
    "RowOptimizer": "kge_torchrec.embeddings.optimizers",
    "State": "kge_torchrec.embeddings.optimizers",
    "Reader": "kge_torchrec.data.readers",
    # what is raised
    "KGEError": "kge_torchrec.errors",
    "CheckpointError": "kge_torchrec.training.checkpoints",
    "ConfigError": "kge_torchrec.config",
    "DataError": "kge_torchrec.errors",
    "PlanDoesNotFit": "kge_torchrec.embeddings.torchrec.planner",
}
_WITHOUT_TORCHREC = ("KGEError", "load_model")  # the rest of the set may be missing

__all__ = [*_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_TORCHREC:
        import_module("kge_torchrec.environment").check_packages()
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
