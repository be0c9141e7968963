"""Knowledge-graph embeddings on TorchRec, from a laptop CPU to many GPUs on many hosts.

Importing it changes nothing in the process and loads neither torch nor TorchRec: that takes
seconds, and happens when a name below is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    # what to call
    "check_data": "kge_torchrec.reports.data_check",
    "compare": "kge_torchrec.comparison",
    "extend": "kge_torchrec.growth",
    "load_config": "kge_torchrec.config.parser",
    "load_model": "kge_torchrec.export.plain_model",
    "open_run": "kge_torchrec.trained_run",
    "plan": "kge_torchrec.planning.report",
    "prepare": "kge_torchrec.data.prepare",
    "report": "kge_torchrec.reports.page",
    "resume": "kge_torchrec.api",
    "serve": "kge_torchrec.serving.server",
    "train": "kge_torchrec.api",
    "train_seeds": "kge_torchrec.seeds",
    "tune": "kge_torchrec.tuning.study",
    "Run": "kge_torchrec.trained_run",
    "SeedRuns": "kge_torchrec.seeds",
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
    # to derive parts of one's own from: docs/how-to/write-your-own-parts.md
    "Scorer": "kge_torchrec.models.scorers.base",
    "Loss": "kge_torchrec.models.losses",
    "Regularizer": "kge_torchrec.models.regularizers",
    "TripleRegularizer": "kge_torchrec.models.regularizers",
    "NegativeSampler": "kge_torchrec.data.negatives",
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
# Where the rest of the set may be missing.
_WITHOUT_TORCHREC = ("KGEError", "load_model")
_SETTINGS = "kge_torchrec.config"

__all__ = [*_HOMES]

if TYPE_CHECKING:  # the same for type checkers, which do not run what is below
    from kge_torchrec.api import resume as resume
    from kge_torchrec.api import train as train
    from kge_torchrec.comparison import compare as compare
    from kge_torchrec.config import CheckpointConfig as CheckpointConfig
    from kge_torchrec.config import Config as Config
    from kge_torchrec.config import ConfigError as ConfigError
    from kge_torchrec.config import DataConfig as DataConfig
    from kge_torchrec.config import DenseConfig as DenseConfig
    from kge_torchrec.config import EntitiesConfig as EntitiesConfig
    from kge_torchrec.config import EvaluationConfig as EvaluationConfig
    from kge_torchrec.config import LossConfig as LossConfig
    from kge_torchrec.config import ModelConfig as ModelConfig
    from kge_torchrec.config import NegativesConfig as NegativesConfig
    from kge_torchrec.config import RunConfig as RunConfig
    from kge_torchrec.config import TrainConfig as TrainConfig
    from kge_torchrec.config.parser import load_config as load_config
    from kge_torchrec.data.negatives import NegativeSampler as NegativeSampler
    from kge_torchrec.data.prepare import prepare as prepare
    from kge_torchrec.data.readers import Reader as Reader
    from kge_torchrec.embeddings.optimizers import RowOptimizer as RowOptimizer
    from kge_torchrec.embeddings.optimizers import State as State
    from kge_torchrec.embeddings.torchrec.planner import PlanDoesNotFit as PlanDoesNotFit
    from kge_torchrec.errors import DataError as DataError
    from kge_torchrec.errors import KGEError as KGEError
    from kge_torchrec.export.plain_model import load_model as load_model
    from kge_torchrec.growth import extend as extend
    from kge_torchrec.models.losses import Loss as Loss
    from kge_torchrec.models.regularizers import Regularizer as Regularizer
    from kge_torchrec.models.regularizers import TripleRegularizer as TripleRegularizer
    from kge_torchrec.models.scorers.base import Scorer as Scorer
    from kge_torchrec.planning.report import plan as plan
    from kge_torchrec.reports.data_check import check_data as check_data
    from kge_torchrec.reports.page import report as report
    from kge_torchrec.seeds import SeedRuns as SeedRuns
    from kge_torchrec.seeds import train_seeds as train_seeds
    from kge_torchrec.serving.server import serve as serve
    from kge_torchrec.trained_run import Run as Run
    from kge_torchrec.trained_run import open_run as open_run
    from kge_torchrec.training.checkpoints import CheckpointError as CheckpointError
    from kge_torchrec.tuning.study import tune as tune
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name not in _WITHOUT_TORCHREC and _HOMES[name] != _SETTINGS:
            import_module("kge_torchrec.environment").check_packages()
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        helpers = {"Any", "TYPE_CHECKING", "import_module"}
        return sorted({*globals(), *_HOMES} - helpers)
