"""Names, import paths and options in a config: what they resolve to, or which error they raise."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from extended import LION, LP, MIXED, REFE, SQUARED, part

from kge_torchrec import Loss, RowOptimizer, Scorer
from kge_torchrec.config import ConfigError
from kge_torchrec.config.describe import parts_help
from kge_torchrec.config.parser import config_from_dict
from kge_torchrec.embeddings.optimizers import make_optimizer

HERE = __name__  # parts below are of this module


# What a config may get wrong


class NoForms(Loss):
    """No closed form over all entities."""


class Needy(Scorer):
    """Has an option without default."""

    @dataclass(frozen=True)
    class Options:
        size: int
        kind: str = "a"


class NoDataclass(Scorer):
    class Options:
        pass


class NoStep(RowOptimizer):
    """An optimizer without a step."""


WRONG = [
    ({"model.scorer": "complx"}, "model.scorer must be one of .*did you mean 'complex'"),
    ({"model.scorer": "my_parts.refe.RefE"}, "a name or package.module:Class, got 'my_p"),
    ({"model.scorer": "my_parts.refe:"}, "a name or package.module:Class"),
    ({"model.scorer": ":RefE"}, "a name or package.module:Class"),
    ({"model.scorer": "no_parts.refe:RefE"}, "cannot be imported: No module named 'no_parts'"),
    ({"model.scorer": "my_parts.refe:RefF"}, "my_parts.refe has no RefF; did you mean RefE?"),
    ({"model.scorer": LP}, "model.scorer: .*Lp is no class derived from .*base.Scorer"),
    ({"model.scorer": "my_parts.refe:math"}, "model.scorer: .* is no class derived from"),
    ({"model.scorer": REFE, "model.options": {"move": True}},
     "model.options.move is no option of refe, which has moves"),
    ({"model.scorer": REFE, "model.options": {"moves": "far"}},
     "model.options.moves must be true or false, got far"),
    ({"model.scorer": REFE, "model.dim": 7}, r"even for refe, got 7"),
    ({"model.scorer": REFE, "model.dropout.hidden": 0.5}, "no meaning for my_parts.refe:RefE"),
    ({"model.scorer": f"{HERE}:Needy"}, "model.options.size: Needy has no default for it; set it"),
    ({"model.scorer": f"{HERE}:NoDataclass"}, "NoDataclass.Options must be a dataclass"),
    ({"loss.name": SQUARED, "loss.options": {"rest": 0}}, "loss.options.rest must be > 0, got 0"),
    ({"loss.name": f"{HERE}:NoForms", "negatives.regime": "1vsall"},
     "loss.name: .*NoForms has no closed form .* use negatives.regime sampled or kvssample"),
    ({"loss.regularizers": {"l3": 1}}, "loss.regularizers must be one of n3, l2, dura"),
    ({"loss.regularizers": {LP: None}}, "has no value; give its weight"),
    ({"loss.regularizers": {LP: {"q": 1}}}, "Lp.q is no option of Lp, which has weight, rel"),
    ({"negatives.sampling": "unifrom"}, "did you mean 'uniform'"),
    ({"negatives.sampling": MIXED, "negatives.options": {"share": "half"}},
     "negatives.options.share must be a number, got half"),
    ({"train.optimizer": LION, "train.optimizer_options.weight_decay": 0.1},
     "weight_decay is no option of Lion"),
    ({"train.optimizer": LION, "train.optimizer_options": {"beta3": 1}}, "beta3 is no option of L"),
    ({"train.optimizer": LION, "entities.engine": "handrolled", "entities.preset": "dgl"},
     "entities.preset: dgl has adam and adagrad only, not .*Lion"),
    ({"data.reader": "jsonl"}, "data.reader must be a name or package.module:Class, got 'jsonl'"),
    ({"data.reader_options": {"head": "h"}}, "data.reader null has no options"),
]  # fmt: skip


@pytest.mark.parametrize("keys, message", WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_names_and_options_are_reported(folder, keys, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(keys)


def test_optimizer_without_a_step_is_rejected():
    with pytest.raises(ConfigError, match="NoStep has no step"):
        make_optimizer(f"{HERE}:NoStep")


def test_part_of_an_import_path_is_listed(folder):
    assert part("scorer", REFE).name == "refe"
    words = "--model.options.moves VALUE (true or false, default true)\n        Whether a relation"
    assert words in parts_help("scorer", REFE)
