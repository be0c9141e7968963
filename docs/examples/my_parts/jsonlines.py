"""A reader of lines such as {"head": "Vienna", "relation": "capital_of", "tail": "Austria"}."""

import io
import json
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from kge_torchrec import DataError, Reader
from kge_torchrec.data.streams import open_bytes


class JsonLines(Reader):
    """One triple per line, an object with three fields."""

    @dataclass(frozen=True)
    class Options:
        """The names of the fields."""

        head: str = "head"
        """Field of the head."""
        relation: str = "relation"
        """Field of the relation."""
        tail: str = "tail"
        """Field of the tail."""

    suffixes = (".jsonl", ".ndjson")

    def __init__(self, head, relation, tail):
        self.fields = [head, relation, tail]

    def read(self, path):
        with io.BufferedReader(open_bytes(path)) as file:  # also .gz, .zst, .bz2
            numbered = enumerate(file, 1)
            while triples := [self._triple(path, *line) for line in islice(numbered, 1 << 16)]:
                columns = [pa.array(column, pa.string()) for column in zip(*triples, strict=True)]
                yield pa.record_batch(columns, ["head", "relation", "tail"])

    def _triple(self, path, number, line):
        try:
            triple = json.loads(line)
            return [triple[field] for field in self.fields]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: no triple: {error!r}") from error
