"""Configs: what is read, and what is said when it is wrong."""

import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kge_torchrec.config import Config, ConfigError, TrainConfig, all_keys
from kge_torchrec.config.describe import help_of, json_schema, keys_help
from kge_torchrec.config.options import Typed, parse_options
from kge_torchrec.config.parser import CONFIGS, config_from_dict, load_config
from kge_torchrec.data.negatives import UniformSampler

DEFAULTS = {
    f"{group}.{name}" if name else group: value
    for group, values in Config().to_dict().items()
    for name, value in (values.items() if isinstance(values, dict) else [("", values)])
}


def error_of(overrides=(), path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.fixture
def written(tmp_path):
    """Writes YAML text to a file and returns its path."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# What is read


def test_empty_config_has_the_defaults():
    assert load_config() == Config()


def test_overrides_precede_the_file_and_the_file_precedes_defaults(written):
    path = written("train:\n  lr: 0.5\n  epochs: 7\nmodel: {scorer: distmult}\n")
    config = load_config(path, ["--train.lr", "0.25", "--seed=3"])
    assert (config.train.lr, config.train.epochs, config.seed) == (0.25, 7, 3)
    assert (config.model.scorer, config.model.dim) == ("distmult", Config().model.dim)
    assert load_config(path, {"train.lr": 0.25, "seed": 3}) == config


@pytest.mark.parametrize("text", ["1e-3", "0.001", ".001"])
def test_numbers_are_read_in_common_notations(written, text):
    """Plain YAML reads 1e-3 as text."""
    assert load_config(written(f"train:\n  lr: {text}\n")).train.lr == 0.001
    assert load_config(None, [f"--train.lr={text}"]).train.lr == 0.001


def test_dotted_keys_are_accepted_in_a_file(written):
    assert load_config(written("train.lr: 0.5\n")).train.lr == 0.5


def test_values_of_every_type_are_read():
    overrides = {
        "data.split.ratio": [0.8, 0.1, 0.1], "data.has_header": True,
        "run.dir": None,
        "train.relation_lr": 0.5, "run.progress": False, "model.dim": 6,
    }  # fmt: skip
    config = load_config(None, overrides)
    assert config.data.split.ratio == (0.8, 0.1, 0.1) and config.data.has_header is True
    assert config.run.dir is None and config.run.progress is False
    assert config.train.relation_lr == 0.5 and config.model.dim == 6


@pytest.mark.parametrize(
    ("paper_name", "scorer"),
    [("ComplEx", "complex"), ("transe-l2", "transe_l2")],
)
def test_scorers_are_found_by_their_paper_names(paper_name, scorer):
    assert load_config(None, {"model.scorer": paper_name}).model.scorer == scorer


NAMES = ["123", "007", "1e3", "true", "null", "~", "a b: c", "#x", "[a]", "- x", "Ünï", "'q'"]


@pytest.mark.parametrize("name", [*NAMES, "long " * 40])
def test_paths_keep_their_spelling(name):
    config = load_config(None, {"data.path": name})
    assert config.data.path == name
    assert config_from_dict(config.to_dict()) == config
    assert load_config(None, {"data.path": Path(name)}).data.path == name


@settings(max_examples=15)
@given(
    lr=st.floats(1e-12, 1e6),
    seed=st.integers(0, 2**63),
    flag=st.booleans(),
    scorer=st.sampled_from(["distmult", "rotate"]),
    relation_lr=st.none() | st.floats(1e-9, 1),
    folder=st.none() | st.text("ab1"),
)
def test_config_equals_its_dictionary_round_trip(lr, seed, flag, scorer, relation_lr, folder):
    values = Config().to_dict()
    values["train"].update(lr=lr, relation_lr=relation_lr)
    values["model"].update(scorer=scorer, reciprocal=flag)
    values["run"]["dir"] = folder
    values["seed"] = seed
    config = config_from_dict(values)
    assert config.to_dict() == values
    assert config_from_dict(yaml.safe_load(yaml.safe_dump(values))) == config


def test_saved_config_loads(tmp_path):
    config = load_config(None, {"data.path": "123", "train.lr": 1e-5, "data.has_header": False})
    config.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert config_from_dict(config.to_dict(), {"seed": 4}).seed == 4


def test_every_published_config_loads():
    for path in sorted(CONFIGS.rglob("*.yaml")):
        config = load_config(path)
        assert config_from_dict(config.to_dict()) == config, path


def test_schema_for_editors_matches_the_fields_and_is_named_by_every_config():
    """`kge-torchrec list keys --format json-schema` writes it anew."""
    schema = CONFIGS / "keys.schema.json"
    assert json.loads(schema.read_text(encoding="utf-8")) == json_schema()
    for path in CONFIGS.rglob("*.yaml"):
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        name = first.removeprefix("# yaml-language-server: $schema=")
        assert name != first and (path.parent / name).resolve() == schema.resolve(), path


def test_schema_for_editors_knows_keys_choices_and_the_options_of_each_part():
    schema = json_schema()
    model, train = (schema["properties"][name]["properties"] for name in ("model", "train"))
    assert train["lr"]["type"] == ["number", "null"] and train["lr"]["exclusiveMinimum"] == 0
    assert model["init"]["enum"] == ["normal", "uniform", "xavier_normal", "xavier_uniform", None]
    assert "rotate" in model["scorer"]["anyOf"][0]["enum"]
    assert model["dropout"]["properties"]["hidden"]["exclusiveMaximum"] == 1
    options = {
        name: case["then"]["properties"]["options"]["properties"]
        for case in schema["properties"]["model"]["allOf"]
        for name in case["if"]["properties"]["scorer"]["enum"]
    }
    assert {"p", "q"} <= options["keci"].keys() and options["complex"] == {}
    assert options["tucker"]["relation_dim"]["type"] == ["integer", "null"]


def test_published_configs_follow_the_schema_for_editors():
    validator = pytest.importorskip("jsonschema").Draft7Validator(json_schema())
    for path in CONFIGS.rglob("*.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(path.read_text()) or {})), path
    for text in ("train: {lrr: 1}", "model: {options: {p: 1}}", "loss: {regularizers: {l2: x}}"):
        assert list(validator.iter_errors(yaml.safe_load(text))), text


def test_default_config_is_empty():
    assert load_config("default") == Config()


def test_every_recipe_states_its_results():
    for path in (CONFIGS / "recipes").glob("*.yaml"):
        head = path.read_text(encoding="utf-8").partition("\ndata:")[0]
        for said in ("# published: ", "# ours: "):
            assert f"\n{said}" in head, (path.name, said)
        assert f"\n# kge-torchrec train {path.stem} --data.path DIRECTORY" in f"{head}\n", path.name


def test_published_config_is_found_by_name(monkeypatch, tmp_path):
    (tmp_path / "demo.yaml").write_text("seed: 9\n")
    monkeypatch.setattr("kge_torchrec.config.parser.CONFIGS", tmp_path)
    assert load_config("demo").seed == load_config("demo.yaml").seed == 9
    assert error_of(path="dmo") == "no config file 'dmo'; there are demo"


def test_config_is_read_without_torch():
    """A wrong key is reported at once, options of scorers included."""
    code = "import sys; from kge_torchrec.config.parser import load_config; load_config()"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


def test_every_key_is_documented_and_listed():
    keys = all_keys()
    assert len(keys) == len(set(keys)) and {"data.path", "train.lr", "seed"} <= set(keys)
    help_text = " ".join(keys_help().split())
    for key in keys:
        assert f"--{key} " in help_text
        assert " ".join(help_of(Config, key).split()[:3]) in help_text


# What is said when it is wrong


@pytest.mark.parametrize("key, meant", [
    ("train.lrr", "train.lr"),
    ("trian.batch_size", "train.batch_size"),
    ("lr", "train.lr"),  # without its group
    ("train.dim", "model.dim"),  # in the wrong group
    ("train.l", "train.lr"),  # abbreviations are no keys
])  # fmt: skip
def test_unknown_key_error_suggests_the_right_key(written, key, meant):
    assert error_of([f"--{key}", "1"]) == f"unknown key {key}; did you mean {meant}?"
    assert error_of([f"--{key}=1"]) == f"unknown key {key}; did you mean {meant}?"
    assert error_of({key: 1}) == f"unknown key {key}; did you mean {meant}?"
    *group, name = key.split(".")
    path = written(f"{group[0]}:\n  {name}: 1\n" if group else f"{name}: 1\n")
    line = len(group) + 1
    assert error_of(path=path) == f"{path}:{line}: unknown key {key}; did you mean {meant}?"


def test_distant_keys_get_no_suggestion(written):
    assert error_of(["--train.zzzzzz", "1"]) == "unknown key train.zzzzzz; see --help for all keys"
    assert "; see --help" in error_of(path=written("1: 2\n"))


@pytest.mark.parametrize("key, value, message", [
    ("train.epochs", "many", "train.epochs must be an integer or null, got many"),
    ("model.dim", "1.5", "model.dim must be an integer or null, got 1.5"),
    ("train.lr", "fast", "train.lr must be a number or null, got fast"),
    ("run.progress", "maybe", "run.progress must be true or false, got maybe"),
])  # fmt: skip
def test_wrong_types_are_rejected(written, key, value, message):
    assert error_of([f"--{key}={value}"]) == message
    assert error_of({key: value}) == message
    path = written(f"seed: 1\n{key}: {value}\n")
    assert error_of(path=path) == f"{path}:2: {message}"


@pytest.mark.parametrize("settings, message", [
    ("3", "entities.tables.user must be a mapping or null, got 3"),
    ("{lr: -1}", "entities.tables.user.lr must be a number > 0, got -1.0"),
    ("{optimizer: adma}", "entities.tables.user.optimizer must be one of adam, "),
])  # fmt: skip
def test_settings_of_a_type_name_their_key(written, settings, message):
    assert error_of({"entities.tables": {"user": yaml.safe_load(settings)}}).startswith(message)
    path = written(f"entities:\n  tables:\n    user: {settings}\n")
    assert error_of(path=path).startswith(f"{path}:3: {message}")


def test_section_that_python_makes_has_the_types_and_ranges_of_a_file():
    made = TrainConfig(lr="1e-3", clip={"norm": 2})
    assert (made.lr, made.clip.norm) == (0.001, 2.0)
    for wrong, message in [
        ({"lr": "fast"}, "train.lr must be a number or null, got fast"),
        ({"clip": {"norm": 0}}, "train.clip.norm must be a number > 0, got 0.0"),
        (
            {"clip": {"size": 1}},
            "train.clip.size is no option of train.clip, which has norm, value",
        ),
        ({"averaging": "emma"}, "train.averaging must be one of none, ema, got 'emma'; did you"),
    ]:
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
            TrainConfig(**wrong)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_negative_and_non_finite_numbers_name_their_key(value):
    numbers = [key for key, default in DEFAULTS.items() if type(default) in (int, float)]
    for key in (*numbers, "train.relation_lr"):
        assert error_of({key: value}).startswith(f"{key} must be ")


ADAM = {"train.optimizer": "adam"}


@pytest.mark.parametrize("overrides, message", [
    ({"train.lr": 0}, "train.lr must be a number > 0, got 0.0"),
    ({"train.batch_size": 0}, "train.batch_size must be an integer >= 1, got 0"),
    ({**ADAM, "train.optimizer_options.beta1": 1},
     "train.optimizer_options.beta1 must be in [0, 1), got 1.0"),
    ({**ADAM, "train.optimizer_options.beta2": 0.99999999},
     "beta2 must be at most 0.99999994, the float32"),
    ({"model.dropout.input": 1}, "model.dropout.input must be in [0, 1), got 1.0"),
    ({"data.split.ratio": [2, -0.5, -0.5]}, "that sum to 1, the first above 0, got (2.0, -0.5"),
    ({"data.split.ratio": [0.5, 0.5]}, "data.split.ratio must be three shares"),
    ({"data.split.by": "lst"}, "data.split.by must be one of random, head, time, last"),
    ({"data.separator": "::"}, "data.separator must be tab, comma, semicolon, bar, blanks, or one"),
    ({"model.scorer": "rotatE3"}, "did you mean 'rotate'?"),
    ({"train.optimizer": "adagrd"}, "did you mean 'adagrad'?"),
    ({"threads": 100_000}, "threads must be an integer from 0 to 1,024, got 100000"),
])  # fmt: skip
def test_values_out_of_range_are_rejected(overrides, message):
    assert message in error_of(overrides)


@dataclass
class Marked:
    """Options of a part, one of them text."""

    mark: str = "2020"
    at: int = 2020


@pytest.mark.parametrize("key, value, message", [
    ("train.lr", "0", "train.lr must be a number > 0, got 0.0"),
    ("train.precision", "fp64", "train.precision must be one of auto, fp32, tf32, bf16, fp16, got"),
    ("negatives.sides", "tail", "negatives.sides tail: with model.reciprocal true, head queries"),
    ("model.options", "{p: 1}", "model.options.p is no option of complex, which has none"),
    ("loss.regularizers", "{dura: x}", "loss.regularizers.dura"),
    ("data.split", "{by: lst}", "data.split.by must be one of random, head, time, last, got 'lst'"),
    ("negatives.head_count", "3", "negatives.head_count 3 has no effect here"),
    ("negatives.count", "3", "negatives.count 3 has no effect here"),
])  # fmt: skip
def test_error_of_a_value_names_its_line(written, key, value, message):
    regime = "negatives.regime: 1vsall" if "count" in key else "seed: 1"
    path = written(f"{regime}\n{key}: {value}\n")
    assert error_of(path=path).startswith(f"{path}:2: {message}")


def test_key_that_stands_nested_and_dotted_is_rejected_with_both_lines(written):
    path = written("train: {lr: 0.1}\ntrain.lr: 0.2\n")
    assert error_of(path=path).startswith(f"{path}:2: train.lr stands here and in {path}:1; keep")


def test_text_that_looks_like_a_number_stays_text(written):
    """Also in the options of parts, whose types only their classes know."""
    path = written('run: {trackers: {wandb: "123"}}\n')
    assert load_config(path).run.trackers.wandb == "123"
    assert load_config(None, ["--run.trackers.wandb", "123"]).run.trackers.wandb == "123"
    assert load_config(None, {"run.trackers.wandb": "123"}).run.trackers.wandb == "123"
    assert load_config(None, ["--run.trackers.wandb", "null"]).run.trackers.wandb is None
    labels = load_config(None, ["--data.labels.id_column=0", "--data.labels.label_column=a"])
    assert (labels.data.labels.id_column, labels.data.labels.label_column) == (0, "a")
    assert parse_options(Marked, {"mark": Typed("2020"), "at": Typed("2020")}, "x") == Marked()


def test_command_line_may_take_the_effect_from_a_count_of_a_file(written):
    path = written("negatives: {count: 9}\n")
    assert load_config(path, ["--negatives.regime", "1vsall"]).negatives.count == 9


@pytest.mark.parametrize("among", ["seen", "types"])
def test_restricted_candidates_have_no_log_q(among):
    said = f"negatives.log_q: with negatives.among {among} it depends on the triple what is drawn"
    assert error_of({"negatives.among": among, "negatives.log_q": True}).startswith(said)
    assert load_config(None, {"negatives.log_q": True, "negatives.among": "all"})


def test_saved_config_may_have_numbers_without_effect(tmp_path):
    """``Config.save`` writes every key, with numbers for all that were null."""
    config = config_from_dict({"negatives.regime": "kvsall", "negatives.count": 9})
    config.save(tmp_path / "best.yaml")
    assert load_config(tmp_path / "best.yaml").negatives.count == 9


class Needy(UniformSampler):
    """A foreign sampler with an option that has no default."""

    @dataclass(frozen=True)
    class Options:
        """Its options."""

        temperature: float


def test_option_without_a_default_of_a_foreign_part_must_be_set():
    keys = {"negatives.sampling": f"{__name__}:Needy"}
    said = "negatives.options.temperature: Needy has no default for it; set it"
    assert error_of(keys) == said
    assert load_config(None, keys | {"negatives.options": {"temperature": 1}})


def test_misleading_suggestions_are_not_made():
    """'gpu' is spelled like 'cpu' and means the other."""
    assert "did you mean" not in error_of({"device": "gpu"})
    assert "did you mean" not in error_of({"model.scorer": "zzz"})


def test_options_of_scorers_are_read_from_files_and_the_command_line(written):
    path = written("model:\n  scorer: keci\n  dim: 96\n  options: {p: 1}\n")
    model = load_config(path, ["--model.options.q", "4"]).model
    assert model.scorer_options() == {"p": 1, "q": 4}
    assert load_config(path).model.scorer_options() == {"p": 1, "q": 1}  # a default
    config = load_config(None, {"model.scorer": "conve", "model.options.feature_dropout": 0.25})
    assert config.model.scorer_options()["feature_dropout"] == 0.25
    assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize("overrides, message", [
    ({"model.options.p": 1}, "model.options.p is no option of complex, which has none"),
    ({"model.scorer": "conve", "model.options.p": 1},
     "model.options.p is no option of conve, which has channels, kernel_size, feature_dropout, "),
    ({"model.scorer": "keci", "model.options.q": "many"},
     "model.options.q must be an integer, got many"),
    ({"model.scorer": "keci", "model.options.q": -1},
     "model.options.q must be an integer >= 0, got -1"),
    ({"model.scorer": "conex", "model.options.kernel_size": 4},
     "model.options.kernel_size must be odd for conex, got 4"),
    ({"model.scorer": "conve", "model.dim": 128, "model.options.height": 5},
     "model.dim must be a multiple of 5 for conve with these model.options"),
    ({"model.scorer": "conve", "model.dim": 7},
     "model.options.kernel_size 3 does not fit the image of conve, 2 x 7 for model.dim 7"),
    ({"model.scorer": "convq", "model.reciprocal": False},
     "model.reciprocal must be true for convq: it answers tail queries only"),
    ({"model.scorer": "mure", "model.dim": 2},
     "model.dim must be at least 3 for mure with biases, which are 2 of its elements, got 2"),
    ({"model.scorer": "rotate", "model.dropout.hidden": 0.1},
     "model.dropout.hidden has no meaning for rotate, whose query is a point"),
    ({"model.normalization": "batch"}, "model.normalization must be one of none, unit, layer"),
    ({"model.scorer": "complex", "model.dim": 5}, "model.dim must be even for complex"),
    ({"model.scorer": "quate", "model.dim": 129}, "model.dim must be "),
    ({"loss.regularizers": {"dura": 0.1}, "negatives.regime": "kvsall"},
     "loss.regularizers.dura: queries of negatives.regime kvsall may have several answers"),
    ({"loss.regularizers": {"dura": 0.1}, "model.scorer": "rotate"},
     "loss.regularizers.dura: DURA takes"),
    ({"negatives.sides": "tail"},
     "negatives.sides tail: with model.reciprocal true, head queries use"),
    ({"negatives.sides": "head"},
     "negatives.sides head: with model.reciprocal true, tail queries use"),
])  # fmt: skip
def test_models_that_cannot_be_built_are_rejected(overrides, message):
    assert error_of(overrides).startswith(message)


@pytest.mark.parametrize("text, message", [
    ("", "run.yaml is empty; it should hold keys"),
    ("- a\n", "run.yaml should hold 'key: value' pairs, not a list"),
    ("a: b: c\n", "run.yaml is not valid YAML"),
    ("train: 3\n", "is a group of keys and needs nested 'key: value'"),
    ("data:\n  path: null\n", "run.yaml:2: data.path has no value; write one"),
    ("data:\n  path: 5\n", "run.yaml:2: data.path must be text, got 5; write text in quotes"),
    ("train: &a\n  lr: *a\n", "nested more than 50 deep, or an anchor stands inside itself"),
    (f"model: {{options: {'{a: ' * 60}1{'}' * 60}}}\n", "nested more than 50 deep"),
    (f"a: {'[' * 5000}{']' * 5000}\n", "is not valid YAML"),
    ("seed: 1\ntrain: {lr: 1}\nseed: 2\n", "run.yaml:3: the key seed stands here and in line 1; "),
    ("train: {lr: 1, lr: 2}\n", "run.yaml:1: the key lr stands here and in line 1"),
    ("data: {path: 2024-99-99}\n", "run.yaml:1: a value cannot be read: month must be in 1..12"),
])  # fmt: skip
def test_files_that_are_no_configs_are_rejected(written, text, message):
    assert message in error_of(path=written(text))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.lr=3"], "settings are given as --key value, got 'train.lr=3'"),
        (["--train.epochs", "5", "x"], "settings are given as --key value, got 'x'"),
        (["--train.lr"], "argument --train.lr: expected one argument"),
        (["--train", "2"], "train is a group of keys; set them one by one, such as --train.epochs"),
    ],
)
def test_invalid_command_lines_are_rejected(arguments, message):
    assert error_of(arguments) == message


def test_binary_file_is_rejected(tmp_path):
    path = tmp_path / "store.bin"
    path.write_bytes(b"\xff\xfe\x00\x81")
    assert "is not valid YAML" in error_of(path=path)


def test_missing_file_is_reported():
    assert error_of(path="no/such.yaml").startswith("no config file 'no/such.yaml'")
