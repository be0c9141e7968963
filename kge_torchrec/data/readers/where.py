"""Filter rows by an expression on columns, such as ``rating >= 4 and kind in ["buy", "view"]``.

The grammar is Python's; pyarrow evaluates whole columns.  A column that is compared with a number
is read as numbers.
"""

from __future__ import annotations

import ast
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
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
            self.names = [node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)]
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
        match node:
            case ast.BoolOp(op, parts):
                join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
                return reduce(join, [self._test(part, columns) for part in parts])
            case ast.UnaryOp(ast.Not(), operand):
                return pc.invert(self._test(operand, columns))
            case ast.Compare(ast.Name(name), [op], [other]) if type(op) in _COMPARE:
                return self._compared(name, columns[name], op, other)
        raise ValueError(f"{ast.unparse(node)!r} compares no column with a value")

    def _compared(self, name: str, column: pa.Array, op: ast.cmpop, other: ast.expr) -> pa.Array:
        """Compare a column, as text, or as numbers with null for an empty cell."""
        is_in = isinstance(op, ast.In | ast.NotIn)
        try:
            value = ast.literal_eval(other)
        except ValueError:
            value = None
        values = value if is_in else [value]
        kinds = {type(part) for part in values} if isinstance(values, list | tuple) else set()
        if kinds != {str} and not (kinds and kinds <= {int, float}):
            raise ValueError(f"{ast.unparse(other)!r} is no number, no text and no list of them")
        kind = pa.large_string() if kinds == {str} else pa.float64()
        if kinds != {str} and pa.types.is_large_string(column.type):
            column = pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), None, column)
        try:
            column = column.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise self._wrong(
                f"the column {name!r} has other values than numbers: {error}"
            ) from None
        if not is_in:
            return _COMPARE[type(op)](column, value)
        known = pc.is_in(column, value_set=pa.array(values, kind))
        return known if isinstance(op, ast.In) else pc.invert(known)
