"""The checks that run before torch is imported."""

import ast
import ctypes
import logging
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_runs import QUIET, restored

import kge_torchrec
from kge_torchrec import api, environment
from kge_torchrec.environment import (
    KNOWN_SETS,
    PackageSetError,
    allow_tf32,
    check_packages,
    keep_large_blocks,
    quiet_dependencies,
    set_threads,
    without_tf32,
)

CUDA = {"fbgemm-gpu-cpu": None, "fbgemm-gpu": "1.8.0", "torch": "2.13.0"}
GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


def among(versions):
    return lambda names: {name: versions[name] for name in names if versions.get(name)}


@pytest.fixture
def installed(monkeypatch):
    """Set the installed {package: version}; None removes a package."""

    def install(changes):
        versions = GOOD | changes
        monkeypatch.setattr(environment, "installed", among(versions))

    return install


def test_import_does_not_change_the_process():
    """Neither warnings, nor loggers, nor the environment; nor does it load torch."""
    code = """
import logging, os, sys, warnings
from importlib import import_module

noisy = ("torch", "torchrec", "fbgemm_gpu", "torch.fx._symbolic_trace",
         "torch.distributed.checkpoint")

def state():
    return dict(os.environ), list(warnings.filters), [logging.getLogger(n).level for n in noisy]

before = state()
import kge_torchrec
for name in ("cli", "config.parser", "environment"):
    import_module(f"kge_torchrec.{name}")
assert state() == before and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_see_public_names():
    """The block that they read, and that is never run, imports what ``__all__`` has, as it does."""
    tree = ast.parse(Path(kge_torchrec.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    stats = {name.asname: of.module for of in block.body for name in of.names}
    assert all(name.asname == name.name for of in block.body for name in of.names)  # public
    assert stats == kge_torchrec._HOMES and set(stats) == set(kge_torchrec.__all__)


def test_training_from_python_restores_warnings_and_loggers(tmp_path):
    def state() -> tuple:
        levels = {n: logging.getLogger(n).level for n in ("torchrec", "torch.fx._symbolic_trace")}
        return list(warnings.filters), levels

    logging.getLogger("torchrec").setLevel(logging.INFO)
    before = state()
    keys = {"data.path": "countries", "model.dim": 4, "train.epochs": 1, "evaluation.every": 0}
    api.train({**QUIET, **keys, "run.dir": str(tmp_path)}).close()
    assert state() == before
    logging.getLogger("torchrec").setLevel(logging.NOTSET)


@pytest.mark.slow
def test_training_from_python_is_quiet(tmp_path):
    keys = {**QUIET, "data.path": "countries", "train.epochs": 1, "evaluation.every": 1,
            "run.dir": str(tmp_path)}  # fmt: skip
    code = f"""
import logging, kge_torchrec
logging.getLogger("kge_torchrec.progress").setLevel("WARNING")
kge_torchrec.train({keys!r}).evaluate()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "load, ranks, spins", [(0.1, 1, "10000"), (64 * 1024, 1, "2000"), (0.1, 2, "2000")]
)
def test_command_is_quiet_and_limits_spinning(load, ranks, spins):
    code = f"""
import os, warnings
from kge_torchrec.environment import prepare_process

os.environ["LOCAL_WORLD_SIZE"] = "{ranks}"
os.getloadavg = lambda: ({load}, 0, 0)
prepare_process()
warnings.warn_explicit("a notice", UserWarning, "file", 1, module="torch.nn")
warnings.warn_explicit("ours", UserWarning, "file", 1, module="kge_torchrec")
print(os.environ["GOMP_SPINCOUNT"])
"""
    rest = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "OMP"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=rest, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == spins
    assert "ours" in done.stderr and "a notice" not in done.stderr


def test_this_environment_passes():
    check_packages()


ALONE = {"torchrec": None, "fbgemm-gpu-cpu": None}  # torch without the others, as on macOS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch": "2.13.1"},
        CUDA,
        {**CUDA, "torch": "2.13.0+cu130"},
        {**CUDA, "torch": "2.13.0+cu126", "fbgemm-gpu": "1.8.0+cu128"},
        {"torch": "2.13.0+cu126"},  # which fbgemm-gpu-cpu does not care about
        {"torch": "2.11.0", "torchrec": "1.6.0", "fbgemm-gpu-cpu": "1.6.0"},
        ALONE,
    ],
)
def test_known_package_sets_pass(installed, changes):
    installed(changes)
    check_packages()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"torch": None}, ["torch is not installed"]),
        ({"torchrec": None}, ["torchrec is not installed"]),
        (
            {n: None for n in ("torch", "torchrec", "fbgemm-gpu-cpu")},
            ["torch and torchrec and fbg"],
        ),
        ({"torch": None, "torchrec": None}, ["torch and torchrec are not installed"]),
        ({"fbgemm-gpu-cpu": None}, ["fbgemm-gpu-cpu (CPU) or fbgemm-gpu (CUDA) is not installed"]),
        ({"fbgemm-gpu": "1.8.0"}, ["both installed", "uninstall both"]),
        ({"torchrec": "1.6.0"}, ["torch 2.13.0+cpu goes with torchrec 1.8", "torchrec 1.6.0"]),
        ({"fbgemm-gpu-cpu": "1.6.0"}, ["fbgemm-gpu-cpu 1.8,", "fbgemm-gpu-cpu 1.6.0 are"]),
        ({**CUDA, "torch": "2.13.0+cu128"}, ["built for cu12,", "fbgemm-gpu 1.8.0 for cu13"]),
        ({**CUDA, "torch": "2.13.0+cpu"}, ["torch 2.13.0+cpu is built for cpu,", "for cu13"]),
        ({**CUDA, "fbgemm-gpu": "1.8.0+cu129"}, ["built for cu13,", "for cu12"]),
        ({"torch": "2.5.1"}, ["torch 2.5.1 is not among the supported ones", *KNOWN_SETS]),
    ],
)
def test_other_package_sets_are_rejected(installed, changes, parts):
    installed(changes)
    with pytest.raises(PackageSetError) as caught:
        check_packages()
    message = str(caught.value)
    for part in [*parts, "make setup", "README"]:
        assert part in message
    assert "\n" not in message and message.endswith(".")
    assert len(re.findall(r"\.(?:\s|$)", message)) == 1


@pytest.fixture
def speaks_at_import(tmp_path):
    """The import of fbgemm 1.6.0, and of a package whose name begins the same."""
    for name in ("fbgemm_gpu", "fbgemm_gpu_of_others"):
        (tmp_path / name).mkdir()
        text = "import logging; logging.warning('from %s'); logging.error('broken %s')"
        (tmp_path / name / "__init__.py").write_text(text % (name, name))
    return lambda: [runpy.run_path(str(p / "__init__.py")) for p in sorted(tmp_path.iterdir())]


OTHERS = ["broken fbgemm_gpu", "from fbgemm_gpu_of_others", "broken fbgemm_gpu_of_others"]


def test_fbgemm_root_messages_are_filtered(speaks_at_import, caplog, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "filters", [])  # a program that ran before keeps its own
    before = root.filters[:], root.handlers[:]
    with quiet_dependencies():
        speaks_at_import()
    assert [record.getMessage() for record in caplog.records] == OTHERS
    assert (root.filters, root.handlers) == before
    caplog.clear()
    speaks_at_import()
    assert len(caplog.records) == 4


def test_process_without_handlers_stays_without(speaks_at_import, monkeypatch, capsys):
    """A call of logging.warning gives the root logger a handler for good if it has none."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    with quiet_dependencies():
        speaks_at_import()
    assert root.handlers == []
    assert capsys.readouterr().err.splitlines() == OTHERS


@pytest.fixture
def precision():
    """Puts torch's settings back."""
    with restored():
        yield


def tf32() -> tuple:
    """Return TF32 of products and convolutions, read by torch's older and newer settings."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    newer = [setting.fp32_precision == "tf32" for setting in (matmul, cudnn.conv)]
    return matmul.allow_tf32, cudnn.allow_tf32, *newer


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_settings_agree(precision, allowed):
    import torch

    torch.backends.cuda.matmul.fp32_precision = "ieee" if allowed else "tf32"  # by somebody else
    allow_tf32(allowed)
    assert tf32() == (allowed,) * 4  # the first two raise where they disagree


def test_without_tf32_restores_the_setting(precision):
    import torch

    allow_tf32(True)
    with without_tf32():
        assert tf32() == (False,) * 4
    assert tf32() == (True,) * 4
    allow_tf32(False)
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # the older one cannot be read any more
    with pytest.raises(ValueError), without_tf32():
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        raise ValueError
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_missing_package_is_left_out():
    assert list(environment.installed(["no-such-package-as-this", "torch"])) == ["torch"]


PAGE_FAULTS = """
import resource, sys
import numpy as np
from kge_torchrec.environment import keep_large_blocks

if sys.argv[1] == "kept":
    assert keep_large_blocks()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [np.ones(1 << 20) for _ in range(6)]  # 8 MiB each, all freed next time
        del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's")
@pytest.mark.slow
def test_large_blocks_are_kept_by_malloc():
    """Memory that a step frees and allocates again is not faulted in page by page."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    faults = {
        how: int(subprocess.check_output([sys.executable, "-c", PAGE_FAULTS, how], env=settings))
        for how in ("kept", "not")
    }
    assert faults["kept"] < faults["not"] / 10


@pytest.mark.parametrize("where", ["glibc", "another library", "another system", "a variable"])
def test_blocks_are_kept_by_glibc_unless_a_variable_says_how(monkeypatch, where):
    calls = []
    library = SimpleNamespace(mallopt=lambda *call: calls.append(call) or 1)
    for key in [key for key in os.environ if key.startswith("MALLOC_")]:
        monkeypatch.delenv(key)
    if where == "a variable":
        monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    made = object() if where == "another library" else library
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(sys, "platform", "darwin" if where == "another system" else "linux")
    assert keep_large_blocks() == (where == "glibc") == bool(calls)


@pytest.mark.parametrize(
    ("requested", "ranks", "cores", "threads"), [(3, 4, 8, 3), (0, 4, 8, 2), (0, 16, 8, 1)]
)
def test_threads_are_shared_among_ranks(monkeypatch, requested, ranks, cores, threads):
    import torch

    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    assert set_threads(requested, ranks) == threads and taken == [threads]


def test_commands_flush_denormals_in_all_threads():
    code = """
from kge_torchrec.environment import loading_torch
with loading_torch():
    import torch
torch.set_num_threads(2)
print(int((torch.full((1 << 20,), 1e-39) * 1.0).count_nonzero()))
print(torch.set_flush_denormal(True))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    left, supported = done.stdout.split()
    if supported == "False":
        pytest.skip("this processor flushes none")
    assert int(left) == 0


@pytest.mark.parametrize("tiles, dots, rounds", [(True, True, True), (False, True, False),
                                                 (False, False, True)])  # fmt: skip
def test_rounding_inside_products_depends_on_the_cpu(monkeypatch, tiles, dots, rounds):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: dots, raising=False)
    assert environment.rounds_as_it_multiplies() == rounds
