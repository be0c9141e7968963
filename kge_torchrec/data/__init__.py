"""From files of string triples to memory-mapped ids, vocabularies and a filter index."""

from kge_torchrec.data.errors import DataError, StoreError, UnknownLabelError
from kge_torchrec.data.known import KnownTriples
from kge_torchrec.data.prepare import prepare, prepare_triples
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.vocabulary import Vocabulary

__all__ = [
    "DataError",
    "KnownTriples",
    "StoreError",
    "TripleStore",
    "UnknownLabelError",
    "Vocabulary",
    "prepare",
    "prepare_triples",
]
