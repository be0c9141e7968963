"""The race of defaults: what continues, what a kill leaves, when rules decide, what it costs."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import config_of, largest_difference, parameters, rank, tiny_store
from worlds import run_world

from kge_torchrec import api
from kge_torchrec.config import Config, ConfigError, GraphSize, sizing
from kge_torchrec.config.keys import declared
from kge_torchrec.config.parser import (
    as_config,
    config_from_dict,
    load_config,
    values_of,
)
from kge_torchrec.config.sizing import is_raced
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.store import TripleStore
from kge_torchrec.distributed.processes import processes
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import load_trained, validation_triples
from kge_torchrec.training.stop_signal import TrainingStopped
from kge_torchrec.training.trainer import NonFiniteLoss, Trainer
from kge_torchrec.tuning import race
from kge_torchrec.tuning.race import FIELDS, PORTFOLIO, PROJECTED, Race

EPOCHS = 8


def open_config(store: Path, folder: Path, **changes) -> Config:
    """A config that leaves its training to a race; ``changes`` are keys with __ for the dot."""
    values = {
        "data.path": str(store),
        "run.dir": str(folder),
        "model.dim": 8,
        "evaluation.patience": 0,
        "threads": 1,
        "device": "cpu",
        "run.progress": False,
        "run.trackers.tensorboard": False,
    }
    config = config_from_dict(values | {k.replace("__", "."): v for k, v in changes.items()})
    assert config.decided_by is None
    return config


@contextmanager
def short(epochs: int = EPOCHS, fields: dict | None = None):
    """A context in which rules take few epochs, and four racers train for at least one each."""
    fields = fields or {"base": (4, 2.0)}
    few = patch.object(sizing, "_epochs", lambda config, graph: epochs)
    with few, patch.object(race, "FIELDS", fields):
        yield


@pytest.fixture(autouse=True)
def _short():
    with short():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory, store) -> api.Run:
    """A raced run that nothing disturbed."""
    with short():
        return api.train(open_config(store, tmp_path_factory.mktemp("whole") / "run"))


@contextmanager
def at_step(step: int, act: Callable[[], object]):
    """A context in which ``act`` is called before a step of the trainings, counted from 0."""
    trained, steps = Trainer.train_step, count()

    def train_step(self, batches):
        if next(steps) == step:
            act()
        return trained(self, batches)

    with patch.object(Trainer, "train_step", train_step):
        yield


def kill() -> None:
    raise KeyboardInterrupt


def killed_at(step: int, config: Config) -> None:
    """Train until a kill at a step."""
    with at_step(step, kill), pytest.raises(KeyboardInterrupt):
        api.train(config)


def table_of(path: Path) -> dict[str, torch.Tensor]:
    folder = RunFolder(path)
    with processes("cpu") as ranks:
        return parameters(load_trained(folder.load_config(), folder, ranks, "newest")[0])


def standings_of(path: Path) -> dict:
    return json.loads((path / "race.json").read_text())


def assert_like(path: Path, whole: Path) -> None:
    """The run's table, config, results and race are those of the other run, bit for bit."""
    assert largest_difference(table_of(path), table_of(whole)) == 0
    assert standings_of(path) == standings_of(whole)
    mine, other = (json.loads((p / "results.json").read_text()) for p in (path, whole))
    assert mine["test"] == other["test"] and mine["valid"] == other["valid"]
    assert not (path / "race").exists()


def test_best_setting_continues(whole):
    """Rungs, dropped racers, the winner's config and one unbroken curve of metrics."""
    standings = standings_of(whole.path)
    names = {}
    for name, values in standings["values"].items():
        names.setdefault(len(values), []).append(name)
    assert sorted(names)[:2] == [1, 2] and list(map(len, names.values())).count(1) == 2
    result, last = Race(**standings), max(names)
    assert last == (3 if result.tells_apart(names[last], 2) else 4)
    assert result.finalists(names[last], last - 1)[0] == standings["winner"]
    assert result.staying(PORTFOLIO, 0) == [n for n in PORTFOLIO if n in names[2] + names[last]]
    assert result.staying(result.staying(PORTFOLIO, 0), 1) == names[last]
    assert standings["queries"] == 20  # both sides of ten valid triples: the noise of comparisons
    chosen = RunFolder(whole.path).load_config()
    assert chosen.decided_by is not None and chosen.model.dim == 8
    for key, value in values_of(standings["winner"]).items():
        section, name = key.split(".")
        assert getattr(getattr(chosen, section), name) == value
    lines = RunFolder(whole.path).load_metrics()
    epochs = [line["epoch"] for line in lines if line["kind"] == "epoch"]
    assert epochs == list(range(1, len(epochs) + 1)) and len(epochs) == chosen.train.epochs
    assert whole.results["train"]["epochs"] == len(epochs)
    assert not (whole.path / "race").exists()


def test_winner_continues_as_if_it_had_never_raced(tmp_path, store, whole):
    """The same config from the start gives the same table; so a race changes only the choice."""
    chosen = RunFolder(whole.path).load_config().to_dict()
    chosen["run"]["dir"] = str(tmp_path / "alone")
    api.train(config_from_dict(chosen))
    assert largest_difference(table_of(tmp_path / "alone"), table_of(whole.path)) == 0


@pytest.mark.parametrize("step", [5, 12])
def test_killed_race_resumes(tmp_path, store, whole, step):
    """A process that ends in any step of the race; both ways to resume take it up."""
    config = open_config(store, tmp_path / "run")
    killed_at(step, config)
    assert not (tmp_path / "run" / "results.json").exists()
    if step % 2:
        api.resume(tmp_path / "run")
    else:
        with_auto = config_from_dict(config.to_dict() | {"run.resume": "auto"})
        api.train(with_auto)
        api.train(with_auto)  # the run has ended; the same command finds the same config
    assert_like(tmp_path / "run", whole.path)


def test_winner_that_was_killed_moving_in(tmp_path, store, whole):
    replace, moves = Path.replace, count()

    def killed(self, target):
        if self.parent.parent.name == "race" and next(moves) == 1:
            kill()
        return replace(self, target)

    with patch.object(Path, "replace", killed), pytest.raises(KeyboardInterrupt):
        api.train(open_config(store, tmp_path / "run"))
    api.resume(tmp_path / "run")
    assert_like(tmp_path / "run", whole.path)


def test_race_ends_where_a_resume_says_how_to_train(tmp_path, store):
    """Nothing of the race stays; rules complete the config."""
    killed_at(0, open_config(store, tmp_path / "run"))
    assert (tmp_path / "run" / "race").is_dir()
    resumed = api.resume(tmp_path / "run", {"train.lr": 0.05})
    assert resumed.config.train.lr == 0.05 and resumed.config.train.epochs == EPOCHS
    assert not {"race", "race.json"} & {path.name for path in (tmp_path / "run").iterdir()}


def test_signal_stops_a_race(tmp_path, store, whole):
    stops = pytest.raises(TrainingStopped, match="in the race of defaults; resume with")
    with at_step(6, lambda: signal.raise_signal(signal.SIGTERM)), stops as caught:
        api.train(open_config(store, tmp_path / "run"))
    assert f"`train --resume {tmp_path / 'run'}`" in str(caught.value)
    api.resume(tmp_path / "run")
    assert_like(tmp_path / "run", whole.path)


def race_on(folder: str, store: str) -> tuple[dict, dict]:
    """Race on the ranks of a world; return race.json and the table."""
    with short():
        path = Path(folder)
        api.train(open_config(Path(store), path))
        if rank():
            return {}, {}
        os.environ["WORLD_SIZE"] = "1"
    return standings_of(path), json.loads((path / "results.json").read_text())


def test_ranks_race_as_one_process_does(tmp_path, store, whole):
    standings, results = run_world(2, race_on, str(tmp_path / "run"), str(store))[0]
    one, last = standings_of(whole.path), {}
    assert standings["epochs"] == one["epochs"]
    for name, values in standings["values"].items():
        last |= {name: values} if len(values) > 2 else {}
        if "adam" not in name:  # its dropout draws by rank
            both = min(len(values), len(one["values"][name]))
            assert values[:both] == pytest.approx(one["values"][name][:both], abs=2e-3)
    rungs = max(map(len, last.values()))
    assert standings["winner"] == Race(**standings).finalists(list(last), rungs - 1)[0]
    assert results["train"]["epochs"] == 2 * EPOCHS and results["train"]["world_size"] == 2


def test_race_continues_with_the_settings_of_its_start(tmp_path, store, whole):
    """Rules choose larger batches on GPUs, so the settings must not follow a change of device."""
    path = tmp_path / "run"
    killed_at(12, open_config(store, path))
    started = standings_of(path)
    assert (started["on_cuda"], started["world_size"]) == (False, 1)
    (path / "race.json").write_text(json.dumps(started | {"on_cuda": True, "world_size": 4}))
    with patch.object(race, "racers", side_effect=race.racers) as racers:
        api.resume(path)
    assert racers.call_args.args[2] == (True, 4)
    assert largest_difference(table_of(path), table_of(whole.path)) == 0  # as small a graph


def test_setting_that_diverges_is_dropped(tmp_path, store, capsys):
    """It loses against all others; if all diverge, the error says what to set."""
    fit, name = race.train_run, "softmax_n3"

    def diverges(config, *args, **options):
        if Path(config.run.dir).name in names:
            raise NonFiniteLoss("the loss is nan")
        return fit(config, *args, **options)

    names: tuple[str, ...] = (name,)
    config = open_config(store, tmp_path / "run", run__progress=True)
    with patch.object(race, "train_run", diverges):
        api.train(config)
    standings = standings_of(tmp_path / "run")
    assert set(standings["values"][name]) == {None} and standings["winner"] != name
    assert f"{name} diverged" in capsys.readouterr().err
    names = PORTFOLIO
    with patch.object(race, "train_run", diverges), pytest.raises(NonFiniteLoss, match="every"):
        api.train(open_config(store, tmp_path / "all"))
    assert not (tmp_path / "all").exists()


def test_race_says_what_it_trains_and_which_setting_won(tmp_path, store, capsys):
    api.train(open_config(store, tmp_path / "run", run__progress=True))
    err = capsys.readouterr().err
    standings = standings_of(tmp_path / "run")
    first = next(line for line in err.splitlines() if "race of defaults" in line)
    assert "4 settings train for a short time and the best one continues" in first
    assert "% of a training's time" in first and "--default rules skips it" in first
    for name, epochs in standings["epochs"].items():
        scorer = "rote" if name == "rote" else "complex"
        assert f"{name} ({scorer}) {', '.join(map(str, epochs))}" in first
    assert f"race of defaults: {standings['winner']} (" in err
    assert "wins and continues (valid mrr" in err


def test_race_of_another_version_is_refused_in_a_sentence(tmp_path, store, capsys):
    """A field too many or too few, and a file that is no JSON."""
    killed_at(0, open_config(store, tmp_path / "run"))
    for text in ('{"metric": "mrr", "share": 0.5}', '{"on_cuda": false}', "{"):
        (tmp_path / "run" / "race.json").write_text(text)
        with pytest.raises(ConfigError, match=r"race\.json is not of this version .* delete it"):
            api.resume(tmp_path / "run")


@pytest.mark.parametrize("why", ["valid has no triples", "a race takes too long"])
def test_rules_where_there_is_nothing_to_compare(tmp_path, store, capsys, why):
    if "valid" in why:
        lines = [("a", "r", "b"), ("b", "r", "c"), ("c", "r", "a")]
        prepare({"train": lines}, tmp_path / "store")
        store = tmp_path / "store"
    config = open_config(store, tmp_path / "run", run__progress=True)
    with patch.object(race, "FIELDS", {"base": (4, 0.01 if "long" in why else 1.0)}):
        api.train(config)
    assert f"default: rules, because {why}" in capsys.readouterr().err
    chosen = RunFolder(tmp_path / "run").load_config()
    assert chosen.model.scorer == "complex" and chosen.train.optimizer == "adagrad"
    assert not (tmp_path / "run" / "race.json").exists()


def test_raced_run_can_be_extended_and_exported(tmp_path, whole):
    new = [("e1", "r1", "new"), ("new", "r0", "e3")]
    made = api.extend(whole.path, {"train": new}, tmp_path / "extended", epochs=1)
    assert made.config.model.scorer == whole.config.model.scorer
    assert not (tmp_path / "extended" / "race.json").exists()
    made.export(tmp_path / "export")
    assert any((tmp_path / "export").iterdir())


# when a race decides

GIVEN = {
    "default is rules": {"default": "rules"},
    "model.scorer is given": {"model.scorer": "distmult"},
    "loss.regularizers is given": {"loss.regularizers.l2": 0.1},
    "negatives.hardest is given": {"negatives.hardest": 4},
    "train.epochs is given": {"train.epochs": 3},
    "evaluation.every is 0": {"evaluation.every": 0},
    "data.weights is loss": {"data.weights": "loss"},
    "dense.compile is true": {"dense.compile": True},
}


@pytest.mark.parametrize("why", GIVEN)
def test_rules_decide_where_something_is_given(why):
    assert config_from_dict(GIVEN[why]).decided_by == why


def test_free_keys_leave_the_choice_to_a_race():
    free = {"model.dim": 32, "seed": 3, "evaluation.metric": "hits@1", "train.precision": "bf16"}
    assert config_from_dict(free).decided_by is None


def test_key_at_its_default_counts_as_given(tmp_path):
    """From the command line, in a file and in a dict; a file may say otherwise."""
    assert load_config("default").decided_by is None and as_config(None).decided_by is None
    assert load_config("default", ["--model.scorer", "complex"]).default == "rules"
    assert load_config("default", ["--train.epochs=5"]).default == "rules"
    file = tmp_path / "mine.yaml"
    file.write_text("model:\n  scorer: complex\n")
    assert load_config(file).default == "rules"
    file.write_text("default: race\nmodel:\n  scorer: complex\n")
    assert load_config(file).decided_by is None
    assert as_config({"loss.name": "softmax"}).default == "rules"
    assert as_config({"seed": 1}).decided_by is None
    assert as_config(Config().to_dict()).decided_by is None


@pytest.mark.parametrize("words", [["--loss.name", "softmax"], ["--evaluation.every", "0"]])
def test_race_that_cannot_be_is_refused(words):
    with pytest.raises(ConfigError, match=r"default race has no effect here: .*(given|is 0)"):
        load_config("default", ["--default", "race", *words])


def test_portfolio_sets_only_what_a_race_decides():
    """Each of them is a config that trains, and decides nothing that a user might have given."""
    for name in PORTFOLIO:
        values = values_of(name)
        for key in values:
            assert is_raced(key), (name, key)
        load_config(name).settled(GraphSize(50, 3, 1000, 10))
    assert set(declared(Config)) > set(values_of(PORTFOLIO[0]))


# the time of a race


@patch.object(race, "FIELDS", FIELDS)
@given(
    works=st.lists(st.floats(0.3, 40), min_size=2, max_size=4),
    epochs=st.integers(5, 100),
    size=st.sampled_from(sorted(FIELDS)),
)
def test_losers_take_no_more_than_the_limit(works, epochs, size):
    """However the race goes, if every racer trains at least one epoch within its first rung."""
    racers, rungs, share = race.entered(dict(zip(PORTFOLIO, works, strict=False)), epochs, size)
    most, limit = FIELDS[size]
    assert share <= limit and len(racers) <= most
    if not racers:
        return
    assert [*racers] == [*PORTFOLIO[: len(racers)]]
    assert all(later == 2 * rung for rung, later in pairwise(rungs))
    for reached in racers.values():
        assert len(reached) == len(rungs) and reached == sorted(reached)
        assert reached[0] >= 1 and reached[-1] <= 2 * epochs


@patch.object(race, "FIELDS", FIELDS)
@pytest.mark.parametrize("size", FIELDS)
def test_race_uses_the_share_of_its_size(tmp_path, store, size):
    """Fewer race with a setting whose epochs are expensive."""
    config = open_config(store, tmp_path / "run", size=size)
    opened = TripleStore.open(store)
    with processes("cpu") as ranks:
        configs = race.racers(config, opened, (False, 1))
        works = {name: race.work_of(each, opened, ranks) for name, each in configs.items()}
    most, limit = FIELDS[size]
    racers, rungs, share = race.entered(works, 60, size)
    assert len(racers) == most and len(rungs) == (2 if size == race.ONCE else 4)
    assert 0.8 * limit < share <= limit
    assert race.entered(works | {"rote": 1000 * works["rote"]}, 60, size)[0] == {}


def test_work_counts_scores_and_steps(store):
    opened = TripleStore.open(store)

    def work(**changes):
        config = config_of(store, **changes).settled(opened.size)
        with processes("cpu") as ranks:
            return race.work_of(config, opened, ranks) - race.STEP_WORK * steps

    steps = 5  # 130 triples in batches of 32
    assert work() == 130 * 2 * 6 * 8
    assert work(negatives__count=12, model__dim=16) == 4 * work()
    assert work(negatives__regime="1vsall", negatives__count=None) == 130 * 2 * 37 * 8
    queries = len({(h, r) for h, r, _ in opened.train}) + len({(r, t) for _, r, t in opened.train})
    steps = -(-queries // 32)
    assert work(negatives__regime="kvsall", negatives__count=None) == queries * 37 * 8


# what the results so far let continue


@patch.object(race, "FIELDS", FIELDS)
@settings(max_examples=200)
@given(st.data())
def test_race_follows_its_rules(data):
    """Random results against the rules in plain words; a race that was killed takes them up.

    Many are equal, and some settings diverge: ties keep the order of the portfolio.
    """
    metric = data.draw(st.sampled_from(["mrr", "mr"]))
    queries = 0 if metric == "mr" else data.draw(st.sampled_from([0, 50, 2000]))
    value = st.one_of(st.none(), st.sampled_from([0.3, 0.31]), st.floats(0.01, 0.99))
    works = [data.draw(st.floats(0.5, 4)) for _ in PORTFOLIO]
    size = data.draw(st.sampled_from(sorted(FIELDS)))
    epochs, rungs, _ = race.entered(dict(zip(PORTFOLIO, works, strict=True)), 50, size)
    if not epochs:
        return
    results = {name: [data.draw(value) for _ in rungs] for name in epochs}
    for values in results.values():  # what diverged stays so
        if None in values:
            values[values.index(None) :] = [None] * (len(values) - values.index(None))

    def run(state: Race, until: int) -> tuple[str | None, list[str]]:
        """The winner, or None if all diverged, after at most ``until`` trainings."""
        trained: list[str] = []

        def train(name, *_):
            if len(trained) == until:
                raise TrainingStopped("killed")
            trained.append(name)
            return results[name][len(state.values[name])]

        config = replace(Config(), size=size)
        configs = dict.fromkeys(epochs, config)
        with patch.object(race, "_trained", train), processes("cpu") as ranks:
            folder = RunFolder(Path(os.devnull))
            with patch.object(Race, "save", lambda *_: None):
                try:
                    return race._winner(state, configs, config, folder, None, ranks), trained
                except NonFiniteLoss:
                    return None, trained

    expected, trained = by_the_rules(results, rungs, metric, queries, size)
    state = Race(metric, epochs, rungs, queries)
    assert run(state, 10**6)[0] == expected
    assert {name: len(values) for name, values in state.values.items()} == trained
    again = Race(metric, epochs, rungs, queries)
    with suppress(TrainingStopped):
        run(again, data.draw(st.integers(0, 6)))
    assert run(again, 10**6)[0] == expected and again.values == state.values


def by_the_rules(
    results: dict, rungs: list[float], metric: str, queries: int, size: str
) -> tuple[str | None, dict[str, int]]:
    """The winner, and how often each setting trains: what the module says, written plainly."""
    sign = -1 if metric == "mr" else 1

    def at_the_end(name: str, rung: int) -> float:
        now, before = results[name][rung], results[name][rung - 1] if rung else None
        if now is None:
            return -math.inf
        gain = max(0, now - before) if rung and metric != "mr" else 0
        return sign * now + PROJECTED * math.log2(2 / rungs[rung]) * gain

    def noise(share: float) -> float:
        return math.sqrt(share * (1 - share) / queries) if queries else 0

    left, trained = list(results), dict.fromkeys(results, 0)
    for rung in range(len(rungs)):
        trained |= dict.fromkeys(left, rung + 1)
        if len(left) > 2:  # the later one of equal ones stops
            left.remove(min(reversed([name for name in left if name != "rote"]),
                            key=lambda name: at_the_end(name, rung)))  # fmt: skip
            continue
        if rung == len(rungs) - 2 and size != "small":
            one, two = (results[name][rung] for name in left)
            ends = [at_the_end(name, rung) for name in left]
            if None in (one, two) or (
                min(abs(one - two), abs(ends[0] - ends[1])) >= noise(max(one, two))
            ):
                break
    ends = [at_the_end(name, rung) for name in left]
    if max(ends) == -math.inf:
        return None, trained
    best = left[ends.index(max(ends))]
    if min(ends) > -math.inf and abs(ends[0] - ends[1]) < noise(results[best][rung]):
        best = next(name for name in left if name != "rote")
    return best, trained


def test_projections_within_a_standard_error_are_compared_again():
    """The results differ by .0084, the projections by .0042; a standard error is .0081."""
    values = {"rote": [0.3568, 0.3693, 0.3845], "softmax_weak_n3": [0.3805, 0.3888, 0.3929]}
    state = Race("mrr", {}, [0.086, 0.171, 0.343], values=values, queries=3654)
    assert not state.tells_apart(list(values), 2)
    assert state.finalists(list(values), 2) == ["softmax_weak_n3", "rote"]
    state.queries = 4 * 3654
    assert state.tells_apart(list(values), 2)


@pytest.mark.parametrize(
    ("metric", "limit", "queries"),
    [("mrr", 0, 20), ("hits@10", 5, 10), ("mr", 0, 0), ("coverage@5", 0, 0)],
)
def test_noise_follows_from_the_triples_of_a_validation(tmp_path, metric, limit, queries):
    opened = tiny_store(tmp_path / "store")
    assert len(opened.valid) == 10
    assert race._queries(validated_by(metric, limit), opened) == queries


@pytest.mark.parametrize("limit", [0, 9])
def test_noise_of_recommendations_follows_from_the_users(tmp_path, limit):
    opened = tiny_store(tmp_path / "store", entities=20, relations=1, train=160, held_out=40)
    triples = validation_triples(validated_by("recall@5", limit), opened)
    users = len({(head, relation) for head, relation, _ in triples.tolist()})
    assert users < len(triples)
    for metric in ("recall@5", "ndcg@5", "auc"):
        assert race._queries(validated_by(metric, limit), opened) == users


def validated_by(metric: str, limit: int) -> Config:
    config = Config()
    evaluation = replace(config.evaluation, metric=metric, max_triples=limit)
    return replace(config, evaluation=evaluation)


def test_a_race_needs_no_optuna(monkeypatch):
    """Which only ``tune`` installs."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    for name in [name for name in sys.modules if name.startswith("kge_torchrec.tuning.")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("kge_torchrec.tuning.race")
    with pytest.raises(ConfigError, match=r"tune needs Optuna: pip install -e '.\[tune\]'"):
        importlib.import_module("kge_torchrec.tuning.study")
