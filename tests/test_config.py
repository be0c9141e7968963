"""Configs: what is read, and what is said when it is wrong."""

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml

from kge_torchrec.config import Config, ConfigError, TrainConfig
from kge_torchrec.config.checks import Typed
from kge_torchrec.config.describe import json_schema
from kge_torchrec.config.keys import declared, parse_options
from kge_torchrec.config.parser import CONFIGS, config_from_dict, load_config
from kge_torchrec.data.negatives import UniformSampler


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


def test_overrides_precede_the_file_and_the_file_precedes_defaults(written):
    path = written("train:\n  lr: 0.5\n  epochs: 7\nmodel: {scorer: distmult}\nrun.progress: no\n")
    config = load_config(path, ["--train.lr", "0.25", "--seed=3"])
    assert (config.train.lr, config.train.epochs, config.seed) == (0.25, 7, 3)
    assert (config.model.scorer, config.model.dim) == ("distmult", Config().model.dim)
    assert config.run.progress is False
    assert load_config(path, {"train.lr": 0.25, "seed": 3}) == config
    assert load_config() == load_config("default") == Config()


@pytest.mark.parametrize("text", ["1e-3", "0.001", ".001"])
def test_numbers_are_read_in_common_notations(written, text):
    """Plain YAML reads 1e-3 as text."""
    assert load_config(written(f"train:\n  lr: {text}\n")).train.lr == 0.001
    assert load_config(None, [f"--train.lr={text}"]).train.lr == 0.001


NAMES = ["123", "007", "1e3", "true", "null", "~", "a b: c", "#x", "[a]", "- x", "Ünï", "'q'"]


@pytest.mark.parametrize("name", [*NAMES, "long " * 40])
def test_paths_keep_their_spelling(name, tmp_path):
    config = load_config(None, {"data.path": name})
    assert config.data.path == name == load_config(None, {"data.path": Path(name)}).data.path
    config.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_every_published_config_loads_follows_the_schema_and_names_it():
    """`kge-torchrec list keys --format json-schema` writes the schema anew."""
    schema, file = json_schema(), CONFIGS / "keys.schema.json"
    assert json.loads(file.read_text(encoding="utf-8")) == schema
    validator = pytest.importorskip("jsonschema").Draft7Validator(schema)
    for path in sorted(CONFIGS.rglob("*.yaml")):
        config, text = load_config(path), path.read_text(encoding="utf-8")
        assert config_from_dict(config.to_dict()) == config, path
        assert not list(validator.iter_errors(yaml.safe_load(text) or {})), path
        name = re.match("# yaml-language-server: [$]schema=(.*)", text)[1]
        assert (path.parent / name).resolve() == file.resolve(), path
    for text in ("train: {lrr: 1}", "model: {options: {p: x}}", "loss: {regularizers: {l2: x}}"):
        assert list(validator.iter_errors(yaml.safe_load(text))), text


def test_schema_for_editors_knows_keys_choices_and_the_options_of_parts():
    schema = json_schema()
    model, train = (schema["properties"][name]["properties"] for name in ("model", "train"))
    assert train["lr"]["type"] == ["number", "null"] and train["lr"]["exclusiveMinimum"] == 0
    assert model["init"]["enum"] == ["normal", "uniform", "xavier_normal", "xavier_uniform", None]
    assert "rotate" in model["scorer"]["anyOf"][0]["enum"]
    assert model["dropout"]["properties"]["hidden"]["exclusiveMaximum"] == 1
    option = model["options"]["properties"]["relation_dim"]
    assert option["type"] == ["integer", "null"] and option["minimum"] == 1
    assert "tucker: " in option["description"] and "meim: " in option["description"]


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


@dataclass
class Marked:
    """Options of a part, of several types."""

    mark: str = "2020"
    at: int = 2020
    numbers: list[float] | None = None
    one: int | bool = 0


def test_text_that_looks_like_a_number_stays_text(written):
    """Also in the options of parts, whose types only their classes know."""
    path = written('run: {trackers: {wandb: "123"}}\n')
    assert load_config(path).run.trackers.wandb == "123"
    assert load_config(None, ["--run.trackers.wandb", "123"]).run.trackers.wandb == "123"
    assert load_config(None, ["--run.trackers.wandb", "null"]).run.trackers.wandb is None
    labels = load_config(None, ["--data.labels.id_column=0", "--data.labels.label_column=a"])
    assert (labels.data.labels.id_column, labels.data.labels.label_column) == (0, "a")
    assert parse_options(Marked, {"mark": Typed("2020"), "at": Typed("2020")}, "x") == Marked()


def test_options_have_the_types_of_their_fields():
    made = parse_options(Marked, {"numbers": [1, 2], "one": True}, "x")
    assert made.numbers == [1.0, 2.0] and type(made.numbers[0]) is float and made.one is True
    with pytest.raises(ConfigError, match=r"x\.numbers must be a list or null, got 1"):
        parse_options(Marked, {"numbers": "1"}, "x")


def test_count_without_effect_is_accepted_from_a_saved_file_or_where_the_line_takes_it(written):
    """``Config.save`` writes every key, with numbers for all that were null."""
    path = written("negatives: {count: 9}\n")
    assert load_config(path, ["--negatives.regime", "1vsall"]).negatives.count == 9
    config_from_dict({"negatives.regime": "kvsall", "negatives.count": 9}).save(path)
    assert load_config(path).negatives.count == 9


def test_options_of_scorers_are_read_from_files_and_the_command_line(written):
    path = written("model:\n  scorer: keci\n  dim: 96\n  options: {p: 1}\n")
    model = load_config(path, ["--model.options.q", "4"]).model
    assert asdict(model.options_in("options")) == {"p": 1, "q": 4}
    assert asdict(load_config(path).model.options_in("options")) == {"p": 1, "q": 1}  # a default
    chosen = {"model.scorer": "conve", "model.options": {"feature_dropout": 0.25}}
    config = load_config(None, {**chosen, "model.options.channels": 8})
    assert config.model.options == {"feature_dropout": 0.25, "channels": 8}
    assert chosen["model.options"] == {"feature_dropout": 0.25}  # a caller's dict stays as it is
    assert config_from_dict(config.to_dict()) == config


# What is said when it is wrong

# Lines of a config, and how the message about the key of the first line begins
WRONG = [
    ("train.lrr: 1", "unknown key train.lrr; did you mean train.lr?"),
    ("trian.batch_size: 1", "unknown key trian.batch_size; did you mean train.batch_size?"),
    ("lr: 1", "unknown key lr; did you mean train.lr?"),  # without its group
    ("train.dim: 1", "unknown key train.dim; did you mean model.dim?"),  # in the wrong group
    ("train.l: 1", "unknown key train.l; did you mean train.lr?"),  # abbreviations are no keys
    ("train.zzzzzz: 1", "unknown key train.zzzzzz; `kge-torchrec list keys` lists all"),
    ("model.dropout.head: 0.5", "unknown key model.dropout.head; did you mean model.dropout.hidd"),
    # types
    ("train.epochs: many", "train.epochs must be an integer or null, got many"),
    ("model.dim: 1.5", "model.dim must be an integer or null, got 1.5"),
    ("train.lr: fast", "train.lr must be a number or null, got fast"),
    ("run.progress: maybe", "run.progress must be true or false, got maybe"),
    ("entities.tables: {user: 3}", "entities.tables.user must be a mapping or null, got 3"),
    # ranges and choices
    ("train.lr: 0", "train.lr must be a number > 0, got 0.0"),
    ("train.batch_size: 0", "train.batch_size must be an integer >= 1, got 0"),
    ("train.optimizer_options.beta1: 1\ntrain.optimizer: adam",
     "train.optimizer_options.beta1 must be in [0, 1), got 1.0"),
    ("train.optimizer_options.beta2: 0.99999999\ntrain.optimizer: adam",
     "train.optimizer_options.beta2 must be at most 0.99999994, the float32"),
    ("model.dropout.input: 1", "model.dropout.input must be in [0, 1), got 1.0"),
    ("data.split.ratio: [2, -0.5, -0.5]",
     "data.split.ratio must be three shares that sum to 1, the first above 0, got (2.0, -0.5"),
    ("data.split.ratio: [0.5, 0.5]", "data.split.ratio must be three shares"),
    ("data.split.by: lst", "data.split.by must be one of random, head, time, last, got 'lst'"),
    ("data.separator: '::'", "data.separator must be tab, comma, semicolon, bar, blanks, or one"),
    ("threads: 100000", "threads must be an integer from 0 to 1,024, got 100000"),
    ("train.precision: fp64", "train.precision must be one of auto, fp32, tf32, bf16, fp16, got"),
    ("model.normalization: batch", "model.normalization must be one of none, unit, layer"),
    ("entities.tables: {user: {lr: -1}}", "entities.tables.user.lr must be a number > 0, got -1.0"),
    ("entities.tables: {user: {optimizer: adma}}", "entities.tables.user.optimizer must be one of"),
    # options
    ("model.options: {p: 1}", "model.options.p is no option of complex, which has none"),
    ("model.options.p: 1\nmodel.scorer: conve",
     "model.options.p is no option of conve, which has channels, kernel_size, feature_dropout, "),
    ("train.optimizer_options.beta1: 1\ntrain.optimizer: sgd",
     "train.optimizer_options.beta1 is no option of SGD, which has none"),
    ("model.options.q: many\nmodel.scorer: keci", "model.options.q must be an integer, got many"),
    ("model.options.q: -1\nmodel.scorer: keci",
     "model.options.q must be an integer >= 0, got -1"),
    ("model.options.block: 0\nmodel.scorer: house",
     "model.options.block must be an integer >= 1, got 0"),
    ("loss.options.answers: max", "loss.options.answers must be one of mean, sum, got 'max'"),
    ("loss.options.smoothing: libkge", "loss.options.smoothing: libkge acts only with label smoo"),
    ("loss.regularizers: {ivr: {alpha: 0.9}}",
     "loss.regularizers.ivr.alpha must be a number >= 1, got 0.9"),
    ("loss.regularizers: {ivr: {lambda1: -1}}",
     "loss.regularizers.ivr.lambda1 must be a number >= 0, got -1.0"),
    ("loss.regularizers: {dura: x}", "loss.regularizers.dura.weight must be a number, got x"),
    # without effect
    ("negatives.head_count: 3\nnegatives.regime: 1vsall",
     "negatives.head_count 3 has no effect here"),
    ("negatives.count: 3\nnegatives.regime: 1vsall", "negatives.count 3 has no effect here"),
    # models that cannot be built
    ("model.options.kernel_size: 4\nmodel.scorer: conex",
     "model.options.kernel_size must be odd for conex, got 4"),
    ("model.dim: 128\nmodel.scorer: conve\nmodel.options.height: 5",
     "model.dim must be a multiple of 5 for conve with these model.options"),
    ("model.options.kernel_size: 3\nmodel.scorer: conve\nmodel.dim: 7",
     "model.options.kernel_size 3 does not fit the image of conve, 2 x 7 for model.dim 7"),
    ("model.reciprocal: false\nmodel.scorer: convq",
     "model.reciprocal must be true for convq: it answers tail queries only"),
    ("model.dim: 2\nmodel.scorer: mure",
     "model.dim must be at least 3 for mure with biases, which are 2 of its elements, got 2"),
    ("model.dropout.hidden: 0.1\nmodel.scorer: rotate",
     "model.dropout.hidden has no meaning for rotate, whose query is a point"),
    ("model.dim: 5\nmodel.scorer: complex", "model.dim must be even for complex"),
    ("model.dim: 129\nmodel.scorer: quate", "model.dim must be "),
    # settings that do not go together
    ("loss.regularizers: {dura: 0.1}\nnegatives.regime: kvsall",
     "loss.regularizers.dura: queries of negatives.regime kvsall may have several answers"),
    ("loss.regularizers: {dura: 0.1}\nmodel.scorer: rotate",
     "loss.regularizers.dura: DURA takes"),
    ("negatives.sides: tail", "negatives.sides tail: with model.reciprocal true, head queries use"),
    ("negatives.sides: head", "negatives.sides head: with model.reciprocal true, tail queries use"),
    *((f"negatives.log_q: true\nnegatives.among: {among}",
       f"negatives.log_q: with negatives.among {among} it depends on the triple what is drawn")
      for among in ("seen", "types")),
]  # fmt: skip


@pytest.mark.parametrize("text, message", WRONG)
def test_wrong_value_is_rejected_with_its_key_and_in_a_file_its_line(written, text, message):
    path = written(f"seed: 1\n{text}\n")
    assert error_of(path=path).startswith(f"{path}:2: {message}")
    first, *others = text.split("\n")
    key, _, value = first.partition(": ")
    *groups, last = key.split(".")
    nested = [f"{' ' * depth}{group}:" for depth, group in enumerate(groups)]
    nested.append(f"{' ' * len(groups)}{last}: {value}")
    path = written("\n".join([*others, *nested]))
    line = len(others) + len(nested)
    assert error_of(path=path).startswith(f"{path}:{line}: {message}")
    assert error_of(yaml.safe_load(text)).startswith(message)
    words = [f"--{line}".split(": ", 1) for line in text.replace("'", "").splitlines()]
    assert error_of([word for pair in words for word in pair]).startswith(message)
    assert error_of(["=".join(pair) for pair in words]).startswith(message)


def test_error_of_an_override_names_no_line_of_the_file(written):
    path = written("train: {lr: 0.1}\nmodel: {scorer: keci, options: {p: 1}}\n")
    assert error_of(["--train.lr=-1"], path).startswith("train.lr must be a number > 0")
    assert error_of(["--model.options={p: -1}"], path).startswith("model.options.p must be")


@pytest.mark.parametrize("text, meant", [
    ("model.scorer: rotatE3", "rotate"),
    ("model.scorer: ComplEx", "complex"),
    ("train.optimizer: adagrd", "adagrad"),
    ("model.scorer: zzz", None),
    ("device: gpu", None),  # it is spelled like 'cpu' and means the other
])  # fmt: skip
def test_close_names_are_suggested_and_misleading_ones_are_not(text, meant):
    message = error_of(yaml.safe_load(text))
    assert message.endswith(f"; did you mean {meant!r}?") if meant else "did you" not in message


def test_section_that_python_makes_has_the_types_and_ranges_of_a_file():
    assert TrainConfig(lr="1e-3").lr == 0.001
    with pytest.raises(ConfigError, match=r"^train\.lr must be a number or null, got fast"):
        TrainConfig(lr="fast")
    with pytest.raises(ConfigError, match=r"^train\.averaging must be one of none, ema, got 'emm"):
        TrainConfig(averaging="emma")


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_negative_and_non_finite_numbers_name_their_key(value):
    for key, item in declared(Config).items():
        if type(item.default) in (int, float) or key == "train.relation_lr":
            assert error_of({key: value}).startswith(f"{key} must be ")


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


@pytest.mark.parametrize("text, message", [
    ("", "run.yaml is empty; it should hold keys"),
    ("- a\n", "run.yaml should hold 'key: value' pairs, not a list"),
    ("a: b: c\n", "run.yaml is not valid YAML"),
    ("train: 3\n", "run.yaml:1: train is a group of keys and needs nested 'key: value'"),
    ("1: 2\n", "run.yaml:1: unknown key 1; `kge-torchrec"),
    ("data:\n  path: null\n", "run.yaml:2: data.path has no value; write one"),
    ("data:\n  path: 5\n", "run.yaml:2: data.path must be text, got 5; write text in quotes"),
    ("entities:\n  tables:\n    user: {lr: -1}\n", "run.yaml:3: entities.tables.user.lr must be"),
    ("train: &a\n  lr: *a\n", "nested more than 50 deep, or an anchor stands inside itself"),
    (f"model: {{options: {'{a: ' * 60}1{'}' * 60}}}\n", "nested more than 50 deep"),
    (f"a: {'[' * 5000}{']' * 5000}\n", "is not valid YAML"),
    ("seed: 1\ntrain: {lr: 1}\nseed: 2\n", "run.yaml:3: the key seed stands here and in line 1; "),
    ("train: {lr: 1, lr: 2}\n", "run.yaml:1: the key train.lr stands here and in line 1"),
    ("train: {lr: 1}\ntrain.lr: 1\n", "run.yaml:2: the key train.lr stands here and in line 1"),
    ("data: {path: 2024-99-99}\n", "run.yaml:1: a value cannot be read: month must be in 1..12"),
    ("\xff\x81", "is not valid YAML"),
])  # fmt: skip
def test_files_that_are_no_configs_are_rejected(tmp_path, text, message):
    (tmp_path / "run.yaml").write_bytes(text.encode("latin-1"))
    assert message in error_of(path=tmp_path / "run.yaml")


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
