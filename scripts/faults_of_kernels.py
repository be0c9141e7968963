"""Faults in how kernels are compiled and cached."""

from __future__ import annotations

from faults import Fault

JIT = "kernels/jit.py"

FAULTS = [
    Fault("kernels have the fastmath of their first caller", JIT,
          "fastmath=flags, **options)", '**({"fastmath": flags} if flags else {}), **options)',
          "tests/models/test_scorers.py -k small_distances"),
    Fault("helpers are functions of their own", JIT,
          "function, fastmath, forceinline=True,", "function, fastmath,",
          "tests/kernels/test_starts.py -k first_and_later"),
    Fault("a process of one thread starts others", JIT,
          "if threads == 1 or work < SERIAL_ELEMENTS:", "if work < SERIAL_ELEMENTS:",
          "tests/kernels/test_row_sums.py"),
    Fault("the last items make no block", JIT,
          "prange((count + block - 1) // block)", "prange(count // block)",
          "tests/kernels/test_row_sums.py -k bit"),
    Fault("a helper's file may change unnoticed", JIT,
          "waiting.append(value)", "pass", "tests/kernels/test_cache.py -k after_a_change"),
    Fault("a constant may change unnoticed", JIT,
          'parts.add(f"{name} = {value!r}")', "pass",
          "tests/kernels/test_cache.py -k after_a_change"),
    Fault("damaged code is loaded", JIT,
          "if hashlib.sha256(content).digest() != digest:", "if not content:",
          "tests/kernels/test_cache.py -k damaged"),
    Fault("a full disk ends the program", JIT,
          "digest() + content)\n        except OSError as",
          "digest() + content)\n        except KeyError as",
          "tests/kernels/test_cache.py -k full_disk"),
    Fault("a package that cannot be written ends the program", JIT,
          "except OSError:\n            continue\n        return place",
          "except ValueError:\n            continue\n        return place",
          "tests/kernels/test_cache.py -k writable_folder"),
    Fault("every start says that it compiles", JIT,
          "if compiled is None:", "if True:", "tests/kernels/test_cache.py -k compiled_once"),
    Fault("files of old versions stay for ever", JIT,
          "        _remove_unused(place)\n", "", "tests/kernels/test_cache.py -k other_versions"),
    Fault("torch cannot trace the names of a class", "kernels/comparisons.py",
          "if set(methods).intersection(vars(base)):",
          "if not vars(base).keys().isdisjoint(methods):",
          "tests/training/test_compile.py -k traced_parts"),
]  # fmt: skip
