"""Deliberate faults in tables per node type."""

from faults import Fault

TABLES, TESTS = "embeddings/tables.py", "tests/training/test_tables.py"
ORACLE, GROWTH = f"{TESTS} -k oracle", "training/growth.py"

FAULTS = [
    Fault(
        "every type has the learning rate of all",
        "training/assembly.py",
        "TableOptimizer.of(own.optimizer, own.lr,",
        "TableOptimizer.of(own.optimizer, config.train.lr,",
        ORACLE,
    ),
    Fault(
        "an optimizer of a type takes the rate of another one",
        "config/type_tables.py",
        "train.lr if same else rate_of(optimizer)",
        "train.lr",
        f"{TESTS} -k completed",
    ),
    Fault(
        "a type's scale belongs to another distribution",
        "config/type_tables.py",
        "model.init_scale if init == model.init else scale_of(init)",
        "model.init_scale",
        f"{TESTS} -k completed",
    ),
    Fault(
        "new entities of a type start like those of the first",
        "growth/__init__.py",
        "fill_rows(shard, self.config.seed, table.init, table.ids)",
        "fill_rows(shard, self.config.seed, self._tables[0].init, table.ids)",
        f"{TESTS} -k whole_graph",
    ),
    Fault(
        "a table steps with the gradients of all",
        "embeddings/row_gradients.py",
        "dict(gradients.split(self.parts))",
        "dict.fromkeys(self.parts, gradients)",
        ORACLE,
    ),
    Fault(
        "occurrences of gradients stay in the order of the batch",
        "embeddings/row_gradients.py",
        "self.occurrences[order].split(sizes)",
        "self.occurrences.split(sizes)",
        "tests/embeddings/test_row_gradients.py -k tables",
    ),
    Fault(
        "rows of a table are numbered from those of the block",
        "embeddings/row_gradients.py",
        "RowGradients(ids - parts[name].start, grad",
        "RowGradients(ids, grad",
        ORACLE,
    ),
    Fault(
        "states of a rank's later rows are saved as those of the first",
        TABLES,
        "first = table.before + max(",
        "first = 0 * max(",
        f"{TESTS} -k resume_on_other",
    ),
    Fault(
        "a second run of a type overwrites the states of the first",
        TABLES,
        "first = table.before + max(",
        "first = max(",
        f"{TESTS} -k whole_states",
    ),
    Fault(
        "states of new entities are left out",
        GROWTH,
        "(kind := _type_of(name)) is not None and counts[kind]",
        "False",
        f"{TESTS} -k keep_the_states",
    ),
    Fault(
        "a new type has no states",
        GROWTH,
        "        self._add_types()\n",
        "",
        f"{TESTS} -k keep_the_states",
    ),
    Fault(
        "a deletion takes rows of the wrong type",
        GROWTH,
        "stays.get(_type_of(name))",
        "stays.get(tables[-1].type)",
        f"{TESTS} -k deleting",
    ),
    Fault(
        "a plan counts a type's rows on every rank",
        "planning/layout.py",
        "len(range(max(ids.start, shard.first_row), min(ids.stop, stop)))",
        "len(ids)",
        f"{TESTS} -k plan_has",
    ),
    Fault(
        "the optimizer of a type may change on resume",
        "config/entities.py",
        "lambda before, after: _without_rates(before) != _without_rates(after)",
        "lambda before, after: False",
        f"{TESTS} -k rates_of_types",
    ),
    Fault(
        "tables are allowed on a graph without types",
        "training/assembly.py",
        "elif FEATURES not in known or not set(chosen) <= {FEATURES}:",
        "elif False:",
        f"{TESTS} -k need_types",
    ),
    Fault(
        "tables that do not fit are planned",
        "embeddings/torchrec/blocks.py",
        "if getattr(need, kind) > have:",
        "if False:",
        f"{TESTS} -k do_not_fit",
    ),
    Fault(
        "a plan file lays out tables of types",
        "config/__init__.py",
        '"run.plan: a plan lays out one table;',
        '"run.plan: one table;',
        f"{TESTS} -k rule_out",
    ),
    Fault(
        "a race chooses optimizers besides those of types",
        "config/sizing.py",
        '"entities.tables is given": config.entities.tables is not None',
        '"entities.tables is given": False',
        f"{TESTS} -k rule_out",
    ),
]
