"""Filter rows by an expression on columns, such as ``rating >= 4 and kind in ["buy", "view"]``.

The grammar is Python's; pyarrow evaluates whole columns.  A column that is compared with a number
is read as numbers.  Backticks quote a name that is no Python name, such as ``order date``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from kge_torchrec.errors import DataError

_COMPARE = {
    ast.Eq: pc.equal, ast.NotEq: pc.not_equal, ast.Lt: pc.less, ast.LtE: pc.less_equal,
    ast.Gt: pc.greater, ast.GtE: pc.greater_equal, ast.In: pc.is_in, ast.NotIn: pc.is_in,
}  # fmt: skip


class Where:
    """A condition on the rows of a table.

    Attributes:
        names: The names of the columns that it takes.

    Raises:
        DataError: The text is no such condition.
    """

    def __init__(self, text: str):
        self._text = text
        quoted = re.findall("`([^`]+)`", text)
        plain = iter(range(len(quoted)))
        python = re.sub("`[^`]+`", lambda _: f"_{next(plain)}_", text)
        try:
            self._tree = ast.parse(python.strip(), mode="eval").body
            columns = [node for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
            for column in columns:
                if re.fullmatch("_[0-9]+_", column.id):
                    column.id = quoted[int(column.id[1:-1])]
            self.names = [column.id for column in columns]
            self(dict.fromkeys(self.names, pa.array([], pa.large_string())))
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise self._wrong(getattr(error, "msg", str(error))) from None

    def __call__(self, columns: Mapping[str, pa.Array]) -> pa.Array:
        """Return for which rows it holds, as booleans; an empty cell is neither above nor below."""
        return pc.fill_null(self._test(self._tree, columns), False)

    def _wrong(self, why: str) -> DataError:
        return DataError(
            f"data.where {self._text!r}: {why}; compare columns with numbers or text, as in "
            "rating >= 4 and kind in ['buy', 'view']"
        )

    def _test(self, node: ast.AST, columns: Mapping[str, pa.Array]) -> pa.Array:
        if isinstance(node, ast.BoolOp):
            join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
            return reduce(join, [self._test(part, columns) for part in node.values])
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return pc.invert(self._test(node.operand, columns))
        if not (
            isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Name)
            and len(node.ops) == 1
            and type(node.ops[0]) in _COMPARE
        ):
            raise ValueError(f"{ast.unparse(node)!r} compares no column with a value")
        operator, name = node.ops[0], node.left.id
        is_in = isinstance(operator, ast.In | ast.NotIn)
        try:
            value = ast.literal_eval(node.comparators[0])
        except ValueError:
            value = None
        values = value if is_in else [value]
        kinds = {type(part) for part in values} if isinstance(values, list | tuple) else set()
        if kinds != {str} and not (kinds and kinds <= {int, float}):
            raise ValueError(
                f"{ast.unparse(node.comparators[0])!r} is no number, no text and no list of them"
            )
        kind = pa.large_string() if kinds == {str} else pa.float64()
        column = self._typed(name, columns[name], kind)
        if not is_in:
            return _COMPARE[type(operator)](column, value)
        known = pc.is_in(column, value_set=pa.array(values, kind))
        return known if isinstance(operator, ast.In) else pc.invert(known)

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
