"""Deliberate faults of the rules of config keys and of verb options, for check_mutations.py."""

from __future__ import annotations

from faults import Fault

KEYS, CONFIG, SIZING = "config/keys.py", "config/__init__.py", "config/sizing.py"
RULES = "tests/test_keys.py"

CONFIG_FAULTS = [
    Fault("a key without effect is taken in silence", KEYS,
          "        raise ConfigError(reason)", "        pass", f"{RULES} -k without_effect"),
    Fault("only the first condition of a key is looked at", KEYS,
          "for c in rules.acts if", "for c in rules.acts[:1] if", f"{RULES} -k without_effect"),
    Fault("a condition that is not known yet refuses", KEYS,
          "c.holds(config, facts) is False", "not c.holds(config, facts)", f"{RULES} -k not_known"),
    Fault("a run's other config.yaml is refused for what was chosen", "training/effects.py",
          "if key not in PICKED_KEYS]", "]", f"{RULES} -k earlier"),
    Fault("reading options are taken in silence by train", "training/effects.py",
          "return Facts(on_cuda, extended, unread)", "return Facts(on_cuda, extended)",
          f"{RULES} -k reading"),
    Fault("a changed key without effect is taken on resume", "api.py",
          "    check_effects(config, facts, changed_keys(before, config))", "    pass",
          f"{RULES} -k earlier"),
    Fault("every key may change on resume", KEYS,
          "        if rule.refuses(before, after):", "        if False:", f"{RULES} -k resume"),
    Fault("a run does not follow its folder", KEYS,
          '        if name == "run.dir" and', '        if name == "no" and', f"{RULES} -k follows"),
    Fault("a run does not follow its store", "config/data.py",
          'return not (Path(after.data.path) / "meta.json").is_file()', "return True",
          f"{RULES} -k follows"),
    Fault("size may change on resume", CONFIG,
          'resume=fixed("what it chose is in config.yaml; change those keys, or start a new run"),',
          "", f"{RULES} -k resumed_run"),
    Fault("a scale of another distribution is chosen", SIZING,
          "_SCALES[config.model.init]", "scale", "tests/training/test_sizing.py -k follow"),
    Fault("n3 is chosen besides an own n3", SIZING,
          ' or "n3" in config.loss.regularizers', "", "tests/training/test_sizing.py -k follow"),
    Fault("no more candidates than the hardest are chosen", SIZING,
          "return max(count, _power_above(config.negatives.hardest + 1))", "return count",
          "tests/training/test_sizing.py -k follow"),
<<<<<<< HEAD
    Fault("an old key is not renamed on the command line", "config/parser.py",
          "{current_name(name.removeprefix('--'))}", "{name.removeprefix('--')}",
          f"{RULES} -k old_names"),
    Fault("an old key without effect stops a run from opening", "config/parser.py",
          "if drops_unknown and not", "if False and not", f"{RULES} -k earlier"),
    Fault("an option of a verb without effect is taken in silence", "commands/effects.py",
=======
    Fault("an option of a verb without effect is taken in silence", "config/verb_options.py",
>>>>>>> 83fda4ef71c54808ec51d27036e91e0e5a950c01
          "            raise ConfigError(", "            print(", "tests/test_verb_options.py"),
    Fault("reading options are taken in silence by prepare", "commands/prepare.py",
          "        if name in reading:", "        if False:",
          "tests/test_verb_options.py -k reading"),
    Fault("a key that stands twice is taken", "config/yaml_file.py",
          "            if key.value in lines:", "            if False:",
          "tests/test_config.py -k no_configs"),
    Fault("values inside themselves are read", "config/yaml_file.py",
          "    if depth > _MOST_DEPTH:", "    if depth > 10**9:",
          "tests/test_config.py -k no_configs"),
    Fault("a rank counts on the memory of all", "training/memory_check.py",
          "host_memory() // processes.local_world_size", "host_memory()",
          "tests/training/test_memory_check.py"),
    Fault("memory is not looked at before work", "training/session.py",
          "on_all_ranks(processes, lambda: check_memory(config, self.store.size, processes))",
          "pass", "tests/training/test_memory_check.py -k leaves"),
    Fault("a study of no trials runs thirty", "tuning/command.py",
          "trials = 30 if options.trials is None else options.trials",
          "trials = options.trials or 30", "tests/tuning/test_studies.py -k no_trials"),
]  # fmt: skip
