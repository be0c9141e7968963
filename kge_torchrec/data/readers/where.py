"""Filter rows by an expression on columns, such as ``rating >= 4 and kind in ["buy", "view"]``.

The grammar is Python's; pyarrow evaluates whole columns.  A column that is compared with a number
is read as numbers.  Backticks quote a name that is no Python name, such as ``order date``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import count
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.errors import DataError

Test: TypeAlias = Callable[[Mapping[str, pa.Array]], pa.Array]

_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
    ast.In: lambda column, values: pc.is_in(column, value_set=values),
    ast.NotIn: lambda column, values: pc.invert(pc.is_in(column, value_set=values)),
}


class Where:
    """A condition on the rows of a table.

    Attributes:
        names: The names of the columns that it takes.

    Raises:
        DataError: The text is no such condition.
    """

    def __init__(self, text: str):
        self._text = text
        self._quoted = re.findall("`([^`]+)`", text)
        self.names: list[str] = []
        try:
            numbers = count()
            plain = re.sub("`[^`]+`", lambda _: f"_{next(numbers)}_", text)
            self._test = self._test_of(ast.parse(plain.strip(), mode="eval").body)
        except SyntaxError as error:
            raise self._wrong(error.msg) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._wrong(str(error)) from None

    def __call__(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """Return for which rows it holds, as booleans; an empty cell is neither above nor below."""
        return pc.fill_null(self._test(columns), False)

    def _wrong(self, why: str) -> DataError:
        return DataError(
            f"data.where {self._text!r}: {why}; compare columns with numbers or text, as in "
            "rating >= 4 and kind in ['buy', 'view']"
        )

    def _test_of(self, node: ast.AST) -> Test:
        if isinstance(node, ast.BoolOp):
            tests = [self._test_of(part) for part in node.values]
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return lambda columns: reduce(join, (test(columns) for test in tests))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            test = self._test_of(node.operand)
            return lambda columns: pc.invert(test(columns))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.left, ast.Name):
            return self._compared(node.left.id, type(node.ops[0]), node.comparators[0])
        raise ValueError(f"{ast.unparse(node)!r} compares no column with a value")

    def _compared(self, name: str, operator: type, node: ast.AST) -> Test:
        if quoted := re.fullmatch("_([0-9]+)_", name):
            name = self._quoted[int(quoted[1])]
        several = isinstance(node, ast.List | ast.Tuple)
        if not several and not isinstance(node, ast.Constant | ast.UnaryOp):
            raise ValueError(f"{ast.unparse(node)!r} is no number and no text")
        value = ast.literal_eval(node)
        values = [*value] if several else [value]
        is_text = all(isinstance(part, str) for part in values)
        is_number = all(type(part) in (int, float) for part in values)
        is_in = operator in (ast.In, ast.NotIn)
        if not values or not (is_text or is_number) or operator not in _COMPARE or several != is_in:
            raise ValueError(f"{ast.unparse(node)!r} is no number, no text and no list of them")
        self.names.append(name)
        kind = pa.large_string() if is_text else pa.float64()
        constant = pa.array(values, kind) if several else value

        def test(columns: Mapping[str, pa.Array]) -> pa.Array:
            return _COMPARE[operator](self._typed(name, columns[name], kind), constant)

        return test

    def _typed(self, name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
        """Return a column as text, or as numbers with null for an empty cell."""
        if pa.types.is_floating(kind) and pa.types.is_large_string(column.type):
            column = pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), None, column)
        try:
            return column.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise self._wrong(
                f"the column {name!r} has other values than numbers: {error}"
            ) from None
