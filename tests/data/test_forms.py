"""Files as people have them: what is read of each form, or what is said of it.

The keys of every form mean the same in Python, for the verb `prepare` and in a config file.
"""
# ruff: noqa: E501

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from file_rows import labelled

from kge_torchrec.cli import main
from kge_torchrec.config.checks import as_yaml as as_text
from kge_torchrec.config.data import DataConfig
from kge_torchrec.config.parser import data_config, load_config
from kge_torchrec.data import SPLITS
from kge_torchrec.data.prepare import prepare
from kge_torchrec.data.report import notes
from kge_torchrec.data.store import TripleStore
from kge_torchrec.errors import KGEError


def form(
    files, triples, *said, source=None, unsaid=(), weights=None, vectors=None, **data
) -> SimpleNamespace:
    """Files, the keys that read them, and what comes of it.

    Args:
        files: Text or a table, by name; the first one is the source unless ``source`` names another.
        triples: "head relation tail" for each triple, with commas in between; None: an error.
        said: Parts of the notes, or of the error.
        unsaid: Parts of no note.
        weights: The weights of the training triples, ascending.
        vectors: "entity feature" for each feature.
        data: Keys of ``data``, with __ for a dot.
    """
    keys = {name.replace("__", "."): value for name, value in data.items()}
    source = next(iter(files)) if source is None else source
    return SimpleNamespace(
        files=files, triples=triples, said=said, unsaid=unsaid, source=source, data=keys,
        weights=weights, vectors=vectors,
    )  # fmt: skip


BUYS = "order,user_id,item_id,rating,ts\n1,u1,i1,4,1700000001\n2,u1,i2,2,1700000002\n3,u2,i1,5,1700000003\n"
BOUGHT = "u1 bought i1, u1 bought i2, u2 bought i1"
NAMED = {"head": "user_id", "tail": "item_id"}
EVENTS = "user,event,item\nu1,view,i1\nu1,cart,i1\nu2,purchase,i2\n"
ALL_EVENTS = "u1 view i1, u1 cart i1, u2 purchase i2"
PLAIN = "a\tr\tb\nb\ts\tc\nc\tr\ta\n"
READ = "a r b, b s c, c r a"

OPENKE = {
    "entity2id.txt": "3\nann\t0\nbob\t1\nrome\t2\n",
    "relation2id.txt": "2\nknows\t0\nlives_in\t1\n",
    "train2id.txt": "2\n0 1 0\n0 2 1\n",
    "test2id.txt": "1\n1 2 1\n",
}
LIBKGE = {
    "entity_ids.del": "0\tann\n1\tbob\n2\trome\n",
    "relation_ids.del": "0\tknows\n1\tlives_in\n",
    "train.del": "0\t0\t1\n0\t1\t2\n",
    "test.del": "1\t1\t2\n",
}
DGL = {
    "entities.dict": "0\tann\n10\tbob\n20\trome\n",
    "relations.dict": "3\tknows\n7\tlives_in\n",
    "train.txt": "0\t3\t10\n0\t7\t20\n",
    "test.txt": "10\t7\t20\n",
}
PEOPLE = "ann knows bob, ann lives_in rome, bob lives_in rome"
KNOWS = "1\tknows\t2\n2\tlikes\t1\n"
TURNED = "".join(f"e{i}\tf{i % 30}\tr{i % 2}\n" for i in range(60))

FORMS = {
    # 1. Columns by name or position
    "purchases by name": form({"buys.csv": BUYS}, BOUGHT, columns=NAMED, relation="bought"),
    "purchases by position": form(
        {"buys.csv": BUYS}, BOUGHT, columns="head=1,tail=2", relation="bought"
    ),
    "purchases as they come": form(
        {"buys.csv": BUYS}, None, "buys.csv:1: separated by commas: 5 columns: 0 'order', 1 'user_id'",
        "head=COLUMN", "data.relation", "description of edge files",
    ),
    "two columns and a relation": form({"x.tsv": "a\tb\nb\tc\n"}, "a likes b, b likes c",
                                       relation="likes"),
    "two named columns and a relation": form(
        {"x.csv": "target,source\nb,a\nc,b\n"}, "a likes b, b likes c", relation="likes"
    ),
    "two columns": form(
        {"x.tsv": "a\tb\nb\tc\n"}, None, "x.tsv:1: separated by tabs: 2 columns: 0 'a', 1 'b'",
        "expected 3 columns", "data.relation",
    ),
    "a description with columns": form(
        {"graph.yaml": yaml.dump({"edges": [
            {"file": "buys.csv", "head": {"type": "user", "column": "user_id"},
             "relation": "bought", "tail": {"type": "item", "column": "item_id"}},
            {"file": "events.tsv", "head": {"type": "user", "column": 2},
             "relation": {"column": 1}, "tail": {"type": "item", "column": 0}},
        ]}), "buys.csv": BUYS, "events.tsv": "i1\tsees\tu1\ni2\tsees\tu1\n"},
        "user:u1 bought item:i1, user:u1 bought item:i2, user:u2 bought item:i1, "
        "user:u1 sees item:i1, user:u1 sees item:i2",
        "types: every entity has one: 2 item, 2 user",
    ),
    "a description with filters": form(
        {"graph.yaml": yaml.dump({"edges": [
            {"file": "buys.csv", "head": {"type": "user", "column": "user_id"},
             "relation": "bought", "tail": {"type": "item", "column": "item_id"},
             "where": "rating >= 4"},
            {"file": "x.csv", "head": "user", "relation": "sees", "tail": "item"}]}),
         "buys.csv": BUYS, "x.csv": "user,item\nu1,i2\n"},
        "user:u1 bought item:i1, user:u2 bought item:i1, user:u1 sees item:i2",
    ),
    "an empty list": form(
        {"x.tsv": PLAIN, "f.tsv": ""}, None, "f.tsv: empty file: no rows", features="{folder}/f.tsv"
    ),
    "a negative weight of a feature": form(
        {"x.tsv": PLAIN, "f.tsv": "a\tred\t-1\n"}, None,
        "f.tsv:1: the weight is no positive, finite number: '-1'", features="{folder}/f.tsv",
        unsaid=("data.columns", "signed"),
    ),
    "a name that is not there": form(
        {"buys.csv": BUYS}, None, "head=user: no column of this name", "did you mean user_id?",
        columns={"head": "user", "tail": "item_id"}, relation="bought",
    ),
    "a position that is not there": form(
        {"x.tsv": PLAIN}, None, "positions count from 0, so the last one is 2", columns="head=3"
    ),
    "names for a file without a header": form(
        {"x.tsv": PLAIN}, None, "no column of this name", "without a header, give positions",
        columns={"head": "a", "tail": "who"},
    ),
    "one column for two roles": form(
        {"x.csv": EVENTS}, None, "takes one of them for head and tail",
        columns={"head": "user", "tail": "user", "relation": "event"},
    ),
    "no such role": form({"x.tsv": PLAIN}, None, "'haed' is no role", columns={"haed": 0}),
    "Parquet by name": form(
        {"x.parquet": {"who": ["a", "b"], "n": [1, 2], "what": ["r", "s"], "whom": ["b", "c"]}},
        "a r b, b s c", columns={"head": "who", "relation": "what", "tail": "whom"},
    ),
    "Parquet as it comes": form(
        {"x.parquet": {"who": ["a"], "n": [1], "what": ["r"], "whom": ["b"]}}, None,
        "4 columns: 0 'who', 1 'n'", "head=COLUMN",
    ),
    "Parquet in order": form(
        {"x.parquet": {"x": ["a"], "link": ["r"], "z": ["b"]}}, "a r b",
        "x.parquet: columns are read as head 'x', relation 'link', tail 'z'; data.columns ",
    ),
    "Parquet with one more column": form(
        {"x.parquet": {"head": ["a"], "relation": ["r"], "tail": ["b"], "object": ["c"]}}, "a r b",
        "tail 'tail'; left out: 'object'; data.columns ",
    ),
    # 2. Id spaces
    "Neo4j with id spaces": form(
        {"x.csv": ":START_ID(Person),since:int,:END_ID(Place),:TYPE\n1,2020,1,LIVES_IN\n2,2021,1,LIVES_IN\n"},
        "Person:1 LIVES_IN Place:1, Person:2 LIVES_IN Place:1",
        "x.csv:1: this line is read as a header", "left out: 'since:int'",
    ),
    "Neo4j with one id space": form(
        {"x.csv": ":START_ID(Person),:END_ID,:TYPE\n1,1,KNOWS\n"}, None,
        "1 entities have no type before a colon, such as '1'",
    ),
    "rows of two tables": form(
        {"x.csv": "user_id,item_id\n" + "".join(f"{i % 5},{i % 4}\n" for i in range(20))},
        ", ".join(f"{i} likes {j}" for i in range(5) for j in range(4)),
        "heads and tails share small numbers such as", "head_type", "description of edge files",
        columns=NAMED, relation="likes",
    ),
    "numbers of one space": form(
        {"x.tsv": "".join(f"{i % 5}\t{i % 2}\t{i % 4}\n" for i in range(20))},
        ", ".join(f"{i % 5} {i % 2} {i % 4}" for i in range(20)), unsaid=("share small numbers",),
    ),
    # 3. Headers
    "a header above numbers": form(
        {"x.csv": "who,how,count\na,r,1\nb,s,2\na,s,1\n"}, "a r 1, b s 2, a s 1",
        "x.csv:1: this line is read as a header", "data.has_header false",
    ),
    "a header of words above ids": form(
        {"x.tsv": "drug\teffect\tdisease\nDB01\ttreats\tD001\nDB02\tcauses\tD002\nDB03\ttreats\tD001\n"},
        "DB01 treats D001, DB02 causes D002, DB03 treats D001", "read as a header",
    ),
    "a header behind a byte order mark": form(
        {"x.csv": "\ufeffhead,relation,tail\r\na,r,b\r\n"}, "a r b", "head 'head'"
    ),
    "a header that repeats": form(
        {"x.csv": "head,relation,tail\na,r,b\nhead,relation,tail\nb,s,c\n"}, None,
        "x.csv:3: the header again", 
    ),
    "no header": form({"x.tsv": PLAIN}, READ, unsaid=("read as a",)),
    "perhaps a header": form(
        {"x.tsv": "who\tdoes\twhom\nann\tknows\tbob\nbob\tknows\tcem\n"},
        "who does whom, ann knows bob, bob knows cem",
        "x.tsv:1: this line is read as a triple", "data.has_header true",
    ),
    "known names that are no header": form(
        {"x.csv": "head,relation,tail\na,r,b\n"}, "head relation tail, a r b", has_header=False
    ),
    "a header said to be one": form(
        {"x.tsv": "who\tdoes\twhom\n" + PLAIN}, READ, unsaid=("read as a",), has_header=True
    ),
    # 4. Order of columns, times, weights
    "head, tail, relation": form(
        {"x.tsv": TURNED}, ", ".join(TURNED.replace("\t", " ").splitlines()),
        "as if columns were head, tail, relation", "data.columns head=0,tail=1,relation=2",
    ),
    "a Unix time behind a triple": form(
        {"x.tsv": "a\tr\tb\t1700000001\nb\ts\tc\t1700000002\n"}, None,
        "4 columns", "data.columns time=3",
    ),
    "a weight behind a triple": form(
        {"x.tsv": "a\tr\tb\t0.5\nb\ts\tc\t1.5\n"}, None, "4 columns", "data.columns weight=3"
    ),
    "a weight that is read": form(
        {"x.tsv": "a\tr\tb\t0.5\nb\ts\tc\t1.5\n"}, "a r b, b s c", columns="weight=3",
        weights="0.5 1.5",
    ),
    "a weight by name": form(
        {"x.csv": "who,since,how,whom,belief\na,1999,r,b,0.25\nb,2000,r,c,4\n"}, "b r a, c r b",
        columns="head=whom,relation=how,tail=who,weight=belief", weights="0.25 4",
    ),
    "signed edges": form(
        {"x.csv": "source,target,weight\na,b,1\nb,c,-1\n"}, None,
        "x.csv:3: the weight -1 is negative, a signed edge", "a relation each", relation="rates",
    ),
    "the last visits": form(
        {"x.csv": "user,place,when\na,x,2024-01-01\na,y,2024-01-02\na,z,2024-01-03\nb,x,2024-01-04\n"},
        "a visits x, b visits x | a visits y | a visits z",
        columns="head=user,tail=place,time=when", relation="visits", split__by="last",
    ),
    "a time that nothing reads": form(
        {"x.csv": "head,relation,tail,timestamp\na,r,b,1\nb,s,c,2\nc,r,a,3\n"}, READ,
        "the column 'timestamp' is not read; data.split.by time",
    ),
    # 5. Label files
    "OpenKE": form(OPENKE, "ann knows bob, ann lives_in rome |  | bob lives_in rome",
                   "entity2id.txt (1 more files alike): its labels take the place of ids", source=""),
    "OpenKE with tabs": form(
        {"entity2id.txt": "3\nb\t1\na\t0\nç d\t2\n", "relation2id.txt": "2\nr\t0\ns\t1\n",
         "train2id.txt": "3\n0\t1\t0\n1\t2\t1\n2\t0\t0\n", "test2id_all.txt": "not read"},
        "a|r|b,b|s|ç d,ç d|r|a", source="train2id.txt", split__ratio=[1, 0, 0],
    ),
    "text beside numbers": form(
        {**LIBKGE, "train.txt": "x\ty\tz\n"}, "x y z | |", source=""
    ),
    "numbers without labels": form(
        {"train.del": "0\t0\t1\n1\t0\t0\n"}, "0 0 1, 1 0 0", source="train.del"
    ),
    "LibKGE": form(LIBKGE, "ann knows bob, ann lives_in rome |  | bob lives_in rome",
                   "entity_ids.del (1 more files alike): its labels", source=""),
    "DGL-KE, ids with gaps": form(DGL, "ann knows bob, ann lives_in rome |  | bob lives_in rome",
                                  "entities.dict (1 more files alike): its labels", source=""),
    "DGL-KE, raw": form(
        {"train.tsv": "x\tr\ty\n", "entities.tsv": "0\tx\n1\ty\n", "relations.tsv": "0\tr\n"},
        "x r y | |", "entities.tsv (1 more files alike): not used: the triples have its labels", source="",
    ),
    "label files by key": form(
        {"x.tsv": KNOWS, "nodes.csv": "called,year,node\nann,1990,1\nbob,1991,2\n"},
        "ann knows bob, bob likes ann",
        labels__entities="{folder}/nodes.csv", labels__id_column="node",
        labels__label_column="called",
    ),
    "an id without a label": form(
        {**DGL, "train.txt": "0\t3\t10\n0\t7\t30\n"}, None,
        "train.txt:2: the tail '30' is no id of", "entities.dict", source="",
    ),
    "label files left alone": form(
        {**DGL, "test.txt": "0\t3\t20\n"}, "0 3 10, 0 7 20 |  | 0 3 20", source="",
        labels__entities="none", labels__relations="none", unsaid=("labels take",),
    ),
    "an id that is there twice": form(
        {**DGL, "entities.dict": "0\tann\n0\tbob\n"}, None,
        "entities.dict: the id '0' is there twice", source="",
    ),
    "lines before the triples": form(
        {"x.tsv": "Exported on Monday\n\n" + PLAIN}, READ, skip=2
    ),
    # 6. Filters and bad lines
    "a filter on numbers": form(
        {"buys.csv": BUYS}, "u1 bought i1, u2 bought i1", columns=NAMED, relation="bought",
        where="rating >= 4",
    ),
    "a filter on words": form(
        {"e.csv": EVENTS}, "u1 cart i1, u2 purchase i2",
        columns="head=user,relation=event,tail=item", where="event in ['cart', 'purchase']",
    ),
    "a filter with or": form(
        {"e.csv": EVENTS}, "u1 cart i1, u2 purchase i2",
        columns="head=user,relation=event,tail=item",
        where="event not in ['view', 'purchase'] or not user == 'u1'",
    ),
    "a filter on no column": form(
        {"buys.csv": BUYS}, None, "data.where names 'stars', which is no column", columns=NAMED,
        relation="bought", where="stars >= 4",
    ),
    "a filter that leaves nothing": form(
        {"buys.csv": BUYS}, None, "no training triples", columns=NAMED, relation="bought", where="rating > 9"
    ),
    "a filter that is none": form(
        {"buys.csv": BUYS}, None, "data.where 'rating ~ 4'", columns=NAMED, relation="bought",
        where="rating ~ 4",
    ),
    "comments": form({"x.tsv": "# made by hand\n" + PLAIN + "# the end\n"}, READ, comments="#"),
    "comments that no key names": form(
        {"x.tsv": PLAIN + "# the end\n"}, None, "x.tsv:4: expected 3 columns separated by tabs",
        "data.comments '#'",
    ),
    "bad lines": form(
        {"x.tsv": "a\tr\tb\nonly this\nb\t\tc\nb\ts\tc\nc\tr\ta\tb\nc\tr\ta\nx\n"}, READ,
        "x.tsv: 4 bad lines were left out", "x.tsv:2: expected 3", "x.tsv:5: expected 3", bad_lines="skip",
    ),
    "a bad line": form(
        {"x.tsv": "a\tr\tb\nonly this\nb\ts\tc\n"}, None,
        "x.tsv:2: expected 3 columns separated by tabs (head, relation, tail), found 1: 'only this'",
        "data.bad_lines skip",
    ),
    "quoted and bare labels": form(
        {"x.tsv": 'a\tr\t"b"\n"b"\ts\tc\n"c"\t"r"\ta\n'}, READ
    ),
    "a separator inside quotes": form(
        {"x.csv": '"Berlin, West",in,"Germany"\n'}, "Berlin, West|in|Germany"
    ),
    # 7. Errors and separators
    "semicolons of a spreadsheet": form(
        {"x.csv": "a;r;b\nb;s;c\nc;r;a\n"}, READ, "separated by semicolons; data.separator"
    ),
    "tabs in .csv": form({"x.csv": PLAIN}, READ, "separated by tabs; data.separator"),
    "commas in .tsv": form({"x.tsv": "a,r,b\nb,s,c\nc,r,a\n"}, READ, "separated by commas"),
    "any separator": form({"x.txt": "a^r^b\nb^s^c\nc^r^a\n"}, READ, separator="^"),
    "blanks": form({"x.txt": "a  r b\nb s c\nc r   a\n"}, READ, "separated by blanks"),
    # 8. Kinds of events
    "events with weights": form(
        {"e.csv": EVENTS}, ALL_EVENTS, weights="1 3 5",
        columns={"head": "user", "relation": "event", "tail": "item",
                 "weight": {"view": 1, "cart": 3, "purchase": 5}},
    ),
    "weights of relations beside one relation": form(
        {"e.csv": EVENTS}, None, "all triples have the relation 'likes'; leave it out", relation="likes",
        columns={"head": "user", "tail": "item", "weight": {"view": 1}},
    ),
    "a weight that is none": form(
        {"e.csv": EVENTS}, None, "the weight of 'view' must be a number > 0, got 0",
        columns={"head": "user", "relation": "event", "tail": "item", "weight": {"view": 0}},
    ),
    "an event without a weight": form(
        {"e.csv": EVENTS}, None, "e.csv:4: the relation 'purchase' has no weight", "data.where",
        columns={"head": "user", "relation": "event", "tail": "item",
                 "weight": {"view": 1, "cart": 3}},
    ),
    "one relation for weighted events": form(
        {"graph.yaml": yaml.dump({"edges": [
            {"file": "e.csv", "head": {"type": "user", "column": "user"},
             "relation": {"column": "event"}, "tail": {"type": "item", "column": "item"},
             "weight": {"view": 1, "cart": 3, "purchase": 5}}]}), "e.csv": EVENTS},
        "user:u1 view item:i1, user:u1 cart item:i1, user:u2 purchase item:i2", weights="1 3 5",
    ),
    # 9. Types and features
    "types by prefix": form(
        {"x.tsv": "user:1\tlikes\titem:1\nuser:2\tlikes\titem:1\n"},
        "user:1 likes item:1, user:2 likes item:1", "types: every entity has one: 1 item, 2 user",
        types="prefix",
    ),
    "types by a relation": form(
        {"x.tsv": "ann\tin\trome\nann\tis\tuser\nrome\tis\tplace\n"}, "ann in rome",
        "types: every entity has one: 1 place, 1 user", "types: 2 triples of is were taken out",
        types="is",
    ),
    "several types": form(
        {"x.tsv": "ann\tin\trome\n", "t.tsv": "ann\tuser\nann\tpoet\n"}, "ann in rome",
        "types: 1 entities have 2 types by", "1 have none, such as 'rome'",
        "1 have several, such as 'ann'", types="{folder}/t.tsv",
    ),
    "types by the ids of the triples": form(
        {**DGL, "t.csv": "entity;type\n0;person\n10;person\n20;place\n"},
        "ann knows bob, ann lives_in rome |  | bob lives_in rome",
        "types: every entity has one: 2 person, 1 place", source="", types="{folder}/t.csv",
    ),
    "features as pairs": form(
        {"x.tsv": PLAIN, "f.tsv": "a\tred\nb\tblue\t\n".replace("\t\n", "\n")}, READ,
        features="{folder}/f.tsv", vectors="a red, b blue",
    ),
    "features by the ids of the triples": form(
        {**DGL, "f.csv": "entity,feature,weight\n0,red,2\n20,old,1\n"},
        "ann knows bob, ann lives_in rome |  | bob lives_in rome", source="",
        features="{folder}/f.csv", vectors="ann red, rome old",
    ),
    "features of a type in named columns": form(
        {"graph.yaml": yaml.dump({"edges": [
            {"file": "x.csv", "head": "user", "relation": "likes", "tail": "item"}]}),
         "x.csv": "user_id,item_id\n1,1\n2,1\n", "f.csv": "item_id,genre,year\n1,comedy,1994\n2,,1995\n"},
        "user:1 likes item:1, user:2 likes item:1", features="{folder}/f.csv",
        vectors="item:1 genre=comedy, item:1 year=1994, item:2 year=1995",
    ),
    "features of the ids of the triples": form(
        {"buys.csv": BUYS, "f.csv": "title,item_id,rating\nTea,i1,4.5\n,i2,\n"}, BOUGHT,
        columns=NAMED, relation="bought", features="{folder}/f.csv",
        vectors="i1 title=Tea, i1 rating=4.5",
    ),
    "features of a type by the name of its column": form(
        {"graph.yaml": yaml.dump({"edges": [
            {"file": "buys.csv", "head": {"type": "buyer", "column": "user_id"},
             "relation": "bought", "tail": {"type": "good", "column": "item_id"}}]}),
         "buys.csv": BUYS, "f.csv": "item_id,genre\ni1,drink\ni2,cup\n"},
        "buyer:u1 bought good:i1, buyer:u1 bought good:i2, buyer:u2 bought good:i1",
        features="{folder}/f.csv", vectors="good:i1 genre=drink, good:i2 genre=cup",
    ),
    "features with a column of types": form(
        {"x.csv": "head_type,head,relation,tail,tail_type\nuser,1,likes,1,item\n",
         "f.csv": "entity_type,entity,feature\nuser,1,old\nitem,1,new\n"},
        "user:1 likes item:1", features="{folder}/f.csv", vectors="user:1 old, item:1 new",
    ),
    "features of two kinds of ids": form(
        {"buys.csv": BUYS, "f.csv": "user_id,item_id,genre\nu1,i1,drink\n"}, None,
        "'user_id' and 'item_id' both stand for the entity", columns=NAMED, relation="bought",
        features="{folder}/f.csv",
    ),
    # 10. RDF
    "N-Triples": form(
        {"x.nt": "<http://x/a> <http://x/r> <http://x/b> .\n<http://x/b> <http://x/r> \"two words\"@en .\n"},
        "http://x/a http://x/r http://x/b", "1 triples with a literal as object were dropped",
    ),
    "a relation of RDF": form(
        {"x.nt": "<a> <r> <b> .\n"}, None, "RDF has none", columns={"head": "s"}
    ),
}  # fmt: skip


def expected(text: str) -> list[set[tuple[str, ...]]]:
    """Return the triples of train, valid and test."""
    if re.search(r"\S\|\S", text):  # labels with blanks
        return [
            {tuple(x.split("|")) for x in re.findall(r"(?:^|(?<=,))[^|]+\|[^|]+\|[^|,]+", text)},
            set(),
            set(),
        ]
    splits = [
        {tuple(triple.split(" ")) for triple in part.strip().split(", ") if triple}
        for part in text.split("|")
    ]
    return splits + [set()] * (3 - len(splits))


def features_of(store: TripleStore) -> set[tuple[str, str]]:
    names, starts, ids, _ = store.features()
    entities = store.entities.array.to_pylist()
    owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return {(entities[e], names[f].as_py()) for e, f in zip(owners, ids.tolist(), strict=True)}


def written(data: dict[str, Any], source: Path, folder: Path) -> list[DataConfig]:
    """Keys as Python takes them, as the verb does, and as a config file does."""
    with mock.patch("kge_torchrec.data.prepare.prepare", side_effect=KGEError) as verb:
        options = [f"--{name}={as_text(value)}" for name, value in data.items()]
        main(["prepare", str(source), "-o", "store", *options])
    nested: dict[str, Any] = {"path": str(source)}
    for name, value in data.items():
        *sections, key = name.split(".")
        (nested.setdefault(*sections, {}) if sections else nested)[key] = value
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({"data": nested}))
    python, config = data_config(data), load_config(str(file)).data
    return [python, verb.call_args.args[2], replace(config, path=python.path)]


@pytest.mark.parametrize("name", FORMS)
def test_form(tmp_path, name):
    form, folder = FORMS[name], tmp_path / "files"
    folder.mkdir()
    for file, content in form.files.items():
        if isinstance(content, dict):
            pq.write_table(pa.table(content), folder / file)
        else:
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    source = folder / form.source
    data = {
        key: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
        for key, value in form.data.items()
    }
    if form.triples is not None and not re.search(r" \||\| ", form.triples):
        data.setdefault("split.ratio", [1, 0, 0])
    config, *others = written(data, source, tmp_path)
    assert all(other == config for other in others)
    try:
        store = prepare(source, tmp_path / "store", config, progress=False)
    except KGEError as error:
        said = str(error)
        assert form.triples is None, said
    else:
        said = "\n".join(notes(store))
        assert form.triples is not None, said
        found = [{*labelled(store, split)} for split in SPLITS]
        assert found == expected(form.triples), said
        if form.weights is not None:
            assert sorted(store.weights("train")) == [*map(float, form.weights.split())]
        if form.vectors is not None:
            assert features_of(store) == {tuple(pair.split()) for pair in form.vectors.split(", ")}
    assert [part for part in form.said if part not in said] == [], said
    assert [part for part in form.unsaid if part in said] == [], said
