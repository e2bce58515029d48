"""What a Python module means: its code without comments and docstrings.

Figures and ticks are of the code, and stay when a comment is rewritten.
"""

import ast
import functools


@functools.cache
def meaning(text: str) -> str:
    """The same for texts that differ in comments, docstrings and layout alone.

    So it is where an import names the same in another order.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            node.names.sort(key=lambda each: (each.name.lower(), each.name))
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def is_text(statement: ast.AST) -> bool:
    value = getattr(statement, "value", None)
    is_constant = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return isinstance(statement, ast.Expr) and is_constant
